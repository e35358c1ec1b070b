"""The posterior process at one setting of the hyperparameters: what conditioning a GP gives is
again a process.

Here from a pseudo-likelihood, or from values of f; from inducing variables it is a
`sparse.process.SparseProcess`, over draws a `draws.Mixture`, with the same calls.

The functions of a softmax, independent a priori, cost O(R N^2 M), not O(R^2 N^2 M), at new inputs.
With E, M as in `local.softmax` and G_r = chol(M)^-1 E_r k_r (Rasmussen & Williams 2006, equation
3.44 and algorithm 3.4):

Cov[f*_r, f*_s] = 1[r = s] (k**_r - k_r^T E_r k_r) + G_r^T G_s,

what is left of a function that has data of its own, and what it shares with the others.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.gp import GP, Conditioned
from ppl_gp.local.factor import PredictionRoot, Root
from ppl_gp.local.natural import PseudoLikelihood
from ppl_gp.local.softmax import SoftmaxRoot
from ppl_gp.numerics.blocks import gram_blocks, product_blocks, times
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky, tril_inverse
from ppl_gp.numerics.loads import ArrowGram, Gram, Loads, OneAndOthers
from ppl_gp.numerics.low_rank import LowRank
from ppl_gp.reading.predictor.prior import blocks_of, loads_of


class Posterior(Conditioned):
    """p(f(X*) | data) = N(m* + k*^T alpha, k** - k*^T R k*) with R = (K + T^-1)^-1 factored once
    (R&W 3.21, 3.24).

    `posterior(X_new)` gives marginals as `Normal`, (M,); `posterior(X_new, joint=True)` a
    `MultivariateNormal`. X_new are the GP site's own inputs, or a `GP` at them (then its kernel and
    mean are taken). O(M N^2).
    """

    alpha: Float[Array, "N"]
    root: PredictionRoot

    def marginals(self, new: GP):
        """(mean, variance), (M,) each; rounding below zero is raised to zero."""
        k = new.kernel(self.prior.X, new.X)
        variance = new.variance - self.root.explained(k)
        return new.mean + k.T @ self.alpha, jnp.maximum(variance, 0.0)

    def joint(self, new: GP):
        """(mean (M,), covariance (M, M))."""
        k = new.kernel(self.prior.X, new.X)
        covariance = new.covariance_matrix - self.root.quadratic(k)
        return new.mean + k.T @ self.alpha, covariance


class Unknowns(eqx.Module):
    """q(w) = N(mean, G^-1) of the unknowns w behind a predictor eta = m + F w, w ~ N(0, I): G = I +
    F^T T F, which no wide prior cancels.
    """

    mean: Float[Array, "U"]
    gram: Gram

    def moments(self, loads: Loads) -> tuple[Array, Array]:
        """Mean and variance of what is computed from them, loads w, (M,) each."""
        if not isinstance(self.gram, ArrowGram) or not isinstance(loads, OneAndOthers):
            return SomeUnknowns(self.mean, self.gram.half()).moments(loads.array())
        return loads @ self.mean, loads.variance(self.gram, loads.weight)

    def part(self, start: int, size: int) -> "SomeUnknowns | LevelUnknowns":
        """Some of them, side by side: those of one site. O(U^2) memory of a dense G, else O(U)."""
        mean = self.mean[start : start + size]
        if isinstance(self.gram, ArrowGram) and (start, size) == (self.gram.start, self.gram.num):
            return LevelUnknowns(mean, self.gram.own)
        return SomeUnknowns(mean, self.gram.half_of(start, size))


class SomeUnknowns(eqx.Module):
    """q(w) = N(mean, half^T half) of some of the unknowns."""

    mean: Float[Array, "U"]
    half: Float[Array, "K U"]

    def moments(self, columns: Float[Array, "M U"]) -> tuple[Array, Array]:
        """Mean and variance of columns w, (M,) each."""
        return columns @ self.mean, jnp.sum((self.half @ columns.T) ** 2, 0)

    def moments_of(self, part: Any) -> tuple[Array, Array]:
        """Of what a `Table` adds, whose unknowns these are."""
        return self.moments(part.flat)


class LevelUnknowns(eqx.Module):
    """Marginals of unknowns of which each row sees one."""

    mean: Float[Array, "U"]
    variance: Float[Array, "U"]

    def moments_of(self, part: Any) -> tuple[Array, Array]:
        """As of `SomeUnknowns`, of `Levels`."""
        return part.weight * self.mean[part.index], part.weight**2 * self.variance[part.index]


def unknowns(K: LowRank, mean, sites: PseudoLikelihood) -> Unknowns:
    """Of F F^T under a pseudo-likelihood. O(N U^2)."""
    gram = K.F.gram(sites.nat2)
    pulled = K.F.pull(sites.nat1 - times(sites.nat2, jnp.ravel(mean)))
    return Unknowns(gram.solve(pulled), gram)


class UnknownsProcess(Conditioned):
    """A predictor eta = m + F w at new rows, from q(w). O(M U^2)."""

    root: Unknowns

    def marginals(self, new: GP):
        """(mean, variance), (M,) each."""
        mean, variance = self.root.moments(loads_of(new))
        return new.mean + mean, variance

    def joint(self, new: GP):
        """(mean (M,), covariance (M, M))."""
        F = loads_of(new).array()
        half = self.root.gram.half() @ F.T
        return new.mean + F @ self.root.mean, half.T @ half


class FunctionsProcess(Conditioned):
    """The R functions of a predictor at new rows, correlated within a row and between rows: as
    `Posterior`, or `UnknownsProcess`, by what its `root` is. Matrices have rows (function, row),
    functions outermost.

    Marginals are `Normal` (R, M); `joint=True` a `MultivariateNormal` of all (R M,) values.
    """

    alpha: Float[Array, "RN"]
    root: Root | Unknowns

    def marginals(self, new):
        """(mean, variance), (R, M) each."""
        k = self._columns(new)
        if isinstance(self.root, Unknowns):
            centred, variance = self.root.moments(loads_of(new))
        else:
            centred, variance = k.T @ self.alpha, new.variance - self.root.explained(k)
        shaped = lambda x: jnp.reshape(x, new.shape())  # noqa: E731
        return new.mean + shaped(centred), jnp.maximum(shaped(variance), 0.0)

    def within(self, new) -> tuple[Array, Array, Array]:
        """(mean, variance, (R, M) each; the covariances of the functions of each row, (M, R, R)).
        O(M N^2 R^3).
        """
        k, like = self._columns(new), blocks_of(new)
        if isinstance(self.root, Unknowns):
            blocks = gram_blocks(self.root.gram.half() @ k, like)
        else:
            seen = gram_blocks(self.root.W @ k, like) * self.root.sign
            blocks = like - seen - product_blocks(k, times(self.root.diagonal, k), like)
        return *self.marginals(new), jnp.moveaxis(blocks, -1, 0)

    def joint(self, new):
        """(mean (R M,), covariance (R M, R M))."""
        k, mean = self._columns(new), jnp.ravel(new.mean)
        if isinstance(self.root, Unknowns):
            half = self.root.gram.half() @ k
            return mean + k.T @ self.root.mean, half.T @ half
        return mean + k.T @ self.alpha, new.covariance_matrix - self.root.quadratic(k)

    def _columns(self, new):
        """What stands left of the root: covariances with the training rows, or loads of unknowns,
        (..., R M).
        """
        if isinstance(self.root, Unknowns):
            return loads_of(new).array().T
        return new.kernel(self.prior.X, new.X)

    def sample(self, key, new, num: int) -> Float[Array, "num R M"]:
        """Joint draws. O((R M)^3 + num (R M)^2), and what `joint` costs."""
        mean, covariance = self.joint(new)
        L, _ = robust_cholesky(covariance, default_jitter(new.variance))
        white = random.normal(key, (num, mean.size), mean.dtype)
        return jnp.reshape(mean + white @ L.T, (num, *new.shape()))


def condition_on_values(prior: GP, f, root: Root | None = None) -> Posterior:
    """p(f(X*) | f(X) = f). O(N^3), or O(N^2) with its `root`."""
    root = root_of_values(prior) if root is None else root
    return Posterior(prior, root.W.T @ (root.W @ (f - prior.mean)), root)


def root_of_values(prior: GP) -> Root:
    """K^-1 = W^T W, of values without noise. O(N^3)."""
    inverse = tril_inverse(prior.scale_tril)
    return Root(inverse, jnp.zeros(inverse.shape[-1], inverse.dtype), jnp.ones((), inverse.dtype))


class SoftmaxProcess(Conditioned):
    """As `posterior.FunctionsProcess`, of the scores of a softmax.

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
