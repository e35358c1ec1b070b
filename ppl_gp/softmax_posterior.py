"""The functions of a softmax at new inputs, which are independent a priori: O(R N^2 M), where those
of any likelihood cost O(R^2 N^2 M), and no matrix of all (R N, R M) covariances.

With E, M as in `local.softmax` and G_r = chol(M)^-1 E_r k_r (Rasmussen & Williams 2006, equation
3.44 and algorithm 3.4):

Cov[f*_r, f*_s] = 1[r = s] (k**_r - k_r^T E_r k_r) + G_r^T G_s,

what is left of a function that has data of its own, and what it shares with the others.
"""

import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.gp import Conditioned
from ppl_gp.local.softmax import SoftmaxRoot
from ppl_gp.model.predictor_prior import blocks_of
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky


class OfSoftmax(Conditioned):
    """As `posterior.OfFunctions`, of the scores of a softmax.

    Marginals are `Normal` (R, M); `joint=True` a `MultivariateNormal` of all (R M,) values. O(R
    N^2 M), and (R M)^2 numbers of `joint` alone.
    """

    alpha: Float[Array, "RN"]
    root: SoftmaxRoot

    def marginals(self, new):
        """(mean, variance), (R, M) each."""
        k = self._columns(new)
        explained, G = self.root.separately(k)
        prior = jnp.reshape(new.variance, explained.shape)
        variance = prior - explained + jnp.sum(G**2, 1)
        return self._mean(new, k), jnp.maximum(variance, 0.0)

    def within(self, new) -> tuple[Array, Array, Array]:
        """(mean, variance, (R, M) each; the covariances of the functions of each row, (M, R,
        R)).
        """
        k = self._columns(new)
        explained, G = self.root.separately(k)
        own = jnp.eye(len(explained), dtype=explained.dtype)[:, :, None] * explained
        blocks = blocks_of(new) - own + jnp.einsum("anm,bnm->abm", G, G)
        variance = jnp.maximum(jnp.einsum("aam->am", blocks), 0.0)
        return self._mean(new, k), variance, jnp.moveaxis(blocks, -1, 0)

    def joint(self, new):
        """(mean (R M,), covariance (R M, R M))."""
        k = self._columns(new)
        A, G = self.root.left(new.kernel.separate(new.X), k)
        shared = jnp.concatenate([*G], 1)
        covariance = jax.scipy.linalg.block_diag(*A) + shared.T @ shared
        return jnp.ravel(self._mean(new, k)), covariance

    def sample(self, key, new, num: int) -> Float[Array, "num R M"]:
        """Joint draws. O(R (M^3 + N^2 M) + num R (M^2 + N M))."""
        k = self._columns(new)
        left = self.root.left(new.kernel.separate(new.X), k)
        return self._mean(new, k) + coloured(*left, default_jitter(new.variance), key, num)

    def _mean(self, new, k) -> Float[Array, "R M"]:
        alpha = jnp.reshape(self.alpha, k.shape[:2])
        return new.mean + jnp.einsum("rnm,rn->rm", k, alpha)

    def _columns(self, new) -> Float[Array, "R N M"]:
        """Covariances of each function with itself at the training rows."""
        return new.kernel.separate_cross(self.prior.X, new.X)


def coloured(
    A: Float[Array, "R M M"], G: Float[Array, "R N M"], unit, key, num: int
) -> Float[Array, "num R M"]:
    """Draws of N(0, diag(A_1, ..., A_R) + G^T G), as L_r z_r + G_r^T z of Cholesky factors of the
    A_r and of a z that the functions share. `unit`: a first raise of the diagonal.
    """
    own_key, shared_key = random.split(key)
    own = random.normal(own_key, (num, *A.shape[:2]), A.dtype)
    shared = random.normal(shared_key, (num, G.shape[1]), A.dtype)
    L = lax.map(lambda A: robust_cholesky(A, unit)[0], A)
    return jnp.einsum("rij,srj->sri", L, own) + jnp.einsum("rnm,sn->srm", G, shared)
