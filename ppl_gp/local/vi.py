"""Variational inference with a full Gaussian, by natural gradients on the pseudo-likelihood.

Conjugate-computation VI (Khan & Lin 2017; Opper & Archambeau 2009): with E_n = E_q(f_n)[log
p(y_n|f_n)], a natural-gradient step of size rho is sites <- (1 - rho) sites + rho (nat1 = dE/dmu -
2 mu dE/dv, nat2 = -2 dE/dv). A Gaussian likelihood is exact after one step of size 1. Steps are
Anderson-accelerated and must not lower the bound

ELBO = log int N(f; m, K) prod t_n + sum_n (E_n - E_q[log t_n]).

It is stationary in q at the optimum, so its gradient holds q. Expectations by `num_nodes`
quadrature nodes a datum, of several functions by those of `several.py`. Cost a step: N^3 / 3 + 2
N^3 / 3; starts from Laplace, whose likelihood need only be finite at a point and not in
expectation. Fails: `max_steps`, `nonfinite`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.local import several
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import Evaluation, LocalMethod, Solution, fixed_point
from ppl_gp.local.natural import (
    Marginals,
    PseudoLikelihood,
    admissible,
    assembled,
    condition,
    drop_rounding,
    lifted,
    mismatch,
    of_varying,
    site_weights,
)
from ppl_gp.local.tilted import integrand, is_usable
from ppl_gp.numerics.quadrature import SAFETY, likelihood_nodes, nodes_of, panel_nodes

_ROUNDS = 20
# relative change of a marginal precision from which on a plain step is not trusted
_SETTLE_ABOVE = 1.0


def expected_log_lik(log_lik, mean, variance, num: int):
    """(E_n, dE_n/dmean, dE_n/dvariance) of E_N(f; mean, variance)[log p(y_n|f)], (N,) each, and
    the nodes (Q, N); O(N num).
    """
    kind = integrand(log_lik, mean)
    # tilt for exponential links
    f, log_w = likelihood_nodes(log_lik, mean, variance, num=num, tilt=1.0, **kind)
    w, rise = _rises(log_lik, mean, f, log_w)
    z = (f - mean) / jnp.sqrt(variance)
    slope = jnp.sum(w * z * rise, 0) / jnp.sqrt(variance)
    curve = 0.5 * jnp.sum(w * (z**2 - 1.0) * rise, 0) / variance
    return log_lik(mean) + jnp.sum(w * rise, 0), slope, curve, lax.stop_gradient(f)


def _rises(log_lik, mean, f, log_w):
    """Weights, which underflow where log p may be infinite; log p less that at the mean."""
    w = jnp.exp(log_w)
    return w, jnp.where(w > 0, jnp.subtract(jax.vmap(log_lik)(f), log_lik(mean)), 0.0)


def expectation_gap(log_lik, mean, variance, expected, nodes) -> Float[Array, "N"]:
    """Estimated error of `expected` by `nodes`, nats, by a finer rule of another kind."""
    w, rise = _rises(log_lik, mean, *panel_nodes(nodes, mean, variance))
    return SAFETY * jnp.abs(expected - log_lik(mean) - jnp.sum(w * rise, 0))


class VI(LocalMethod):
    """Variational inference with a full-covariance Gaussian, by natural gradients.

    Use it if you need a lower bound on the evidence, or for heavy tails and noise that is a
    function. Standard deviations come out somewhat too small.

    Parameters
    ----------
    hyper, integrate : default MAP(), "gaussian"
        What happens to the hyperparameters, and which sites are integrated. See `LocalMethod`.
    damping : float, default 1.0
        Size of a natural-gradient step, in (0, 1].
    num_nodes : int, default 96 for one function per datum
        Quadrature nodes per datum. For several functions as in `EP`.
    tol : float, default 1e-8
        Largest mismatch of moments, in posterior standard deviations.
    max_steps : int, default 200
        Steps at most.

    Raises
    ------
    DataError
        For numbers out of range.
    ModelError
        In `fit`, for example if the likelihood of a row depends on other rows
        (`NotPointwiseError`).

    Notes
    -----
    Maximises the bound `sum_n E_q[log p(y_n | f_n)] - KL[q(f) || p(f)]` over all Gaussians q. It
    starts from Laplace's solution, and no step may lower the bound. Gaussian noise is exact after
    one step. A step costs O(N^3). `fit.result` is `converged`, `max_steps` or `nonfinite`.

    Sources: Opper & Archambeau (2009); Khan & Lin (2017).

    Examples
    --------
    >>> pg.VI(damping=0.5).evidence_is
    'lower bound'
    """

    evidence_is = "lower bound"

    damping: float = eqx.field(default=1.0, static=True)
    num_nodes: int | None = eqx.field(default=None, static=True)
    tol: float = eqx.field(default=1e-8, static=True)
    max_steps: int = eqx.field(default=200, static=True)

    def __check_init__(self):
        if not 0.0 < self.damping <= 1.0:
            raise DataError(
                f"VI(damping={self.damping}): give a natural-gradient step size in (0, 1]."
            )

    def solve(self, K, mean, log_lik, init=None) -> Solution:
        """Natural-gradient steps from Laplace's sites, which a warm start `init` shortens."""
        init = Laplace(tol=1e-2).solve(K, mean, log_lik, init).sites
        step = lambda x: self._evaluate(K, mean, log_lik, x)  # noqa: E731
        limits = {"tol": self.tol, "max_steps": self.max_steps, "damping": self.damping}
        end = fixed_point(step, init, step(init), **limits, project=admissible)
        q, terms, nodes = end.evaluation.aux
        expected, residual = terms - _spread(q, end.x), end.evaluation.residual
        if init.functions == 1:
            error = expectation_gap(log_lik, q.mean, q.variance, expected, nodes)
        else:
            error = several.expectation_error(log_lik, q, expected, self.num_nodes)
        return Solution(end.x, q, None, end.steps, residual, end.code, terms, jnp.max(error))

    def log_terms(self, log_lik, solution):
        """E_q[log p(y_n|f_n)] - E_q[log t_n] + log t_n at the mean, q held."""
        q, R = solution.marginals, solution.sites.functions
        if R > 1:
            nodes = several.rule(R, self.num_nodes)
            expected = several.expected_log_lik(log_lik, q.mean, q.variance, nodes)
        else:
            expected = self._expected(log_lik, q.mean, q.variance)[0]
        return expected + _spread(q, solution.sites)

    def _expected(self, log_lik, mean, variance):
        return expected_log_lik(log_lik, mean, variance, nodes_of(1, self.num_nodes))

    def _evaluate(self, K, mean, log_lik, sites) -> Evaluation:
        (q, varies), nodes = lifted(condition(K, mean, sites)), None
        if sites.functions > 1:
            target, expected = several.variational_target(log_lik, q, sites, self.num_nodes)
        else:
            expected, *slopes, nodes = self._expected(log_lik, q.mean, q.variance)
            target = self._settle(log_lik, q, sites, *slopes)
        terms = expected + _spread(q, sites)
        target = of_varying(varies, target)
        residual = jnp.where(is_usable(q), mismatch(q, sites, target), jnp.nan)
        elbo = assembled(q, mean, terms)
        return Evaluation(target, site_weights(q, sites), residual, elbo, (q, terms, nodes))

    def _settle(
        self, log_lik, q: Marginals, sites: PseudoLikelihood, slope, curve
    ) -> PseudoLikelihood:
        """The natural-gradient target, taken to each datum's own fixed point with its cavity fixed.

        One plain step overshoots if the expectation is steep in q's variance (E exp f under a wide
        q asks for a precision of exp(v / 2)). A one-dimensional iteration that averages precisions
        geometrically settles it. O(N num_nodes) per round.
        """
        cavity = 1.0 / q.variance - sites.nat2
        centre = (q.mean / q.variance - sites.nat1) / cavity
        proper = cavity > 1e-10 / q.variance

        def move(m, nat2: Array, slope, curve):
            wanted = drop_rounding(-2.0 * curve, cavity)
            both = (nat2 > 0) & (wanted > 0)
            geometric = jnp.sqrt(jnp.where(both, nat2 * wanted, 1.0))
            nat2 = jnp.where(both, geometric, 0.5 * (nat2 + wanted))
            precision = jnp.maximum(cavity + nat2, 0.1 * cavity)
            step = (slope - cavity * (m - centre)) / precision
            limit = 2.0 / jnp.sqrt(precision)
            return m + jnp.clip(step, -limit, limit), nat2, precision

        def settle(_, state):
            m, nat2, slope, curve = state
            m, nat2, precision = move(m, nat2, slope, curve)
            _, slope, curve, _ = self._expected(log_lik, m, 1.0 / precision)
            return m, nat2, slope, curve

        far = jnp.max(jnp.abs(-2.0 * curve - sites.nat2) * q.variance) > _SETTLE_ABOVE
        start = (q.mean, sites.nat2, slope, curve)
        settled = lambda: lax.fori_loop(0, _ROUNDS, settle, start)  # noqa: E731
        m, _, slope, curve = lax.cond(far, settled, lambda: start)
        nat2 = drop_rounding(-2.0 * curve, 1.0 / q.variance)
        plain = sites.like(slope + nat2 * m, nat2)
        natural = sites.like(start[2] - 2.0 * start[3] * q.mean, -2.0 * start[3])
        usable = proper & jnp.isfinite(plain.nat1) & jnp.isfinite(plain.nat2)
        return admissible(jax.tree.map(lambda a, b: jnp.where(usable, a, b), plain, natural))


def _spread(q: Marginals, sites: PseudoLikelihood) -> Float[Array, "N"]:
    """log t_n at the mean less its expectation: tr(T_n Sigma_n) / 2."""
    product = sites.nat2 * q.variance
    return 0.5 * (product if sites.functions == 1 else jnp.sum(product, (0, 1)))
