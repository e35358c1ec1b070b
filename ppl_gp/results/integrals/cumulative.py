"""Cumulative distribution functions of observations, NumPyro's and those that it leaves out."""

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import betainc
from jaxtyping import Array, Float
from numpyro.distributions.discrete import ZeroInflatedLogits, ZeroInflatedProbs
from numpyro.distributions.transforms import AffineTransform

from ppl_gp.wrappers import bare_shape, unwrap


def cumulative(fn: dist.Distribution, value) -> Float[Array, "..."]:
    """p(y <= value) of every entry of fn, in the shape of `value` against `bare_shape(fn)`.

    Raises `NotImplementedError` where neither NumPyro nor this module has the function.
    """
    found = _cumulative(unwrap(fn), value)
    shape = jnp.broadcast_shapes(bare_shape(fn), jnp.shape(value))
    return jnp.broadcast_to(jnp.clip(jnp.nan_to_num(found, nan=0.0), 0.0, 1.0), shape)


def _cumulative(core: Any, value):
    p: Any = getattr(core, "probs", None)
    if isinstance(core, dist.BinomialProbs | dist.BinomialLogits):
        return _binomial(p, core.total_count, value)
    if isinstance(core, dist.GeometricProbs | dist.GeometricLogits):
        return 1.0 - jnp.exp((jnp.floor(value) + 1.0) * jnp.log1p(-p))
    if isinstance(core, ZeroInflatedProbs | ZeroInflatedLogits):
        gate: Any = core.gate
        return gate * (value >= 0) + (1.0 - gate) * _cumulative(core.base_dist, value)
    if isinstance(core, dist.TransformedDistribution):
        return _transformed(core, value)
    return _inside(core.cdf(value), core.support, value)


def _transformed(core, value):
    """By the base's, whose bounds are constants where those of y depend on f."""
    return _through(tuple(core.transforms), unwrap(core.base_dist), value)


def _through(transforms: tuple, base, value):
    """p(t_k(... t_1(x)) <= value): 0 and 1 beyond what t_k reaches, where its inverse has no
    number, before an earlier or later map turns it around.
    """
    if not transforms:
        return _cumulative(base, value)
    *before, last = transforms
    below = _through(tuple(before), base, last.inv(value))
    found = jnp.where(last.sign > 0, below, 1.0 - below)
    # an affine map has its inverse everywhere, and NumPyro's codomain is that of a positive scale
    return found if isinstance(last, AffineTransform) else _inside(found, last.codomain, value)


def _inside(found, support, value):
    """0 and 1 beyond the support, where NumPyro has any number or none for some distributions."""
    low, high = (getattr(support, k, None) for k in ("lower_bound", "upper_bound"))
    found = found if low is None else jnp.where(value < low, 0.0, found)
    return found if high is None else jnp.where(value >= high, 1.0, found)


def _binomial(p, total, value):
    """I_{1 - p}(n - k, k + 1) (DLMF 8.17.5)."""
    k = jnp.floor(value)
    inside = betainc(jnp.maximum(total - k, 0.5), jnp.maximum(k + 1.0, 0.5), 1.0 - p)
    return jnp.where(k < 0, 0.0, jnp.where(k >= total, 1.0, inside))
