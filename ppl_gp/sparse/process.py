"""The posterior process behind q(u), draws of the inducing variables, and of f given them.

With A = R^-1 Cov[u, f(X)] and q(v) = N(m, S), P = I - S, marginals of f are
mean_n = m_X + a_n^T m,  variance_n = k_nn - a_n^T P a_n:
the inner loop of everything sparse, with a hand-written reverse rule.

The R functions of a predictor are one vector per datum, functions outermost: they are correlated
given the data, so that q of them is one Gaussian over all (R B,) values, with one q(u) behind it.
Several functions at the site of a plain GP are independent, and have a leading axis.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from ppl_gp.gp import GP, Conditioned
from ppl_gp.numerics.arrow import Arrow, ArrowCovariance
from ppl_gp.numerics.blocks import product_blocks
from ppl_gp.numerics.linalg import (
    add_diagonal,
    default_jitter,
    lower_of_product,
    product,
    robust_factors,
    symmetric_product,
    tril_transpose_product,
)
from ppl_gp.reading.predictor.prior import PredictorGP, blocks_of
from ppl_gp.sparse.families import DenseRoot, Root, Whitened
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.parts import LevelColumns


def explained(
    root: Root, C: Any, mean: Float[Array, "*F M"], reduction: Any
) -> tuple[Float[Array, "*F B"], Float[Array, "*F B"]]:
    """(a_n^T m, a_n^T P a_n) for C = Cov[u, f(X)], (M, B); several functions F share the root.

    `reduction` is P, (M, M), or its diagonal, (M,), or an `Arrow`, which costs O(V^2 B) where each
    row depends on one level. A dense root costs 2 M^2 B multiply-adds forward and 2 M^2 B in
    reverse (about 6 M^3 besides), and half of that for each further function; differentiating
    through triangular solves takes 10 M^2 B.
    """
    if isinstance(reduction, Arrow):
        return _explained_arrow(root.whiten(C), mean, reduction)
    if reduction.ndim == mean.ndim:
        A = root.whiten(C)
        return mean @ A, reduction @ A**2
    if mean.ndim > 1:
        return _of_several(root.whiten(C), mean, reduction)
    if isinstance(root, DenseRoot):
        return _explained_dense(root.W, root.omega, C, mean, reduction)
    return _explained(root.whiten(C), mean, reduction)


def gram(A: Any) -> Float[Array, "B B"]:
    """A^T A."""
    if isinstance(A, LevelColumns):
        same = jnp.where(A.index[:, None] == A.index, A.weight[:, None] * A.weight, 0.0)
        return product(A.few.T, A.few) + same
    return product(A.T, A)


def squares(A: Any) -> Float[Array, "B"]:
    """The diagonal of A^T A."""
    return squares(A.few) + A.weight**2 if isinstance(A, LevelColumns) else jnp.sum(A**2, 0)


def explained_jointly(A: Any, mean, reduction: Any) -> Float[Array, "*F B B"]:
    """A^T P A."""
    if isinstance(reduction, Arrow):
        return gram(A) - _arrow_quadratic(A, covariance_of_arrow(reduction))
    dense = reduction.ndim > mean.ndim
    return product(A.T, reduction @ A if dense else reduction[..., None] * A)


def explained_blocks(A, reduction: Any, like: Float[Array, "R R B"]) -> Float[Array, "R R B"]:
    """The blocks of A^T P A within a row, of A (M, R B). O(M^2 R B + M R^2 B)."""
    PA = product(reduction, A) if reduction.ndim == 2 else reduction[:, None] * A
    return product_blocks(A, PA, like)


def reduction_of_some(reduction: Any, start: int, size: int) -> Array:
    """P of some of the unknowns, side by side; of an `Arrow`, of the few."""
    if isinstance(reduction, Arrow):
        at = start if start < reduction.start else start - len(reduction.own)
        return reduction_of_some(reduction.block, at, size)
    some = slice(start, start + size)
    return reduction[some, some] if reduction.ndim == 2 else reduction[some]


def covariance_of_arrow(reduction: Arrow) -> ArrowCovariance:
    """Cov q(v) = I - P by its conditionals."""
    return reduction.times(-1.0).plus_diagonal(1.0).covariance()


def _arrow_quadratic(A: Any, S: ArrowCovariance) -> Float[Array, "B B"]:
    """A^T S A: of rows that see one level each, O(B^2 V), with no array of (levels x B)."""
    if not isinstance(A, LevelColumns):
        X, Y = S.halves(A)
        return gram(X) + gram(Y)
    few = S.L.T @ (A.few + S.slopes[A.index].T * A.weight)
    own = jnp.sqrt(S.given[A.index]) * A.weight
    return gram(LevelColumns(few, A.index, own, A.num, A.start))


def _explained_arrow(A: Any, m, P: Arrow):
    if not isinstance(A, LevelColumns):
        X, Y = covariance_of_arrow(P).halves(A)
        return m @ A, squares(A) - squares(X) - squares(Y)
    few, levels = P.split(m)
    mean, square = _explained(A.few, few, P.block)
    across = jnp.sum(P.across[A.index] * A.few.T, 1)
    square = square + A.weight * (2.0 * across + A.weight * P.own[A.index])
    return mean + A.weight * levels[A.index], square


def _of_several(A, mean, reduction):
    """One function after another, so that M x B arrays stay in the processor's cache."""
    M, F = mean.shape[-1], mean.shape[:-1]
    each = (jnp.reshape(mean, (-1, M)), jnp.reshape(reduction, (-1, M, M)))
    m, square = lax.map(lambda q: _explained(A, *q), each)
    return jnp.reshape(m, (*F, -1)), jnp.reshape(square, (*F, -1))


@jax.custom_vjp
def _explained(A, m, P):
    return _forward(A, m, P)[:2]


# Under `vmap`, too, one M x B problem after the other.
@sequential_vmap
def _forward(A, m, P):
    PA = product(P, A)
    return m @ A, jnp.sum(A * PA, 0), PA


@sequential_vmap
def _reverse(A, PA, m, g_mean, g_square):
    return 2.0 * PA * g_square + m[:, None] * g_mean, A @ g_mean, symmetric_product(A * g_square, A)


def _explained_forward(A, m, P):
    mean, square, PA = _forward(A, m, P)
    return (mean, square), (A, PA, m)


_explained.defvjp(_explained_forward, lambda saved, bars: _reverse(*saved, *bars))


@jax.custom_vjp
def _explained_dense(W, omega, C, m, P):
    return _dense_forward(W, C, m, P)[:2]


@sequential_vmap
def _dense_forward(W, C, m, P):
    A = product(W, C)
    return *_forward(A, m, P), A


@sequential_vmap
def _dense_reverse(W, P, A, PA, m, g_mean, g_square):
    A_bar, m_bar, P_bar = _reverse(A, PA, m, g_mean, g_square)
    # omega_bar = -A_bar A^T, and A_bar A^T = 2 P (A g A^T) + m (A g_mean)^T: a product of M^3 in
    # place of M^2 B.
    # Only its lower triangle counts: omega is lower triangular.
    omega_bar = -2.0 * lower_of_product(P, P_bar) - m[:, None] * m_bar
    return omega_bar, tril_transpose_product(W, A_bar), m_bar, P_bar


def _explained_dense_forward(W, omega, C, m, P):
    mean, square, PA, A = _dense_forward(W, C, m, P)
    return (mean, square), (W, P, A, PA, m)


_explained_dense.defvjp(
    _explained_dense_forward,
    lambda saved, bars: (jnp.zeros_like(saved[0]), *_dense_reverse(*saved, *bars)),
)


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
    """q(f(X*)) = int p(f(X*) | u) q(u) du: mean m* + A^T m, covariance k** - A^T P A.

    `process(X_new)` gives marginals as `Normal`, batch (*F, B); `process(X_new, joint=True)` a
    `MultivariateNormal`. X_new are the GP site's own inputs, or a `GP` at them (then its kernel and
    mean are taken). O(M^2 B); K_uu is factored already. Of a predictor of R functions marginals are
    (R, B), and joint moments are of all (R B,) values.
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
        if self.inducing.is_exact:
            prior = new.covariance_matrix
        else:
            # what u leaves unexplained is of each row alone: k - Q need not be a covariance
            Q = gram(A)
            prior = add_diagonal(Q, jnp.maximum(new.variance - jnp.diagonal(Q), 0.0))
        covariance = prior - explained_jointly(A, self.mean, self.reduction)
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
