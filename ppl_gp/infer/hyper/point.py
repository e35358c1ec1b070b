"""What a local method does about hyperparameters, a file for each choice; a fit at given ones."""

import copy
import math
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, Result, warn
from ppl_gp.gp import GP
from ppl_gp.infer.hyper.space import Space, fixed_values
from ppl_gp.kept import from_sites
from ppl_gp.local.laplace import Laplace
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
from ppl_gp.numerics.quadrature import nodes_of, tolerance
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.reading.factors import Factors, read
from ppl_gp.reading.predictor.parts import Table
from ppl_gp.reading.predictor.prior import PredictorGP, covariance_of
from ppl_gp.reading.roles import Roles, roles
from ppl_gp.results.fit import Fit
from ppl_gp.settings import Fixed

WIDE = 2.0  # standard deviations of q(f_n), in prior ones, that no mode away from a saddle has
_APART = 1e3
SHARE = 0.01  # of the posterior's weight that may have such a q unsaid


class Setting(NamedTuple):
    """What compiled code is given: other values and settings of `hyper` find it again."""

    model: Any
    method: LocalMethod
    args: tuple
    kwargs: dict[str, Any]

    def factors(self, hyper: dict) -> Factors:
        """Prior and likelihood at these hyperparameters."""
        return read(self.model, *self.args, hyper=hyper, **self.kwargs)


class LocalProblem(NamedTuple):
    """A declared model of which all was checked that does not depend on the choice."""

    method: LocalMethod
    model: Any
    trace: dict  # at the values that the choice gives, or draws
    rng_key: Any
    args: tuple
    kwargs: dict[str, Any]
    progress: bool

    @property
    def found(self) -> Roles:
        return roles(self.trace)

    @property
    def names(self) -> tuple[str, ...]:
        """Hyperparameters and params."""
        return (*self.found.hyper, *self.found.params)

    @property
    def site(self) -> str:
        return self.found.gps[0]

    @property
    def setting(self) -> Setting:
        """With a method that has no values of its own."""
        bare = copy.copy(self.method)
        object.__setattr__(bare, "hyper", Fixed())
        return Setting(self.model, bare, self.args, self.kwargs)

    def fit(self, **fields: Any) -> Fit:
        """The fit of these further fields."""
        return Fit(**{k: getattr(self, k) for k in ("model", "method", "args", "kwargs")}, **fields)


@singledispatch
def infer_hyper(hyper: Any, problem: LocalProblem) -> Fit:
    """The fit of a local method under a choice: register an implementation for its class."""
    raise DataError(
        f"{type(problem.method).__name__}(hyper={hyper!r}): give MAP(), Fixed({{...}}), Grid() or "
        "Sample()."
    )


class Point(NamedTuple):
    """Hyperparameters, how the way to them ended, its figures, log evidence and solution there.
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
    kept, code, (jitter, raised, wide) = _kept(problem.setting, hyper, solution)
    stats = {**stats, **_quadrature_error(solution, code, problem.method)}
    if int(code) == Result.converged.code:
        stats |= warn_if_wide(problem.method, wide)
    return problem.fit(
        draws=Draws.one(hyper, {problem.site: kept}),
        log_evidence=float(value),
        result=_worst(ended, Result.from_code(code), float(value)),
        stats={
            **stats,
            "steps": int(solution.steps),
            "residual": float(solution.residual),
            "jitter": float(np.max(np.asarray(jitter))),
            "jitter_raised": float(raised),
        },
    )


def point_at(problem: LocalProblem, hyper: dict) -> Point:
    """The point at given hyperparameters."""
    num = math.prod(problem.trace[problem.site]["fn"].shape())
    return Point(hyper, Result.converged, {}, *_solved(problem.setting, hyper, num))


def _solved(setting: Setting, hyper: dict, num: int) -> tuple[Float[Array, ""], Solution]:
    """As `_solve`, which compiles what is not log-concave's where it has failed without."""
    solve = _solve if num <= FEW_DATA else _solve.full
    value, solution = solve(setting, hyper, general=False)
    if isinstance(solution.sites, Positive) and solution.code != Result.converged.code:
        value, solution = solve(setting, hyper, general=True)
    return value, solution


@quick_jit
def _solve(setting: Setting, hyper: dict, general: bool) -> tuple[Float[Array, ""], Solution]:
    method, factors = setting.method, setting.factors(hyper)
    return log_evidence(method, factors, first_sites(method, factors, general))


@quick_jit
def _kept(setting: Setting, hyper: dict, solution: Solution):
    """(what the fit keeps of f, the solution's status, the jitter's figures and q's width)."""
    factors = setting.factors(hyper)
    prior, K = factors.prior, covariance_of(factors.prior)
    sites, q = centred(setting.method, factors, solution.sites)
    kept = jax.tree.map(lambda x: x[None], from_sites(q, as_kept(sites)))
    # A kernel that is not positive definite can still leave K + T^-1 with a factor: its answers are
    # none. F F^T is semi-definite, and has no jitter.
    variance = diagonal_of(q.variance)
    proper, raised = jnp.all(variance >= 0), jnp.zeros(())
    if not isinstance(K, LowRank) or K.rest is not None:
        factorises, raised = _factorised(prior, K)
        # predictions take k(x*, X) alpha, wide columns and all
        proper &= factorises & has_digits(K, q, solution.sites, 0.0)
    proper |= solution.code != Result.converged.code
    code = jnp.where(proper, solution.code, Result.nonfinite.code)
    jitter = prior.variance - prior.kernel.diag(prior.X)
    return kept, code, (jitter, raised, widest(prior, variance))


def _factorised(prior, K):
    """(whether the prior covariance has a factor, what its diagonal was raised by for it)."""
    if isinstance(K, LowRank) and K.rest is not None:
        L, raised = robust_cholesky(K.rest, default_jitter(jnp.diagonal(K.rest)))
        return jnp.isfinite(L[-1, -1]), raised
    if not isinstance(K, Independent):
        L, raised = prior.factor()
        return jnp.isfinite(L[-1, -1]), raised
    unit = default_jitter(prior.variance)
    L, raised = lax.map(lambda part: robust_cholesky(part, unit), K.parts)
    return jnp.all(jnp.isfinite(L[:, -1, -1])), jnp.max(raised)


def _quadrature_error(solution, code, method) -> dict:
    """The worst datum's error, nats, of integrals where the iteration converged; a warning."""
    if solution.quadrature_error is None or int(code) != Result.converged.code:
        return {}
    error, R = float(solution.quadrature_error), solution.sites.functions
    if not error <= tolerance(R):
        num, name = nodes_of(R, method.num_nodes), type(method).__name__
        seen = f" over the {R} functions that it sees" if R > 1 else ""
        warn(
            f"{name}(num_nodes={num}): the integral of some datum's likelihood{seen} is off by "
            f"about {error:.1g} nats (several modes, edges, long tails), and the log evidence by "
            "up to as much per datum; raise num_nodes, or use NUTS()."
        )
    return {"quadrature_error": error}


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
    sp = Space(problem.model, problem.names, problem.args, problem.kwargs, {})
    return fit_at(problem, point_at(problem, fixed_values(hyper, sp)))


def widest(prior: GP, variance: Float[Array, "RN"]) -> Float[Array, ""]:
    """The largest standard deviation of q in that of the prior, of functions that have one."""
    own: Array = prior.variance
    return jnp.sqrt(jnp.max(jnp.where(own > 1e-13 * jnp.max(own), variance / own, 0.0)))


def wide_column(prior: GP) -> str | None:
    """In words, the unknown of a predictor that adds a thousand times as much as another term."""
    if not isinstance(prior, PredictorGP):
        return None
    sizes = {}
    for k, part in prior.kernel.at(prior.X).parts.items():
        is_table = isinstance(part, Table)
        squares = part.flat**2 if is_table else part.diag() + diagonal_of(part.jitter())
        rms = np.sqrt(np.mean(np.asarray(squares), 0))
        sizes |= {(k, i): float(x) for i, x in enumerate(np.atleast_1d(rms)) if x > 0}
    (site, i), widest = max(sizes.items(), key=lambda entry: entry[1])
    if not (ratio := widest / min(sizes.values())) > _APART:
        return None
    return (
        f"unknown {i} of '{site}' adds {widest:.1g} prior standard deviations to the predictor, "
        f"{ratio:.0e} times as much as the smallest of its terms, and no digits may be left of the "
        f"others: centre and scale its column, or give '{site}' a narrower prior"
    )


def warn_if_wide(method, ratios, weights=None) -> dict[str, float]:
    """{"widest": the largest ratio}; a warning of `Laplace`, wide at a hundredth of the weight.

    Data narrow a Gaussian posterior where the likelihood is log-concave. Where it is not (a noise
    that is a function, heavy tails), K^-1 + W of Laplace's method (Rasmussen & Williams 2006,
    section 3.4) may be nearly singular at the mode: q is then wide without end, its evidence
    -log|B| / 2 too high, and a sampler of the hyperparameters goes there.
    """
    ratios = np.atleast_1d(np.asarray(ratios))
    weights = np.full(len(ratios), 1.0 / len(ratios)) if weights is None else np.asarray(weights)
    share = float(np.sum(weights, where=ratios > WIDE))
    if isinstance(method, Laplace) and share > SHARE:
        where = "" if len(ratios) == 1 else f" at {share:.0%} of the hyperparameters' posterior"
        warn(
            f"Laplace(): q(f) is up to {np.nanmax(ratios):.1f} times as wide as f's prior{where}: "
            "the likelihood is not log-concave, and the mode lies near a saddle, where a Gaussian "
            "at the mode is no approximation and its evidence is too high. Compare with EP(), "
            "VI() or NUTS()."
        )
    return {"widest": float(np.nanmax(ratios)) if np.any(np.isfinite(ratios)) else float("nan")}
