"""q without a share of each datum's site, and what moments of the tilted distributions, cavity x
p(y_n | f_n)^power, give: the sites that match them, and their part of the evidence.

Of R functions a datum, precisions are (N, R, R), by loops over R that are written out.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.local.natural import Marginals, PseudoLikelihood, admissible, at_mean, drop_rounding
from ppl_gp.numerics import blocks as small


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
        nat1 = q.mean / q.variance - jnp.where(proper, power * sites.nat1, 0.0)
        return Cavity(precision, nat1 / precision, proper)
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
    q: Marginals, without: Cavity, sites: PseudoLikelihood, log_z, power: float
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
