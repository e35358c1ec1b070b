"""A covariance of R functions that are independent a priori, (R, N, N) in place of (R N, R N)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Independent(eqx.Module):
    """K = diag(K_1, ..., K_R): rows are (function, row), functions outermost."""

    parts: Float[Array, "R N N"]

    @property
    def dtype(self):
        """Of its entries."""
        return self.parts.dtype

    def __matmul__(self, x):
        split = jnp.reshape(x, (*self.parts.shape[:2], -1))
        return jnp.reshape(self.parts @ split, x.shape)

    def diagonal(self) -> Float[Array, "RN"]:
        """Variances."""
        return jnp.ravel(jnp.einsum("rnn->rn", self.parts))

    def within(self) -> Float[Array, "R R N"]:
        """Covariances within a row."""
        variances = jnp.einsum("rnn->rn", self.parts)
        return jnp.eye(len(variances), dtype=self.dtype)[:, :, None] * variances

    def dense(self) -> Float[Array, "RN RN"]:
        """The matrix."""
        return jax.scipy.linalg.block_diag(*self.parts)
