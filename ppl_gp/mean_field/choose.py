"""The family of a site's factor, by the support of its prior; the start of its q."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.mean_field.discrete import Dirichlet, discrete
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.gaussian import gaussian
from ppl_gp.mean_field.paired import NormalGamma, NormalWishart
from ppl_gp.mean_field.positive import Gamma, Wishart
from ppl_gp.numerics.linalg import inverse

Make = Callable[[str, dict], Family]
_OWN: list[tuple[Callable[[Any], bool], Make]] = []


def register_family(fits: Callable[[Any], bool], make: Make) -> None:
    """Add a family of distributions to `MeanField`.

    `fit` still proves that the model is conjugate.

    Parameters
    ----------
    fits : callable
        `fits(support)` returns whether the family is for sites of this support, a NumPyro
        constraint.
    make : callable
        `make(name, site)` returns the first q of a site, a `ppl_gp.mean_field.family.Family`.
        `site` is its entry in the trace.

    Notes
    -----
    Families that are registered later are tried first, and all before those of the package.

    Examples
    --------
    >>> from ppl_gp.mean_field.positive import Gamma
    >>> def make(name, site):
    ...     ones = jnp.ones(site["fn"].shape())
    ...     return Gamma((name,), ones.shape, False, ones, ones)
    >>> fits = lambda support: support is dist.constraints.nonnegative
    >>> pg.register_family(fits, make)  # doctest: +SKIP
    """
    _OWN.insert(0, (fits, make))


def single(name: str, site: dict) -> Family:
    """The family of one site, q about where the trace is, of a gamma with shape one, of a Wishart
    with D + 1 degrees of freedom; `ModelError` where no family has its support.
    """
    fn: Any = unwrap(site["fn"])
    support = fn.support
    for fits, make in _OWN:
        if fits(support):
            return make(name, site)
    if support.is_discrete:
        return _discrete(name, site)
    inner, shape = support, tuple(site["fn"].shape())
    while isinstance(inner, constraints.independent):  # real vectors and matrices too
        inner = inner.base_constraint
    if inner == constraints.real:
        return gaussian_of([name], {name: site}, len(site["fn"].batch_shape))
    if inner == constraints.positive:
        inverted, middle = isinstance(fn, dist.InverseGamma), _middle(site)
        rate = middle if inverted else 1.0 / middle
        return Gamma((name,), shape, inverted, jnp.ones_like(rate), rate)
    if inner == constraints.unit_interval:
        return Dirichlet((name,), shape, True, jnp.ones((*shape, 2)))
    if inner == constraints.simplex:
        return Dirichlet((name,), shape[:-1], False, jnp.ones(shape))
    if inner == constraints.positive_definite:
        inverted = isinstance(fn, dist.InverseWishart)
        value = jnp.asarray(site["value"])
        mean = jnp.linalg.inv(value) if inverted else _mean_or(fn, value)
        df = jnp.full(shape[:-2], shape[-1] + 1.0, value.dtype)
        rate = df[..., None, None] * inverse(jnp.broadcast_to(mean, shape))
        return Wishart((name,), shape[:-2], inverted, df, rate)
    raise ModelError(
        f"MeanField() has no family for site '{name}' ({type(fn).__name__} on {support}): it has "
        "Gaussian, gamma, inverse gamma, beta, Dirichlet, Wishart, inverse Wishart and discrete "
        f"factors. Give it one by register_family(...), or use another method. {LISTED}"
    )


def _middle(site: dict):
    """The prior mean where there is one and it is finite, else the value drawn."""
    value = jnp.asarray(site["value"], jnp.result_type(float))
    mean = jnp.broadcast_to(_mean_or(unwrap(site["fn"]), value), site["fn"].shape())
    return jnp.where(jnp.isfinite(mean) & (mean > 0), mean, value)


def _mean_or(fn, value):
    """The mean of a distribution that has one; else, as of an improper one, the value."""
    try:
        return fn.mean
    except (NotImplementedError, ArithmeticError):  # `InverseGamma(1.0, 1.0)` divides by zero
        return value


def _discrete(name: str, site: dict) -> Family:
    fn: Any = unwrap(site["fn"])
    if not fn.has_enumerate_support or fn.event_shape:
        raise ModelError(
            f"MeanField() sums discrete sites over their categories, and those of '{name}' "
            f"({type(fn).__name__}) cannot be listed. {LISTED}"
        )
    try:
        values = np.asarray(fn.enumerate_support(expand=False)).ravel()
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"the categories of site '{name}' cannot be listed: {error}") from error
    shape = tuple(site["fn"].shape())
    probs = jnp.full((*shape, len(values)), 1.0 / len(values))
    return discrete((name,), shape, [int(v) for v in values], probs)


def gaussian_of(names: list[str], trace: dict, apart: int) -> Family:
    """A Gaussian of these sites together, whose first `apart` axes hold independent elements: mean
    at the trace's values, the prior's variance up to one.
    """
    sites = [trace[k] for k in names]
    batch = tuple(sites[0]["fn"].batch_shape[:apart])
    shapes = [tuple(site["fn"].shape())[apart:] for site in sites]
    means = [jnp.asarray(site["value"], jnp.result_type(float)) for site in sites]
    variances = map(_variance, sites, means)
    mean, variance = (
        jnp.concatenate([x.reshape(*batch, -1) for x in parts], -1) for parts in (means, variances)
    )
    return gaussian(names, batch, shapes, mean, variance)


def _variance(site: dict, like):
    try:
        found = jnp.broadcast_to(unwrap(site["fn"]).variance, like.shape)
    except (NotImplementedError, AttributeError, ValueError, TypeError, ArithmeticError):
        return jnp.ones_like(like)
    return jnp.where(jnp.isfinite(found) & (found > 0), jnp.minimum(found, 1.0), 1.0)


def paired(mean: str, precision: str, trace: dict) -> Family | None:
    """A mean and its precision as one block, where their shapes fit; `None` where they do not."""
    q: Any = single(precision, trace[precision])
    if not isinstance(q, Gamma | Wishart) or q.inverted:
        return None
    sites, batch, shape = (mean, precision), q.batch, tuple(trace[mean]["fn"].shape())
    value = jnp.asarray(trace[mean]["value"], jnp.result_type(float))
    if isinstance(q, Wishart):
        if shape != (*batch, q.size):
            return None
        return NormalWishart(sites, batch, q.df, q.rate, jnp.ones(batch), value)
    if shape[: len(batch)] != batch:
        return None
    flat, tail = value.reshape(*batch, -1), shape[len(batch) :]
    P = jnp.broadcast_to(jnp.eye(flat.shape[-1]), (*flat.shape, flat.shape[-1]))
    return NormalGamma(sites, batch, tail, q.shape, q.rate, flat, P)
