"""`SVGP`, `CollapsedSVGP`: configurations of sparse variational inference, and their parts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jax.core import Tracer

from ppl_gp.errors import DataError
from ppl_gp.settings import MAP, Fixed, Sample, require_positive, require_whole
from ppl_gp.sparse.expectation import Expectation

COVARIANCES = ("full", "diagonal")
_FULL_BATCH, _MINIBATCH = 2000, 1000


@dataclass(frozen=True)
class Checkpoint:
    """Saves the state of a run to a folder, so that the same call goes on after a crash.

    Parameters
    ----------
    folder : str or Path
        Where the files are written.
    every : int, default 500
        Steps between two files. The end of the run is saved as well.
    keep : int, default 2
        Number of files that are kept.
    resume : bool, default True
        Go on from the newest file. `False` starts anew and replaces the files in the folder.

    Raises
    ------
    DataError
        For counts below 1.
    StoreError
        In `fit`, if the folder belongs to another run, with a list of what differs, or if no file
        can be read.

    Notes
    -----
    A resumed run has the numbers of an uninterrupted one. It must be the same run, `max_steps`
    included. `fit` compares the model's code with all that it reads (closures, globals, partial
    arguments), the settings, the key and the data. Schedules count by their values. Of arrays above
    16 MiB it compares 4096 rows and the column sums, and of a stream the first batch. If a file is
    damaged, `fit` warns and goes on from an older one.

    Examples
    --------
    >>> method = pg.SVGP(checkpoint=pg.Checkpoint("run", every=100))
    >>> method.checkpoint.keep
    2
    """

    folder: str | Path
    every: int = 500
    keep: int = 2
    resume: bool = True

    def __post_init__(self):
        require_whole(self, "every", "keep")


@dataclass(frozen=True)
class Training:
    """How `SVGP` represents q(u) and steps it, and how it steps everything else.

    Parameters
    ----------
    covariance : "full" or "diagonal", default "full"
        Covariance of q(v), the whitened q(u). A diagonal one is trained by Adam and has a lower
        bound.
    natural : bool, default True
        Train a full covariance by natural gradients in the dual parameterisation. `False` uses
        Adam.
    natural_rate : float or schedule, default None
        Size of a natural-gradient step, in (0, 1]. `None` is 1 if the bound is exact (all data in a
        step, nothing drawn), and otherwise decays from 0.1 to 0.01.
    optimiser : callable, default optax.adam
        A function from a learning rate to an optax optimiser.
    warm_up : int, default 0
        Steps in which hyperparameters and inducing variables are fixed, while q(u), q(h) and
        encoders move.

    Raises
    ------
    DataError
        For another `covariance`, a rate outside (0, 1], or a negative `warm_up`.

    Examples
    --------
    >>> pg.SVGP(training=pg.Training(natural_rate=0.1, warm_up=100)).training.uses_natural
    True
    """

    covariance: str = "full"
    natural: bool = True
    natural_rate: float | Callable | None = None
    optimiser: Callable | None = None
    warm_up: int = 0

    def __post_init__(self):
        require_whole(self, "warm_up", least=0)
        if self.covariance not in COVARIANCES:
            raise DataError(f"Training(covariance={self.covariance!r}): give one of {COVARIANCES}.")
        if isinstance(self.natural_rate, int | float) and not 0.0 < self.natural_rate <= 1.0:
            raise DataError(f"Training(natural_rate={self.natural_rate}): give a size in (0, 1].")

    @property
    def uses_natural(self) -> bool:
        """Whether q(u) is trained by natural gradients."""
        return self.natural and self.covariance == "full"


@dataclass(frozen=True)
class Layers:
    """How `SVGP` treats latents per row, and GPs that feed each other.

    Parameters
    ----------
    latents : Amortised, Free or dict, default Amortised()
        The approximate posterior q(h) of the latents, one for all, or `{site: ...}`.
    num_importance : int, default 1
        Draws K of each row's latents inside the logarithm, see `ImportanceWeightedELBO`.
    num_paths : int, default 1
        Passes through the layers that a step averages.
    expected_last : bool, default True
        Draw the inner layers, whose q(u) Adam trains, and integrate the last one. `False` draws the
        last one too. Then use Adam for all, `Training(natural=False)`.
    doubly_reparameterised : bool, default False
        Use the gradient of q(h) of Tucker et al. (2019).
    beta : float, default 1.0
        Weight of every KL term in training, finite and at least 0. 1 gives a bound, and
        `log_evidence` always uses 1. `numpyro.handlers.scale` around a site weighs the KL term of
        that site alone.

    Raises
    ------
    DataError
        For counts below 1, or a `beta` out of range.

    Notes
    -----
    A step costs O(num_paths K M^2 B) per GP site for B rows and M inducing variables. A layer that
    is drawn jointly at K copies costs K^3 B more.

    Examples
    --------
    >>> layers = pg.Layers(latents=pg.Free(), num_importance=10)
    >>> pg.SVGP(layers=layers).layers.num_importance
    10
    """

    latents: Any = field(default=None, hash=False, compare=True)
    num_importance: int = 1
    num_paths: int = 1
    expected_last: bool = True
    doubly_reparameterised: bool = False
    beta: Any = 1.0  # of a compiled step an array

    def __post_init__(self):
        require_whole(self, "num_importance", "num_paths")
        if not isinstance(self.beta, Tracer) and not 0.0 <= float(self.beta) < float("inf"):
            raise DataError(f"Layers(beta={self.beta}): give a finite weight, at least 0.")


@dataclass(frozen=True)
class CollapsedSVGP:
    """Titsias' sparse bound for Gaussian noise, with q(u) in closed form.

    Use it up to some 10 000 rows. Each step of L-BFGS reads all data, so there are no step sizes to
    choose.

    Parameters
    ----------
    num_inducing, inducing, train_inducing : default 100, "greedy", True
        Number and choice of the inducing variables, and whether points move. See `SVGP`. "farthest"
        points are tried as well once the run has converged.
    hyper : MAP or Fixed, default MAP()
        What happens to the hyperparameters.
    max_steps : int, default 3000
        Steps at most.
    tol : float, default 1e-6
        The run has converged if fifteen steps gain less than this, nats.

    Raises
    ------
    DataError
        For counts below 1 or another `hyper`. In `fit`, for a `Stream`, and as in `SVGP` for
        options of `MAP`.
    ModelError
        In `fit`, unless the noise is Gaussian around one function at given inputs.

    Notes
    -----
    `log_evidence` is a lower bound on the log evidence, nats. A step costs O(N M^2) for N rows and
    M inducing variables. Source: Titsias (2009).

    Examples
    --------
    >>> pg.CollapsedSVGP(num_inducing=50).evidence_is
    'lower bound'
    """

    evidence_is: ClassVar[str] = "lower bound"
    # what code that it shares with `SVGP` asks for, and what leaves no choice here
    training: ClassVar[Training] = Training()
    layers: ClassVar[Layers] = Layers()
    expectation: ClassVar[Expectation] = Expectation()
    learning_rate = devices = patience = None

    num_inducing: int = 100
    inducing: Any = field(default="greedy", hash=False, compare=True)
    train_inducing: bool = True
    hyper: Any = field(default=MAP(), hash=False)
    max_steps: int = 3000
    tol: float = 1e-6

    def __post_init__(self):
        require_whole(self, "num_inducing", "max_steps")
        require_positive(self, "tol")
        if not isinstance(self.hyper, MAP | Fixed):
            raise DataError(f"CollapsedSVGP(hyper={self.hyper!r}): give MAP() or Fixed({{...}}).")


@dataclass(frozen=True)
class SVGP:
    """Sparse variational inference with M inducing variables, in minibatches.

    For more than a few thousand rows, and for latent inputs and deep GPs. The function is
    summarised by a Gaussian q(u) at M inducing variables. Natural gradients train q(u), and Adam
    the rest.

    Parameters
    ----------
    num_inducing : int, default 100
        Number M of inducing points per GP site.
    inducing : str, array, InducingVariables or dict, default "greedy"
        How points are chosen: "greedy", "kmeans", "subset" or "farthest". Or points Z (M, D), or
        inducing variables such as `features.FourierFeatures`. `{site: ...}` for several GP sites.
    train_inducing : bool, default True
        Whether points move during training. Steps are in units of the column's standard deviation /
        M^(1 / D).
    hyper : MAP, Fixed or autoguide class, default MAP()
        What happens to the hyperparameters. Under a NumPyro autoguide such as `AutoNormal` all
        standard deviations come out too small, because one q(v) serves all its draws. `SparseNUTS`
        does not have this limit. `AutoDelta` is a point, as under `MAP()`.
    batch_size : int, default None
        Rows per step. `None` takes all rows up to 2000, and otherwise 1000. Ignored if a plate of
        the model subsamples.
    max_steps : int, default 3000
        Steps at most.
    learning_rate : float or optax schedule, default None
        Adam's rate. A number decays by a cosine to a hundredth. `None` is 0.05, or 0.03 if a GP
        feeds another.
    tol : float, default 1e-6
        Change of the objective in ten steps, nats, below which a run with all rows in a batch has
        converged. See Notes.
    patience : int, default None
        End the run if the bound, averaged over this many steps, stops rising. On batches the run
        then counts as converged. Over all data it does so only if `tol` agrees.
    training, layers, expectation : Training, Layers, Expectation
        Form and steps of q(u); latents and GPs that feed each other; integrals of the likelihood.
    devices : int, default None
        Spread the rows of each batch over this many devices.
    checkpoint : Checkpoint, default None
        Where the run is saved.

    Raises
    ------
    DataError
        For options out of range, here and in the parts, and for `beta=0` with natural gradients. In
        `fit`, for annealed guides (`AutoDAIS` and the like), `AutoLaplaceApproximation`, and `MAP`
        with more `restarts`, or with `max_steps` or `tol`, which the method has itself.

    Notes
    -----
    The bound is `sum_n E_q[log p(y_n | f_n)] - KL[q(u) || p(u)]`, where the rows of a batch count N
    / B times. A step costs O(M^3 + M^2 B), and memory is O(B M + M^2). `log_evidence` is the bound
    on all data, nats. It is conditional on hyperparameters that are points, without their prior.
    With an autoguide it is a bound on log p(y).

    With all rows in a batch, convergence has two more conditions. Derivatives by unconstrained
    hyperparameters are at most 0.01 (`stats["map_gradient"]`), and a whole step of q(u) expects to
    gain less than 1e-4 nats (`stats["q_gap"]`). A warning appears if they end above 0.1 or 1e-3.

    Gaussian effects in a linear predictor with GPs are integrated too, at O((inducing variables +
    effects)^3) per step, unless you pass `latents` or `num_importance`. A run of at least 400 steps
    also tries other starts.

    `fit.result` is `converged` (by `tol` or `patience`), `completed` (all steps made), `diverged`
    (the bound ended far below its start), `nonfinite`, `interrupted` or `stream_ended`.
    `stats["ended"]` says why the run stopped. Other entries of `stats`:

    - "log_evidence_se": standard error of `log_evidence`, an average of 2 to 10 sums, if the bound
      is drawn. That is so for autoguides, layers, latents, more than three functions that are not
      additive, and a `Stream` that draws its rows anew.
    - "expectation_error": nats by which `log_evidence` is too high at most, because quadrature
      nodes miss something of the likelihood. It is 0 for Gaussian noise. A warning appears above
      1e-3 per row.
    - "inducing_gap": nats that more inducing variables could add at most, at these hyperparameters.
      It is a bound for Gaussian noise and up to 2000 rows (for a stream, if it can be read again),
      and otherwise an estimate. A warning appears above 1 nat per 100 rows.

    Sources: Hensman, Fusi & Lawrence (2013); Hensman, Matthews & Ghahramani (2015).

    Examples
    --------
    >>> training, nodes = pg.Training(warm_up=9), pg.Expectation(num_nodes=40)
    >>> method = pg.SVGP(num_inducing=50, training=training, expectation=nodes)
    >>> method.rows(10**6)
    1000
    """

    evidence_is: ClassVar[str] = "lower bound"

    num_inducing: int = 100
    inducing: Any = field(default="greedy", hash=False, compare=True)
    train_inducing: bool = True
    hyper: Any = field(default=MAP(), hash=False)
    batch_size: int | None = None
    max_steps: int = 3000
    learning_rate: float | Callable | None = None
    tol: float = 1e-6
    patience: int | None = None
    training: Training = Training()
    layers: Layers = Layers()
    expectation: Expectation = Expectation()
    devices: int | None = None
    checkpoint: Checkpoint | None = None

    def __post_init__(self):
        require_whole(self, "num_inducing", "batch_size", "max_steps", "patience", "devices")
        require_positive(self, "tol")
        _require_parts(self)
        if self.learning_rate is not None and not callable(self.learning_rate):
            require_positive(self, "learning_rate")
        if self.layers.beta == 0.0 and self.training.uses_natural:
            raise DataError(
                f"SVGP(layers=Layers(beta={self.layers.beta})): 0 leaves q(u) without a prior, and "
                "only Training(natural=False), which trains q(u) by Adam, can start there."
            )

    def rows(self, num_data: int) -> int:
        """The batch size for N rows."""
        if self.batch_size is not None:
            return min(self.batch_size, num_data)
        return num_data if num_data <= _FULL_BATCH else _MINIBATCH


SparseMethod = SVGP | CollapsedSVGP


def _require_parts(method: SVGP) -> None:
    """What stands for the hyperparameters, and options that are configurations themselves."""
    hyper, known = method.hyper, (MAP, Fixed, Sample)
    guide = callable(hyper) and not (isinstance(hyper, type) and issubclass(hyper, known))
    if not guide and not isinstance(hyper, known):
        raise DataError(
            f"SVGP(hyper={getattr(hyper, '__name__', repr(hyper))}): give MAP(), a NumPyro "
            "autoguide class such as AutoNormal, or for known values hyper=Fixed({...})."
        )
    for kind in (Training, Layers, Expectation, Checkpoint):
        value, name = getattr(method, kind.__name__.lower()), kind.__name__
        if not isinstance(value, kind) and (kind is not Checkpoint or value is not None):
            raise DataError(f"SVGP({name.lower()}={value!r}): give {name.lower()}=pg.{name}(...).")
