"""Laplace's method: a Gaussian at the posterior mode (Rasmussen & Williams 2006, algorithm 3.1;
PRML section 6.4.6).

Newton's method on Psi(f) = log p(y|f) - (f - m)^T K^-1 (f - m) / 2 with an exact step search, which
costs O(N) a trial because K^-1 f is carried along. Evidence log q(y) = Psi(f_hat) - log|B| / 2. The
gradient holds the implicit term, the mode's own movement (PRML 6.91-6.94; R&W 5.23).

Cost: one Cholesky factor, N^3 / 3, a step (6 to 10 steps from cold); the gradient about N^3 + 2 N^3
once more. Of R functions a datum the curvature has blocks (R, R) (R&W section 3.5), R^3 as much.
Fails: `max_steps`; `nonfinite` where the likelihood is not finite near the mode;
`negative_curvature` where the likelihood is not log-concave and K^-1 + W is not positive definite
at the end.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, vjp
from jaxtyping import Array, Bool, Float, Int

from ppl_gp.errors import DataError, Result
from ppl_gp.local.factor import moved, pulled_back
from ppl_gp.local.method import LocalMethod, Solution
from ppl_gp.local.natural import (
    Marginals,
    MinusRankOne,
    Positive,
    PseudoLikelihood,
    admissible,
    condition_for_gradients,
    condition_mean,
    start_from,
)
from ppl_gp.numerics.blocks import diagonal_of, per_datum, positive_part, pulled_to, times
from ppl_gp.numerics.low_rank import Independent
from ppl_gp.numerics.modes import derivatives
from ppl_gp.reading.factors import functions_of
from ppl_gp.reading.predictor.prior import covariance_of

# Steps tried, the finest on the way to counts of a million, along most of which exp overflows.
_TRIALS = 0.5 ** np.concatenate([np.arange(13), np.arange(15, 63, 3)])

_MARGINALS = ("gaussian", "simplified")
_RUNNING = -1  # no status of a result


def curvature(log_lik, f: Float[Array, "RN"], sites: PseudoLikelihood):
    """(gradient, Hessian in the form of the sites) of a log-likelihood."""
    if not isinstance(sites, MinusRankOne):
        return derivatives(log_lik, f, sites.functions)
    return jax.grad(lambda f: jnp.sum(log_lik(f)))(f), -log_lik.softmax_weights(f)


def expansion(log_lik, f: Float[Array, "RN"], sites: PseudoLikelihood):
    """(gradient, Hessian) at f, and the second-order Taylor expansion there as sites like these."""
    g, h = curvature(log_lik, f, sites)
    found = sites.like(g - times(h, f), -h)
    return g, h, admissible(found) if sites.functions == 1 else found


class _State(NamedTuple):
    f: Float[Array, "RN"]
    alpha: Float[Array, "RN"]  # K^-1 (f - m)
    sites: PseudoLikelihood  # the expansion that gave `marginals`
    at: Float[Array, "RN"]  # where it was made
    marginals: Marginals  # without variances
    decrement: Float[Array, ""]
    steps: Int[Array, ""]
    code: Int[Array, ""]


class Laplace(LocalMethod):
    """Laplace's method: a Gaussian at the mode of the posterior.

    The cheapest local method, and exact for Gaussian noise. Use it for counts and positive values.
    For sparse counts or binary data prefer `EP()`, or `marginals="simplified"`.

    Parameters
    ----------
    hyper, integrate : default MAP(), "gaussian"
        What happens to the hyperparameters, and which sites are integrated. See `LocalMethod`.
    tol : float, default 1e-8
        Newton decrement at which the search ends, in posterior standard deviations.
    max_steps : int, default 100
        Newton steps at most.
    marginals : "gaussian" or "simplified", default "gaussian"
        "simplified" moves the means of latents and effects from the mode to the posterior mean, to
        first order in the third derivatives of the likelihood. It costs one more solve. Variances
        and the evidence do not change.

    Raises
    ------
    DataError
        For another `marginals`, or numbers out of range.
    ModelError
        In `fit`, for example if the likelihood of a row depends on other rows
        (`NotPointwiseError`).

    Notes
    -----
    With the mode `f^` and `W = -d^2 log p(y | f) / df^2` there, the log evidence is approximated by
    `log p(y | f^) - (f^ - m)^T K^-1 (f^ - m) / 2 - log|I + K W| / 2`. Its gradient includes the
    movement of the mode. For skewed posteriors, such as those of binary data, means are too close
    to zero and the evidence is too low. A step costs O(N^3), and O(R^3 N^3) for R functions per
    row.

    `fit.result` is `converged`, `max_steps`, `nonfinite` (the likelihood is not finite near the
    mode), or `negative_curvature` (not log-concave, and the end is not a maximum).

    With "simplified" marginals, draws at the training rows and the quantiles of `fit.summary()` are
    skewed too, if each row depends on one function.

    For a model without GPs and without a linear predictor, or with `integrate=()`, the Gaussian is
    at the joint mode of all latents. It is one in NumPyro's unconstrained coordinates, and the
    evidence includes their log-Jacobian. `MAP(restarts=)` sets the number of starts, and `Fixed`
    keeps sites fixed.

    Sources: Rasmussen & Williams (2006), algorithm 3.1; Bishop (2006), section 6.4.6; Rue, Martino
    & Chopin (2009), section 3.2.3, for simplified marginals.

    Examples
    --------
    >>> method = pg.Laplace(hyper=pg.Grid(), marginals="simplified")
    >>> method.marginals, method.evidence_is
    ('simplified', 'estimate')
    """

    tol: float = eqx.field(default=1e-8, static=True)
    max_steps: int = eqx.field(default=100, static=True)
    marginals: str = eqx.field(default="gaussian", static=True)

    def __check_init__(self):
        if self.marginals not in _MARGINALS:
            raise DataError(f"Laplace(marginals={self.marginals!r}): give one of {_MARGINALS}.")

    def form(self, factors):
        """As in the base class, and what is known of a softmax of independent functions."""
        independent = isinstance(covariance_of(factors.prior), Independent)
        if factors.log_lik.softmax and independent and factors.log_lik.is_concave:
            return MinusRankOne
        return super().form(factors)

    def solve(self, K, mean, log_lik, init=None) -> Solution:
        """Newton's method from the prior mean, or from the mean that the warm start implies."""
        tol = max(self.tol, 1e3 * float(jnp.finfo(K.dtype).eps))
        state = lax.while_loop(
            lambda s: (s.code == _RUNNING) & (s.steps < self.max_steps),
            lambda s: _newton(s, K, mean, log_lik, tol),
            _start(K, mean, init, functions_of(log_lik)),
        )
        code = jnp.where(state.code == _RUNNING, Result.max_steps.code, state.code)
        if functions_of(log_lik) > 1:
            code = jnp.where(_is_told(state, mean, log_lik), code, Result.nonfinite.code)
        return Solution(state.sites, state.marginals, state.at, state.steps, state.decrement, code)

    def centred(self, K, mean, log_lik, sites, q):
        """Of `simplified` marginals: with D_n = d^3 log p(y_n | f_n), the posterior mean is off its
        mode by Sigma D diag(Sigma) / 2 to first order in D, which a change of nat1 gives to all
        that is computed from the sites. `third` is D, for draws (`kept`).
        """
        if self.marginals == "gaussian":
            return sites, q
        bend = _bend(log_lik, q.mean, sites, pulled_to(sites.nat2, -0.5 * q.variance))
        moved = sites.like(sites.nat1 + bend, sites.nat2)
        if sites.functions == 1:
            third = _bend(log_lik, q.mean, sites, -jnp.ones_like(q.mean))
            moved = type(moved)(moved.nat1, moved.nat2, third)
        centre = condition_mean(K, mean, moved)
        return moved, q._replace(mean=centre.mean, alpha=centre.alpha)

    def log_terms(self, log_lik, solution):
        """The expansion of log p(y_n | f_n) at the mean (R&W 3.32), made where the sites were."""
        f, sites = solution.local, solution.sites
        step = solution.marginals.mean - f
        rise = step * (sites.nat1 - times(sites.nat2, f) - 0.5 * times(sites.nat2, step))
        return log_lik(f) + per_datum(rise, sites.nat2)

    def pull_back(self, K, mean, log_lik, solution):
        """log p(y|f) and log|B| with the mode held, and the mode's movement (R&W 5.22, 5.23). What
        the integral and the constants have in common is left out, as it has no digits where the
        noise is small.
        """
        sites = solution.sites
        q, R = condition_for_gradients(K, mean, sites)
        f = solution.marginals.mean
        half = pulled_to(sites.nat2, -0.5 * q.variance)  # of -log|B| / 2
        w, Kw = moved(K, R, _bend(log_lik, f, sites, half))
        K_bar = pulled_back(K, R, jnp.ones((), K.dtype), w, q.alpha)

        def held(lik):
            g, h = curvature(lik, f, sites)
            return g, -h, lik(f)

        _, pull_lik = eqx.filter_vjp(held, log_lik)
        ones = jnp.ones_like(mean[: mean.size // sites.functions])
        return (K_bar, q.alpha + w, *pull_lik((Kw, half, ones)))


def _bend(log_lik, f, sites: PseudoLikelihood, half) -> Float[Array, "RN"]:
    """sum_st d^3 log p / (df_r df_s df_t) Sigma_st / 2 at the mode f, (R N,); `half`: -Sigma / 2
    within each datum, as a cotangent of nat2.
    """
    _, pull = vjp(lambda f: expansion(log_lik, f, sites)[2].nat2, f)
    return pull(half)[0]


def _is_told(s: _State, mean, log_lik) -> Bool[Array, ""]:
    """Whether log Z and the expansion's constants have digits left between them: where a noise that
    is a function falls to 1e-6 of f, each is 1e14, and gradients of the noise have none.
    """
    direct = jnp.sum(log_lik(s.f)) - 0.5 * s.alpha @ (s.f - mean) - s.marginals.half_log_det
    expansion = s.sites.nat1 * s.at - 0.5 * s.at * times(s.sites.nat2, s.at)
    terms = log_lik(s.at) - per_datum(expansion, s.sites.nat2)
    summed = s.marginals.log_partition + jnp.sum(terms)
    tolerance = jnp.maximum(1e-3, 1e5 * jnp.finfo(direct.dtype).eps)
    at_mode = s.code == Result.converged.code  # the two are the same there alone
    return ~at_mode | (jnp.abs(direct - summed) <= tolerance * (1.0 + jnp.abs(direct)))


def _start(K, mean, init, functions: int) -> _State:
    sites, q = start_from(K, mean, init, functions, variances=False)
    decrement, steps = jnp.asarray(jnp.inf, K.dtype), jnp.zeros((), jnp.int32)
    return _State(q.mean, q.alpha, sites, q.mean, q, decrement, steps, jnp.int32(_RUNNING))


def _newton(s: _State, K, mean, log_lik, tol) -> _State:
    g, h, sites = expansion(log_lik, s.f, s.sites)
    q = condition_mean(K, mean, sites)
    proper = jnp.all(jnp.isfinite(q.mean))
    finite = jnp.all(jnp.isfinite(g)) & jnp.all(jnp.isfinite(h))
    if not isinstance(sites, Positive):
        # where K^-1 + W is indefinite, W without its negative part still gives an ascent
        upward = positive_part(-h)
        damped = Positive(g + times(upward, s.f), upward)
        q = lax.cond(proper | ~finite, lambda: q, lambda: condition_mean(K, mean, damped))
    df, dalpha = q.mean - s.f, q.alpha - s.alpha
    slope = (g - s.alpha) @ df
    t, here, ascended = _search(s, df, dalpha, mean, log_lik, slope)
    decrement = jnp.sqrt(jnp.maximum(slope, 0.0))
    # Psi cannot be told from its maximum: the decrement is rounding error and has stopped falling.
    bent, eps = jnp.abs(diagonal_of(h)), jnp.finfo(K.dtype).eps
    lost = eps * jnp.max(K.diagonal()) * jnp.sum(jnp.abs(s.alpha))  # of K alpha, to rounding
    rounding = 1e3 * eps * (1.0 + jnp.abs(here) + jnp.max(bent * s.f**2)) + jnp.sum(bent) * lost**2
    at_limit = (decrement**2 < rounding) & ((decrement > 0.5 * s.decrement) | ~ascended)
    ended = (decrement < tol) | at_limit
    at_end = jnp.where(proper, Result.converged.code, Result.negative_curvature.code)
    code = jnp.where(ended, at_end, _RUNNING)
    code = jnp.where(~ascended & ~ended, Result.max_steps.code, code)
    code = jnp.where(finite & jnp.isfinite(here), code, Result.nonfinite.code).astype(jnp.int32)
    return _State(s.f + t * df, s.alpha + t * dalpha, sites, s.f, q, decrement, s.steps + 1, code)


def _search(s: _State, df, dalpha, mean, log_lik, slope):
    """(t, Psi at the start, ascended): t = 1 if that climbs as a Newton step, else the best."""

    def psi(t):
        f = s.f + t * df
        return jnp.sum(log_lik(f)) - 0.5 * (s.alpha + t * dalpha) @ (f - mean)

    trials = jnp.asarray(_TRIALS, df.dtype)
    here, values = psi(jnp.zeros((), df.dtype)), jax.vmap(psi)(trials)
    values: Array = jnp.where(jnp.isfinite(values), values, -jnp.inf)
    rounding = 10 * jnp.finfo(df.dtype).eps * (1.0 + jnp.abs(here)) * df.size**0.5
    full = values[0] >= here + 0.1 * slope - rounding
    best = jnp.argmax(values)
    return trials[jnp.where(full, 0, best)], here, full | (values[best] > here)
