"""The posterior process behind q(u), draws of the inducing variables, and of f given them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import random
from jaxtyping import Array, Float

from ppl_gp.gp import GP, Conditioned
from ppl_gp.numerics.arrow import Arrow, ArrowCovariance
from ppl_gp.numerics.linalg import add_diagonal, default_jitter, half_log_det, robust_cholesky
from ppl_gp.reading.predictor.prior import blocks_of
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
from ppl_gp.sparse.several import flat_mean, is_coupled, shaped


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

    def marginals(self, new: GP):
        """(mean, variance), (*F, B) or (R, B) each; rounding below zero is raised to a rounding
        error of the prior variance.
        """
        mean, explained_variance = explained(
            self.root, self.inducing.cross(new, new.X), self.mean, self.reduction
        )
        prior_variance = new.variance
        least = jnp.finfo(prior_variance.dtype).eps * prior_variance
        variance = jnp.maximum(prior_variance - explained_variance, least)
        return shaped(flat_mean(new) + mean, new), shaped(variance, new)

    def moments(self, new: GP):
        """As `marginals`; of functions that are correlated within a row their covariances,
        (R, R, B), in place of variances.
        """
        if not is_coupled(new):
            return self.marginals(new)
        return self._of_functions(new)

    def within(self, new: GP) -> tuple[Array, Array, Array]:
        """(mean, variance, (R, B) each; the covariances of the functions of each row of a
        predictor, (B, R, R)). O(M^2 R B).
        """
        return *self.marginals(new), jnp.moveaxis(self._of_functions(new)[1], -1, 0)

    def _of_functions(self, new: Any):
        A, like = self.root.whiten(self.inducing.cross(new, new.X)), blocks_of(new)
        blocks = like - explained_blocks(A, self.reduction, like)
        return shaped(flat_mean(new) + self.mean @ A, new), blocks

    def joint(self, new: GP):
        """(mean (*F, B), covariance (*F, B, B)), or of (R B,) values. O(M B^2)."""
        A = self.root.whiten(self.inducing.cross(new, new.X))
        covariance = new.covariance_matrix - explained_jointly(A, self.mean, self.reduction)
        if (
            not self.inducing.is_exact
            # what u leaves unexplained is independent from row to row: k - Q need not be a
            # covariance
        ):
            Q = gram(A)
            rest = jnp.maximum(new.variance - jnp.diagonal(Q), 0.0)
            covariance = add_diagonal(covariance - new.covariance_matrix + Q, rest)
        return flat_mean(new) + self.mean @ A, covariance


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
        each = jnp.reshape(self.L, (-1, *self.L.shape[-2:]))
        return sum([half_log_det(x) for x in each], jnp.zeros(()))


def factor_of_v(process: SparseProcess) -> Factor | ArrowCovariance:
    """Cov q(v) = I - P, factored."""
    m, P = process.mean, process.reduction
    if isinstance(P, Arrow):
        return covariance_of_arrow(P)
    eye = jnp.eye(m.shape[-1], dtype=m.dtype)
    S = eye - P if P.ndim > m.ndim else eye * (1.0 - P)[..., None]
    factor = lambda c: robust_cholesky(c, jnp.full((), 1e-10, m.dtype))[0]  # noqa: E731
    for _ in m.shape[:-1]:
        factor = jax.vmap(factor)
    return Factor(factor(S))


def draw_with_inducing(
    process: SparseProcess, new: GP, key
) -> tuple[Float[Array, "*F N"], Float[Array, ""]]:
    """(f at the rows of `new`, log p(u) - log q(u) in nats): u ~ q(u), then f ~ p(f | u) jointly
    over the rows. O(M N^2 + N^3).
    """
    f, log_ratio = draws_with_inducing(process, new, key, 1)
    return f[0], log_ratio[0]


def draws_with_inducing(
    process: SparseProcess, new: GP, key, num: int
) -> tuple[Float[Array, "num *F N"], Float[Array, "num"]]:
    """`num` of these. O(M N^2 + N^3 + num N^2)."""
    key_u, key_f = random.split(key)
    L, white = (
        factor_of_v(process),
        random.normal(key_u, (num, *process.mean.shape), process.mean.dtype),
    )
    v = process.mean + L.colour(white)
    distances = jnp.reshape(white**2 - v**2, (num, -1))
    A = process.root.whiten(process.inducing.cross(new, new.X))
    rest = new.covariance_matrix - gram(A)
    if not process.inducing.is_exact:
        rest = jnp.diag(jnp.maximum(jnp.diagonal(rest), 0.0))
    R, _ = robust_cholesky(
        add_diagonal(rest, default_jitter(new.variance)), default_jitter(new.variance)
    )
    noise = random.normal(key_f, (*v.shape[:-1], A.shape[1]), v.dtype) @ R.T
    f = shaped(flat_mean(new) + v @ A + noise, new)
    return f, 0.5 * jnp.sum(distances, 1) + L.half_log_det()


def draw_jointly(process: SparseProcess, prior: GP, key, num: int) -> Float[Array, "num *F N"]:
    """f at the training inputs with its full covariance. O(M N^2 + N^3)."""
    mean, covariance = process.joint(prior)
    unit = default_jitter(prior.variance)
    factor = lambda c: robust_cholesky(c, unit)[0]  # noqa: E731
    for _ in covariance.shape[:-2]:
        factor = jax.vmap(factor)
    white = random.normal(key, (num, *mean.shape), mean.dtype)
    return shaped(mean + jnp.einsum("...ij,r...j->r...i", factor(covariance), white), prior)


def draw_given_inducing(
    process: SparseProcess, prior: GP, key, num: int
) -> Float[Array, "num *F N"]:
    """u jointly, f given u row by row. O(N M) a draw."""
    A = process.root.whiten(process.inducing.cross(prior, prior.X))
    m = process.mean
    key_u, key_f = random.split(key)
    white = random.normal(key_u, (num, *m.shape), m.dtype)
    v = m + factor_of_v(process).colour(white)
    rest = jnp.sqrt(jnp.maximum(prior.variance - squares(A), 0.0))
    noise = random.normal(key_f, (num, *m.shape[:-1], A.shape[1]), m.dtype)
    return shaped(flat_mean(prior) + v @ A + rest * noise, prior)
