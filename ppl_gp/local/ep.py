"""Expectation propagation, parallel and damped, with a power (Minka 2001, 2004; R&W 2006 section
3.6; PRML section 10.7).

A sweep removes each site's share from its marginal (the cavity), matches the moments of cavity x
likelihood^power, and moves all sites at once; the sweeps are Anderson-accelerated. power = 1 is EP,
power -> 0 approaches VI. `sequential=True` updates one site after another in R&W's order with
rank-one changes of Sigma (algorithm 3.5).

log Z_EP = log int N(f; m, K) prod t_n + (1/power) sum_n [log int cavity_n p_n^power - log int
cavity_n t_n^power]. It is stationary in the sites and cavities at the fixed point, so its gradient
holds them.

Cost: a sweep N^3 / 3 + 2 N^3 / 3 and N x `num_nodes` likelihood values (to the power R for R
functions a datum); 6 to 12 sweeps to 1e-8.
Fails: `max_steps`; `negative_cavity` where a cavity had no proper precision at the end (its site is
then left alone); `nonfinite`. Sites of likelihoods that are not log-concave may have negative
precision: nothing is clipped. Of several functions a datum, a step that leads to an improper cavity
is halved, and a run that fails is tried from its start again, twice, with 0.3 of the damping.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from ppl_gp.errors import DataError, Result
from ppl_gp.local import several
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import Evaluation, LocalMethod, Solution, fixed_point, one_function_only
from ppl_gp.local.natural import (
    Marginals,
    Positive,
    admissible,
    condition,
    lifted,
    mismatch,
    of_varying,
    prediction_root,
    site_weights,
    start_from,
)
from ppl_gp.local.tilted import Cavity, cavity, is_usable, matched_sites, tilted, tilted_terms
from ppl_gp.numerics.low_rank import dense
from ppl_gp.numerics.quadrature import nodes_of
from ppl_gp.quick import zeros_of
from ppl_gp.reading.factors import functions_of

# posterior standard deviations: a start that far off (a Poisson mean of exp(900), say) is no start
_HOPELESS = 1e6
_TRIES = 3  # of several functions, which a short step may lead where a long one does not


class EP(LocalMethod):
    """Expectation propagation: a Gaussian per datum that matches the moments of its likelihood.

    Use it for binary data and sparse counts, if the evidence or probabilities matter. Its evidence
    is an estimate and not a bound. If it does not converge, lower `damping` or `power`.

    Parameters
    ----------
    hyper, integrate : default MAP(), "gaussian"
        What happens to the hyperparameters, and which sites are integrated. See `LocalMethod`.
    power : float, default 1.0
        Power of the likelihood that is matched at a time, in (0, 1]. 1 is EP, and 0 would be
        `VI()`.
    damping : float, default 0.9
        Fraction of each new Gaussian that a sweep takes, in (0, 1].
    sequential : bool, default False
        Update one datum after another instead of all at once. For one function per datum only.
    closed_form : bool, default True
        Use closed forms for Gaussian and probit likelihoods. `False` forces quadrature.
    num_nodes : int, default 96 for one function per datum
        Quadrature nodes per datum: per direction 24 for two functions and 14 for three, and 8192
        points in all for more.
    tol : float, default 1e-8
        Largest mismatch of moments, in posterior standard deviations.
    max_steps : int, default 200
        Sweeps at most.

    Raises
    ------
    DataError
        For numbers out of range.
    ModelError
        In `fit`, for `sequential=True` with several functions per datum, and for a likelihood that
        depends on other rows (`NotPointwiseError`).

    Notes
    -----
    A sweep removes each Gaussian `t_n` from its marginal, which leaves the cavity, and matches the
    moments of cavity times likelihood^power. The log evidence is `log int N(f; m, K) prod_n t_n df
    + (1 / power) sum_n log(int cavity_n p_n^power df_n / int cavity_n t_n^power df_n)`. A sweep
    costs O(N^3) and `num_nodes` likelihood values per datum. It takes 6 to 12 sweeps.

    `fit.result` is `converged`, `max_steps`, `nonfinite`, or `negative_cavity` (a cavity had no
    proper precision at the end). Precisions of `t_n` may be negative if the likelihood is not
    log-concave.

    Sources: Minka (2001, 2004); Rasmussen & Williams (2006), section 3.6; Bishop (2006), section
    10.7.

    Examples
    --------
    >>> method = pg.EP(hyper=pg.Grid(), damping=0.5)
    >>> method.damping, method.evidence_is
    (0.5, 'estimate')
    """

    power: float = eqx.field(default=1.0, static=True)
    damping: float = eqx.field(default=0.9, static=True)
    sequential: bool = eqx.field(default=False, static=True)
    closed_form: bool = eqx.field(default=True, static=True)
    num_nodes: int | None = eqx.field(default=None, static=True)
    tol: float = eqx.field(default=1e-8, static=True)
    max_steps: int = eqx.field(default=200, static=True)

    def __check_init__(self):
        if not 0.0 < self.power <= 1.0:
            raise DataError(f"EP(power={self.power}): give a value in (0, 1].")
        if not 0.0 < self.damping <= 1.0:
            raise DataError(
                f"EP(damping={self.damping}): give a value in (0, 1]; 1 takes the whole new site."
            )

    def refuses(self, log_lik):
        """Several functions a datum one after another."""
        return one_function_only(self, log_lik) if self.sequential else None

    def solve(self, K, mean, log_lik, init=None) -> Solution:
        """Iterate sweeps from flat sites (or from `init`) until the moments match."""
        sites, first = self._start(K, mean, log_lik, init)
        sweep = self._sequential_sweep if self.sequential else self._parallel_sweep

        def run(damping):
            limits = {"tol": self.tol, "max_steps": self.max_steps, "project": admissible}
            step = lambda x: sweep(K, mean, log_lik, x)  # noqa: E731
            return fixed_point(step, sites, first, damping=damping, **limits)

        end = run(self.damping) if sites.functions == 1 else self._ever_shorter(run)
        marginals, skipped, terms, moments = end.evaluation.aux
        without, residual = cavity(marginals, end.x, self.power), end.evaluation.residual
        error = jnp.max(moments.error(log_lik, without, self.power, self.num_nodes))
        skipped &= end.code == Result.converged.code
        code = jnp.where(skipped, Result.negative_cavity.code, end.code)
        return Solution(end.x, marginals, None, end.steps, residual, code, terms, error)

    def _ever_shorter(self, run):
        """The first of some runs from the same start that converges, each more damped than the one
        before; the last one, if none does. Steps are those of all.
        """

        def again(state):
            tries, steps, _ = state
            end = run(self.damping * 0.3**tries)
            return tries + 1, steps + end.steps, end

        def failed(state):
            return (state[0] < _TRIES) & (state[2].code != Result.converged.code)

        none = zeros_of(run, jnp.asarray(self.damping))
        none = none._replace(code=jnp.full_like(none.code, Result.nonfinite.code))
        zero = jnp.zeros_like(none.steps)
        _, steps, end = lax.while_loop(failed, again, (zero, zero, none))
        return end._replace(steps=steps)

    def _start(self, K, mean, log_lik, init):
        """Flat sites or the warm start; Laplace's sites if the tilted moments there cannot be
        computed. That is not compiled for sites known to be positive: the caller tries again.
        """
        flat = start_from(K, mean, init, functions_of(log_lik))
        if isinstance(init, Positive):
            return flat[0], self._match(log_lik, *flat)

        def from_laplace():
            mode = Laplace(tol=1e-2).solve(K, mean, log_lik).sites
            return mode, condition(K, mean, mode)

        def attempt(state):
            tries, _, _ = state
            sites, q = lax.cond(tries == 0, lambda: flat, from_laplace)
            return tries + 1, sites, self._match(log_lik, sites, q)

        # A loop, so that the moments are compiled once for both starts.
        blank = zeros_of(self._match, log_lik, *flat)
        blank = blank._replace(residual=jnp.asarray(jnp.inf, K.dtype))
        hopeless = lambda s: (s[0] < 2) & ~(s[2].residual < _HOPELESS)  # noqa: E731
        return lax.while_loop(hopeless, attempt, (jnp.zeros((), jnp.int32), flat[0], blank))[1:]

    def log_terms(self, log_lik, solution):
        """As `tilted_terms`, the cavities held."""
        q, sites = solution.marginals, solution.sites
        without = cavity(q, sites, self.power)
        return tilted_terms(q, without, sites, self._tilted(log_lik, without).log_z, self.power)

    def _tilted(self, log_lik, without: Cavity) -> Any:
        """Moments of cavity x p(y_n | f_n)^power."""
        if without.precision.ndim > 1:
            return several.tilted_moments(log_lik, without, self.power, self.num_nodes)
        return tilted(
            log_lik,
            without.mean,
            1.0 / without.precision,
            num=nodes_of(1, self.num_nodes),
            power=self.power,
            closed_form=self.closed_form,
        )

    def _matched(self, log_lik, sites, q: Marginals):
        """(`matched_sites`, q where it varies, the cavities, the moments)."""
        q, varies = lifted(q)
        without = cavity(q, sites, self.power)
        moments = self._tilted(log_lik, without)
        target = matched_sites(moments, without, sites, self.power)
        return of_varying(varies, target), q, without, moments

    def _match(self, log_lik, sites, q: Marginals) -> Evaluation:
        target, q, without, moments = self._matched(log_lik, sites, q)
        terms = tilted_terms(q, without, sites, moments.log_z, self.power)
        improper = jnp.any(~without.proper)
        residual = jnp.where(is_usable(q), mismatch(q, sites, target), jnp.nan)
        if sites.functions > 1:  # no step may end there: from sites left alone few sweeps find back
            residual = jnp.where(improper, jnp.inf, residual)
        aux = (q, improper, terms, moments)
        return Evaluation(target, site_weights(q, sites), residual, jnp.zeros_like(residual), aux)

    def _parallel_sweep(self, K, mean, log_lik, sites) -> Evaluation:
        return self._match(log_lik, sites, condition(K, mean, sites))

    def _sequential_sweep(self, K, mean, log_lik, sites) -> Evaluation:
        """As the parallel sweep from outside; inside, a site sees those updated before it."""
        start = self._parallel_sweep(K, mean, log_lik, sites)
        q, whole = start.aux[0], dense(K)
        Sigma = whole - prediction_root(whole, sites).quadratic(whole)

        def visit(n, carry):
            sites, mu, Sigma = carry
            here = q._replace(mean=mu, variance=jnp.diagonal(Sigma))
            new, *_ = self._matched(log_lik, sites, here)
            d1, d2 = new.nat1[n] - sites.nat1[n], new.nat2[n] - sites.nat2[n]
            s = Sigma[:, n]
            shrink = 1.0 / (1.0 + d2 * s[n])
            mu = mu + s * (d1 - d2 * mu[n]) * shrink
            sites = sites.like(sites.nat1.at[n].add(d1), sites.nat2.at[n].add(d2))
            return sites, mu, Sigma - shrink * d2 * s[:, None] * s  # R&W 3.70

        target, _, _ = lax.fori_loop(0, mean.shape[0], visit, (sites, q.mean, Sigma))
        residual = jnp.maximum(start.residual, mismatch(q, sites, target))
        return start._replace(target=target, residual=residual)
