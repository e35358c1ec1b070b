"""The fit at one setting of the hyperparameters: its last solution, what it keeps of f, how it
ended.
"""

import copy
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.draws import Draws
from ppl_gp.errors import Result, warn
from ppl_gp.hyperparameters import Fixed
from ppl_gp.infer.hyper.choice import LocalProblem, infer_hyper
from ppl_gp.infer.hyper.given import fixed_values
from ppl_gp.infer.hyper.width import warn_if_wide, widest
from ppl_gp.kept import from_sites
from ppl_gp.local import several
from ppl_gp.local.method import (
    LocalMethod,
    Solution,
    centred,
    first_sites,
    has_digits,
    log_evidence,
)
from ppl_gp.local.natural import Positive, as_kept
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky
from ppl_gp.numerics.low_rank import Independent, LowRank
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.reading.factors import read
from ppl_gp.reading.predictor.prior import covariance_of
from ppl_gp.results.fit import Fit


class Point(NamedTuple):
    """Constrained hyperparameters, how the way to them ended, the figures behind it, the log
    evidence and the solution there.

    `stats["at_bound"]`: sites whose optimum lies at an end of the interval that they are declared
    on: a maximum at the edge, where the gradient in the declared coordinates does not vanish.
    """

    hyper: dict
    result: Result
    stats: dict
    value: Array
    solution: Solution


def fit_at(problem: LocalProblem, point: Point) -> Fit:
    """A fit of one draw. One more O(N^3)."""
    hyper, ended, stats, value, solution = point
    kept, code, figures = _kept(
        problem.model, without_values(problem.method), hyper, problem.args, problem.kwargs, solution
    )
    stats = {**stats, **_quadrature_error(solution, code, problem.method)}
    if int(code) == Result.converged.code:
        stats |= warn_if_wide(problem.method, figures[-1])
    return Fit(
        model=problem.model,
        method=problem.method,
        args=problem.args,
        kwargs=problem.kwargs,
        draws=Draws.one(hyper, {problem.site: kept}),
        log_evidence=float(value),
        result=_worst(ended, Result.from_code(code), float(value)),
        stats={
            **stats,
            "steps": int(solution.steps),
            "residual": float(solution.residual),
            **_jitter(figures),
        },
    )


def point_at(problem: LocalProblem, hyper: dict) -> Point:
    """The point at given hyperparameters."""
    num = math.prod(problem.trace[problem.site]["fn"].shape())
    method = without_values(problem.method)
    solved = _solved(problem.model, method, hyper, problem.args, problem.kwargs, num=num)
    return Point(hyper, Result.converged, {}, *solved)


def without_values(method: LocalMethod) -> LocalMethod:
    """What compiled code is keyed by: other values of hyperparameters and other settings of `MAP`
    find it again.
    """
    bare = copy.copy(method)
    object.__setattr__(bare, "hyper", Fixed())
    return bare


def _solved(*problem, num: int) -> tuple[Float[Array, ""], Solution]:
    """As `_solve`; what a log-concave likelihood should not need is compiled where the solution
    failed without it.
    """
    solve = _solve if num <= FEW_DATA else _solve.full
    value, solution = solve(*problem, general=False)
    if isinstance(solution.sites, Positive) and solution.code != Result.converged.code:
        value, solution = solve(*problem, general=True)
    return value, solution


@quick_jit
def _solve(model, method, hyper, args, kwargs, general: bool) -> tuple[Float[Array, ""], Solution]:
    factors = read(model, *args, hyper=hyper, **kwargs)
    return log_evidence(method, factors, first_sites(method, factors, general))


@quick_jit
def _kept(model, method, hyper, args, kwargs, solution: Solution):
    """(what the fit keeps of f, the solution's status, the jitter's figures and q's width)."""
    factors = read(model, *args, hyper=hyper, **kwargs)
    prior, K = factors.prior, covariance_of(factors.prior)
    sites, q = centred(method, factors, solution.sites)
    kept = jax.tree.map(lambda x: x[None], from_sites(q, as_kept(sites)))
    # A kernel that is not positive definite can still leave K + T^-1 with a factor: its answers are
    # none. F F^T is semi-definite, and has no jitter.
    variance = diagonal_of(q.variance)
    proper, raised = jnp.all(variance >= 0), jnp.zeros(())
    if not isinstance(K, LowRank) or K.rest is not None:
        factorises, raised = _factorised(prior, K)
        # predictions take k(x*, X) alpha, wide columns and all
        proper &= factorises & has_digits(K, q, solution.sites)
    code = jnp.where(
        proper | (solution.code != Result.converged.code), solution.code, Result.nonfinite.code
    )
    jitter = prior.variance - prior.kernel.diag(prior.X)
    return kept, code, (jitter, raised, widest(prior, variance))


def _factorised(prior, K):
    """(whether the prior covariance has a factor, what its diagonal was raised by for it)."""
    if isinstance(K, LowRank):
        L, raised = robust_cholesky(K.rest, default_jitter(jnp.diagonal(K.rest)))
        return jnp.isfinite(L[-1, -1]), raised
    if not isinstance(K, Independent):
        L, raised = prior.factor()
        return jnp.isfinite(L[-1, -1]), raised
    unit = default_jitter(prior.variance)
    L, raised = lax.map(lambda part: robust_cholesky(part, unit), K.parts)
    return jnp.all(jnp.isfinite(L[:, -1, -1])), jnp.max(raised)


def _quadrature_error(solution, code, method) -> dict:
    """The estimated error of the worst datum's integral, nats, where there are integrals and the
    iteration converged; a warning where it is large.
    """
    if solution.quadrature_error is None or int(code) != Result.converged.code:
        return {}
    error, R = float(solution.quadrature_error), solution.sites.functions
    if not error <= several.tolerance(R):
        num, name = several.nodes_of(R, method.num_nodes), type(method).__name__
        seen = f" over the {R} functions that it sees" if R > 1 else ""
        warn(
            f"{name}(num_nodes={num}): the integral of some datum's likelihood{seen} is off by "
            f"about {error:.1g} nats (several modes, edges, long tails), and the log evidence by "
            "up to as much per datum; raise num_nodes, or use NUTS()."
        )
    return {"quadrature_error": error}


def _jitter(figures):
    jitter, raised, _ = figures
    return {"jitter": float(np.max(np.asarray(jitter))), "jitter_raised": float(raised)}


def _worst(outer: Result, inner: Result, value: float) -> Result:
    """An inner status that names a cause comes first; where values are not finite, it is no cause
    that steps ran out.
    """
    if inner not in (Result.converged, Result.max_steps):
        return inner
    if outer is Result.nonfinite or not math.isfinite(value):
        return Result.nonfinite
    return inner if inner is not Result.converged else outer


@infer_hyper.register
def _fit_fixed(hyper: Fixed, problem: LocalProblem) -> Fit:
    values = fixed_values(hyper, problem.names, problem.model, problem.args, problem.kwargs)
    return fit_at(problem, point_at(problem, values))
