"""`hyper=Grid()`: the hyperparameters integrated over a few points about their mode, in the manner
of INLA (Rue, Martino & Chopin 2009, section 3).

In unconstrained coordinates theta: the mode of log evidence + log prior + log |J|, its curvature by
central differences of exact gradients, a design in the rotated and scaled coordinates
(`design.py`), stretched along half axes where the posterior is skewed, and one evaluation of the
log evidence at each of its points, in one compiled call.

Ctrl-C leaves the point that the search had reached, or the mode: one draw of the hyperparameters.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.special import logsumexp

from ppl_gp.draws import Draws
from ppl_gp.errors import ModelError, Result
from ppl_gp.hyperparameters import MAP, Grid
from ppl_gp.infer.hyper.choice import LocalProblem, infer_hyper
from ppl_gp.infer.hyper.design import (
    ASKED_AT,
    WIDEST,
    design,
    effective,
    half_widths,
    is_regular,
    require_few,
    stretched,
)
from ppl_gp.infer.hyper.map import maximise
from ppl_gp.infer.hyper.point import Point, fit_at, without_values
from ppl_gp.infer.hyper.restarts import UNUSABLE, Ascent, Evaluation, evaluate
from ppl_gp.infer.hyper.sample import kept_of_draws
from ppl_gp.infer.hyper.space import transform
from ppl_gp.infer.hyper.width import tell_of_width
from ppl_gp.infer.loop import Stage, interruptible
from ppl_gp.infer.probes.maximum import require_bounded
from ppl_gp.local.natural import as_general, as_kept
from ppl_gp.results.fit import Fit

# From here on a posterior counts as no Gaussian, besides a stretch that had to be cut: the share of
# the points that one would use, and the weight at a regular grid's edge, where one has a percent.
_FEWEST, _EDGE = 0.2, 0.1
_STEP = 5e-3  # of the differences: their error is its square, and the gradient's error over it


@infer_hyper.register
def _fit_grid(config: Grid, problem: LocalProblem) -> Fit:
    label = f"{type(problem.method).__name__}(hyper=Grid())"
    require_bounded(problem.trace, problem.model.reading, label)
    _require_priors(problem)
    _require_few(problem)
    how = MAP(config.restarts, config.max_steps, config.tol, config.init)
    ascent, mode = maximise(how, problem, jacobian=True)
    if mode.result is Result.interrupted:  # no mode, and so nothing to lay points about
        return fit_at(problem, mode)
    laid, interrupted = interruptible(_lay(ascent, mode), label, 3, problem.progress)
    if laid is None or interrupted:
        return fit_at(problem, mode._replace(result=Result.interrupted))
    return _fit(problem, ascent, mode, laid)


class _Laid(NamedTuple):
    """The points (n, d) about the mode, what they stand for, and what was found there."""

    thetas: np.ndarray
    log_design: np.ndarray
    scales: np.ndarray  # S of the covariance S S^T
    stretch: np.ndarray | None
    result: Result
    rebuild: Callable
    at: Evaluation


def _lay(ascent: Ascent, mode: Point) -> Iterator[Stage[_Laid | None]]:
    """The curvature, the half axes and the points, one after another."""
    yield Stage(None, 0)
    centre, rebuild = ravel_pytree(ascent.space.unconstrain(mode.hyper))
    scales, result = _scales(ascent, centre, rebuild, mode)
    yield Stage(None, 1)
    (points, log_design), stretch = design(centre.size), None
    if not is_regular(centre.size):
        stretch = _widths(ascent, centre, scales, rebuild, mode)
        points, log_design = stretched(points, log_design, stretch)
        yield Stage(None, 2)
    thetas = np.asarray(centre) + points @ scales.T
    at = _at(ascent, thetas, rebuild, mode)
    yield Stage(_Laid(thetas, log_design, scales, stretch, result, rebuild, at), 3)


def _widths(ascent: Ascent, centre, scales, rebuild, mode: Point) -> np.ndarray:
    """What half axes of the rotated coordinates are to be stretched by, (2 d,)."""
    axes = ASKED_AT * np.concatenate([np.eye(centre.size), -np.eye(centre.size)])
    at = _at(ascent, centre + axes @ scales.T, rebuild, mode)
    falls = np.asarray(at.loss) + mode.stats["log_posterior"]
    return half_widths(np.where(np.asarray(at.loss) < UNUSABLE, falls, np.inf))


def _require_priors(problem: LocalProblem) -> None:
    if problem.found.params or not problem.found.hyper:
        raise ModelError(
            f"Grid() integrates hyperparameters under their priors; the model has hyperparameters "
            f"{list(problem.found.hyper)}, and params without a prior {list(problem.found.params)}."
            " Declare them by numpyro.sample, or use MAP() or Fixed({...})."
        )


def _require_few(problem: LocalProblem) -> None:
    """No search for a mode that no design would be laid about."""
    sites = [problem.trace[name] for name in problem.found.hyper]
    shapes = jax.eval_shape(
        lambda: [transform(s).inv(1.0 * jnp.asarray(s["value"])) for s in sites]
    )
    require_few(sum(int(np.prod(x.shape)) for x in shapes))


def _scales(ascent: Ascent, centre, rebuild, mode: Point):
    """(S with S S^T the covariance of theta at the mode, how it ended)."""
    d = centre.size
    steps = _STEP * np.concatenate([np.eye(d), -np.eye(d)])
    at = _at(ascent, centre + steps, rebuild, mode)
    slopes = jax.vmap(lambda s: ravel_pytree(s)[0])(at.slopes)
    H = np.asarray(slopes[:d] - slopes[d:]) / (2.0 * _STEP)
    values, V = np.linalg.eigh(0.5 * (H + H.T))
    if not (np.all(np.isfinite(values)) and values[0] > 0):
        return V, Result.negative_curvature
    return V / np.sqrt(values), mode.result


def _at(ascent: Ascent, thetas, rebuild, mode: Point) -> Evaluation:
    """Loss, gradient and solution at points (n, d), each from the mode's pseudo-likelihood: of a
    softmax in its own form, unless a point fails in it.
    """
    points = jax.vmap(rebuild)(jnp.asarray(thetas))

    def ask(sites):
        many = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(thetas), *x.shape)), sites)
        return evaluate(ascent, points, many, jnp.zeros(len(thetas), bool))

    kept, general = as_kept(mode.solution.sites), as_general(mode.solution.sites)
    at = ask(kept)
    solved = np.all(np.asarray(at.loss) < UNUSABLE)
    return at if solved or type(kept) is type(general) else ask(general)


def _fit(problem: LocalProblem, ascent: Ascent, mode: Point, laid: _Laid) -> Fit:
    thetas, log_design, scales, stretch, result, rebuild, at = laid
    solved = np.asarray(at.loss) < UNUSABLE
    log_density = np.where(solved, -np.asarray(at.loss), -np.inf)
    log_weights = log_density + log_design
    centre, _ = ravel_pytree(ascent.space.unconstrain(mode.hyper))
    total = float(np.asarray(logsumexp(log_weights)))
    with np.errstate(invalid="ignore"):  # where no point was solved
        log_weights = log_weights - total
    reach = _reach(centre, thetas, scales, log_weights, int(np.sum(~solved)), stretch)
    hyper = jax.vmap(lambda t: ascent.space.constrain(rebuild(t)))(jnp.asarray(thetas))
    site, sites = problem.site, at.solution.sites
    kept, ratios, sound = kept_of_draws(
        problem.model, without_values(problem.method), hyper, sites, problem.args, problem.kwargs
    )
    half = 0.5 * thetas.shape[1] * np.log(2.0 * np.pi) + np.linalg.slogdet(scales)[1]
    return Fit(
        model=problem.model,
        method=problem.method,
        args=problem.args,
        kwargs=problem.kwargs,
        draws=Draws(hyper, {}, {site: kept}, jnp.asarray(log_weights)),
        log_evidence=None,
        result=_ended(result, reach, total) if np.all(sound[solved]) else Result.nonfinite,
        stats={
            **mode.stats,
            **tell_of_width(problem.method, ratios, np.exp(log_weights)),
            **reach,
            # log p(y), the hyperparameters integrated too
            "log_marginal_likelihood": float(total + half),
            "steps": int(mode.solution.steps),
            "residual": float(jnp.max(at.solution.residual)),
        },
        sampled=True,
    )


def _ended(result: Result, reach: dict, total: float) -> Result:
    """The search's result, unless the weights say that the design does not hold the posterior."""
    if not np.isfinite(total):
        return Result.nonfinite
    few = reach["grid_effective"] < _FEWEST * reach["grid_effective_gaussian"]
    cut = np.max(np.abs(np.log(reach.get("grid_stretch", 1.0)))) > 0.999 * np.log(WIDEST)
    edge = reach.get("grid_edge_weight", 0.0) > _EDGE
    return Result.not_gaussian if result is Result.converged and (few or cut or edge) else result


def _reach(centre, thetas, scales, log_weights, failed: int, stretch) -> dict:
    """How far the grid's weights reach: the effective number of points, that of a Gaussian
    posterior, and where the posterior is none. Points whose inner iteration failed have no weight.

    Of a regular grid the share of the weight on the outermost points; of a composite design, whose
    sphere has most of it for any posterior, the stretch of its half axes (2 d,).
    """
    points, log_design = design(centre.size)
    told = {
        "grid_points": len(points),
        "grid_failed": failed,
        "grid_effective": effective(log_weights),
        "grid_effective_gaussian": effective(log_design - 0.5 * np.sum(points**2, 1)),
    }
    if stretch is not None:
        return told | {"grid_stretch": stretch}
    weights = np.exp(log_weights)
    far = np.linalg.norm(np.linalg.solve(scales, (thetas - centre).T), axis=0)
    return told | {"grid_edge_weight": float(np.sum(weights[far > far.max() - 0.5]))}
