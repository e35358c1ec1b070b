"""`MeanField`: variational message passing on a declared model, by coordinate ascent."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.start import start
from ppl_gp.conjugate.structure import Structure, find_structure
from ppl_gp.conjugate.sweep import Progress, begin, climb, is_open
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError, Result
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.loop import Stage, interruptible
from ppl_gp.infer.over_axis import over_leading_axis
from ppl_gp.infer.probes.observed import first_trace
from ppl_gp.kept import FromDraws
from ppl_gp.model.roles import is_missing_part, require_no_subsampling, roles
from ppl_gp.model.tracing import bare_trace
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.results.fit import Fit

CHUNK = 10  # sweeps between two looks at Ctrl-C


@dataclass(frozen=True)
class MeanField:
    """q(z) = prod_j q_j(z_j), each q_j of an exponential family, by coordinate ascent: log q_j =
    E_{q without j}[log p(y, z)] + const (Bishop 2006, eq. 10.9; Winn & Bishop 2005).

    Latent sites are Gaussian (normal, multivariate normal, GP sites with fixed kernels), gamma,
    inverse gamma, beta, Dirichlet, Wishart, inverse Wishart, or discrete with few categories, which
    are summed. That every density is affine in the statistics of the sites that it sees is proved
    before the first sweep, at values over orders of magnitude; expectations are then exact sums
    over a few nodes, of the model's own densities, so that any link may be written.

    - `factors`: names of sites that share a block, `[["mean", "precision"]]`; default: each site
      alone, but for a mean with the precision that scales its prior, where both are conjugate
      together. Elements of a plate are apart where no density couples them.
    - `init`: {site: value to start from}, labels or probabilities of discrete sites. By default
      labels by k-means++ of the observed rows, and draws of the prior.
    - `restarts`: starts that are climbed in one compiled call; the best bound is kept,
      `stats["restart_bounds"]` has all.
    - `bounds`: Bernoulli and binomial sites with logits affine in Gaussian sites take the local
      bound of Jaakkola and Jordan, `stats["local_bounds"]` says which.
    - `tol`: nats that a sweep must gain to go on; `max_steps`: sweeps. `num_draws`: of q, kept for
      predictions.

    `log_evidence` is the bound, nats, exact in every constant; `fit.sites` are NumPyro
    distributions, `fit.factors` the blocks. Results: converged; max_steps; nonfinite; interrupted.
    A bound has several maxima where labels can be exchanged (`fit.symmetries`), and others: take
    restarts. `fit.log_density` integrates q exactly where its blocks stand apart in a row's
    density, and else takes draws. A sweep costs, for each block, a gradient of the densities it
    sees at the product of the other blocks' nodes (2 D of a Gaussian of D values, two of a gamma or
    Wishart, three of a Dirichlet, the categories of a discrete site).

    Raises `NotConjugateError` naming both sites; `ModelError` for params, plates that subsample,
    and supports without a family; `DataError` for arguments, and in float32, where nothing can be
    proved.
    """

    evidence_is: ClassVar[str] = "lower bound"

    factors: Any = None
    init: Any = field(default_factory=dict)
    restarts: int = 1
    bounds: bool = True
    tol: float = 1e-11
    max_steps: int = 1000
    num_draws: int = 1000

    def __post_init__(self):
        for name in ("restarts", "max_steps", "num_draws"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise DataError(f"MeanField({name}={value!r}): give a whole number of at least 1.")
        if not self.tol > 0:
            raise DataError(f"MeanField(tol={self.tol!r}): give a positive number of nats.")
        if isinstance(self.factors, str) or any(isinstance(g, str) for g in self.factors or ()):
            raise DataError(
                f"MeanField(factors={self.factors!r}): give lists of names, "
                "[['mean', 'precision']]."
            )
        if self.init is not None and not isinstance(self.init, dict):
            raise DataError(f"MeanField(init={self.init!r}): give {{site: value}}.")


@run_method.register
def _fit_mean_field(method: MeanField, model, rng_key, args, kwargs, progress) -> Fit:
    if jnp.result_type(float) != jnp.float64:
        raise DataError(
            "MeanField() proves conjugacy to rounding, which float32 has too much of: switch "
            'float64 on, jax.config.update("jax_enable_x64", True).'
        )
    trace = first_trace(model, args, kwargs)
    require_no_subsampling(trace, "MeanField()")
    joint = _log_joint(model, trace, args, kwargs)
    structure = find_structure(joint, trace, method.factors, method.bounds)
    keys = random.split(rng_key, method.restarts + 1)
    starts = [_start(method, structure, trace, key) for key in keys[1:]]
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
    if not np.isfinite(value) and (improper := _improper(q)):
        stats["caution"] = (
            f"q of {improper} is no distribution, as where the data do not make up for an improper "
            "prior; give these sites a proper one"
        )
    return Fit(
        model=model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=_draws(q, trace, keys[0], method.num_draws),
        log_evidence=value,
        result=_result(value, bool(is_open(state, method.tol)[best]), stopped),
        stats=stats,
        sampled=True,
        blocks=tuple(q),
    )


def is_conjugate(model, trace: dict, args, kwargs) -> bool:
    """Whether `MeanField()` fits a model; its proof is run, some seconds of compiling."""
    try:
        require_no_subsampling(trace, "MeanField()")
        find_structure(_log_joint(model, trace, args, kwargs), trace, None, True)
    except ModelError:
        return False
    return jnp.result_type(float) == jnp.float64


def _log_joint(model, trace: dict, args, kwargs) -> LogJoint:
    found = roles(trace)
    if found.params:
        raise ModelError(
            f"site '{found.params[0]}' is a numpyro.param, which has no distribution: MeanField() "
            "would leave it at its initial value. Declare it by numpyro.sample, with a prior."
        )
    if state := [k for k, s in trace.items() if s["type"] == "mutable"]:
        raise ModelError(f"MeanField() cannot follow the state of numpyro.mutable sites {state}.")
    latents = tuple(k for k in trace if k in (*found.hyper, *found.gps, *found.local_latents))
    if not latents:
        raise ModelError("MeanField(): nothing in the model is random but the observations.")
    if empty := [k for k in latents if 0 in trace[k]["fn"].shape()]:
        raise ModelError(f"MeanField(): sites {empty} have no elements (a plate of size zero).")
    terms = tuple(
        k for k, s in trace.items() if s["type"] == "sample" and not is_missing_part(k, trace)
    )
    return LogJoint(model, args, kwargs, latents, terms)


def _start(method: MeanField, structure: Structure, trace: dict, key):
    """Of one restart: latents drawn by its key."""
    seed = int(np.asarray(random.key_data(key)).ravel()[-1])
    joint = structure.joint
    drawn = bare_trace(joint.model, joint.args, joint.kwargs, key=key)
    with_values = {
        k: {**s, "value": drawn[k]["value"]} if k in joint.latents else s
        for k, s in trace.items()
        if k in drawn
    }
    return start(structure, with_values, method.init or {}, np.random.default_rng(seed))


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
    # over starts, can wait for each other for ever (`numerics.lapack`).
    return over_leading_axis(lambda s: climb(joint, terms, s, tol, num), state)


def _improper(q) -> list[str]:
    """Sites of blocks whose moments are no numbers."""
    moments = [jax.tree.leaves(f.coordinates()) for f in q]
    finite = [all(bool(jnp.all(jnp.isfinite(x))) for x in m) for m in moments]
    return [k for f, ok in zip(q, finite, strict=True) if not ok for k in f.sites]


def _draws(q, trace: dict, key, num: int) -> Draws:
    values = {}
    for family, k in zip(q, random.split(key, len(q)), strict=True):
        values |= family.draw(k, num)
    gps = roles(trace).gps
    known = {k: x for k, x in values.items() if k not in gps}
    return Draws.equal(known, {k: FromDraws(values[k]) for k in gps})


def _result(bound: float, still_open: bool, stopped: bool) -> Result:
    if stopped:
        return Result.interrupted
    if not np.isfinite(bound):
        return Result.nonfinite
    return Result.max_steps if still_open else Result.converged
