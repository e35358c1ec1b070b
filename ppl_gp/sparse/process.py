"""The posterior process behind q(u), draws of the inducing variables, and of f given them.

The R functions that a datum sees of a predictor are one vector, functions outermost: they are
correlated given the data, so that q of them is one Gaussian over all (R B,) values, with one q(u)
behind it. Several functions at the site of a plain GP are independent, and have a leading axis.
"""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import random
from jaxtyping import Array, Float

from ppl_gp.gp import GP, Conditioned
from ppl_gp.numerics.arrow import Arrow, ArrowCovariance
from ppl_gp.numerics.linalg import add_diagonal, default_jitter, robust_factors
from ppl_gp.reading.predictor.prior import PredictorGP, blocks_of
from ppl_gp.sparse.families import Whitened
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.projection import (
    covariance_of_arrow,
    explained,
    explained_blocks,
    explained_jointly,
    gram,
    squares,
)
from ppl_gp.sparse.root import Root


def is_coupled(prior: GP) -> bool:
    """Whether a prior is of several functions of a datum that are correlated."""
    return isinstance(prior, PredictorGP) and prior.kernel.functions > 1


def batch_of(prior: GP, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a site of `shape` that have a q(u) each."""
    return () if isinstance(prior, PredictorGP) else tuple(shape[:-1])


def num_values(prior: GP, shape: tuple[int, ...], num: int) -> int:
    """Entries of all u of a site with `num` inducing variables."""
    return math.prod(batch_of(prior, shape)) * num


def prior_moments(prior: GP, shape: tuple[int, ...]) -> tuple[Array, Any]:
    """(mean, variance) in the shape of the site; of coupled functions covariances, (R, R, B)."""
    if is_coupled(prior):
        return prior.mean, blocks_of(prior)
    return jnp.broadcast_to(prior.mean, shape), jnp.broadcast_to(prior.variance, shape)


def _flat_mean(new: GP) -> Float[Array, "*F RB"]:
    mean = new.mean
    return jnp.reshape(mean, (*mean.shape[: mean.ndim - len(new.shape())], -1))


def _shaped(x: Float[Array, "*F RB"], new: GP) -> Float[Array, "..."]:
    """Values at the rows of `new` in the shape of its site, (B,) or (R, B)."""
    return jnp.reshape(x, (*x.shape[:-1], *new.shape()))


class SparseProcess(Conditioned):
    """q(f(X*)) = int p(f(X*) | u) q(u) du: mean m* + A^T m, covariance k** - A^T P A with A = R^-1
    Cov[u, f(X*)].

    `process(X_new)` gives marginals as `Normal`, batch (*F, B); `process(X_new, joint=True)` a
    `MultivariateNormal`. X_new are the GP site's own inputs, or a `GP` at them (then its kernel and
    mean are taken). O(M^2 B); K_uu is factored already. Of a predictor of R functions marginals are
    (R, B), and joint moments are of all (R B,) values, functions outermost.
    """

    inducing: InducingVariables
    root: Root
    mean: Float[Array, "*F M"]
    reduction: Any

    def columns(self, new: GP) -> Any:
        """A, (M, R B)."""
        return self.root.whiten(self.inducing.cross(new, new.X))

    def marginals(self, new: GP):
        """(mean, variance), (*F, B) or (R, B) each; at least a rounding of the prior variance."""
        C = self.inducing.cross(new, new.X)
        mean, explained_variance = explained(self.root, C, self.mean, self.reduction)
        prior_variance = new.variance
        least = jnp.finfo(prior_variance.dtype).eps * prior_variance
        variance = jnp.maximum(prior_variance - explained_variance, least)
        return _shaped(_flat_mean(new) + mean, new), _shaped(variance, new)

    def moments(self, new: GP):
        """As `marginals`; of correlated functions their covariances, (R, R, B), for variances."""
        return self._of_functions(new) if is_coupled(new) else self.marginals(new)

    def within(self, new: GP) -> tuple[Array, Array, Array]:
        """(mean, variance, (R, B) each; covariances within a row, (B, R, R)). O(M^2 R B)."""
        return *self.marginals(new), jnp.moveaxis(self._of_functions(new)[1], -1, 0)

    def _of_functions(self, new: Any):
        A, like = self.columns(new), blocks_of(new)
        blocks = like - explained_blocks(A, self.reduction, like)
        return _shaped(_flat_mean(new) + self.mean @ A, new), blocks

    def joint(self, new: GP):
        """(mean (*F, B), covariance (*F, B, B)), or of (R B,) values. O(M B^2)."""
        A = self.columns(new)
        covariance = new.covariance_matrix - explained_jointly(A, self.mean, self.reduction)
        # Where u is not exact, what it leaves unexplained is independent from row to row: k - Q
        # need not be a covariance.
        if not self.inducing.is_exact:
            Q = gram(A)
            rest = jnp.maximum(new.variance - jnp.diagonal(Q), 0.0)
            covariance = add_diagonal(covariance - new.covariance_matrix + Q, rest)
        return _flat_mean(new) + self.mean @ A, covariance


def sparse_process(prior: GP, inducing: InducingVariables, q: Whitened) -> SparseProcess:
    """The posterior process of q(u) under a prior (its inputs do not matter). O(M^3)."""
    return SparseProcess(prior, inducing, inducing.root(prior), q.mean, q.reduction)


class Factor(eqx.Module):
    """The lower Cholesky factor of Cov q(v), one a function."""

    L: Float[Array, "*F M M"]

    def colour(self, white: Float[Array, "K *F M"]) -> Float[Array, "K *F M"]:
        """L white."""
        return jnp.einsum("...ij,r...j->r...i", self.L, white)

    def half_log_det(self) -> Float[Array, ""]:
        """log|L L^T| / 2, summed over functions."""
        return jnp.sum(jnp.log(jnp.diagonal(self.L, axis1=-2, axis2=-1)))


def factor_of_v(process: SparseProcess) -> Factor | ArrowCovariance:
    """Cov q(v) = I - P, factored."""
    m, P = process.mean, process.reduction
    if isinstance(P, Arrow):
        return covariance_of_arrow(P)
    eye = jnp.eye(m.shape[-1], dtype=m.dtype)
    S = eye - P if P.ndim > m.ndim else eye * (1.0 - P)[..., None]
    return Factor(robust_factors(S, jnp.full((), 1e-10, m.dtype)))


def draws_with_inducing(
    process: SparseProcess, new: GP, key, num: int
) -> tuple[Float[Array, "num *F N"], Float[Array, "num"]]:
    """`num` draws of (f at the rows of `new`, log p(u) - log q(u) in nats): u ~ q(u), then f ~
    p(f | u) jointly over the rows. O(M N^2 + N^3 + num N^2).
    """
    key_u, key_f = random.split(key)
    L, m, unit = factor_of_v(process), process.mean, default_jitter(new.variance)
    white = random.normal(key_u, (num, *m.shape), m.dtype)
    v = m + L.colour(white)
    distances = jnp.reshape(white**2 - v**2, (num, -1))
    A = process.columns(new)
    rest = new.covariance_matrix - gram(A)
    if not process.inducing.is_exact:
        rest = jnp.diag(jnp.maximum(jnp.diagonal(rest), 0.0))
    R = robust_factors(add_diagonal(rest, unit), unit)
    noise = random.normal(key_f, (*v.shape[:-1], A.shape[1]), v.dtype) @ R.T
    f = _shaped(_flat_mean(new) + v @ A + noise, new)
    return f, 0.5 * jnp.sum(distances, 1) + L.half_log_det()


def draw_jointly(process: SparseProcess, prior: GP, key, num: int) -> Float[Array, "num *F N"]:
    """f at the training inputs with its full covariance. O(M N^2 + N^3)."""
    mean, covariance = process.joint(prior)
    white = random.normal(key, (num, *mean.shape), mean.dtype)
    L = robust_factors(covariance, default_jitter(prior.variance))
    return _shaped(mean + jnp.einsum("...ij,r...j->r...i", L, white), prior)


def draw_given_inducing(
    process: SparseProcess, prior: GP, key, num: int
) -> Float[Array, "num *F N"]:
    """u jointly, f given u row by row. O(N M) a draw."""
    A, m = process.columns(prior), process.mean
    key_u, key_f = random.split(key)
    v = m + factor_of_v(process).colour(random.normal(key_u, (num, *m.shape), m.dtype))
    rest = jnp.sqrt(jnp.maximum(prior.variance - squares(A), 0.0))
    noise = random.normal(key_f, (num, *m.shape[:-1], A.shape[1]), m.dtype)
    return _shaped(_flat_mean(prior) + v @ A + rest * noise, prior)
