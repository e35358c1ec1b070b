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
import jax
import jax.numpy as jnp
from jax import lax

from ppl_gp.errors import DataError, Result
from ppl_gp.local import several
from ppl_gp.local.condition import condition, prediction_root, start_from
from ppl_gp.local.fixed_point import Evaluation, fixed_point
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import LocalMethod, Solution, one_function_only
from ppl_gp.local.natural import (
    Marginals,
    Positive,
    PseudoLikelihood,
    admissible,
    at_mean,
    drop_rounding,
    lifted,
    mismatch,
    of_varying,
    site_weights,
)
from ppl_gp.local.tilted import tilted
from ppl_gp.numerics.low_rank import dense
from ppl_gp.reading.factors import functions_of

# posterior standard deviations: a start that far off (a Poisson mean of exp(900), say) is no start
_HOPELESS = 1e6
_TRIES = 3  # of several functions, which a short step may lead where a long one does not


class EP(LocalMethod):
    """Expectation propagation. `damping` is the fraction of each new site that a sweep takes;
    `power` in (0, 1].

    `tol` bounds the moments' mismatch in posterior standard deviations. `closed_form=False` forces
    quadrature, by `num_nodes` a datum: 96 for one function; in each direction 24 for two functions
    a datum and 14 for three; 8192 points in all above.
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
        tol = max(self.tol, 1e3 * float(jnp.finfo(K.dtype).eps))
        sites, first = self._start(K, mean, log_lik, init)
        sweep = self._sequential_sweep if self.sequential else self._parallel_sweep

        def run(damping):
            return fixed_point(
                lambda x: sweep(K, mean, log_lik, x),
                sites,
                first,
                tol=tol,
                max_steps=self.max_steps,
                damping=damping,
                project=admissible,
            )

        end = run(self.damping) if sites.functions == 1 else self._ever_shorter(run)
        marginals, skipped, terms, moments = end.evaluation.aux
        if sites.functions == 1:
            precision, centre, _ = self._cavity(marginals, end.x)
            error = moments.error(log_lik, centre, 1.0 / precision, self.power)
        else:
            without = several.cavity(marginals, end.x, self.power)
            error = moments.error(log_lik, without, self.power, self.num_nodes)
        error, residual = jnp.max(error), end.evaluation.residual
        code = jnp.where(
            (end.code == Result.converged.code) & skipped, Result.negative_cavity.code, end.code
        )
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

        blank = eqx.filter_eval_shape(run, jnp.asarray(self.damping))
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank)
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
        blank = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            eqx.filter_eval_shape(self._match, log_lik, *flat),
        )
        start = (
            jnp.zeros((), jnp.int32),
            flat[0],
            blank._replace(residual=jnp.asarray(jnp.inf, K.dtype)),
        )
        _, sites, first = lax.while_loop(
            lambda s: (s[0] < 2) & ~(s[2].residual < _HOPELESS), attempt, start
        )
        return sites, first

    def log_terms(self, log_lik, solution):
        """(1/power) [log int cavity p^power - log int cavity site^power] + log site at q's mean,
        the cavities held.
        """
        q, sites = solution.marginals, solution.sites
        if sites.functions > 1:
            without = several.cavity(q, sites, self.power)
            moments = several.tilted_moments(log_lik, without, self.power, self.num_nodes)
            return several.tilted_terms(q, without, sites, moments.log_z, self.power)
        cavity = self._cavity(q, sites)
        log_z = self._tilted(log_lik, cavity[1], 1.0 / cavity[0]).log_z
        return self._terms(q, sites, cavity, log_z)

    def _terms(self, q: Marginals, sites: PseudoLikelihood, cavity, log_z):
        """As cavity x site^power is q times a constant, that constant and the site at q's mean are
        the log ratio of q to the cavity there.
        """
        precision, centre, proper = cavity
        ratio = 0.5 * (precision * (q.mean - centre) ** 2 - jnp.log(precision * q.variance))
        return jnp.where(proper, (log_z + ratio) / self.power, at_mean(q, sites))

    def _cavity(self, q: Marginals, sites: PseudoLikelihood):
        precision = 1.0 / q.variance - self.power * sites.nat2
        proper = precision > 1e-10 / q.variance
        precision = jnp.where(proper, precision, 1.0 / q.variance)
        nat1 = q.mean / q.variance - jnp.where(proper, self.power * sites.nat1, 0.0)
        return precision, nat1 / precision, proper

    def _tilted(self, log_lik, mean, variance):
        return tilted(
            log_lik,
            mean,
            variance,
            num=several.nodes_of(1, self.num_nodes),
            power=self.power,
            closed_form=self.closed_form,
        )

    def _matched(self, log_lik, sites, q: Marginals):
        """The sites whose product with the cavities has the tilted moments; the cavities, and the
        moments.
        """
        q, varies = lifted(q)
        precision, centre, proper = cavity = self._cavity(q, sites)
        moments = self._tilted(log_lik, centre, 1.0 / precision)
        nat2 = drop_rounding((1.0 / moments.variance - precision) / self.power, precision)
        nat1 = (moments.mean / moments.variance - centre * precision) / self.power
        matched = sites.like(
            jnp.where(proper, nat1, sites.nat1), jnp.where(proper, nat2, sites.nat2)
        )
        return of_varying(varies, admissible(matched)), cavity, moments

    def _match(self, log_lik, sites, q: Marginals) -> Evaluation:
        q, varies = lifted(q)
        if sites.functions > 1:
            without = several.cavity(q, sites, self.power)
            moments = several.tilted_moments(log_lik, without, self.power, self.num_nodes)
            target = several.matched_sites(moments, without, sites, self.power)
            target = of_varying(varies, target)
            terms = several.tilted_terms(q, without, sites, moments.log_z, self.power)
            improper, usable = jnp.any(~without.proper), several.is_usable(q)
        else:
            target, cavity, moments = self._matched(log_lik, sites, q)
            terms = self._terms(q, sites, cavity, moments.log_z)
            improper, usable = jnp.any(~cavity[2]), jnp.all(q.variance > 0)
        residual = jnp.where(usable, mismatch(q, sites, target), jnp.nan)
        if sites.functions > 1:  # no step may end there: from sites left alone few sweeps find back
            residual = jnp.where(improper, jnp.inf, residual)
        aux = (q, improper, terms, moments)
        return Evaluation(target, site_weights(q, sites), residual, jnp.zeros_like(residual), aux)

    def _parallel_sweep(self, K, mean, log_lik, sites) -> Evaluation:
        return self._match(log_lik, sites, condition(K, mean, sites))

    def _sequential_sweep(self, K, mean, log_lik, sites) -> Evaluation:
        """As the parallel sweep from outside; inside, a site sees those updated before it."""
        start = self._parallel_sweep(K, mean, log_lik, sites)
        q = start.aux[0]
        whole = dense(K)
        root: Any = prediction_root(whole, sites)  # (K + T^-1)^-1 K, of one function
        product = root.diagonal[:, None] * whole + root.sign * root.W.T @ (root.W @ whole)
        Sigma = whole - whole @ product

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
        return start._replace(
            target=target, residual=jnp.maximum(start.residual, mismatch(q, sites, target))
        )
