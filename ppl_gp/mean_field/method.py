"""`MeanField`: variational message passing on a declared model, by coordinate ascent."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError, Result
from ppl_gp.infer.chains import over_leading_axis
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.probes import first_trace
from ppl_gp.infer.sources import Stream
from ppl_gp.kept import FromDraws
from ppl_gp.mean_field.batches import Found, fit_by_steps
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.forms import with_forms
from ppl_gp.mean_field.log_joint import LogJoint, log_joint_of
from ppl_gp.mean_field.structure import (
    Structure,
    find_structure,
    require_conjugate_nearby,
    start_of,
)
from ppl_gp.mean_field.sweep import Progress, begin, caution_of, climb, is_open
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.reading.roles import require_no_subsampling, roles
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import Stage, interruptible
from ppl_gp.settings import require_whole
from ppl_gp.sparse.svgp import Checkpoint

CHUNK = 10  # sweeps between two looks at Ctrl-C


@dataclass(frozen=True)
class MeanField:
    """Mean-field variational inference with exact expectations, for conjugate models.

    For mixtures with discrete labels, regressions with unknown noise, factor analysis and the like.
    You write an ordinary model, and `fit` proves that it is conjugate. It needs float64.

    Parameters
    ----------
    factors : list of lists of str, default None
        Sites that share a factor of q, for example `[["mean", "precision"]]`. `None` keeps each
        site alone, but joins a mean with the precision that scales its prior, if both are conjugate
        together. Elements of a plate are independent in q if no density couples them.
    init : dict, default {}
        `{site: value}` to start from: labels or probabilities for discrete sites, values for
        Gaussian ones. By default labels come from k-means++ of the observed rows, and the rest from
        the prior.
    restarts : int, default 1
        Starts that are climbed in one compiled call. The best bound is kept, and
        `stats["restart_bounds"]` has all. Mixtures need several. On batches there is one.
    bounds : bool, default True
        Use the bound of Jaakkola and Jordan for Bernoulli and binomial sites whose logits are
        affine in Gaussian sites. `stats["local_bounds"]` lists them.
    tol : float, default 1e-11
        Nats that a sweep must gain to go on.
    max_steps : int, default 1000
        Sweeps at most, or steps on batches.
    num_draws : int, default 1000
        Draws of q that are kept for predictions.
    batch_size : int, default None
        Rows per step, for arrays or memory maps. `None` sweeps over all rows. A `Stream` has its
        own batches.
    natural_rate : float or callable, default None
        Size rho of a step on batches, in (0, 1], or a function of the step, counted from 0. `None`
        is `(t + delay)^-forgetting` at step t = 1, 2, ...
    delay, forgetting : float, default 1.0, 0.7
        See `natural_rate`. At least 0, and in (0.5, 1].
    checkpoint : Checkpoint, default None
        Where a run on batches is saved.

    Raises
    ------
    NotConjugateError
        In `fit`, if a density is not affine in the statistics of a site. The message names both
        sites.
    ModelError
        In `fit`, for params, plates that subsample, and supports without a family. On batches, for
        rows that depend on each other (`NotPointwiseError`).
    DataError
        For options out of range, and in `fit` for float32.

    Notes
    -----
    `q(z) = prod_j q_j(z_j)` by coordinate ascent, `log q_j = E_{q without j}[log p(y, z)] + const`.
    Sites may be Gaussian (normal, multivariate normal, GPs with fixed kernels), gamma, inverse
    gamma, beta, Dirichlet, Wishart or inverse Wishart. Discrete sites with few categories are
    summed. Any link that keeps the model conjugate may be written. Per block, a sweep costs one
    gradient of its densities at the product of the other blocks' nodes. A Gaussian of D values has
    2 D nodes, a gamma or Wishart three, a Dirichlet four, and a discrete site one per category.

    Conjugacy is proved at values of the sites, at every combination of labels up to 300 of them.
    Beyond, each label takes its values in turn, up to 300 of them. A label of more values is drawn
    at random, and a density that is not conjugate under a rare value of it can be missed.

    `log_evidence` is the bound, nats, exact in every constant. `fit.sites` has NumPyro
    distributions, and `fit.factors` the blocks. Labels that can be exchanged (`fit.symmetries`)
    give the bound several maxima. `fit.log_density` integrates q exactly if the blocks in the
    density of a row are independent of each other, and otherwise uses draws. `fit.result` is
    `converged`, `max_steps`, `nonfinite` or `interrupted`.

    On batches, the factors of the rows go to their optimum. Then each other block goes a step rho
    from its natural parameters towards its maximum, with rows counted N / B times. Rows must be
    independent given the sites outside their plate, which is checked on the first batch. So is
    conjugacy. At the end all data are read once, for the exact bound, which is `None` for a stream
    that cannot be read again. If other rows could differ, conjugacy is proved for them in that
    pass, or as they come from such a stream. That costs about fifty gradients per batch.
    `stats["bounds"]` has the estimates of the batches. `fit.sites` has the factors of all rows, or
    of the first batch of a stream. `fit.result` is then `completed`, `stream_ended`, `nonfinite` or
    `interrupted`.

    Sources: Bishop (2006), eq. 10.9; Winn & Bishop (2005); Hoffman et al. (2013) for batches.

    Examples
    --------
    >>> method = pg.MeanField(batch_size=500, forgetting=0.8)
    >>> round(method.rate(0), 3)
    0.574
    """

    evidence_is: ClassVar[str] = "lower bound"

    factors: Any = None
    init: Any = field(default_factory=dict)
    restarts: int = 1
    bounds: bool = True
    tol: float = 1e-11
    max_steps: int = 1000
    num_draws: int = 1000
    batch_size: int | None = None
    natural_rate: float | Callable | None = None
    delay: float = 1.0
    forgetting: float = 0.7
    checkpoint: Checkpoint | None = None

    def __post_init__(self):
        require_whole(self, "restarts", "max_steps", "num_draws", "batch_size")
        if not self.tol > 0:
            raise DataError(f"MeanField(tol={self.tol!r}): give a positive number of nats.")
        if isinstance(self.factors, str) or any(isinstance(g, str) for g in self.factors or ()):
            raise DataError(
                f"MeanField(factors={self.factors!r}): give lists of names, "
                "[['mean', 'precision']]."
            )
        if self.init is not None and not isinstance(self.init, dict):
            raise DataError(f"MeanField(init={self.init!r}): give {{site: value}}.")
        if not (self.delay >= 0.0 and 0.5 < self.forgetting <= 1.0):
            raise DataError(
                f"MeanField(delay={self.delay!r}, forgetting={self.forgetting!r}): the steps (t + "
                "delay)^-forgetting settle for a delay of at least 0 and a forgetting in (0.5, 1]."
            )
        rate = self.natural_rate
        if not (rate is None or callable(rate) or 0.0 < rate <= 1.0):
            raise DataError(
                f"MeanField(natural_rate={rate!r}): give a rate in (0, 1] or a schedule."
            )

    def rate(self, step: int) -> float:
        """The size rho of a step, counted from 0.

        Raises
        ------
        DataError
            If a schedule leaves (0, 1].
        """
        if (given := self.natural_rate) is None:
            return (step + 1.0 + self.delay) ** -self.forgetting
        rate = float(given(step) if callable(given) else given)
        if not 0.0 < rate <= 1.0:
            raise DataError(
                f"MeanField(natural_rate=...) is {rate} at step {step}; it has to be in (0, 1]."
            )
        return rate


@run_method.register
def _fit_mean_field(method: MeanField, model, rng_key, args, kwargs, progress) -> Fit:
    if jnp.result_type(float) != jnp.float64:
        raise DataError(
            "MeanField() proves conjugacy to rounding, which float32 has too much of: switch "
            'float64 on, jax.config.update("jax_enable_x64", True).'
        )
    by_steps = method.batch_size is not None or (args and isinstance(args[0], Stream))
    find = fit_by_steps if by_steps else _fit_at_once
    return fit_of(method, find(method, model, rng_key, args, kwargs, progress))


def fit_of(method: MeanField, found: Found) -> Fit:
    """The fit behind independent draws of q, those of GP sites apart."""
    values, gps = _drawn(found.q, found.key, method.num_draws), roles(found.trace).gps
    known = {k: x for k, x in values.items() if k not in gps}
    return Fit(
        model=found.model,
        method=method,
        args=found.args,
        kwargs=found.kwargs,
        draws=Draws.equal(known, {k: FromDraws(values[k]) for k in gps}),
        log_evidence=found.bound,
        result=found.result,
        stats=found.stats,
        sampled=True,
        blocks=tuple(found.q),
    )


@quick_jit
def _drawn(q: list[Family], key, num: int) -> dict:
    values = {}
    for family, k in zip(q, random.split(key, len(q)), strict=True):
        values |= family.draw(k, num)
    return values


def _fit_at_once(method: MeanField, model, rng_key, args, kwargs, progress) -> Found:
    trace = first_trace(model, args, kwargs)
    require_no_subsampling(trace, "MeanField()")
    joint = log_joint_of(model, trace, args, kwargs)
    structure = find_structure(joint, trace, method.factors, method.bounds)
    structure = with_forms(structure, trace)
    keys = random.split(rng_key, method.restarts + 1)
    starts = [start_of(method.init, structure, trace, key) for key in keys[1:]]
    stages = _stages(structure, starts, method)
    (state, bounds), stopped = interruptible(stages, "MeanField", method.max_steps, progress)
    best = int(np.argmax(np.where(np.isnan(state.bound), -np.inf, np.asarray(state.bound))))
    q = jax.tree.map(lambda x: x[best], state.q)
    stats = {
        "bounds": bounds[best][~np.isnan(bounds[best])],
        "steps": int(state.sweeps[best]),
        "restart_bounds": np.asarray(state.bound),
        "local_bounds": list(structure.joint.bounded),
    }
    value = float(state.bound[best])
    stats |= {} if np.isfinite(value) else caution_of(q)
    if np.isfinite(value) and not stopped:
        require_conjugate_nearby(structure, q)
    result = Result.max_steps if bool(is_open(state, method.tol)[best]) else Result.converged
    result = result if np.isfinite(value) else Result.nonfinite
    return Found(model, args, kwargs, trace, keys[0], q, value, result, stats)


def is_conjugate(model, trace: dict, args, kwargs) -> bool:
    """Whether `MeanField()` fits a model; its proof is run, some seconds of compiling."""
    try:
        require_no_subsampling(trace, "MeanField()")
        find_structure(log_joint_of(model, trace, args, kwargs), trace, None, True)
    except ModelError:
        return False
    return jnp.result_type(float) == jnp.float64


def _stages(structure: Structure, starts, method: MeanField) -> Iterator[Stage]:
    """Chunks of sweeps of all starts."""
    state = jax.vmap(begin)(jax.tree.map(lambda *x: jnp.stack(x), *starts))
    bounds = np.zeros((len(starts), 0))
    yield Stage((state, bounds), 0, keep=False)
    done = 0
    few = max(math.prod(q.batch) for q in structure.blocks) <= FEW_DATA
    run = _climb if few else _climb.full  # good code pays where a sweep is long
    while done < method.max_steps:
        num = min(CHUNK, method.max_steps - done)
        state, new = run(structure.joint, structure.terms, state, method.tol, num)
        bounds = np.concatenate([bounds, np.asarray(new)], 1)
        done += num
        yield Stage((state, bounds), done, f"bound {float(jnp.nanmax(state.bound)):.4f}")
        if not np.any(np.asarray(is_open(state, method.tol))):
            return


@quick_jit
def _climb(joint: LogJoint, terms, state: Progress, tol: float, num: int):
    # On CPU one start after the other: NumPyro's own factors of Wishart and normal sites, batched
    # over starts, can wait for each other for ever (`numerics.linalg`).
    return over_leading_axis(lambda s: climb(joint, terms, s, tol, num), state)
