"""`hyper=Grid()`: the hyperparameters integrated over a few points about their mode, in the manner
of INLA (Rue, Martino & Chopin 2009, section 3).

In unconstrained coordinates theta: the mode of log evidence + log prior + log |J|, its curvature by
central differences of exact gradients, a design in the rotated and scaled coordinates
(`design.py`), and one evaluation of the log evidence at each of its points, in one compiled call.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp

from ppl_gp.draws import Draws
from ppl_gp.errors import ModelError, Result
from ppl_gp.hyperparameters import MAP, Grid
from ppl_gp.infer.hyper.choice import LocalProblem, infer_hyper
from ppl_gp.infer.hyper.design import design
from ppl_gp.infer.hyper.map import maximise
from ppl_gp.infer.hyper.point import Point
from ppl_gp.infer.hyper.restarts import UNUSABLE, Ascent, Evaluation, evaluate
from ppl_gp.infer.hyper.sample import kept_of_draws
from ppl_gp.infer.probes import require_bounded
from ppl_gp.local.natural import as_general
from ppl_gp.results.fit import Fit

_STEP = 5e-3  # of the differences: their error is its square, and the gradient's error over it


@infer_hyper.register
def _fit_grid(config: Grid, problem: LocalProblem) -> Fit:
    label = f"{type(problem.method).__name__}(hyper=Grid())"
    require_bounded(problem.trace, problem.model.reading, label)
    _require_priors(problem)
    how = MAP(config.restarts, config.max_steps, config.tol, config.init)
    ascent, mode = maximise(how, problem, jacobian=True)
    centre, rebuild = ravel_pytree(ascent.space.unconstrain(mode.hyper))
    scales, result = _scales(ascent, centre, rebuild, mode)
    points, log_design = design(centre.size)
    thetas = centre + points @ scales.T
    at = _at(ascent, thetas, rebuild, mode)
    return _fit(problem, ascent, mode, thetas, rebuild, log_design, scales, at, result)


def _require_priors(problem: LocalProblem) -> None:
    if problem.found.params or not problem.found.hyper:
        raise ModelError(
            f"Grid() integrates hyperparameters under their priors; the model has hyperparameters "
            f"{list(problem.found.hyper)}, and params without a prior {list(problem.found.params)}."
            " Declare them by numpyro.sample, or use MAP() or Fixed({...})."
        )


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
    """Loss, gradient and solution at points (n, d), each from the mode's pseudo-likelihood."""
    sites = as_general(mode.solution.sites)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(thetas), *x.shape)), sites)
    points = jax.vmap(rebuild)(jnp.asarray(thetas))
    return evaluate(ascent, points, many, jnp.zeros(len(thetas), bool))


def _fit(problem, ascent, mode, thetas, rebuild, log_design, scales, at, result) -> Fit:
    solved = np.asarray(at.loss) < UNUSABLE
    log_density = np.where(solved, -np.asarray(at.loss), -np.inf)
    log_weights = log_density + log_design
    total = logsumexp(log_weights)
    hyper = jax.vmap(lambda t: ascent.space.constrain(rebuild(t)))(jnp.asarray(thetas))
    site, sites = problem.site, at.solution.sites
    kept = kept_of_draws(problem.model, site, hyper, sites, problem.args, problem.kwargs)
    log_weights = jnp.asarray(log_weights - total)
    if not np.isfinite(total):
        result = Result.nonfinite
    half = 0.5 * thetas.shape[1] * np.log(2.0 * np.pi) + np.linalg.slogdet(scales)[1]
    return Fit(
        model=problem.model,
        method=problem.method,
        args=problem.args,
        kwargs=problem.kwargs,
        draws=Draws(hyper, {}, {site: kept}, log_weights),
        log_evidence=None,
        result=result,
        stats={
            **mode.stats,
            **_reach(thetas, scales, log_weights, int(np.sum(~solved))),
            # log p(y), the hyperparameters integrated too
            "log_marginal_likelihood": float(total + half),
            "steps": int(mode.solution.steps),
            "residual": float(jnp.max(at.solution.residual)),
        },
        sampled=True,
    )


def _reach(thetas, scales, log_weights, failed: int) -> dict:
    """How far the grid's weights reach: the share of the weight on the outermost points, and the
    effective number of points. Points whose inner iteration failed have no weight.
    """
    weights = np.exp(np.asarray(log_weights))
    z = np.linalg.solve(scales, (thetas - thetas.mean(0)).T).T
    far = np.linalg.norm(z, axis=1)
    outermost = far > far.max() - 0.5
    return {
        "grid_points": len(weights),
        "grid_failed": failed,
        "grid_edge_weight": float(np.sum(weights[outermost])),
        "grid_effective": float(1.0 / np.sum(weights**2)),
    }
