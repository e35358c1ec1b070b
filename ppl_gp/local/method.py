"""What every local approximation offers, and the log evidence with its exact gradient.

Damped fixed-point iteration with Anderson acceleration: the one loop behind EP, VI and the local
bound.

x <- x + step (g(x) - x); near the fixed point, g is extrapolated from the last iterates (Anderson
1965; Walker & Ni 2011, type II). A point is kept only where it can be evaluated and either the
residual does not grow (EP, which has no merit to climb) or the merit does not fall (VI, the local
bound). After a rejected point the memory is empty, and the step is halved if it was a plain one.
Each step evaluates g once. Fails by `max_steps`, or by `nonfinite` where the start, or no smaller
step, can be evaluated.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, vjp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ppl_gp.errors import LISTED, ModelError, Result
from ppl_gp.local.natural import (
    Marginals,
    MinusRankOne,
    Positive,
    PseudoLikelihood,
    assembled,
    condition,
    flat,
    log_partition_and_mean,
)
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.numerics.linalg import cholesky, solve_factored
from ppl_gp.numerics.low_rank import Covariance, LowRank, apart
from ppl_gp.reading.factors import Factors, LogLikelihood, functions_of
from ppl_gp.reading.predictor.prior import covariance_of
from ppl_gp.settings import GAUSSIAN, MAP, Fixed, Grid, Sample, require_positive, require_whole

_SPREAD = 100.0  # measured: a half to ten (tests/test_small_noise.py)


class Solution(NamedTuple):
    """A converged (or not: see `code`) pseudo-likelihood with its posterior marginals."""

    sites: PseudoLikelihood
    marginals: Marginals
    local: Any  # what else the method's objective depends on, e.g. the bound's xi
    steps: Int[Array, ""]
    residual: Float[Array, ""]  # distance to the fixed point in posterior standard deviations
    code: Int[Array, ""]  # Result.<member>.code
    # `log_terms` at the solution, where the method has them already
    terms: Float[Array, "N"] | None = None
    # estimated, nats, of the worst datum; `None` without quadrature
    quadrature_error: Float[Array, ""] | None = None


class LocalMethod(eqx.Module):
    """Base class of `Laplace`, `EP`, `VI` and `LocalBound`: a Gaussian factor per datum.

    To add a method, subclass it and write `solve` and `log_terms`. If the evidence is not
    stationary in the Gaussians, override `pull_back` too. `fit`, `check`, prediction and comparison
    then accept the method.

    Parameters
    ----------
    hyper : MAP, Fixed, Grid or Sample, default MAP()
        What happens to the hyperparameters.
    integrate : "gaussian" or tuple of str, default "gaussian"
        Gaussian sites that are integrated: all on which the data depend through one linear
        predictor, or the named ones. The other sites are hyperparameters.

    Raises
    ------
    DataError
        If `max_steps` is below 1, `num_nodes` below 2, or `tol` not positive, for methods with
        these.

    Notes
    -----
    `evidence_is` is "estimate" or "lower bound", and says what the log evidence is.

    Examples
    --------
    >>> pg.Laplace(integrate=("u",)).integrate
    ('u',)
    >>> issubclass(pg.EP, pg.LocalMethod)
    True
    """

    evidence_is: ClassVar[str] = "estimate"  # or "lower bound": what `log_evidence` is

    hyper: MAP | Fixed | Grid | Sample = eqx.field(default=MAP(), static=True)
    integrate: str | tuple[str, ...] = eqx.field(default=GAUSSIAN, static=True)

    def __check_init__(self):
        require_whole(self, *(k for k in ("max_steps",) if hasattr(self, k)))
        require_whole(self, *(k for k in ("num_nodes",) if hasattr(self, k)), least=2)
        require_positive(self, *(k for k in ("tol",) if hasattr(self, k)))

    @abc.abstractmethod
    def solve(
        self, K: Covariance, mean: Float[Array, "RN"], log_lik: LogLikelihood, init=None
    ) -> Solution:
        """Find the pseudo-likelihood; `init` is a warm start. Not differentiable."""

    @abc.abstractmethod
    def log_terms(self, log_lik: LogLikelihood, solution: Solution) -> Float[Array, "N"]:
        """Terms c_n of the log evidence, (N,), nats; differentiable in `log_lik`.

        `log evidence = sum_n c_n - alpha^T (mu - m) / 2 - log|I + T K| / 2`. `c_n` replaces the
        likelihood at the posterior mean mu, and includes the value of each site there
        (`natural.assembled`).
        """

    def form(self, factors: Factors) -> type[PseudoLikelihood]:
        """The class of pseudo-likelihood, by what is known about its signs."""
        return Positive if factors.log_lik.is_concave else PseudoLikelihood

    def centred(
        self, K: Covariance, mean, log_lik: LogLikelihood, sites: PseudoLikelihood, q: Marginals
    ) -> tuple[PseudoLikelihood, Marginals]:
        """(sites, their marginals) that a fit keeps, from those of the solution."""
        return sites, q

    def refuses(self, log_lik: LogLikelihood) -> str | None:
        """The message of a `ModelError` if the method cannot take this likelihood, else `None`."""
        return None

    def pull_back(self, K, mean, log_lik, solution: Solution):
        """d log evidence / d (K, mean, log_lik) at a fixed solution.

        Exact if the evidence is stationary in the solution, as for EP, VI and the local bound.
        """
        _, pull = vjp(lambda K, m: log_partition_and_mean(K, m, solution.sites)[0], K, mean)
        _, pull_terms = eqx.filter_vjp(lambda lik: jnp.sum(self.log_terms(lik, solution)), log_lik)
        one = jnp.ones((), K.dtype)
        return (*pull(one), *pull_terms(one))


def centred(
    method: LocalMethod, factors: Factors, sites: PseudoLikelihood
) -> tuple[PseudoLikelihood, Marginals]:
    """`LocalMethod.centred` of a solution's sites. O(N^3)."""
    K, mean = covariance_of(factors.prior), jnp.ravel(factors.prior.mean)
    return method.centred(K, mean, factors.log_lik, sites, condition(K, mean, sites))


def one_function_only(method: LocalMethod, log_lik: LogLikelihood) -> str | None:
    """`refuses` of a method whose sites are of one function a datum."""
    if (R := functions_of(log_lik)) == 1:
        return None
    return (
        f"a datum sees {R} functions of this model, and {type(method).__name__}() takes "
        f"one. {LISTED}"
    )


@eqx.filter_custom_vjp
def _log_evidence(differentiable, method: LocalMethod, init):
    K, mean, log_lik = differentiable
    solution = method.solve(K, mean, log_lik, init)
    terms = method.log_terms(log_lik, solution) if solution.terms is None else solution.terms
    code = jnp.where(_has_digits(K, mean, solution), solution.code, Result.nonfinite.code)
    value = assembled(solution.marginals, mean, terms)
    return value, solution._replace(code=code.astype(solution.code.dtype))


def _has_digits(K: Covariance, mean, solution: Solution) -> Bool[Array, ""]:
    """Whether rounding leaves an evidence. What columns of unknowns add to the mean is known to eps
    over the share of a column that the others do not explain, whatever their scales.
    """
    q, delta, array = solution.marginals, jnp.zeros(()), K
    if isinstance(K, LowRank):
        most = jnp.max(jnp.abs(diagonal_of(solution.sites.nat2)))
        delta, array = jnp.max(jnp.abs(q.mean - mean)) / apart(K.F, most), K.rest
    return has_digits(array, q, solution.sites, delta) | (solution.code != Result.converged.code)


def has_digits(K: Covariance | None, q, sites: PseudoLikelihood, delta) -> Bool[Array, ""]:
    """Whether a mean K alpha is known well enough: to about eps max(K) |alpha|_1, and eps `delta`
    more; of columns alone, to the latter. Sites of precision T lose N T times its square, nats,
    times `_SPREAD`.
    """
    eps, nat2 = jnp.finfo(q.mean.dtype).eps, diagonal_of(sites.nat2)
    if K is not None and not (isinstance(K, LowRank) and K.rest is None):
        delta += jnp.max(jnp.abs(K.diagonal())) * jnp.sum(jnp.abs(q.alpha))
    lost = _SPREAD * nat2.size * jnp.max(jnp.abs(nat2)) * (eps * delta) ** 2
    return ~(lost > jnp.maximum(1e-2, 1e7 * eps))


@_log_evidence.def_fwd
def _forward(perturbed, differentiable, method, init):
    out = _log_evidence(differentiable, method, init)
    return out, out[1]


@_log_evidence.def_bwd
def _backward(solution, cotangent, perturbed, differentiable, method, init):
    # a Python float that moves arrives as a float, which filters take for a constant
    arrays = jax.tree.map(lambda x, m: jnp.asarray(x) if m else x, differentiable, perturbed)
    K, mean, log_lik = arrays
    bars = method.pull_back(K, mean, log_lik, solution)
    return jax.tree.map(lambda x: cotangent[0] * x if eqx.is_inexact_array(x) else None, bars)


def first_sites(method: LocalMethod, factors: Factors, general: bool = False) -> PseudoLikelihood:
    """Sites that say nothing, in the form that what is known of the likelihood allows (`general`:
    nothing): decided once, while tracing, where an iteration starts.
    """
    log_lik, mean = factors.log_lik, jnp.ravel(factors.prior.mean)
    form = PseudoLikelihood if general else method.form(factors)
    return flat(mean, form, log_lik.functions)


def log_evidence(method: LocalMethod, factors: Factors, init: PseudoLikelihood | None = None):
    """Compute the log evidence of a model at given hyperparameters, with exact first derivatives.

    Use it inside `jax.jit`, `jax.vmap` or `jax.grad`, if `fit` is not what you need.

    Parameters
    ----------
    method : LocalMethod
        `Laplace()`, `EP()`, `VI()` or `LocalBound()`.
    factors : Factors
        The model at its hyperparameters, from `pg.read`. The result is differentiable in its
        arrays.
    init : PseudoLikelihood, default None
        Sites to start from, such as `solution.sites` of similar hyperparameters. If they are of
        class `Positive`, less is compiled. A solution that did not converge may then succeed if you
        start again from `ppl_gp.local.natural.as_general(init)`.

    Returns
    -------
    value : array, ()
        The log evidence or a bound on it, nats, with the terms of observed sites outside the data's
        plate.
    solution : Solution
        `sites`, `marginals` (`mean`, `variance`), `steps`, `residual` and `code`.
        `Result.from_code` translates the code. Unless the solver converged, the value is not the
        evidence.

    Raises
    ------
    ModelError
        If the method does not accept the likelihood of several functions.

    Notes
    -----
    `log int N(f; m, K) prod_n t_n(f_n) df + sum_n c_n`, with the method's Gaussians `t_n`. The
    gradient is exact at the fixed point. Differentiating twice raises an error instead of a wrong
    Hessian. It costs the method's `solve`, and O(N^3) once for the gradient.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> factors = pg.read(model, jnp.arange(4.0), y=jnp.array([0, 2, 1, 0]))
    >>> value, solution = pg.log_evidence(pg.EP(), factors)
    >>> round(float(value), 2), pg.Result.from_code(solution.code).value
    (-5.33, 'converged')
    """
    prior, log_lik = factors.prior, factors.log_lik
    if log_lik.functions > 1 and (why := method.refuses(log_lik)) is not None:
        raise ModelError(why)
    if init is None and log_lik.functions > 1 and method.form(factors) is MinusRankOne:
        init = first_sites(method, factors)  # (R + 1) N^3 / 3 a step in place of (R N)^3 / 3
    problem = (covariance_of(prior), jnp.ravel(prior.mean), log_lik)
    value, solution = _log_evidence(problem, method, init)
    return jnp.add(value, log_lik.shared()), solution


MEMORY = 5
SMALLEST_STEP = 1e-4
_ACCELERATE_BELOW = 1.0  # residual from which on extrapolation is tried
_GROWTH = 1.5  # by which a residual may grow in one accepted step


class Evaluation(NamedTuple):
    """g at a point: the target, weights for its residual, its size, the merit and byproducts."""

    target: Any
    weight: Any
    residual: Float[Array, ""]
    merit: Float[Array, ""]  # constant where there is none
    aux: Any


class FixedPoint(NamedTuple):
    """Where the iteration ended."""

    x: Any
    evaluation: Evaluation
    steps: Int[Array, ""]
    code: Int[Array, ""]


class _State(NamedTuple):
    x: Any
    at: Evaluation
    step: Float[Array, ""]
    points: Float[Array, "H P"]
    targets: Float[Array, "H P"]
    count: Int[Array, ""]
    steps: Int[Array, ""]
    stuck: Array


def fixed_point(
    evaluate: Callable[[Any], Evaluation],
    x: Any,
    first: Evaluation,
    *,
    tol: float,
    max_steps: int,
    damping: float | Float[Array, ""],
    project: Callable[[Any], Any] = lambda x: x,
) -> FixedPoint:
    """Iterate from x, whose evaluation is `first`, until the residual is below tol (or 1e3
    roundings); `project` takes a point to one that is allowed.
    """
    size, dtype = ravel_pytree(x)[0].size, first.residual.dtype
    memory, zero = jnp.zeros((MEMORY, size), dtype), jnp.zeros((), jnp.int32)
    tol, step = max(tol, 1e3 * float(jnp.finfo(dtype).eps)), jnp.asarray(damping, dtype)
    state = _State(x, first, step, memory, memory, zero, zero, jnp.zeros((), bool))

    def running(s):
        return (s.at.residual >= tol) & (s.steps < max_steps) & ~s.stuck

    def advance(s):
        candidate, extrapolated = _propose(s)
        candidate = project(candidate)
        return _accept(s, candidate, evaluate(candidate), extrapolated, damping, tol)

    end = lax.while_loop(running, advance, state)
    code = jnp.where(end.at.residual < tol, Result.converged.code, Result.max_steps.code)
    broken = end.stuck | ~jnp.isfinite(end.at.residual)
    return FixedPoint(end.x, end.at, end.steps, jnp.where(broken, Result.nonfinite.code, code))


def _propose(s: _State):
    x, unravel = ravel_pytree(s.x)
    g, weight = ravel_pytree(s.at.target)[0], ravel_pytree(s.at.weight)[0]
    ready = (s.count > 0) & (s.at.residual < _ACCELERATE_BELOW)
    extrapolated = _anderson(x, g, weight, s.points, s.targets, s.count)
    usable = ready & jnp.all(jnp.isfinite(extrapolated))
    return unravel(x + s.step * (jnp.where(usable, extrapolated, g) - x)), usable


def _anderson(x, g: Array, weight, points, targets: Array, count):
    """argmin_c |W (r - sum_j c_j (r - r_j))|, r = g - x; the mixture of targets it gives."""
    r = g - x
    used = (jnp.arange(MEMORY) < count)[:, None]
    dr = jnp.where(used, r - (targets - points), 0.0) * weight
    gram = dr @ dr.T
    ridge = 1e-12 * jnp.trace(gram) + jnp.finfo(x.dtype).tiny
    gram = gram + jnp.diag(jnp.where(used[:, 0], ridge, 1.0))
    c = solve_factored(cholesky(gram), dr @ (weight * r))
    return g - c @ jnp.where(used, g - targets, 0.0)


def _move(x, at: Evaluation):
    """Weighted, (P,), from x to its target."""
    return ravel_pytree(jax.tree.map(lambda w, g, x: w * (g - x), at.weight, at.target, x))[0]


def _accept(s: _State, candidate, at: Evaluation, extrapolated, damping, tol) -> _State:
    finite = jnp.isfinite(at.residual) & jnp.isfinite(at.merit)
    slack = (1e-9 + 32.0 * jnp.finfo(at.merit.dtype).eps) * (1.0 + jnp.abs(s.at.merit))
    shrinks = at.residual < jnp.maximum(_GROWTH * s.at.residual, tol)
    # The first point may start anywhere: whatever can be evaluated is an improvement on it.
    no_worse = (at.merit >= s.at.merit - slack) & (shrinks | (at.merit > s.at.merit + slack))
    better = finite & (no_worse | (s.steps == 0))
    # steps that grow the same way leave a least residual, no fixed point; extrapolation leads back
    away = (at.residual > s.at.residual) & (_move(s.x, s.at) @ _move(candidate, at) > 0)
    slot = s.count % MEMORY
    kept = _State(
        candidate,
        at,
        jnp.minimum(damping, 1.4 * s.step),
        s.points.at[slot].set(ravel_pytree(s.x)[0]),
        s.targets.at[slot].set(ravel_pytree(s.at.target)[0]),
        jnp.where(away, 0, s.count + 1),
        s.steps + 1,
        jnp.zeros((), bool),
    )
    step = jnp.where(extrapolated, 1.0, 0.5) * s.step
    # Below the smallest step: take any point that can be evaluated rather than stand still.
    forced = finite & (step < SMALLEST_STEP)
    rejected = s._replace(
        step=step, count=jnp.zeros_like(s.count), steps=s.steps + 1, stuck=step < SMALLEST_STEP
    )
    return jax.tree.map(lambda a, b: jnp.where(better | forced, a, b), kept, rejected)
