"""Partial derivatives of f as inducing variables."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.errors import DataError, ModelError
from ppl_gp.kernels.derivative import WithDerivatives, as_dim, require_differentiable
from ppl_gp.numerics.linalg import add_diagonal, default_jitter
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.root import DenseRoot, dense_root


class Derivatives(InducingVariables):
    """u = d f / d x_dim at Z, (M, D) or (M,); `dim` counts columns from 0.

    Cov[u, f(x)] = d k(z, x) / d z_dim, Cov[u] = d^2 k(z, z') / d z_dim d z'_dim (Rasmussen &
    Williams 2006, eq. 9.1), E[u] the mean's derivative. One jvp for all rows: K_uf costs two
    evaluations of the kernel, whatever D is. K_uu is dense, with the default jitter of its own
    diagonal; the GP's `jitter` is noise on f and does not enter. With values of f, or several
    partial derivatives: `Concatenated([Points(Z), Derivatives(Z, 0), Derivatives(Z, 1)])`.

    Raises `ModelError` for a kernel without derivatives (Matern12, White) and for a site that
    observes derivatives
    itself (kernel `WithDerivatives`): there derivatives are plain `Points(derivative_inputs(Z,
    dim))`.
    """

    Z: Float[Array, "M *D"]
    dim: int = eqx.field(default=0, static=True)

    @property
    def num(self):
        return self.Z.shape[0]

    def root(self, prior) -> DenseRoot:
        K = self.of(lambda Z: self.cross(prior, Z))
        unit = default_jitter(jnp.diagonal(K))
        return dense_root(add_diagonal(K, unit), unit)

    def cross(self, prior, X):
        """Cov[u, f(X)]: the slopes of the kernel at the points."""
        if isinstance(prior.kernel, WithDerivatives):
            raise ModelError(
                f"Derivatives at a site with kernel {prior.kernel!r}: use "
                "Points(derivative_inputs(Z, dim))."
            )
        require_differentiable(prior.kernel, "Derivatives")
        return self.of(lambda Z: prior.kernel(Z, X))

    def of(self, function):
        """The functional itself: the derivative of X -> array, one axis of which follows the rows
        of X, at Z.
        """
        D = 1 if self.Z.ndim == 1 else self.Z.shape[1]
        along = jnp.zeros_like(self.Z) + jnp.asarray(jnp.arange(D) == self.dim, self.Z.dtype)
        return jax.jvp(function, (self.Z,), (along,))[1]

    def __check_init__(self):
        if not hasattr(self.Z, "ndim"):
            return
        if self.Z.ndim not in (1, 2) or 0 in self.Z.shape:
            raise DataError(
                f"Derivatives(Z=...) has shape {self.Z.shape}; give (M, D) or (M,) with M >= 1."
            )
        as_dim(self.dim, 1 if self.Z.ndim == 1 else self.Z.shape[1], "Derivatives")
