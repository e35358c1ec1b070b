"""Moments of the tilted distribution N(f; cavity) p(y|f)^power, for every datum at once.

Quadrature in log space, at the modes and breaks of the factor, with an estimate of its error; a
closed form where the likelihood is a Gaussian or a probit of a + b f, which is proved while tracing
(the site's type; `numerics.affine`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.local.cavity import Cavity
from ppl_gp.numerics.modes import normal_log_pdf
from ppl_gp.numerics.normal import log_ndtr
from ppl_gp.numerics.quadrature import likelihood_nodes, log_integral_error
from ppl_gp.observations import BernoulliProbit
from ppl_gp.reading.affine import Dependence, dependence
from ppl_gp.reading.dependence import decides
from ppl_gp.reading.factors import LogLikelihood, is_concave
from ppl_gp.reading.roles import is_observed


class Tilted(NamedTuple):
    """log normaliser (nats), mean and variance of each tilted distribution, (N,), and the nodes of
    their quadrature (`None` of a closed form), by which `error` judges it.
    """

    log_z: Float[Array, "N"]
    mean: Float[Array, "N"]
    variance: Float[Array, "N"]
    nodes: Float[Array, "Q N"] | None = None

    def error(self, log_lik: Callable, without: Cavity, power=1.0, num=None) -> Float[Array, "N"]:
        """Estimated error of log_z, nats, by a finer rule of another kind. O(N Q)."""
        if self.nodes is None:
            return jnp.zeros_like(self.log_z)
        log_g, variance = lambda f: power * log_lik(f), 1.0 / without.precision
        return log_integral_error(log_g, self.log_z, self.nodes, without.mean, variance)


def tilted_quadrature(
    log_lik: Callable, mean, variance, *, num: int, power=1.0, **kind: bool
) -> Tilted:
    """Moments by `num` nodes a datum, of the `kind` that `likelihood_nodes` takes. O(N num)."""
    kind = kind or {"breaks": False}
    f, log_w = likelihood_nodes(log_lik, mean, variance, num=num, power=power, **kind)
    log_p = power * jax.vmap(log_lik)(f) + log_w
    log_z = logsumexp(log_p, 0)
    p = jnp.exp(log_p - log_z)
    first = jnp.sum(p * f, 0)
    return Tilted(log_z, first, jnp.sum(p * (f - first) ** 2, 0), lax.stop_gradient(f))


def tilted_probit(mean, variance, slope, intercept, sign) -> Tilted:
    """Phi(sign (slope f + intercept)): R&W 3.58 and 3.85-3.87, PRML 4.152."""
    spread = jnp.sqrt(1.0 + slope**2 * variance)
    z = sign * (slope * mean + intercept) / spread
    log_z = log_ndtr(z)
    ratio = jnp.exp(normal_log_pdf(z, 0.0, 1.0) - log_z)
    b = sign * slope / spread
    first, second = mean + variance * b * ratio, variance - variance**2 * b**2 * ratio * (z + ratio)
    return Tilted(log_z, first, second)


def tilted_gaussian(mean, variance, slope, intercept, y, scale) -> Tilted:
    """N(y; slope f + intercept, scale^2): conjugate."""
    total = slope**2 * variance + scale**2
    gain = variance * slope / total
    return Tilted(
        normal_log_pdf(y, slope * mean + intercept, total),
        mean + gain * (y - slope * mean - intercept),
        variance * scale**2 / total,
    )


class Line(NamedTuple):
    """slope f + intercept, elementwise."""

    slope: Float[Array, "..."]
    intercept: Float[Array, "..."]


def is_affine(function: Callable, num: int, dtype) -> bool:
    """Whether `function` of f (N,) is proved affine, while tracing; nothing is computed."""
    return all(d <= Dependence.affine for d in dependence(function, jnp.zeros((num,), dtype)))


def line(function: Callable, num: int, dtype) -> Line:
    """The lines of an affine function of f (N,), of which each entry sees one f_n. One jvp."""
    zero = jnp.zeros((num,), dtype)
    intercept, slope = jax.jvp(function, (zero,), (jnp.ones_like(zero),))
    return Line(slope, intercept)


def only_site(log_lik: LogLikelihood, kind: type):
    """f -> the one observed site, if it is of this kind, unwrapped, unscaled and of full size."""
    zero = jnp.zeros((log_lik.num,))
    sites = {k: s for k, s in log_lik.trace(zero).items() if is_observed(s)}
    if len(sites) != 1:
        return None
    ((name, site),) = sites.items()
    if type(site["fn"]) is not kind or site["scale"] is not None:
        return None
    whole = jnp.shape(site["value"]) == (log_lik.num,)
    return (lambda f: log_lik.trace(f)[name]) if whole else None


def tilted(
    log_lik: LogLikelihood, mean, variance, *, num: int, power=1.0, closed_form=True
) -> Tilted:
    """Tilted moments in closed form where there is one (power 1), else by `num` nodes."""
    closed = _closed_form(log_lik, mean, variance) if closed_form and power == 1.0 else None
    if closed is not None:
        return closed
    kind = integrand(log_lik, mean)
    return tilted_quadrature(log_lik, mean, variance, num=num, power=power, **kind)


def integrand(log_lik: Callable, f) -> dict[str, bool]:
    """What `likelihood_nodes` has to be prepared for, decided while tracing."""
    is_read = isinstance(log_lik, LogLikelihood)
    concave = is_read and is_concave(log_lik.trace, None, log_lik.num)
    split = not concave and decides(lambda f, _: log_lik(f), f, ())
    return {"concave": concave, "breaks": False, "split": split}


def _closed_form(log_lik, mean, variance) -> Tilted | None:
    num, dtype = log_lik.num, mean.dtype
    if (site := only_site(log_lik, BernoulliProbit)) is not None:
        if not is_affine(eta := lambda f: site(f)["fn"].f, num, dtype):
            return None
        sign = 2.0 * site(mean)["value"] - 1.0
        return tilted_probit(mean, variance, *line(eta, num, dtype), sign)
    if (site := only_site(log_lik, dist.Normal)) is not None:
        if not is_affine(loc := lambda f: site(f)["fn"].loc, num, dtype):
            return None
        if any(dependence(lambda f: site(f)["fn"].scale, mean)):
            return None
        here = site(mean)
        seen = here["value"], here["fn"].scale
        return tilted_gaussian(mean, variance, *line(loc, num, dtype), *seen)
    return None
