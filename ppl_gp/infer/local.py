"""Fitting by a local approximation: what is checked whatever is chosen for `hyper`; and `Laplace()`
of a model without a linear predictor, a Gaussian at the joint mode of all latents.

In NumPyro's unconstrained coordinates u the log joint with the log-Jacobian of z(u),

    psi(u) = log p(y, z(u)) + log |dz / du|,

is expanded at its maximum u^ to second order (MacKay 2003, chapter 27; PRML 4.4):

    q(u) = N(u^, H^-1), H = -psi''(u^),   log q(y) = psi(u^) + D/2 log 2 pi - log|H| / 2.

Exact where psi is a quadratic, and bad for several modes, a long tail, or a scale near zero:
importance weights say so, `stats["pareto_k"]`; `["importance_gain"]` estimates log p(y) - log q(y),
nats. Of sites that are held the evidence is given them, without their prior.

Cost: O(D) gradients of the log joint for H, O(D^3) once; some tens of gradients a start.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax import lax, random
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from ppl_gp.draws import Draws
from ppl_gp.errors import LISTED, DataError, ModelError, Result, warn
from ppl_gp.infer.fit import run_method

# each registers its choice
from ppl_gp.infer.hyper import grid, map, point, sample  # noqa: F401
from ppl_gp.infer.hyper.point import LocalProblem, infer_hyper, wide_column
from ppl_gp.infer.hyper.space import Space, fixed_values, given, held, holding, starts, transform
from ppl_gp.infer.maximised import integrated, require_bounded, require_no_maximised_effects
from ppl_gp.infer.mcmc.nuts import require_samplable
from ppl_gp.infer.probes import observed_trace, probe, require_numbers
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import LocalMethod
from ppl_gp.numerics.linalg import cholesky, solve_lower
from ppl_gp.quick import quick_jit
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.factors import factors_of, read
from ppl_gp.reading.predictor.collapsed import Collapsed, require_levels
from ppl_gp.reading.predictor.predictor import require_gp
from ppl_gp.reading.refusals import require_observations
from ppl_gp.reading.roles import is_missing_part, require_no_subsampling, roles, scored
from ppl_gp.reading.tracing import run, run_at_once
from ppl_gp.results.compare.truth import KHAT_LIMIT, smooth
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import Stage, interruptible
from ppl_gp.settings import GAUSSIAN, MAP, Fixed


@run_method.register
def _fit_local(method: LocalMethod, model, rng_key, args, kwargs, progress) -> Fit:
    at = holding(model, method.hyper) if given(method.hyper)[1] else model
    trace = observed_trace(at, args, kwargs)
    require_observations(model, args, kwargs, trace)
    require_no_subsampling(trace, type(method).__name__)
    whole, numbers = model, partial(require_numbers, model, args, kwargs, trace)
    model = integrated(model, method, args, kwargs, held(method.hyper, trace))
    if model is not whole or not roles(trace).gps:
        numbers()  # of others `probe` sees all that f is computed from
    if isinstance(method, Laplace) and not isinstance(model, Collapsed) and not roles(trace).gps:
        return fit_joint(LocalProblem(method, model, trace, rng_key, args, kwargs, progress))
    if isinstance(method.hyper, MAP) and method.integrate == GAUSSIAN:
        label = f"{type(method).__name__}(hyper=MAP())"
        require_no_maximised_effects(model, args, kwargs, label, method.hyper.maximise)
    if isinstance(model, Collapsed):
        names = {*roles(trace).hyper, *roles(trace).params} - {*model.plan.sites}
        trace = run_at_once(model, args, kwargs, {k: trace[k]["value"] for k in names})
    problem = LocalProblem(method, model, trace, rng_key, args, kwargs, progress)
    hyper = {k: trace[k]["value"] for k in problem.found.hyper}
    factors = factors_of(model, args, kwargs, trace, hyper)
    log_lik = factors.log_lik
    if isinstance(model, Collapsed):
        require_levels(model, args, kwargs, factors.log_lik.joint.hyper)
    try:
        probe(log_lik)
    except DataError:
        numbers()  # which names the values
        raise
    if (why := method.refuses(log_lik)) is not None:
        raise ModelError(why)
    fit = infer_hyper(method.hyper, problem)
    if isinstance(method, Laplace):
        _warn_if_steps(fit, problem)
    if fit.result is Result.nonfinite and "caution" not in fit.stats:
        there = read(model, *args, hyper=fit.draws.at(0).known, **kwargs).prior
        fit.stats |= {k: x for k, x in {"caution": wide_column(there)}.items() if x}
    return fit


def _warn_if_steps(fit: Fit, problem: LocalProblem) -> None:
    """Where all sites are flat, q is f's prior, to which a step function need not be flat."""
    kept: Any = fit.draws.kept[problem.site]
    if np.any(kept.sites.nat1) or np.any(kept.sites.nat2):
        return
    factors = problem.setting.factors(fit.draws.at(0).known)
    f, sd = jnp.ravel(factors.prior.mean), jnp.sqrt(jnp.ravel(factors.prior.variance))
    at = jnp.stack([factors.log_lik(f + k * sd) for k in (-1.0, 0.0, 1.0)])
    if (rise := float(jnp.max(jnp.ptp(at, 0)))) > 1e-2:
        warn(
            "Laplace(): the likelihood is flat at the mode in all rows, as a step function is. The "
            f"posterior is the prior, although a row's log-likelihood changes by {rise:.2g} nats "
            "within one sd, and the evidence is off by up to that per row. Use EP()."
        )


MAX_LATENTS = 3000  # entries of all sites: H has their square
_DRAWS = 1000  # of q that a fit keeps, half of them the mirror images of the others
_HALVINGS = 30  # of a Newton step that does not gain


class Joint(eqx.Module):
    """psi(u), u one vector of all latents; `like`: a tree of the form that u is read by."""

    space: Space
    like: dict

    def sites(self, u: Float[Array, "D"]) -> dict:
        """{site: value} in declared coordinates."""
        return self.space.constrain(ravel_pytree(self.like)[1](u))

    def __call__(self, u: Float[Array, "D"]) -> Float[Array, ""]:
        """log p(y, z(u)) + log |dz / du|, nats."""
        sp, free = self.space, ravel_pytree(self.like)[1](u)
        z = sp.constrain(free)
        trace = run(sp.model, sp.args, sp.kwargs, {**sp.given, **z})
        own = [k for k, s in trace.items() if s["type"] == "sample"]
        volumes = [transform(trace[k]).log_abs_det_jacobian(free[k], z[k]) for k in sp.names]
        terms = [*(scored(trace[k]) for k in own if not is_missing_part(k, trace)), *volumes]
        return jnp.sum(jnp.stack([jnp.sum(t) for t in terms]))


def of_draws(space: Space, drawn: dict) -> tuple[Joint, Float[Array, "S D"]]:
    """(psi, {site: draws} as its arguments)."""
    free = lax.map(space.unconstrain, {k: drawn[k] for k in space.names})
    u = jax.vmap(lambda tree: ravel_pytree(tree)[0])(free)
    return Joint(space, jax.tree.map(lambda x: x[0], free)), u


class Mode(NamedTuple):
    """Where an ascent ended."""

    u: Float[Array, "D"]
    value: Float[Array, ""]
    factor: Float[Array, "D D"]  # L of L L^T = H
    decrement: Float[Array, ""]  # of Newton's method: the distance to the mode in sd of q
    steps: Int[Array, ""]


def fit_joint(problem: LocalProblem) -> Fit:
    """`Laplace()` over all latents that are not held.

    Raises `DataError` for a `hyper=` other than `MAP` and `Fixed`, `ModelError` for what has no
    such mode: discrete sites, params, subsampling, a spread that is itself unknown.
    """
    method: Any = problem.method
    if method.marginals != "gaussian":
        raise ModelError(
            f'Laplace(marginals="{method.marginals}") corrects what enters a GP or a linear '
            "predictor, and this model has neither: leave `marginals` out."
        )
    space = _space(problem)
    config = method.hyper if isinstance(method.hyper, MAP) else MAP()
    key_start, key_draws = random.split(problem.rng_key)
    points, like = _starts(space, key_start, config)
    joint = Joint(space, like)
    stages = _stages(joint, points, method)
    modes, _ = interruptible(stages, "Laplace", len(points), problem.progress)
    best, result = _best(modes, method.tol)
    draws, log_w = _drawn(joint, best, key_draws)
    value = float(best.value) + 0.5 * len(best.u) * np.log(2.0 * np.pi)
    value -= float(np.sum(np.log(np.diagonal(np.asarray(best.factor)))))
    value -= _prior_of_held(space)
    stats = {
        "steps": int(best.steps),
        "residual": float(best.decrement),
        "restart_log_joints": np.asarray([float(m.value) for m in modes]),
        "mode": joint.sites(best.u),
        "num_latents": len(best.u),
        **(weighted(np.asarray(log_w), "Laplace()") if result is Result.converged else _NO_MODE),
    }
    held = jax.tree.map(lambda x: jnp.broadcast_to(x, (_DRAWS, *jnp.shape(x))), space.given)
    return problem.fit(
        draws=Draws.equal({**draws, **held}, {}),
        log_evidence=value,
        result=result,
        stats=stats,
        sampled=True,
    )


_NO_MODE = {
    "caution": "the model has no linear predictor, and this is its joint mode: a density with a "
    "kink there (a Laplace prior's) or without a bound has none that Newton's method ends at; "
    "take NUTS() or SVI()"
}


def _space(problem: LocalProblem) -> Space:
    """Of all latents, after all that can be refused is refused."""
    method, model, trace = problem.method, problem.model, problem.trace
    if not isinstance(method.hyper, MAP | Fixed):
        held = f": {model.reading.held}" if model.reading.held else "."
        raise DataError(
            f"Laplace(hyper={method.hyper!r}): the model has no GP, and no linear predictor was "
            "found, so that all latents are taken together, by hyper=MAP() or Fixed({...})" + held
        )
    if named := getattr(method.hyper, "maximise", ()):
        raise DataError(
            f"Laplace(hyper=MAP(maximise={named!r})): the model has no linear predictor, and one "
            "Gaussian takes all latents. Leave maximise out, or fix sites, hyper=Fixed({...})."
        )
    if not (*problem.found.hyper, *problem.found.local_latents):
        require_gp(problem.found, trace)
    require_samplable(model, trace, problem.args, problem.kwargs, "Laplace()")
    held = method.hyper.values if isinstance(method.hyper, Fixed) else {}
    found = roles(trace)
    latents = (*found.hyper, *found.local_latents)
    if unknown := [k for k in held if k not in latents]:
        raise ModelError(f"Fixed(...) gives {unknown}, and the model's sites are {list(latents)}.")
    names = tuple(k for k in latents if k not in held)
    num = sum(np.size(trace[k]["value"]) for k in names)
    if not 0 < num <= MAX_LATENTS:
        raise ModelError(
            f"Laplace() expands the log density in all latents that are not held, and they have "
            f"{num} entries; it takes 1 to {MAX_LATENTS}. {LISTED}"
        )
    require_bounded(trace, model.reading, "Laplace()", names, tuple(held))
    given = {k: jnp.asarray(trace[k]["value"]) for k in held}
    return Space(model, names, problem.args, problem.kwargs, given)


def _prior_of_held(sp: Space) -> float:
    """log p of the sites that are held, nats: the evidence is given them. One whose prior a latent
    enters is evidence about that latent, as data are, and stays in.
    """

    def priors(values):
        trace = run(sp.model, sp.args, sp.kwargs, {**values, **sp.given})
        return {k: scored(trace[k]) for k in sp.given}

    values = {k: s["value"] for k, s in run(sp.model, sp.args, sp.kwargs, sp.given).items()}
    free = {k: values[k] for k in sp.names}
    entered = sources(priors, free) if sp.given else {}
    return sum((float(jnp.sum(x)) for k, x in priors(free).items() if not entered[k]), 0.0)


def _starts(space: Space, key, config: MAP) -> tuple[Float[Array, "S D"], dict]:
    """(the points where ascents begin, a tree that u is read by)."""
    some = config.restarts - (config.init is not None)
    trees = []
    if config.init is not None:
        trees = [space.unconstrain(fixed_values(config, space))]
    if some:
        drawn = starts(space, key, some)
        trees += [jax.tree.map(lambda x, i=i: x[i], drawn) for i in range(some)]
    return jnp.stack([ravel_pytree(t)[0] for t in trees]), trees[0]


def _stages(joint: Joint, points, method) -> Iterator[Stage[list[Mode]]]:
    found: list[Mode] = []
    yield Stage(found, 0, keep=False)
    for i, first in enumerate(points):
        tol = max(method.tol, 1e3 * float(jnp.finfo(first.dtype).eps))
        found = [*found, _climb(joint, first, tol, method.max_steps)]
        yield Stage(found, i + 1, f"log joint {float(found[-1].value):.3f}")


@quick_jit
def _climb(joint: Joint, start, tol, max_steps: int) -> Mode:
    """BFGS to the neighbourhood of a maximum, and Newton's method from there."""

    def loss(u, _=None):
        value = joint(u)
        return jnp.where(jnp.isfinite(value), -value, 1e30)  # so that the line search backs off

    solver, limit = optx.BFGS(rtol=1e-6, atol=1e-6), 20 * max_steps
    near = optx.minimise(loss, solver, start, max_steps=limit, throw=False).value

    def newton(state):
        u, _, _, steps = state
        g, L = -jax.grad(loss)(u), cholesky(jax.hessian(loss)(u))
        step = solve_lower(L, solve_lower(L, g), trans=1)
        decrement = jnp.sqrt(jnp.maximum(step @ g, 0.0))

        # a last step may gain less than the log joint's rounding
        here = loss(u)
        limit = here + 10.0 * jnp.finfo(u.dtype).eps * (1.0 + jnp.abs(here))

        def worse(t):
            return (t > 0.5**_HALVINGS) & ~(loss(u + t * step) <= limit)

        t = lax.while_loop(worse, lambda t: 0.5 * t, jnp.ones((), u.dtype))
        return jnp.where(jnp.all(jnp.isfinite(step)), u + t * step, u), L, decrement, steps + 1

    def going(state):
        _, _, decrement, steps = state
        return (decrement > tol) & (steps < max_steps)  # NaN ends it: H has a negative direction

    D = len(start)
    first = near, jnp.full((D, D), jnp.nan), jnp.full((), jnp.inf), jnp.int32(0)
    u, _, decrement, steps = lax.while_loop(going, newton, first)
    return Mode(u, joint(u), cholesky(jax.hessian(loss)(u)), decrement, steps)


def _best(modes: list[Mode], tol: float) -> tuple[Mode, Result]:
    """The highest of the proper modes, or where there is none of all points, and what it is. A mode
    is proper too where half of the squared decrement, what a step gains, is lost by rounding.
    """
    values = np.asarray([float(m.value) for m in modes])
    eps = float(np.finfo(np.asarray(modes[0].u).dtype).eps)
    near = np.maximum(max(tol, 1e3 * eps), np.sqrt(20.0 * eps * (1.0 + np.abs(values))))
    proper = np.asarray([float(m.decrement) for m in modes]) <= near
    ranked = np.where(np.isfinite(values), values, -np.inf)
    best = modes[int(np.argmax(np.where(proper, ranked, -np.inf) if proper.any() else ranked))]
    if not np.isfinite(float(best.value)):
        return best, Result.nonfinite
    if not np.isfinite(float(best.factor[-1, -1])):
        return best, Result.negative_curvature
    return best, Result.converged if proper.any() else Result.max_steps


@quick_jit
def _drawn(joint: Joint, mode: Mode, key) -> tuple[dict, Float[Array, "S"]]:
    """({site: draws of q}, log p(y, z) / q of each but for what is the same for all)."""
    half = random.normal(key, (_DRAWS // 2, len(mode.u)), mode.u.dtype)
    white = jnp.concatenate([half, -half])
    u = mode.u + solve_lower(mode.factor, white.T, trans=1).T
    log_w = lax.map(joint, u) - mode.value + 0.5 * jnp.sum(white**2, 1)
    return lax.map(joint.sites, u), log_w


def weighted(log_w: np.ndarray, method: str) -> dict[str, Any]:
    """What importance weights of q say; a warning where q is far from the posterior."""
    finite = np.where(np.isfinite(log_w), log_w, -np.inf)
    khat = smooth(finite)[1]
    gain = float(np.logaddexp.reduce(finite) - np.log(len(finite)))
    if khat > KHAT_LIMIT:
        warn(
            f"{method}: the Gaussian at the joint mode is far from the posterior (Pareto k-hat "
            f"{khat:.2f} of its weights, above {KHAT_LIMIT}); compare with NUTS()."
        )
    return {"pareto_k": khat, "importance_gain": gain}
