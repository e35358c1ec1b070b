"""`SVGP`: the configuration of sparse stochastic variational inference."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from ppl_gp.errors import DataError
from ppl_gp.settings import MAP, Fixed, Sample, require_positive, require_whole
from ppl_gp.sparse.expectation import Expectation

COVARIANCES = ("full", "diagonal")
_FULL_BATCH = 2000
_MINIBATCH = 1000


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
class SVGP:
    """Sparse variational inference with M inducing variables (Hensman et al. 2013, 2015; Titsias
    2009).

    q(u) by natural gradients in the dual parameterisation, hyperparameters and inducing inputs by
    Adam, both from one forward and reverse pass a step. O(M^3 + M^2 B) a step, O(B M + M^2) memory.
    A step of an inducing input is in units of its column's standard deviation / M^(1 / columns), so
    that inputs and a prior that follows them can have any scale.

    - `num_inducing`, `inducing`: "greedy", "kmeans", "subset", "farthest" (`sparse.inducing`), an
      array Z, or inducing variables such as `FourierFeatures`; {site: ...} for several GP sites.
      `train_inducing`: whether Z moves. With `Fixed`, "greedy" takes as many points as the
      hyperparameters need. Otherwise it starts from `num_inducing` points all over the inputs. If
      more would help after an eighth of a run of 1000 steps or more (or where a collapsed run has
      converged), "farthest" points get as many steps, and the better run goes on.
    - `covariance` of q(v), the whitened q(u): "full" or "diagonal". `natural=False` and a diagonal
      covariance train it by Adam.
    - `collapsed`: Titsias' bound, q(u) in closed form, by L-BFGS: Gaussian likelihoods, all data in
      a step, O(N M^2); the options on batches and rates do not apply.
    - `hyper`: `MAP()`, `Fixed({...})`, or a NumPyro autoguide class such as `AutoNormal`. Standard
      deviations of any guide come out too small, because one q(v) serves all its draws: 3 to 11
      times for length scales and variances of regressions on 40 and 100 rows, 1.1 to 1.3 for the
      noise. `SparseNUTS` has no such limit. `AutoDelta` is a point as under `MAP()`. `DataError`
      for `AutoLaplaceApproximation`, and guides that anneal (`AutoDAIS` and its kin).
    - A run of at least 400 steps tries other starts for 20 steps each and goes on from the best:
      length scales of 1e-3 to 1e3 times the first, and the sds of the inputs, unless
      `MAP(init=...)` gives a start; q(u) around a draw of the prior, and minus it, if the
      likelihood is not proved log-concave.
    - `batch_size`: rows a step; `None` takes all up to 2000, else 1000. Ignored where the model's
      plate subsamples.
    - `max_steps`; `learning_rate`: a number (decays by a cosine to a hundredth) or an optax
      schedule; `None`: 0.05, or 0.03 where a GP feeds another. `optimiser`: a function from a
      learning rate to an optax optimiser, default `optax.adam`. `natural_rate`: step size in (0, 1]
      or a schedule; `None`: 1 where the bound is exact (all data, nothing drawn), else 0.1 decaying
      to 0.01.
      `warm_up`: steps in which hyperparameters and inducing variables are held; q(u), q(h) and
      encoders move.
    - q(u) starts as the prior, or narrower if that gains a nat per datum, which is also the most
      that a derivative counts for. Over all data a step that loses more than the optimiser's can
      explain is taken back and made shorter (`stats["failed_steps"]`).
    - `tol`: with all data in a batch, the run has converged if ten steps change the objective by
      less than this many nats, no derivative in an unconstrained hyperparameter is above 0.01
      (`stats["map_gradient"]`), and a whole step of q(u) expects to gain less than 1e-4 nats
      (`stats["q_gap"]`). A warning if they end above 0.1 or 1e-3.
      `patience`: ends where the bound, averaged over so many steps, stops rising: on batches as
      converged, over all data only if `tol` says so.
    - Effects (`Normal`, `MultivariateNormal` sites and their kin) that enter a linear predictor
      beside GPs are integrated: one q(u) for them and the inducing variables of all functions that
      a datum sees, O((sum of both)^3) a step; of one function an arrow for a factor of many levels
      (`sparse.parts`), and effects of each datum inside the likelihood (`sparse.expectation`),
      unless `latents` or `num_importance` is given.
    - Latents that stand one a datum: `latents` is their q(h), `Amortised()` (also `None`) or
      `Free()`, for all or as {site: ...}.
      `num_importance`: K copies of each datum's latents in a log-mean-exp (`ImportanceWeightedELBO`
      has the bound).
      `doubly_reparameterised`: their gradient by Tucker et al. (2019). `beta`: weight of every KL
      term, 1 for a bound (the fit's `log_evidence` has 1 in any case). `numpyro.handlers.scale`
      around a site weighs its own KL.
    - GPs that feed each other: inner layers are drawn, their q(u) trained by Adam, the last by
      natural gradients. `num_paths`: passes through the layers that a step averages.
      `expected_last=False` draws the last layer too (Adam for all is advised). O(M^3 + num_paths K
      M^2 B) a GP site, K^3 B more for a layer that is drawn at K copies.
    - `num_nodes`, `num_draws`: see `sparse.expectation`. `devices`: spread each batch's rows over
      this many devices.

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
    """

    evidence_is: ClassVar[str] = "lower bound"

    num_inducing: int = 100
    inducing: Any = field(default="greedy", hash=False, compare=True)
    train_inducing: bool = True
    covariance: str = "full"
    natural: bool = True
    collapsed: bool = False
    hyper: Any = field(default=MAP(), hash=False)
    batch_size: int | None = None
    max_steps: int = 3000
    learning_rate: float | Callable | None = None
    optimiser: Callable | None = None
    natural_rate: float | Callable | None = None
    warm_up: int = 0
    tol: float = 1e-6
    patience: int | None = None
    num_nodes: int | None = None
    num_draws: int | None = None
    devices: int | None = None
    checkpoint: Checkpoint | None = None
    latents: Any = field(default=None, hash=False, compare=True)
    num_importance: int = 1
    num_paths: int = 1
    expected_last: bool = True
    doubly_reparameterised: bool = False
    beta: float = 1.0

    def __post_init__(self):
        _require_counts(self)
        _require_form(self)
        if self.collapsed:
            _require_collapsible(self)
        _require_rates(self)

    @property
    def uses_natural(self) -> bool:
        """Whether q(u) is trained by natural gradients."""
        return self.natural and self.covariance == "full"

    @property
    def expectation(self) -> Expectation:
        """How the likelihood is integrated."""
        return Expectation(self.num_nodes, self.num_draws)

    def rows(self, num_data: int) -> int:
        """The batch size for N data."""
        if self.batch_size is not None:
            return min(self.batch_size, num_data)
        return num_data if num_data <= _FULL_BATCH else _MINIBATCH


def _require_counts(method: SVGP) -> None:
    counts = {f.name for f in fields(method) if f.type in (int, int | None)}
    require_whole(method, *sorted(counts - {"warm_up"}))
    require_whole(method, "warm_up", least=0)
    if method.checkpoint is not None and not isinstance(method.checkpoint, Checkpoint):
        raise DataError(
            f"SVGP(checkpoint={method.checkpoint!r}): give a Checkpoint, "
            f"checkpoint=pg.Checkpoint({method.checkpoint!r})."
        )


def _require_form(method: SVGP) -> None:
    """The form of q(u), and what stands for the hyperparameters."""
    if method.covariance not in COVARIANCES:
        raise DataError(f"SVGP(covariance={method.covariance!r}): give one of {COVARIANCES}.")
    if not (callable(method.hyper) or isinstance(method.hyper, MAP | Fixed | Sample)):
        raise DataError(
            f"SVGP(hyper={method.hyper!r}): give MAP(), a NumPyro autoguide class such as "
            "AutoNormal, or for known values hyper=Fixed({...})."
        )
    if isinstance(method.hyper, type) and issubclass(method.hyper, MAP | Fixed):
        raise DataError(
            f"SVGP(hyper={method.hyper.__name__}) is a class; give an instance, "
            f"{method.hyper.__name__}(...)."
        )


def _require_collapsible(method: SVGP) -> None:
    """What the bound with q(u) in closed form has no room for."""
    if method.covariance != "full" or not isinstance(method.hyper, MAP | Fixed):
        raise DataError(
            "SVGP(collapsed=True) has a full covariance and hyper=MAP() or Fixed({...})."
        )
    if method.checkpoint is not None or method.devices is not None:
        raise DataError(
            "SVGP(collapsed=True) is a short run on one device; leave checkpoint and devices out."
        )
    if method.beta != 1.0:
        raise DataError(
            f"SVGP(collapsed=True, beta={method.beta}): the collapsed bound has a KL weight of 1."
        )


def _require_rates(method: SVGP) -> None:
    if not 0.0 <= method.beta < float("inf") or (method.beta == 0.0 and method.uses_natural):
        raise DataError(
            f"SVGP(beta={method.beta}): give a positive weight of the KL terms; 0 leaves q(u) "
            "without a prior, and only natural=False, which trains q(u) by Adam, can start there."
        )
    if isinstance(method.natural_rate, int | float) and not 0.0 < method.natural_rate <= 1.0:
        raise DataError(f"SVGP(natural_rate={method.natural_rate}): give a step size in (0, 1].")
    if method.learning_rate is not None and not callable(method.learning_rate):
        require_positive(method, "learning_rate")
