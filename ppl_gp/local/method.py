"""What every local approximation offers, and the log evidence with its exact gradient."""

import abc
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import vjp
from jaxtyping import Array, Bool, Float, Int

from ppl_gp.errors import LISTED, ModelError, Result
from ppl_gp.hyperparameters import GAUSSIAN, MAP, Fixed, Grid, Sample
from ppl_gp.local.condition import condition, log_partition_and_mean
from ppl_gp.local.natural import (
    Marginals,
    MinusRankOne,
    Positive,
    PseudoLikelihood,
    assembled,
    flat,
)
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.numerics.low_rank import Covariance, LowRank, apart
from ppl_gp.option_checks import require_positive, require_whole
from ppl_gp.reading.factors import Factors, LogLikelihood, functions_of
from ppl_gp.reading.predictor.prior import covariance_of

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
    """A Gaussian approximation with one pseudo-likelihood per datum; `solve` finds it.

    `integrate`: the Gaussian sites that are integrated: `"gaussian"`, all that the data see through
    one linear predictor, or a tuple of names. The others are hyperparameters.
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
        """c_n with log evidence = sum_n c_n - alpha^T (mu - m) / 2 - log|I + T K| / 2: what stands
        for the likelihood at the posterior mean mu, each site's value there included
        (`natural.assembled`); differentiable in log_lik.
        """

    def form(self, factors: Factors) -> type[PseudoLikelihood]:
        """What is known of the signs of the pseudo-likelihood."""
        return Positive if factors.log_lik.is_concave else PseudoLikelihood

    def centred(
        self, K: Covariance, mean, log_lik: LogLikelihood, sites: PseudoLikelihood, q: Marginals
    ) -> tuple[PseudoLikelihood, Marginals]:
        """(sites, their marginals) that a fit keeps, from those of the solution."""
        return sites, q

    def refuses(self, log_lik: LogLikelihood) -> str | None:
        """The message of a `ModelError`, where it cannot take this pointwise likelihood."""
        return None

    def pull_back(self, K, mean, log_lik, solution: Solution):
        """d log evidence / d (K, mean, log_lik) at the solution.

        It is held fixed: exact where the evidence is stationary in it (EP, VI, the local bound).
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
    sound = has_digits(array, q, solution.sites, delta)
    return sound | (solution.code != Result.converged.code)


def has_digits(K: Covariance | None, q, sites: PseudoLikelihood, delta=0.0) -> Bool[Array, ""]:
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
    """(log evidence or bound in nats, Solution), differentiable in everything `factors` holds.

    log p(y | hyperparameters), or the method's approximation of it: log int N(f; m, K) prod sites
    df + sum_n c_n, and the terms of observed sites that belong to no datum (`log_lik.shared`).

    `init`: a warm start. Where its class is `Positive`, forms for other likelihoods and rescues
    from failed starts are not compiled; a solution that did not converge is then worth another try
    with `as_general(init)`.

    The gradient is exact at the fixed point and of first order only: differentiating twice raises
    rather than returning a wrong Hessian. Cost: the method's `solve`, and for the gradient O(N^3)
    once.
    """
    prior, log_lik = factors.prior, factors.log_lik
    if log_lik.functions > 1 and (why := method.refuses(log_lik)) is not None:
        raise ModelError(why)
    if init is None and log_lik.functions > 1 and method.form(factors) is MinusRankOne:
        init = first_sites(method, factors)  # (R + 1) N^3 / 3 a step in place of (R N)^3 / 3
    problem = (covariance_of(prior), jnp.ravel(prior.mean), log_lik)
    value, solution = _log_evidence(problem, method, init)
    return value + log_lik.shared(), solution
