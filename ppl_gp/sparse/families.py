"""Families of q(u): Gaussians over the inducing variables, each seen as q(v) = N(m, S) of the
whitened v = R^-1 (u - E[u]).

A family has arrays (several functions at one site: a leading axis F) and says what m, P = I - S
and KL[q(u) || p(u)] are.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics.triangular import lower_of_product, tril_outer


class Whitened(NamedTuple):
    """q(v) = N(mean, I - reduction); `reduction` is (*F, M, M), its diagonal (*F, M), or an
    `Arrow`. `kl` in nats.
    """

    mean: Float[Array, "*F M"]
    reduction: Any
    kl: Float[Array, "*F"]


class Family(eqx.Module):
    """A parameterised q(u)."""

    @abstractmethod
    def whitened(self) -> Whitened:
        """q(v), with KL[q(u) || p(u)]."""

    @abstractmethod
    def narrowed(self, scale: Float[Array, ""]) -> "Family":
        """The same mean with `scale` times the standard deviations."""


class FullGaussian(Family):
    """q(v) = N(loc, L L^T), L the lower triangle of `scale_tril`; the signs of its diagonal do not
    matter.
    """

    loc: Float[Array, "*F M"]
    scale_tril: Float[Array, "*F M M"]

    def whitened(self):
        return _from_scale(self.loc, jnp.tril(self.scale_tril))

    def narrowed(self, scale):
        return FullGaussian(self.loc, scale * self.scale_tril)


class Values(Family):
    """u known: q(v) = delta(v - values), P = I. What MCMC over inducing variables draws."""

    values: Float[Array, "*F M"]

    def whitened(self):
        return Whitened(
            self.values,
            jnp.ones_like(self.values),
            jnp.zeros(self.values.shape[:-1], self.values.dtype),
        )

    def narrowed(self, scale):
        return self


class DiagonalGaussian(Family):
    """q(v) = N(loc, diag(scale^2)): O(M B) beside the whitening, no M x M parameters; too narrow
    along correlations.
    """

    loc: Float[Array, "*F M"]
    log_scale: Float[Array, "*F M"]

    def whitened(self):
        variance = jnp.exp(2.0 * self.log_scale)
        kl = 0.5 * jnp.sum(variance + self.loc**2 - 1.0, -1) - jnp.sum(self.log_scale, -1)
        return Whitened(self.loc, 1.0 - variance, kl)

    def narrowed(self, scale):
        return DiagonalGaussian(self.loc, self.log_scale + jnp.log(scale))


def _from_scale(loc, L) -> Whitened:
    outer = _outer
    for _ in L.shape[:-2]:
        outer = jax.vmap(outer)
    S = outer(L)
    return _of_moments(loc, S, jnp.sum(jnp.log(jnp.abs(jnp.diagonal(L, axis1=-2, axis2=-1))), -1))


@jax.custom_vjp
def _outer(L):
    """L L^T of a lower triangular L, whose reverse rule is one product: 2 tril(S_bar L) for a
    symmetric S_bar.
    """
    return tril_outer(L)


def _outer_forward(L):
    return tril_outer(L), L


def _outer_reverse(L, S_bar):
    return (jnp.tril(lower_of_product(S_bar + S_bar.T, L)),)


_outer.defvjp(_outer_forward, _outer_reverse)


def _of_moments(m, S, half_log_det_S) -> Whitened:
    trace = jnp.trace(S, axis1=-2, axis2=-1)
    kl = 0.5 * (trace + jnp.sum(m**2, -1) - m.shape[-1]) - half_log_det_S
    return Whitened(m, jnp.eye(S.shape[-1], dtype=S.dtype) - S, kl)
