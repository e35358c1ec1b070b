"""Inducing variables: what u is. A kind of them says two things about a GP prior, and nothing
else changes.

u is a set of M linear functionals of f: values at points, projections on Fourier features or
eigenfunctions, derivatives. q(v) of the whitened v = R^-1 (u - E[u]) is trained, so the bound, the
posterior, training and prediction ask for Cov[u] and Cov[u, f(X)] only.
"""

from abc import abstractmethod

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.gp import GP
from ppl_gp.kernels.base import jitter_of
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.sparse.root import DenseRoot, Root, dense_root


class InducingVariables(eqx.Module):
    """M linear functionals of a GP. Array leaves are what training may move."""

    @property
    @abstractmethod
    def num(self) -> int:
        """M."""

    @property
    def is_exact(self) -> bool:
        """Whether u are functionals of f under the prior's own kernel, so that the bound is one on
        the model's evidence.
        """
        return True

    @property
    def functions(self) -> int:
        """R, where Cov[u, .] is of R functions of a datum together, (M, R B); else 1."""
        return 1

    @abstractmethod
    def root(self, prior: GP) -> Root:
        """R with R R^T = Cov[u], in the form that its structure allows."""

    @abstractmethod
    def cross(self, prior: GP, X) -> Float[Array, "M B"]:
        """Cov[u, f(X)] for X in the GP site's own inputs."""


class Points(InducingVariables):
    """u = f(Z), Z (M, D) or (M,) (Titsias 2009). K_uu is dense: O(M^3), O(M^2 B) for B data."""

    Z: Float[Array, "M *D"]

    @property
    def num(self):
        return self.Z.shape[0]

    def root(self, prior) -> DenseRoot:
        variance = prior.kernel.diag(self.Z)
        unit = jitter_of(prior.kernel, self.Z)
        jitter = unit if prior.jitter is None else jnp.asarray(prior.jitter, variance.dtype)
        return dense_root(add_diagonal(prior.kernel(self.Z, self.Z), jitter), unit)

    def cross(self, prior, X):
        return prior.kernel(self.Z, X)

    def __check_init__(self):
        require_places(self.Z, "Points")


def require_places(Z, name: str) -> None:
    """Raise `DataError` for an array that is not (M, D) or (M,)."""
    if hasattr(Z, "ndim") and (Z.ndim not in (1, 2) or 0 in Z.shape):
        raise DataError(f"{name}(Z=...) has shape {Z.shape}; give (M, D) or (M,) with M >= 1.")
