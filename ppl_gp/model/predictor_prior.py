"""The prior of a linear predictor eta = A z, as a GP over the rows of the model's arguments.

eta_n is affine in z by the arguments of row n alone, so that cov(eta(r), eta(r')) is a function of
two rows: the sum over the Gaussian sites of a(r) C a(r')^T. A site with one entry a datum (a GP at
the data's inputs) has a number a_n there and the covariance of its own kernel; noise of its own at
each datum stands on the diagonal; of the others, coefficients and groups, come columns F = A L with
C = L L^T. A is never formed: columns of L are pushed through the model's own operations.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from ppl_gp.gp import GP
from ppl_gp.kernels.base import Kernel
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.wrappers import unwrap


class Loadings(NamedTuple):
    """eta at n rows, by what it is made of."""

    mean: Float[Array, "n"]
    columns: Float[Array, "n U"]  # A L of the sites that have no entry a datum
    weights: dict[str, Float[Array, "P n"]]  # of the P units of each GP at the rows' inputs
    priors: dict[str, GP]
    noise: Float[Array, "n"]  # variances of what stands one a datum and is no GP

    @property
    def jitter(self) -> Float[Array, "n"]:
        """Variances that a row shares with no other row."""
        own = [
            jnp.sum(w**2, 0) * self.priors[k]._jitter(self.priors[k].kernel.diag(self.priors[k].X))
            for k, w in self.weights.items()
        ]
        return sum(own, self.noise)

    def diag(self) -> Float[Array, "n"]:
        """Variances without `jitter`."""
        own = [
            jnp.sum(w**2, 0) * self.priors[k].kernel.diag(self.priors[k].X)
            for k, w in self.weights.items()
        ]
        return sum(own, jnp.sum(self.columns**2, 1))

    def cross(self, other: "Loadings") -> Float[Array, "n m"]:
        """Covariances with the predictor at other rows."""
        own = [
            (w.T @ other.weights[k]) * other.priors[k].kernel(self.priors[k].X, other.priors[k].X)
            for k, w in self.weights.items()
        ]
        return sum(own, self.columns @ other.columns.T)


def loadings(eta: Callable, trace: dict, sites: tuple[str, ...], axes: dict[str, int]) -> Loadings:
    """Of one predictor `eta({site: innovation}) -> (n,)`, affine.

    `trace`: the model at these rows. `axes`: {site with one entry a datum: the axis of the data in
    its value, from the right}.
    """
    fns = {k: trace[k]["fn"] for k in sites}
    zero = {k: jnp.zeros(fn.shape()) for k, fn in fns.items()}
    mean = eta(zero)

    def pushed(site, e):
        """A e of one site's innovations."""
        return jax.jvp(lambda x: eta({**zero, site: x}), (zero[site],), (e,))[1]

    def basis(shape):
        """One innovation after another, (U, *shape)."""
        return jnp.reshape(jnp.eye(math.prod(shape)), (-1, *shape))

    def alike(site, unit):
        """An innovation of a site's units that is the same in all rows."""
        num = fns[site].shape()[axes[site]]
        rows = jnp.broadcast_to(unit[..., None], (*unit.shape, num))
        return jnp.moveaxis(rows, -1, axes[site])

    def units(site, root: Callable):
        """(P, n): what each of a site's units gives, taken alone and alike in all rows."""
        shape = list(fns[site].shape())
        del shape[axes[site]]
        return jax.vmap(lambda b: pushed(site, root(alike(site, b))))(basis(shape))

    def column(site):
        root = root_of(fns[site])
        return jax.vmap(lambda b: pushed(site, root(b)))(basis(fns[site].shape()))

    gps = [k for k in sites if k in axes and isinstance(unwrap(fns[k]), GP)]
    noisy = [k for k in sites if k in axes and k not in gps]
    columns = [column(k) for k in sites if k not in axes]
    return Loadings(
        mean,
        jnp.concatenate([jnp.zeros((0, len(mean)), mean.dtype), *columns]).T,
        {k: units(k, lambda e: e) for k in gps},
        {k: unwrap(fns[k]) for k in gps},
        sum([jnp.sum(units(k, root_of(fns[k])) ** 2, 0) for k in noisy], jnp.zeros_like(mean)),
    )


def root_of(fn) -> Callable:
    """white -> L white, in the shape of the site: L L^T is its covariance."""
    shape, inner = fn.shape(), unwrap(fn)
    if isinstance(inner, GP):
        L = inner.scale_tril
        return lambda white: white @ L.T
    if isinstance(inner, dist.MultivariateNormal):
        return lambda white: jnp.einsum("...ij,...j->...i", inner.scale_tril, white)
    return lambda white: jnp.broadcast_to(inner.scale, shape) * white


class RowsKernel(Kernel):
    """cov(eta(r), eta(r')) of rows r, r' of a model's arguments, as columns of numbers (N, D)."""

    model: Any = eqx.field(static=True)  # a `Collapsed`
    tables: dict[str, Any]  # arguments that belong to no datum
    hyper: dict[str, Any]

    def at(self, X) -> Loadings:
        """The predictor at rows."""
        return self.model.loadings(X, self.tables, self.hyper)

    def __call__(self, X1, X2):
        first = self.at(X1)
        return first.cross(first if X2 is X1 else self.at(X2))

    def diag(self, X):
        return self.at(X).diag()


class PredictorGP(GP):
    """The prior of eta at rows of a model's arguments. What a row shares with no other (a GP's
    jitter, effects that stand one a datum) is on the diagonal of the covariance, as jitter is.
    """

    def __init__(self, kernel: RowsKernel, X):
        super().__init__(kernel, X)

    @property
    def mean(self):
        """The predictor at the sites' means, (N,)."""
        return self.kernel.at(self.X).mean

    @property
    def covariance_matrix(self):
        """Cov[eta], (N, N)."""
        found = self.kernel.at(self.X)
        return add_diagonal(found.cross(found), found.jitter)

    @property
    def variance(self):
        """Var[eta_n], (N,)."""
        found = self.kernel.at(self.X)
        return found.diag() + found.jitter
