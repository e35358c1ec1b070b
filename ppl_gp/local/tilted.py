"""Moments of the tilted distributions, cavity x p(y_n | f_n)^power, of all data at once, and what
they give: the sites that match them, and their part of the evidence.

Quadrature in log space, at the modes and breaks of the factor, with an estimate of its error; a
closed form where the likelihood is a Gaussian or a probit of a + b f, which is proved while tracing
(the site's type; `reading.dependence`). For R functions per datum, precisions are (N, R, R), by
loops over R that are written out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.local.natural import Marginals, PseudoLikelihood, admissible, at_mean, drop_rounding
from ppl_gp.numerics import blocks as small
from ppl_gp.numerics.modes import normal_log_pdf
from ppl_gp.numerics.quadrature import likelihood_nodes, log_integral_error, log_ndtr
from ppl_gp.observations import BernoulliProbit
from ppl_gp.reading.dependence import Dependence, decides, dependence
from ppl_gp.reading.factors import LogLikelihood, is_concave, is_weighed_by
from ppl_gp.reading.roles import is_observed


def split(x: Float[Array, "RN"], R: int) -> Float[Array, "N R"]:
    """A row a datum."""
    return jnp.reshape(x, (R, -1)).T


def joined(x: Float[Array, "N R"]) -> Float[Array, "RN"]:
    """The inverse of `split`."""
    return jnp.ravel(x.T)


def front(T: Float[Array, "R R N"]) -> Float[Array, "N R R"]:
    """A block a datum."""
    return jnp.moveaxis(T, -1, 0)


def rows_times(A: Float[Array, "N R R"], x: Float[Array, "N R"]) -> Float[Array, "N R"]:
    """A_n x_n of each datum."""
    return jnp.einsum("nab,nb->na", A, x)


class Cavity(NamedTuple):
    """q without a share of its sites: precision (N,) or (N, R, R), mean (R N,), and whether it is a
    Gaussian; where it is none, the whole of q.
    """

    precision: Float[Array, "..."]
    mean: Float[Array, "RN"]
    proper: Array


def cavity(q: Marginals, sites: PseudoLikelihood, power: float) -> Cavity:
    """Of every datum, without `power` of its site."""
    if (R := sites.functions) == 1:
        precision = 1.0 / q.variance - power * sites.nat2
        proper = precision > 1e-10 / q.variance
        precision = jnp.where(proper, precision, 1.0 / q.variance)
        # exactly q's mean where the site is flat: of a tiny variance, all but that has no digits
        away = jnp.where(proper, power * (sites.nat2 * q.mean - sites.nat1), 0.0) / precision
        return Cavity(precision, q.mean + away, proper)
    whole = small.inverse(front(q.variance))
    proper = small.is_definite(whole - power * front(sites.nat2))
    share = jnp.where(proper, power, 0.0)
    precision = whole - share[:, None, None] * front(sites.nat2)
    nat1 = rows_times(whole, split(q.mean, R)) - share[:, None] * split(sites.nat1, R)
    return Cavity(precision, joined(rows_times(small.inverse(precision), nat1)), proper)


def matched_sites(
    moments: Any, without: Cavity, sites: PseudoLikelihood, power: float
) -> PseudoLikelihood:
    """Sites that give the tilted moments with the cavities; of improper ones the old sites."""
    keep, precision = without.proper, without.precision
    if (R := sites.functions) == 1:
        nat2 = drop_rounding((1.0 / moments.variance - precision) / power, precision)
        nat1 = (moments.mean / moments.variance - without.mean * precision) / power
        found = sites.like(jnp.where(keep, nat1, sites.nat1), jnp.where(keep, nat2, sites.nat2))
        return admissible(found)
    whole = small.inverse(moments.covariance)
    pulled = rows_times(whole, split(moments.mean, R))
    nat1 = joined(pulled - rows_times(precision, split(without.mean, R))) / power
    nat2 = jnp.moveaxis((whole - precision) / power, 0, -1)
    nat1 = jnp.where(jnp.tile(keep, R), nat1, sites.nat1)
    return sites.like(nat1, jnp.where(keep, nat2, sites.nat2))


def tilted_terms(
    q: Marginals, without: Cavity, sites: PseudoLikelihood, log_z: Array, power: float
) -> Float[Array, "N"]:
    """(1/power) [log int cavity p^power - log int cavity site^power] + log site at q's mean. As
    cavity site^power is a multiple of q, all but the first is their log ratio at q's mean.
    """
    precision, away = without.precision, q.mean - without.mean
    if (R := sites.functions) == 1:
        ratio = precision * away**2 - jnp.log(precision * q.variance)
    else:
        apart = split(away, R)
        ratio = jnp.sum(apart * rows_times(precision, apart), -1)
        ratio -= small.log_det(precision) + small.log_det(front(q.variance))
    return jnp.where(without.proper, (log_z + 0.5 * ratio) / power, at_mean(q, sites))


def is_usable(q: Marginals) -> Array:
    """Whether every variance, or block of a posterior covariance, is positive (definite)."""
    if q.variance.ndim == 1:
        return jnp.all(q.variance > 0)
    return jnp.all(small.is_definite(front(q.variance)))


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
    concave = isinstance(log_lik, LogLikelihood) and is_concave(log_lik.trace, None, log_lik.num)
    split = not concave and decides(lambda f, _: log_lik(f), f, ())
    return {"concave": concave, "breaks": False, "split": split}


_SEES = {BernoulliProbit: "f", dist.Normal: "loc"}  # the parameter that may be affine in f


def _closed_form(log_lik, mean, variance) -> Tilted | None:
    """If there is one observed site, unwrapped, unscaled and of full size."""
    sites = {k: s for k, s in log_lik.trace(mean).items() if is_observed(s)}
    if len(sites) != 1:
        return None
    ((name, here),) = sites.items()
    fn, y, own = here["fn"], here["value"], (log_lik.num, mean.dtype)
    if type(fn) not in _SEES or here["scale"] is not None or jnp.shape(y) != mean.shape:
        return None

    def parameter(key):
        return lambda f: getattr(log_lik.trace(f)[name]["fn"], key)

    seen = is_weighed_by(log_lik.trace, sites, mean)
    if seen or not is_affine(eta := parameter(_SEES[type(fn)]), *own):
        return None
    if isinstance(fn, BernoulliProbit):
        return tilted_probit(mean, variance, *line(eta, *own), 2.0 * y - 1.0)
    if any(dependence(parameter("scale"), mean)):
        return None
    return tilted_gaussian(mean, variance, *line(eta, *own), y, fn.scale)
