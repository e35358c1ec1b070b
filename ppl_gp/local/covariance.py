"""The inverse of the prior covariance under the pseudo-likelihood, and the covariance's cotangent,
in either form of it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.numerics.blocks import times
from ppl_gp.numerics.independent import Independent
from ppl_gp.numerics.loads import Gram, Loads
from ppl_gp.numerics.low_rank import Covariance, LowRank


class Precision(eqx.Module):
    """R = (K + T^-1)^-1 = T - T F G^-1 F^T T of a `LowRank` K = F F^T, without the matrix; G = I +
    F^T T F, T = diag(nat2).
    """

    nat2: Float[Array, "..."]
    F: Loads
    G: Gram

    def __matmul__(self, x: Float[Array, "RN"]) -> Float[Array, "RN"]:
        scaled = times(self.nat2, x)
        return scaled - times(self.nat2, self.F @ self.G.solve(self.F.pull(scaled)))


def _blocks(R: Float[Array, "RN RN"], functions: int) -> Float[Array, "R N N"]:
    whole = jnp.reshape(R, (functions, len(R) // functions, functions, -1))
    return jnp.einsum("rnrm->rnm", whole)


def pulled_back(K: Covariance, R, z_bar, w, alpha) -> Covariance:
    """The cotangent G of K, (z_bar / 2) (alpha alpha^T - R) + w alpha^T; of F in F F^T it is (G +
    G^T) F.
    """
    if isinstance(K, Independent):
        a, m = (jnp.reshape(x, K.parts.shape[:2]) for x in (alpha, w))
        blocks = R.blocks() if hasattr(R, "blocks") else _blocks(R, len(a))
        outer = a[:, :, None] * a[:, None]
        return Independent(0.5 * z_bar * (outer - blocks) + m[:, :, None] * a[:, None])
    if not isinstance(K, LowRank):
        return (0.5 * z_bar) * (alpha[:, None] * alpha - R) + w[:, None] * alpha
    F = K.F
    # R F = T F G^-1
    terms = (
        F.outer(z_bar * alpha + w, F.pull(alpha)),
        F.outer(alpha, F.pull(w)),
        F.through(R.G).scaled(-z_bar * R.nat2),
    )
    return LowRank(jax.tree.map(_summed, *terms))


def _summed(*terms):
    """Entries; an index has no cotangent."""
    return sum(terms) if jnp.issubdtype(terms[0].dtype, jnp.inexact) else None
