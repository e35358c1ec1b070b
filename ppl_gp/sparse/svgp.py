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
    """Save the state of a run to `folder` every `every` steps (and at its end), and go on from
    there when it is run again.

    A resumed run has the numbers of an uninterrupted one; it must be the same run, `max_steps`
    included: the model's code with all that it reads (closures, globals, partial arguments), the
    settings, schedules by their values, the key and the data (arrays above 16 MiB by 4096 rows and
    column sums, a stream by its first batch) are compared, and `StoreError` names what differs.
    `keep`: how many files stay. `resume=False` starts anew and replaces the folder's files.
    """

    folder: str | Path
    every: int = 500
    keep: int = 2
    resume: bool = True

    def __post_init__(self):
        require_whole(self, "every", "keep")


@dataclass(frozen=True)
class Training:
    """How `SVGP` steps q(u), and how everything else.

    Parameters
    ----------
    covariance, natural : default "full", True
        Of q(v), the whitened q(u): "full" or "diagonal". Natural gradients in the dual
        parameterisation train a full one; `False` leaves it to Adam, as a diagonal one is.
    natural_rate : default 1 where the bound is exact (all data, nothing drawn)
        Size of a natural-gradient step in (0, 1], or a schedule; else 0.1, decaying to 0.01.
    optimiser : default `optax.adam`
        A function from a learning rate to an optax optimiser.
    warm_up : default 0
        Steps in which hyperparameters and inducing variables are held; q(u), q(h), encoders move.
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
    """Per-datum latents, and GPs that feed each other, in the bound of `SVGP`.

    Parameters
    ----------
    latents : default `Amortised()`
        q(h) of the latents, `Amortised()` or `Free()`, for all or as {site: ...}.
    num_importance : default 1
        K copies of each datum's latents in a log-mean-exp (`ImportanceWeightedELBO` has the bound).
    num_paths : default 1
        Passes through the layers that a step averages. O(num_paths K M^2 B) a GP site, K^3 B more
        for a layer that is drawn at K copies.
    expected_last : default True
        Inner layers are drawn, their q(u) trained by Adam, and the last one is integrated, or drawn
        too (`False`; Adam for all is advised).
    doubly_reparameterised : default False
        The gradient of q(h) by Tucker et al. (2019).
    beta : default 1
        Weight of every KL term, finite, at least 0, and 1 for a bound (the fit's `log_evidence` has
        1 in any case). `numpyro.handlers.scale` around a site weighs its own KL.
    """

    latents: Any = field(default=None, hash=False, compare=True)
    num_importance: int = 1
    num_paths: int = 1
    expected_last: bool = True
    doubly_reparameterised: bool = False
    beta: Any = 1.0  # of a compiled step an array

    def __post_init__(self):
        require_whole(self, "num_importance", "num_paths")
        if not isinstance(self.beta, Tracer) and not 0.0 <= self.beta < float("inf"):
            raise DataError(f"Layers(beta={self.beta}): give a finite weight, at least 0.")


@dataclass(frozen=True)
class CollapsedSVGP:
    """Titsias' bound (2009): q(u) in closed form, the rest by L-BFGS, all data in a step, O(N M^2).

    Parameters
    ----------
    num_inducing, inducing, train_inducing, hyper : default 100, "greedy", True, `MAP()`
        As of `SVGP`, without guides; "farthest" points are tried where the run has converged.
    max_steps, tol : default 3000, 1e-6 nats
        Steps at most; the run has converged if fifteen steps gain less than `tol`.

    Raises
    ------
    DataError
        For counts below 1, another `hyper`; in `fit`, for a `Stream`.
    ModelError
        In `fit`, unless the likelihood is Gaussian in one function at given inputs.

    Examples
    --------
    >>> CollapsedSVGP(num_inducing=50).evidence_is
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
        if not isinstance(self.hyper, MAP | Fixed):
            raise DataError(f"CollapsedSVGP(hyper={self.hyper!r}): give MAP() or Fixed({{...}}).")


@dataclass(frozen=True)
class SVGP:
    """Sparse variational inference with M inducing variables (Hensman et al. 2013, 2015): q(u) by
    natural gradients, hyperparameters and inducing inputs by Adam, both from one forward and
    reverse pass a step. O(M^3 + M^2 B) a step of B rows, O(B M + M^2) memory.

    Parameters
    ----------
    num_inducing, inducing, train_inducing : default 100, "greedy", True
        "greedy", "kmeans", "subset", "farthest" (`sparse.inducing`), an array Z, or inducing
        variables such as `FourierFeatures`; {site: ...} for several GP sites. Whether Z moves, in
        units of its column's standard deviation / M^(1 / columns).
    hyper : default `MAP()`
        `MAP()`, `Fixed({...})`, or a NumPyro autoguide class such as `AutoNormal`, of which all
        standard deviations come out too small, as one q(v) serves all its draws. `SparseNUTS` has
        no such limit. `AutoDelta` is a point as under `MAP()`.
    batch_size : default all rows up to 2000, else 1000
        Rows a step. Ignored where the model's plate subsamples.
    max_steps, learning_rate : default 3000; 0.05, or 0.03 where a GP feeds another
        A rate that is a number decays by a cosine to a hundredth; or an optax schedule.
    tol : default 1e-6 nats
        With all data in a batch, the run has converged if ten steps change the objective by less,
        no derivative in an unconstrained hyperparameter is above 0.01 (`stats["map_gradient"]`),
        and a whole step of q(u) expects to gain less than 1e-4 nats (`stats["q_gap"]`). A warning
        if they end above 0.1 or 1e-3.
    patience : default None
        Ends where the bound, averaged over so many steps, stops rising: on batches as converged,
        over all data only if `tol` says so.
    training, layers, expectation : `Training`, `Layers`, `Expectation`
        Steps of q(u); latents and GPs that feed each other; integrals of the likelihood.
    devices, checkpoint : default None
        Spread each batch's rows over this many devices; where the run is saved (`Checkpoint`).

    Raises
    ------
    DataError
        For values outside of these, here and in the parts; in `fit`, for guides that anneal
        (`AutoDAIS` and its kin), and `AutoLaplaceApproximation`.

    Notes
    -----
    Effects (`Normal`, `MultivariateNormal` sites and their kin) that enter a linear predictor
    beside GPs are integrated, O((inducing variables + effects)^3) a step, unless `latents` or
    `num_importance` is given. A run of at least 400 steps tries other starts.

    Results: converged (by `tol` or `patience`); completed (all steps made); diverged (the bound
    ended far below its start); nonfinite; interrupted; stream_ended. If a bound is drawn
    (autoguides, layers, latents, more than three functions that are not additive, a `Stream` that
    draws its rows anew) `log_evidence` averages 2 to 10 sums and `stats["log_evidence_se"]` is its
    standard error. `stats["expectation_error"]`: by how many nats `log_evidence` is too high at
    most, as nodes miss something of the likelihood (0 for Gaussian noise), with a warning above
    1e-3 per datum. `stats["inducing_gap"]`: how many nats more inducing variables could add at most
    at these hyperparameters, a bound for Gaussian noise and up to 2000 rows (of a stream, if read
    again), with a warning above 1 nat per 100 rows. `stats["ended"]` says why the run stopped.
    `log_evidence` is the bound at hyperparameters that are points, without their prior, else the
    bound on log p(y).

    Examples
    --------
    >>> SVGP(50, training=Training(warm_up=9), expectation=Expectation(num_nodes=40)).rows(10**6)
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
        _require_parts(self)
        if self.learning_rate is not None and not callable(self.learning_rate):
            require_positive(self, "learning_rate")
        if self.layers.beta == 0.0 and self.training.uses_natural:
            raise DataError(
                f"SVGP(layers=Layers(beta={self.layers.beta})): 0 leaves q(u) without a prior, and "
                "only Training(natural=False), which trains q(u) by Adam, can start there."
            )

    def rows(self, num_data: int) -> int:
        """The batch size for N data."""
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
