"""The Jaakkola-Jordan local bound for logistic likelihoods (Jaakkola & Jordan 2000; PRML section
10.6).

log sigma(eta) >= log sigma(xi) + (eta - xi) / 2 - lambda(xi) (eta^2 - xi^2), lambda(xi) = tanh(xi /
2) / (4 xi)  (PRML 10.144), one xi_n a datum, set to xi_n^2 = E[eta_n^2] (PRML 10.163). A strict
lower bound on the evidence, and the loosest Gaussian method here: its covariance is too narrow. For
Bernoulli and binomial sites with logits affine in f, masks and scales and repeats of a datum
included.

Cost a step: N^3 / 3 + 2 N^3 / 3. Fails: `max_steps`, `nonfinite`; `ModelError` for another
likelihood, and for logits that are not proved affine.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.gp import mask_of, unwrap
from ppl_gp.local.method import Evaluation, LocalMethod, Solution, fixed_point, one_function_only
from ppl_gp.local.natural import Positive, at_mean, condition, prior_marginals
from ppl_gp.local.tilted import is_affine, line
from ppl_gp.reading.factors import is_weighed_by
from ppl_gp.reading.roles import is_observed, sum_per_datum

_LOGISTIC = (dist.BernoulliLogits, dist.BinomialLogits)


class Logistic(NamedTuple):
    """weight [y log sigma(eta) + (total - y) log sigma(-eta)] + constant, eta = slope f_n +
    intercept: one a logit, *E, of the shape of the observed values; repeats of a datum have one
    each.
    """

    slope: Float[Array, "*E"]
    intercept: Float[Array, "*E"]
    y: Float[Array, "*E"]
    total: Float[Array, "*E"]
    weight: Float[Array, "*E"]
    log_lik: Float[Array, "N"]  # at f = 0
    moved: Callable  # f (N,) -> slope f_n, *E
    pulled: Callable  # x, *E -> sum over the logits of datum n of slope x, (N,)
    per_datum: Callable  # x, *E -> sum over the logits of datum n of x, (N,)


def logistic_form(log_lik) -> Logistic:
    """Read the logistic form off the model's observed site; `ModelError` where it has none."""
    num = log_lik.num
    zero = jnp.zeros((num,), jnp.result_type(float))
    sites = {k: s for k, s in log_lik.trace(zero).items() if is_observed(s)}
    kinds = {k: type(unwrap(s["fn"])).__name__ for k, s in sites.items()}
    if len(sites) != 1 or type(unwrap((site := [*sites.values()][0])["fn"])) not in _LOGISTIC:
        raise ModelError(
            "LocalBound() needs one observed Bernoulli or Binomial site with `logits=`; the "
            f"model has {kinds}. {LISTED}"
        )
    (name,) = sites
    shape = jnp.shape(site["value"])

    def logits(f):
        return jnp.broadcast_to(unwrap(log_lik.trace(f)[name]["fn"]).logits, shape)

    if not is_affine(logits, num, zero.dtype):
        raise ModelError(
            f"LocalBound() needs logits affine in f, and those of site '{name}' are not shown to "
            "be (they may be sums and multiples of f, with no clip, where, power or link of f). "
            f"{LISTED}"
        )
    if is_weighed_by(log_lik.trace, sites, zero):
        raise ModelError(
            f"an observed value, a mask or a scale of site '{name}' is computed from f, and "
            f"LocalBound() needs all three to be constant. {LISTED}"
        )
    total = jnp.asarray(getattr(unwrap(site["fn"]), "total_count", 1.0), zero.dtype)
    y, total = (jnp.broadcast_to(jnp.asarray(x, zero.dtype), shape) for x in (site["value"], total))
    form = line(logits, num, zero.dtype)
    return Logistic(
        *form,
        y,
        total,
        _weight(site, shape, zero.dtype),
        log_lik(zero),
        lambda f: logits(f) - form.intercept,
        lambda x: jax.vjp(logits, zero)[1](x)[0],
        lambda x: sum_per_datum(site, x),
    )


def _weight(site, shape, dtype):
    """Masks and scale of each logit; a scale has the batch shape, and no axes for an event."""
    fn, scale = site["fn"], jnp.asarray(1.0 if site["scale"] is None else site["scale"], dtype)
    scale = jnp.reshape(scale, scale.shape + (1,) * fn.event_dim)
    return jnp.ones(shape, dtype) * mask_of(fn) * scale


def lam(xi: Array) -> Array:
    """lambda(xi) = tanh(xi / 2) / (4 xi) (PRML 10.141), 1/8 at zero."""
    safe = jnp.where(xi > 1e-4, xi, 1.0)
    return jnp.where(xi > 1e-4, jnp.tanh(0.5 * safe) / (4.0 * safe), 0.125 - xi**2 / 96.0)


def _sites(form: Logistic, xi) -> Positive:
    scaled = 2.0 * form.weight * form.total * lam(xi)
    linear = form.weight * (form.y - 0.5 * form.total)
    return Positive(form.pulled(linear - scaled * form.intercept), form.pulled(scaled * form.slope))


def _log_terms(form: Logistic, xi):
    """(N,): the bound at f = 0, and what of the likelihood at f = 0 is no logistic term."""
    b = form.intercept
    bound = jax.nn.log_sigmoid(xi) - 0.5 * xi - lam(xi) * (b**2 - xi**2)
    logistic = form.y * b - form.total * jax.nn.softplus(b)
    gap = form.weight * ((form.y - 0.5 * form.total) * b + form.total * bound - logistic)
    return form.log_lik + form.per_datum(gap)


class LocalBound(LocalMethod):
    """The bound of Jaakkola and Jordan for logistic likelihoods.

    A lower bound on the evidence without quadrature. It is the loosest of the local methods, and
    its posterior is too narrow, so use it only for comparisons.

    Parameters
    ----------
    hyper, integrate : default MAP(), "gaussian"
        What happens to the hyperparameters, and which sites are integrated. See `LocalMethod`.
    tol : float, default 1e-8
        Largest change of log xi at which the iteration ends.
    max_steps : int, default 500
        Steps at most.

    Raises
    ------
    DataError
        For numbers out of range.
    ModelError
        In `fit`, unless the data are Bernoulli or binomial with logits that are proved affine in
        one function per datum. Masks, scales and repeats of a datum are allowed.

    Notes
    -----
    `log sigma(eta) >= log sigma(xi) + (eta - xi) / 2 - lambda(xi) (eta^2 - xi^2)`, with `lambda(xi)
    = tanh(xi / 2) / (4 xi)` and one `xi_n` per datum, set to `xi_n^2 = E[eta_n^2]`. A step costs
    O(N^3). `fit.result` is `converged`, `max_steps` or `nonfinite`.

    Sources: Jaakkola & Jordan (2000); Bishop (2006), section 10.6.

    Examples
    --------
    >>> pg.LocalBound(hyper=pg.Grid()).evidence_is
    'lower bound'
    """

    evidence_is = "lower bound"

    tol: float = eqx.field(default=1e-8, static=True)
    max_steps: int = eqx.field(default=500, static=True)

    def solve(self, K, mean, log_lik, init=None) -> Solution:
        """Alternate q(f) and xi; every kept step raises the bound. No warm start: xi is local."""
        form = logistic_form(log_lik)

        def matched(q):
            mean = form.moved(q.mean) + form.intercept
            second = form.slope * form.moved(q.variance) + mean**2
            return 0.5 * jnp.log(second + jnp.finfo(K.dtype).tiny)

        def evaluate(log_xi) -> Evaluation:
            xi = jnp.exp(log_xi)
            q = condition(K, mean, _sites(form, xi))
            target = matched(q)
            bound = q.log_partition + jnp.sum(_log_terms(form, xi))
            residual = jnp.max(jnp.abs(target - log_xi))
            return Evaluation(target, jnp.ones_like(xi), residual, bound, q)

        start = matched(prior_marginals(K, mean))
        limits = {"tol": self.tol, "max_steps": self.max_steps, "damping": 1.0}
        end = fixed_point(evaluate, start, evaluate(start), **limits)
        xi, at = jnp.exp(end.x), end.evaluation
        return Solution(_sites(form, xi), at.aux, xi, end.steps, at.residual, end.code)

    def refuses(self, log_lik):
        """Several functions, what is not logistic, and logits that are not proved affine."""
        if (why := one_function_only(self, log_lik)) is not None:
            return why
        try:
            logistic_form(log_lik)
        except ModelError as error:
            return str(error)
        return None

    def log_terms(self, log_lik, solution):
        """The bound's part outside exp(nat1 f - nat2 f^2 / 2), xi held, and that at the mean."""
        here = at_mean(solution.marginals, solution.sites)
        return _log_terms(logistic_form(log_lik), solution.local) + here

    def pull_back(self, K, mean, log_lik, solution):
        """As in the base class; the sites hold likelihood parameters too, at the given xi."""
        base_K, base_mean, terms_bar = super().pull_back(K, mean, log_lik, solution)
        q = solution.marginals
        sites_bar = Positive(q.mean, -0.5 * (q.mean**2 + q.variance))
        _, pull = eqx.filter_vjp(lambda lik: _sites(logistic_form(lik), solution.local), log_lik)
        (more,) = pull(sites_bar)
        return base_K, base_mean, eqx.apply_updates(terms_bar, more)
