"""`SVI`: NumPyro's stochastic variational inference behind the same verb, for models without a GP.
The guide's distribution is kept as draws, as that of `NUTS` is.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro import infer
from numpyro.infer import autoguide
from numpyro.infer.elbo import ELBO as NumPyroELBO
from numpyro.optim import optax_to_numpyro
from scipy.special import logsumexp

from ppl_gp.draws import Draws
from ppl_gp.errors import LISTED, DataError, ModelError, Result, warn
from ppl_gp.gp import unwrap
from ppl_gp.infer.elbo import ELBO
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.hyper.autoguides import ANNEALED, is_auto, kind_of, require_guide, traced
from ppl_gp.infer.hyper.space import Space
from ppl_gp.infer.local import of_draws, weighted
from ppl_gp.infer.mcmc.nuts import missing_parts, require_samplable, self_contained
from ppl_gp.infer.probes import first_trace
from ppl_gp.numerics.linalg import cholesky, solve_lower
from ppl_gp.quick import full_jit, quick_jit
from ppl_gp.reading.roles import roles
from ppl_gp.results.compare.truth import KHAT_LIMIT, smooth
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import Stage, interruptible, unless_stopped
from ppl_gp.settings import require_positive, require_whole

CHUNK = 50  # steps between two looks at Ctrl-C
BOUNDS = 200  # draws of the bound at the end
_OWN = 4000  # draws of q that its own means and sds are computed from
_MOST_LATENTS = 1000  # entries of all sites up to which q is judged: their square is kept
# trained as points: their loss is not a bound
_POINTS = (autoguide.AutoDelta, autoguide.AutoLaplaceApproximation)
# without a best member that sds could be compared with
_FLOWS = (autoguide.AutoBNAFNormal, autoguide.AutoIAFNormal)


@dataclass(frozen=True)
class SVI:
    """NumPyro's SVI for models without a GP, with any guide, and a check of the result.

    For networks, regressions and other models with continuous latents. Latents of each row have
    parameters of their own in an autoguide, and all rows are used at every step.

    Parameters
    ----------
    guide : autoguide class, guide or callable, default AutoNormal
        A class of NumPyro autoguides, a `functools.partial` of one, an autoguide made of the model,
        or a guide function with the arguments of the model.
    loss : NumPyro loss, default ELBO()
        What training minimises.
    num_steps : int, default 2000
        Number of steps.
    learning_rate : float, default 0.05
        Adam's rate at the start. It falls to zero along a squared cosine.
    optimiser : optax.GradientTransformation, default None
        Used as it is, instead of Adam.
    num_draws : int, default 1000
        Draws of the guide that are kept.

    Raises
    ------
    DataError
        For numbers out of range, an optimiser that is not from optax, a guide or loss that is none,
        and annealed guides (`AutoDAIS`).
    ModelError
        In `fit`, for GP sites (use `SVGP`, or `guide` with NumPyro's SVI), params, discrete latents
        and plates that subsample. Also for a guide that does not match the model, and a log density
        that is not finite at any start.

    Notes
    -----
    `log_evidence` is the bound at the end, nats: a mean of 200 draws with standard error
    `stats["log_evidence_se"]`. It is `None` for guides that are trained as points.
    `stats["losses"]` has the loss of every step. `fit.result` is `completed`, `nonfinite` or
    `interrupted`.

    At the end `fit` compares the guide with the posterior, in unconstrained coordinates, by 2000
    importance weights. A warning appears for a mean that is off by 0.1 posterior standard
    deviations, a standard deviation off by a tenth, or k-hat above 0.7. Entries of `stats`:

    - "mean_shift": largest error of a mean, in posterior standard deviations.
    - "sd_ratio": standard deviation of the guide over the posterior's, where it is furthest from 1.
    - "importance_gain": log p(y) minus the bound, nats.
    - "pareto_k": k-hat of the weights. `AutoLaplaceApproximation` has this entry only.

    Guides of points and of more than 1000 latents are not judged, and `stats["ended"]` says so. A
    step costs one gradient of the loss. Each fit compiles anew, because autoguides keep the shapes
    of their data.

    Examples
    --------
    >>> from numpyro.infer.autoguide import AutoMultivariateNormal
    >>> pg.SVI(guide=AutoMultivariateNormal, num_steps=500).evidence_is
    'lower bound'
    """

    evidence_is: ClassVar[str] = "lower bound"

    guide: Any = autoguide.AutoNormal
    loss: Any = field(default_factory=ELBO)
    num_steps: int = 2000
    learning_rate: float = 0.05
    optimiser: Any = None
    num_draws: int = 1000

    def __post_init__(self):
        require_whole(self, "num_steps", "num_draws")
        require_positive(self, "learning_rate")
        if not (self.optimiser is None or isinstance(self.optimiser, optax.GradientTransformation)):
            raise DataError(
                f"SVI(optimiser={type(self.optimiser).__name__}): give an optax transformation, "
                "optax.adam(0.02), and no optimiser of numpyro.optim."
            )
        if not callable(self.guide):
            raise DataError(
                f"SVI(guide={self.guide!r}): give an autoguide class, AutoNormal, or a guide."
            )
        if not isinstance(self.loss, NumPyroELBO):
            given = getattr(self.loss, "__name__", repr(self.loss))
            raise DataError(f"SVI(loss={given}): give an instance, pg.ELBO() or Trace_ELBO().")
        if issubclass(kind := kind_of(self.guide), ANNEALED):
            raise DataError(
                f"SVI(guide={kind.__name__}): annealed guides have no draws after training that "
                "can be scored; take AutoNormal or AutoMultivariateNormal."
            )


@run_method.register
def _fit_svi(method: SVI, model, rng_key, args, kwargs, progress) -> Fit:
    trace = first_trace(model, args, kwargs)
    found = roles(trace)
    if found.gps:
        raise ModelError(
            f"SVI() is for models without a GP, and {list(found.gps)} are GP sites: use "
            f"NumPyro's own SVI with pg.guide(model, ...). {LISTED}"
        )
    require_samplable(model, trace, args, kwargs, "SVI()")
    whole = self_contained(model, missing_parts(trace))
    guide = method.guide(whole) if is_auto(method.guide) else method.guide
    svi = infer.SVI(whole, guide, optax_to_numpyro(method.optimiser or _adam(method)), method.loss)
    key_init, key_bound, key_draws = random.split(rng_key, 3)
    stages = _stages(svi, trace, key_init, args, kwargs, method.num_steps)
    (state, losses), stopped = interruptible(stages, "SVI", method.num_steps, progress)
    losses, params = np.concatenate(losses), svi.get_params(state)
    stats = {"losses": losses, "steps": len(losses)}
    result = Result.interrupted if stopped else Result.completed
    bound, names = None, (*found.hyper, *found.local_latents)
    num = sum(np.size(trace[k]["value"]) for k in names)
    if not np.all(np.isfinite(losses)):
        result = Result.nonfinite
    elif _is_bound(method.loss) and not _has_points(guide, params, args, kwargs):
        summed = functools.partial(_bound, svi, params, key_bound, args, kwargs)
        (bound, stats["log_evidence_se"]), _ = unless_stopped(summed, (None, None))
    is_mode = isinstance(guide, autoguide.AutoLaplaceApproximation) and _is_bound(method.loss)
    if result is Result.completed and num <= _MOST_LATENTS and (is_mode or bound is not None):
        judge = _of_mode if is_mode or bound is None else functools.partial(_judged, method, bound)
        given = svi.guide, params, key_bound, Space(model, names, args, kwargs, {})
        stats |= unless_stopped(functools.partial(judge, *given), {})[0]
    if result is Result.completed and "pareto_k" not in stats:
        stats["ended"] = "all steps made; whether they were enough was not judged"
    with numpyro.validation_enabled(False):
        drawn = _draws(guide, params, key_draws, method.num_draws, args, kwargs)
    return Fit(
        model=model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal({k: drawn[k] for k in names}, {}),
        log_evidence=bound,
        result=result,
        stats=stats,
        sampled=True,
    )


def _adam(method: SVI) -> optax.GradientTransformation:
    """Its memory of squared gradients is 20 steps long: that of 1000 is full of the start's."""
    rate = optax.cosine_decay_schedule(method.learning_rate, method.num_steps, exponent=2.0)
    return optax.adam(rate, b2=0.95)


def _is_bound(loss) -> bool:
    """Renyi's bound of a negative order lies above log p(y)."""
    return not (isinstance(loss, infer.RenyiELBO) and loss.alpha < 0.0)


def _has_points(guide, params, args, kwargs) -> bool:
    """Whether q has no density: a site of it is a point."""
    if isinstance(guide, autoguide.AutoGuideList):
        return any(_has_points(g, params, args, kwargs) for g in guide._guides)
    if isinstance(guide, autoguide.AutoGuide):
        return isinstance(guide, _POINTS)
    trace = traced(guide, params, random.key(0), args, kwargs)
    fns = [unwrap(s["fn"]) for s in trace.values() if s["type"] == "sample"]
    return any(isinstance(fn, dist.Delta) for fn in fns)


def _stages(svi, trace, key, args, kwargs, num: int) -> Iterator[Stage[tuple[Any, list]]]:
    """Chunks of steps: (where the optimiser stands, the losses so far)."""
    state, losses = _started(svi, trace, key, args, kwargs), []
    yield Stage((state, losses), 0, keep=False)
    for done in range(0, num, CHUNK):
        state, new = _steps(svi, state, args, kwargs, min(CHUNK, num - done))
        losses = [*losses, np.asarray(new)]
        yield Stage((state, losses), done + len(new), f"loss {float(new[-1]):.3f}")


def _started(svi, trace, key, args, kwargs):
    """The optimiser's first state; `ModelError` for a guide of other sites, or no density."""
    try:
        if not getattr(svi.loss, "multi_sample_guide", False):  # draws of it have an axis more
            as_init_does = random.split(key, 3)[2]
            require_guide(traced(svi.guide, {}, as_init_does, args, kwargs), trace, "SVI()")
        return svi.init(key, *args, **kwargs)
    except RuntimeError as error:
        if "valid initial parameters" not in str(error):
            raise
        raise ModelError(
            "SVI(): the log density of the model, or its gradient, is not finite at any value "
            "where NumPyro's guide tried to begin; write it so that it is (jnp.where with safe "
            "arguments in both branches), or begin elsewhere: functools.partial(AutoNormal, "
            "init_loc_fn=numpyro.infer.init_to_value(values={...}))."
        ) from error


@full_jit
def _steps(svi, state, args, kwargs, num: int):
    return lax.scan(lambda s, _: svi.update(s, *args, **kwargs), state, None, length=num)


def _bound(svi, params, key, args, kwargs) -> tuple[float, float]:
    """(the bound at these parameters, its standard error), nats."""
    loss = copy.copy(svi.loss)
    if getattr(loss, "beta", 1.0) != 1.0:  # a loss with another weight of the KL is no bound
        loss.beta = 1.0

    @full_jit
    def losses(params, args, kwargs):
        given = params, svi.model, svi.guide, *args
        return lax.map(lambda k: loss.loss(k, *given, **kwargs), random.split(key, BOUNDS))

    found = -np.asarray(losses(params, args, kwargs))
    return float(found.mean()), float(found.std(ddof=1) / np.sqrt(BOUNDS))


def _of_mode(guide, params, key, space: Space) -> dict:
    """What `Laplace()` says of a Gaussian at the mode, by importance weights of its draws."""
    joint, u = of_draws(space, _draws(guide, params, key, _OWN, space.args, space.kwargs))
    L = cholesky(jnp.cov(u.T).reshape(u.shape[1], -1))
    squares = jnp.sum(solve_lower(L, (u - u.mean(0)).T) ** 2, 0)
    log_w = np.asarray(lax.map(joint, u) + 0.5 * squares)
    if not np.isfinite(log_w).any():  # NumPyro warns of a singular Hessian: its draws are equal
        return {}
    return {"pareto_k": weighted(log_w, "SVI(guide=AutoLaplaceApproximation)")["pareto_k"]}


def _judged(method: SVI, bound: float, guide, params, key, space: Space) -> dict:
    """How far q is from the posterior, and a warning where that matters: entries of `stats`."""
    found = _looked(guide, params, key, space)
    log_w, log_g, step, shift, sd, own_sd, left, lacking = map(np.asarray, found)
    log_w = np.where(np.isfinite(log_w), log_w, -np.inf)
    if np.all(log_w == -np.inf):
        return {}
    smoothed, khat = smooth(log_w)
    # The Gaussian's moments are known: they are corrected by the difference from its own weights
    extra = (np.exp(smoothed) - np.exp(smooth(log_g)[0]))[:, None]
    moved = np.sum(extra * step, 0)
    off = step - moved
    wide = 1.0 + np.sum(extra * step**2, 0) - moved**2
    mean, ratio = (shift / sd + moved) / np.sqrt(wide), own_sd / (sd * np.sqrt(wide))
    # standard errors: q's own moments are those of `_OWN` draws
    mean_se = np.sqrt(np.sum((extra * off) ** 2, 0) / wide + ratio**2 / _OWN)
    ratio_se = np.sqrt(np.sum((extra * (off**2 / wide - 1.0)) ** 2, 0) / 4.0 + 0.5 / _OWN)
    far, wrong = np.abs(mean) - 2.0 * mean_se, np.abs(np.log(ratio)) - 2.0 * ratio_se
    stats = {
        "mean_shift": float(np.abs(mean[np.argmax(far)])),
        "sd_ratio": float(ratio[np.argmax(wrong)]),
        "pareto_k": khat,
        "importance_gain": float(lacking + logsumexp(log_w) - logsumexp(log_g) - bound),
    }
    is_wrong = np.max(wrong) > np.log(1.1)
    if not khat <= KHAT_LIMIT or np.max(far) > 0.1 or is_wrong:
        settled = np.max(np.abs(np.log(left))) < np.log(1.2)
        _tell(method, settled and (is_wrong or np.max(np.abs(shift / sd)) < 0.1), **stats)
    return stats


@quick_jit
def _looked(guide, params, key, space: Space) -> tuple[jax.Array, ...]:
    """A Gaussian in the place of the posterior of all latents, unconstrained: as log p(y, u) looks
    where q has its draws, by a regression of its gradients on u, exact for a Gaussian posterior.
    Half of the draws are from it, half from one twice as wide, for the posterior's tails.

    (log weights of the draws and those of the Gaussian itself (S,), steps from its mean in its
    sds (S, D), its mean less q's, its sds, q's sds, the sds of q over those of the best q that is
    as independent (D,), the constant that the log weights lack).
    """
    keys = random.split(key)
    joint, u = of_draws(space, _draws(guide, params, keys[0], _OWN, space.args, space.kwargs))
    D, few = u.shape[1], u[: max(BOUNDS, 3 * u[0].size)]
    centre, L = few.mean(0), cholesky(jnp.cov(few.T, ddof=0).reshape(D, D))
    slopes = lax.map(jax.grad(lambda x: joint(x)), few) @ L
    bend = -solve_lower(L, (few - centre).T) @ slopes / len(few)  # I where q is exact
    values, V = jnp.linalg.eigh(0.5 * (bend + bend.T))
    values = jnp.maximum(jnp.abs(values), 1e-8)  # q's place may be no maximum
    root = L @ V / jnp.sqrt(values)
    mean = centre + root @ (V.T @ slopes.mean(0) / jnp.sqrt(values))
    half = random.normal(keys[1], (2, 5 * BOUNDS // 2, D), u.dtype) * jnp.array([[[1.0]], [[2.0]]])
    white = jnp.concatenate([half, -half]).reshape(-1, D)
    squares = 0.5 * jnp.sum(white**2, 1)
    log_r = jnp.logaddexp(-squares, -squares / 4.0 - D * jnp.log(2.0)) - jnp.log(2.0)
    log_p = lax.map(joint, mean + white @ root.T)
    log_det = jnp.sum(jnp.log(jnp.diagonal(L))) - 0.5 * jnp.sum(jnp.log(values))
    sd, own_sd = jnp.linalg.norm(root, axis=1), u.std(0)
    alone = own_sd * jnp.linalg.norm(solve_lower(L, V * jnp.sqrt(values), trans=1), axis=1)
    apart = jnp.max(jnp.abs(jnp.corrcoef(u.T).reshape(D, D) - jnp.eye(D))) < 0.1
    left = jnp.where(apart, alone, own_sd / sd)
    lacking = 0.5 * D * jnp.log(2.0 * jnp.pi) + log_det
    step = white @ root.T / sd
    return log_p - log_r, -squares - log_r, step, mean - u.mean(0), sd, own_sd, left, lacking


def _draws(guide: Callable, params, key, num: int, args, kwargs) -> dict[str, jax.Array]:
    """{site: (num, ...)} of the guide's distribution."""
    if isinstance(guide, autoguide.AutoGuide):
        # of a guide of points NumPyro runs the model, for its deterministic sites
        return dict(guide.sample_posterior(key, params, *args, sample_shape=(num,), **kwargs))
    again = infer.Predictive(guide, params=params, num_samples=num)
    return {k: jnp.asarray(x) for k, x in again(key, *args, **kwargs).items()}


def _tell(method: SVI, settled, mean_shift, sd_ratio, pareto_k, importance_gain) -> None:
    """Warn that q is not the posterior: by how much, and what helps."""
    kind = kind_of(method.guide)
    name = getattr(getattr(method.guide, "func", method.guide), "__name__", kind.__name__)
    sizes = [f"a mean is about {mean_shift:.2g} posterior sd off"] * (mean_shift > 0.1)
    if max(sd_ratio, 1.0 / sd_ratio) > 1.1:
        sizes += [f"an sd is {sd_ratio:.2g} times the posterior's"]
    told = ", ".join([*sizes, f"the bound is {importance_gain:.2g} nats below log p(y)"])
    is_flow, steps = issubclass(kind, _FLOWS), method.num_steps
    full = is_flow or issubclass(kind, autoguide.AutoMultivariateNormal)
    other = "NUTS()" if full else "SVI(guide=AutoMultivariateNormal), or NUTS()"
    if not pareto_k <= KHAT_LIMIT:
        warn(
            f"SVI(guide={name}): nothing says how far the guide is from the posterior, because "
            f"importance weights are too heavy (Pareto k-hat {pareto_k:.2f}, above {KHAT_LIMIT}). "
            f"Unreliably, by these weights {told}. Compare with {other}."
        )
    elif settled and not is_flow:
        warn(
            f"SVI(guide={name}): the best guide of this family is not the posterior: by "
            f"importance weights {told}. Take {other}."
        )
    else:
        where = f"did not bring {name} to the posterior" if is_flow else "has not settled"
        warn(
            f"SVI(num_steps={steps}) {where}: by importance weights {told}. Take num_steps="
            f"{4 * steps}, or a larger learning_rate; if that changes nothing, {other}."
        )
