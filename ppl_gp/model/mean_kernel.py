"""A GP whose prior mean takes part of other Gaussian sites, as a GP again: the kernel they add."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

from ppl_gp.kernels.base import Kernel
from ppl_gp.model.predictor import innovate
from ppl_gp.model.tracing import run
from ppl_gp.wrappers import unwrap


class MeanKernel(Kernel):
    """The covariance that a GP's mean m(X) = m_0(X) + Phi(X)^T w takes from other integrated sites,
    w ~ N(0, I) behind their innovations: k(X, X') = Phi(X)^T Phi(X').
    """

    model: Callable = eqx.field(static=True)
    site: str = eqx.field(static=True)
    args: tuple
    hyper: dict
    zero: dict[str, jax.Array]
    roots: dict[str, jax.Array]  # {site: its covariance's root, column by column, (U, *shape)}

    def basis(self, X):
        """Phi, (U, N)."""

        def mean(e):
            trace = run(innovate(self.model, {**self.zero, **e}), *self.args, self.hyper)
            return unwrap(trace[self.site]["fn"]).mean_function(X)

        at_zero = mean({})
        parts = [jax.vmap(lambda e, k=k: mean({k: e}))(x) - at_zero for k, x in self.roots.items()]
        return jnp.concatenate(parts)

    def __call__(self, X1, X2):
        """The matrix k(x1_i, x2_j)."""
        return self.basis(X1).T @ self.basis(X2)

    def diag(self, X):
        """The vector k(x_n, x_n)."""
        return jnp.sum(self.basis(X) ** 2, 0)
