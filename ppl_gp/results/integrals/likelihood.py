"""What the model's own observed sites say about y given f: moments, probabilities of outcomes, log
densities.

Integrals over one f_n per datum use the nodes of `numerics.quadrature.likelihood_nodes`, centred on
the integrand, so that a logistic edge of width 1 under a standard deviation of 30 is resolved, and
so is exp(2 f).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.errors import ModelError
from ppl_gp.gp import bare, unwrap
from ppl_gp.numerics.quadrature import likelihood_nodes, log_integral_error
from ppl_gp.reading.roles import log_prob_per_datum
from ppl_gp.results.query.layout import Layout, ObservedSite
from ppl_gp.results.query.mixture import Moments


def log_expectation(
    log_g: Callable, f: Moments, num_nodes: int, concave: bool = False
) -> Float[Array, "M"]:
    """log E[exp log_g(f)_n] under f_n ~ N(mean_n, variance_n), (M,), nats. O(M num_nodes).
    `concave`: log_g is known to be.
    """
    nodes, log_w = likelihood_nodes(
        log_g, f.mean, floored(f).variance, num=num_nodes, concave=concave
    )
    return logsumexp(log_w + jax.vmap(log_g)(nodes), 0)


def log_expectation_and_error(log_g: Callable, f: Moments, num_nodes: int, concave: bool):
    """(`log_expectation`, log of its estimated error in nats: -inf where log_g is known to be
    concave), (M,) each.
    """
    nodes, log_w = likelihood_nodes(
        log_g, f.mean, floored(f).variance, num=num_nodes, concave=concave
    )
    value = logsumexp(log_w + jax.vmap(log_g)(nodes), 0)
    if concave:
        return value, jnp.full_like(value, -jnp.inf)
    return value, jnp.log(log_integral_error(log_g, value, nodes, f.mean, floored(f).variance))


def expected_moments(
    mean: Callable, variance: Callable, f: Moments, num_nodes: int, concave: bool = False
) -> Moments:
    """Mean and variance of y from those given f, (M,) each, by the law of total variance.

    One set of nodes, centred on the integrand of E[y^2]; the variance is taken about the mean, so
    that it does not cancel. Infinite or NaN where y has no such moment.
    """

    def log_square(f):
        return jnp.log(variance(f) + mean(f) ** 2 + jnp.finfo(f.dtype).tiny)

    nodes, log_w = likelihood_nodes(
        log_square, f.mean, floored(f).variance, num=num_nodes, concave=concave
    )
    w = jnp.exp(log_w)
    first, spread = jax.vmap(mean)(nodes), jax.vmap(variance)(nodes)
    total = jnp.sum(jnp.where(w > 0, w * first, 0.0), 0)
    about = spread + (first - total) ** 2
    return Moments(total, jnp.sum(jnp.where(w > 0, w * about, 0.0), 0))


def floored(f: Moments) -> Moments:
    """With variances that nodes resolve beside the mean: 50 rounding errors of its square."""
    unit = 50 * jnp.finfo(f.mean.dtype).eps
    scale = f.mean**2 + jnp.mean(f.variance) + jnp.finfo(f.mean.dtype).tiny ** 0.5
    return Moments(f.mean, jnp.maximum(f.variance, unit * scale))


def by_datum(x, site: ObservedSite):
    """(entries, M): a site's values with the data last and its other axes in one."""
    return jnp.reshape(jnp.moveaxis(x, site.axis, -1), (-1, x.shape[site.axis]))  # pyright: ignore[reportArgumentType]


def from_by_datum(x, site: ObservedSite, shape):
    """The inverse of `by_datum` for values of this shape."""
    moved = tuple(n for i, n in enumerate(shape) if i != site.axis)
    return jnp.moveaxis(jnp.reshape(x, (*moved, x.shape[-1])), -1, site.axis)  # pyright: ignore[reportArgumentType]


def outcome_log_probs(site: ObservedSite, fn_at: Callable, f: Moments, num_nodes: int):
    """log p(y = k) of every outcome k in the support, normalised over k: (K, *batch), nats. O(K M
    num_nodes).
    """
    shape = jax.eval_shape(fn_at, f.mean).batch_shape

    def entry(outcome, e):
        def log_lik(f):
            fn = fn_at(f)
            return by_datum(fn.log_prob(jnp.full(fn.batch_shape, outcome)), site)[e]

        return log_expectation(log_lik, f, num_nodes, site.concave)

    entries = jnp.arange(by_datum(jnp.zeros(shape), site).shape[0])
    log_p = lax.map(lambda k: lax.map(lambda e: entry(k, e), entries), jnp.asarray(site.support))
    log_p = jax.vmap(lambda x: from_by_datum(x, site, shape))(log_p)
    return log_p - logsumexp(log_p, 0)


def site_moments(site: ObservedSite, fn_at: Callable, f: Moments, num_nodes: int) -> Moments | None:
    """Mean and variance of y at each datum, in the site's shape; `None` where NumPyro's
    distribution has none.
    """
    if (shape := moments_shape(fn_at, f.mean)) is None:
        return None

    def entry(e):
        mean, variance = (
            lambda f, a=a: by_datum(jnp.broadcast_to(getattr(fn_at(f), a), shape), site)[e]
            for a in _MOMENTS
        )
        return expected_moments(mean, variance, f, num_nodes, site.concave)

    entries = jnp.arange(by_datum(jnp.zeros(shape), site).shape[0])
    return Moments(*(from_by_datum(x, site, shape) for x in lax.map(entry, entries)))


_MOMENTS = ("mean", "variance")
# `mean` and `variance` of these are a direction's, not the expectations of y and (y - E[y])^2
_CIRCULAR = (dist.VonMises, dist.SineSkewed, dist.SineBivariateVonMises, dist.ProjectedNormal)


def mean_and_variance(fn) -> list[Float[Array, "..."]]:
    """Of y, each in the distribution's shape. Raises `NotImplementedError` where NumPyro has none,
    or has a circular one.
    """
    if _is_circular(fn):
        raise NotImplementedError
    return [jnp.broadcast_to(getattr(fn, a), fn.shape()) for a in _MOMENTS]


def _is_circular(fn) -> bool:
    """Also of mixtures, and what is built on another distribution."""
    core = unwrap(fn)
    inner = [getattr(core, k, None) for k in ("base_dist", "component_distribution")]
    inner += getattr(core, "component_distributions", ())
    return isinstance(core, _CIRCULAR) or any(_is_circular(x) for x in inner if x is not None)


def moments_shape(fn_at: Callable, f) -> tuple[int, ...] | None:
    """The shape of the distribution's values, or `None` where it has no mean or variance in
    NumPyro, or circular ones.
    """

    try:
        return jax.eval_shape(lambda f: mean_and_variance(fn_at(f)), f)[0].shape
    except NotImplementedError:
        return None


def fn_at(trace_at: Callable, site: ObservedSite) -> Callable:
    """f -> the site's distribution, from f -> trace."""
    return lambda f: bare(trace_at(f)[site.name]["fn"])


def log_density_per_datum(trace: dict, plan: Layout, weighed: bool = False) -> Float[Array, "M"]:
    """sum over observed sites of log p(y_n | f), (M,), nats. Masks hold; `scale`, a device of
    training, does not unless `weighed`.

    A factor counts where it sees observations (censored data, say); another one is a penalty, and
    no part of a density of y. Raises `ModelError` where no observed site has a log density for each
    datum.
    """
    sites = [s for s in trace.values() if s["type"] == "sample" and s["is_scored"]]
    terms = [log_prob_per_datum(s if weighed else {**s, "scale": None}) for s in sites]
    pointwise = [t for t in terms if jnp.ndim(t)]
    if not sites:
        raise ModelError(
            "log_density scores observations, and the model was given none: give them after X_new, "
            "or by keyword, y=..."
        )
    if not pointwise:
        raise ModelError(
            f"the model's observed sites {[s['name'] for s in sites]} have no log density for "
            "each datum: each is one event. Put them into a plate with one entry per row of X_new."
        )
    return sum(pointwise[1:], pointwise[0])
