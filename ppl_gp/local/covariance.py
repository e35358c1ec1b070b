"""The inverse of the prior covariance under the pseudo-likelihood, and the covariance's cotangent,
in either form of it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics.blocks import times
from ppl_gp.numerics.loads import Gram, Loads
from ppl_gp.numerics.low_rank import Covariance, Independent, LowRank


class Precision(eqx.Module):
    """R = (K + T^-1)^-1 = R0 - E G^-1 E^T of a `LowRank` K = K0 + F F^T; E = (I + T K0)^-1 T F, G =
    I + F^T E, T = diag(nat2). `rest`: (K0, R0 = (K0 + T^-1)^-1); without it, K0 = 0 and R0 = T.
    """

    nat2: Float[Array, "..."]
    F: Loads
    E: Loads
    G: Gram
    rest: tuple[Array, Array] | None = None

    def __matmul__(self, x: Float[Array, "RN"]) -> Float[Array, "RN"]:
        alone = times(self.nat2, x) if self.rest is None else self.rest[1] @ x
        return alone - self.E @ self.G.solve(self.E.pull(x))

    def dense(self) -> Float[Array, "RN RN"]:
        """The matrix, where there is a K0."""
        V = self.G.half() @ self.E.array().T
        return self.rest[1] - V.T @ V  # pyright: ignore[reportOptionalSubscript]

    def moved(self, x):
        """As `moved`."""
        alone = x if self.rest is None else x - self.rest[1] @ (self.rest[0] @ x)
        unknowns = self.G.solve(self.F.pull(alone))
        w, Kw = alone - self.E @ unknowns, self.F @ unknowns
        return w, Kw if self.rest is None else Kw + self.rest[0] @ w


def moved(K: Covariance, R, x: Float[Array, "RN"]) -> tuple[Array, Array]:
    """(w, K w) of w = (I + T K)^-1 x: without a product by the squares of wide columns."""
    if isinstance(R, Precision):
        return R.moved(x)
    w = x - R @ (K @ x)
    return w, K @ w


def _blocks(R: Float[Array, "RN RN"], functions: int) -> Float[Array, "R N N"]:
    whole = jnp.reshape(R, (functions, len(R) // functions, functions, -1))
    return jnp.einsum("rnrm->rnm", whole)


def pulled_back(K: Covariance, R, z_bar, w, alpha) -> Covariance:
    """The cotangent G of K, (z_bar / 2) (alpha alpha^T - R) + w alpha^T; of F in F F^T it is (G +
    G^T) F, with R F = E G^-1.
    """
    if isinstance(K, Independent):
        a, m = (jnp.reshape(x, K.parts.shape[:2]) for x in (alpha, w))
        blocks = R.blocks() if hasattr(R, "blocks") else _blocks(R, len(a))
        outer = a[:, :, None] * a[:, None]
        return Independent(0.5 * z_bar * (outer - blocks) + m[:, :, None] * a[:, None])
    if not isinstance(K, LowRank):
        return (0.5 * z_bar) * (alpha[:, None] * alpha - R) + w[:, None] * alpha
    F = K.F

    def summed(a, b, RF):
        """Entries; an index has no cotangent."""
        return a + b - z_bar * RF if jnp.issubdtype(a.dtype, jnp.inexact) else None

    outer = F.outer(z_bar * alpha + w, F.pull(alpha)), F.outer(alpha, F.pull(w))
    rest = None if K.rest is None else pulled_back(K.rest, R.dense(), z_bar, w, alpha)
    return LowRank(jax.tree.map(summed, *outer, R.E.through(R.G)), rest)  # pyright: ignore[reportArgumentType]
