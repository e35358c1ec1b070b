"""Weighted draws of all that a fit inferred, and mixtures over them, accumulated in one pass:
memory does not grow with the number of draws.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.gp import require_flag
from ppl_gp.kept import Kept
from ppl_gp.numerics import blocks as small
from ppl_gp.numerics.linalg import robust_factors
from ppl_gp.quick import entry, one_entry


class Moments(NamedTuple):
    """Mean and variance of something, arrays of one shape."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]


class JointMoments(NamedTuple):
    """Mean and variance of R functions that are correlated within a row, (R, M), and S with S S^T
    their covariance there, (M, R, R).
    """

    mean: Float[Array, "R M"]
    variance: Float[Array, "R M"]
    root: Float[Array, "M R R"]

    @classmethod
    def of(cls, mean, variance, covariance: Float[Array, "M R R"]) -> "JointMoments":
        """With S a factor, which a covariance without full rank has too."""
        return cls(mean, variance, small.lower_root(covariance))

    def at(self, z: Float[Array, "R _"]) -> Float[Array, "R M"]:
        """The functions at independent standard normal z."""
        return self.mean + jnp.einsum("mab,bm->am", self.root, jnp.broadcast_to(z, self.mean.shape))


def plain(moments: Moments | JointMoments) -> Moments:
    """Without the correlations, which a mixture need not carry."""
    return Moments(moments.mean, moments.variance)


def mixture(
    component: Callable[[Any], Any], draws: Any, log_weights: Float[Array, "S"] | None = None
) -> Any:
    """Mix component(draw) over the leading axis of `draws`, by exp(log_weights) or in equal shares.

    `Moments` in what a component returns mix by the laws of total expectation and total variance;
    any other array is a log density, and mixes as logsumexp over draws of log weight + log density.
    """
    if (num := jax.tree.leaves(draws)[0].shape[0]) == 1:
        return component(jax.tree.map(lambda x: x[0], draws))
    # Only the weights' ratios matter: what was mixed so far has the sum of its weights.
    weights = jnp.ones(num) if log_weights is None else jnp.exp(log_weights - jnp.max(log_weights))

    def step(carry, entry):
        before, total = carry
        draw, weight = entry
        after, counts = before + weight, weight > 0  # a draw that does not may be NaN
        mixed = _combine(total, component(draw), weight / jnp.where(counts, after, 1.0))
        return (after, jax.tree.map(lambda x, old: jnp.where(counts, x, old), mixed, total)), None

    shape = jax.eval_shape(component, jax.tree.map(lambda x: x[0], draws))
    empty = jax.tree.map(_empty, shape, is_leaf=_is_moments)
    (_, total), _ = lax.scan(step, (jnp.zeros((), weights.dtype), empty), (draws, weights))
    return total


def _is_moments(x):
    return isinstance(x, Moments)


def _empty(shape):
    if _is_moments(shape):
        return Moments(*(jnp.zeros(s.shape, s.dtype) for s in shape))
    return jnp.full(shape.shape, -jnp.inf, shape.dtype)


def _combine(total, part, share):
    """The mixture of draws before and one more, which has this share of it."""

    def combine(old, new):
        w = share.astype(jnp.result_type(new.mean if _is_moments(new) else new))
        if not _is_moments(new):
            return jnp.logaddexp(old + jnp.log1p(-w), new + jnp.log(w))
        shift = new.mean - old.mean
        return Moments(
            old.mean + w * shift, (1 - w) * old.variance + w * new.variance + w * (1 - w) * shift**2
        )

    return jax.tree.map(combine, total, part, is_leaf=_is_moments)


class Draws(eqx.Module):
    """S weighted draws of all that a posterior is over; S = 1 if the hyperparameters are one value.

    - `hyper`: {hyperparameter or param: (S, ...)}.
    - `latents`: {per-datum latent: (S, ...)}, where a sampler drew it.
    - `kept`: {GP site: what is kept of q(f)}.
    - `log_weights`: (S,), finite, their exponentials sum to one; -log S each for draws by MCMC.
    """

    hyper: dict
    latents: dict
    kept: Mapping[str, Kept]
    log_weights: Float[Array, "*S"]

    @classmethod
    def one(cls, hyper: dict, kept: Mapping[str, Kept]) -> "Draws":
        """One setting of the hyperparameters; `kept` has its leading axis of one already."""
        return cls(one_entry(hyper), {}, kept, jnp.asarray(np.zeros(1)))

    @classmethod
    def equal(cls, hyper: dict, kept: Mapping[str, Kept], num: int | None = None) -> "Draws":
        """Draws of equal weight; `num` of them where nothing is kept that says how many."""
        known = [v.num_draws for v in kept.values()] + [len(x) for x in jax.tree.leaves(hyper)]
        num = num or known[0]
        return cls(hyper, {}, kept, jnp.full(num, -np.log(num)))

    def apart(self, latents: Callable[[str], bool]) -> "Draws":
        """The same draws, with the per-datum sites among `latents`."""
        known = self.known
        hyper = {k: v for k, v in known.items() if not latents(k)}
        local = {k: v for k, v in known.items() if latents(k)}
        return dataclasses.replace(self, hyper=hyper, latents=local)

    @property
    def num(self) -> int:
        """S."""
        return self.log_weights.shape[0]

    @property
    def effective(self) -> Float[Array, ""]:
        """1 / sum w^2: S where weights are equal. What a variance between draws is divided by."""
        return jnp.exp(-jax.nn.logsumexp(2.0 * self.log_weights))

    @property
    def known(self) -> dict:
        """{site: value} of all that was inferred beside the GP sites."""
        return {**self.hyper, **self.latents}

    @property
    def values(self) -> dict:
        """{GP site: f at the training inputs} of an entry, where there is one, to run the model."""
        return {k: v.values for k, v in self.kept.items() if v.values is not None}

    def at(self, s) -> "Draws":
        """Entry s, without the leading axis."""
        return entry(self, s) if isinstance(s, int) else jax.tree.map(lambda x: x[s], self)

    def part(self, indices) -> "Draws":
        """Some of the draws, in their proportions."""
        found = self.at(indices)
        return dataclasses.replace(found, log_weights=jax.nn.log_softmax(found.log_weights))

    def is_weighted(self) -> bool:
        """Whether weights differ by more than rounding. Not under `jit`."""
        w = np.asarray(self.log_weights)
        return bool(np.ptp(w) > 1e-3 * np.sqrt(np.finfo(w.dtype).eps))

    def resampled(self, num: int) -> np.ndarray:
        """Indices of `num` draws in proportion to the weights, spread evenly over the draws
        (systematic resampling). Not under `jit`.

        Equal weights: every draw floor(num / S) or one more times.
        """
        if not self.is_weighted():
            used = min(self.num, num)
            return ((np.arange(used) * self.num) // used)[np.arange(num) % used]
        edges = np.cumsum(np.exp(np.asarray(self.log_weights, float)))
        found = np.searchsorted(edges / edges[-1], (np.arange(num) + 0.5) / num)
        # so that every part of them is as well spread
        return np.random.default_rng(0).permutation(found)

    def of_equal_weight(self, num: int) -> "Draws":
        """`num` resampled draws where weights differ, else these draws."""
        if not self.is_weighted():
            return self
        equal = jnp.full(num, -np.log(num))
        return dataclasses.replace(self.at(self.resampled(num)), log_weights=equal)


class Mixture(eqx.Module):
    """The mixture of posterior processes over S draws, rebuilt in each call: O(S (N^3 + M N^2))."""

    process_of: Callable = eqx.field(static=True)  # an entry of the draws -> its process
    draws: Draws
    beside: tuple[str, ...] = eqx.field(default=(), static=True)  # as `Conditioned` has it

    def __call__(self, X_new, joint: Any = False) -> dist.Distribution:
        """A `MixtureSameFamily` of normals, batch (M,); joint: of multivariate normals."""
        require_flag(joint)

        def one(draw):
            process = self.process_of(draw)
            new = process.at(X_new)
            return process.joint(new) if joint else process.marginals(new)

        mean, spread = lax.map(one, self.draws)  # (S, M)
        if not joint:
            return mixed_normals(self.draws.log_weights, mean, spread)
        unit = jnp.finfo(mean.dtype).eps * jnp.max(jnp.diagonal(spread, axis1=1, axis2=2), 1)
        components = dist.MultivariateNormal(mean, scale_tril=robust_factors(spread, unit))
        shares = dist.CategoricalLogits(self.draws.log_weights.astype(mean.dtype))
        return dist.MixtureSameFamily(shares, components)


def mixed_normals(
    log_weights: Float[Array, "S"], mean: Float[Array, "S *B"], variance: Float[Array, "S *B"]
) -> dist.MixtureSameFamily:
    """sum_s w_s N(mean_s, variance_s), batch (*B,)."""
    mean, variance = (jnp.moveaxis(x, 0, -1) for x in (mean, variance))
    # what a draw leaves no uncertainty about has a variance of zero
    normals = dist.Normal(mean, jnp.sqrt(variance), validate_args=False)
    return dist.MixtureSameFamily(dist.CategoricalLogits(log_weights.astype(mean.dtype)), normals)
