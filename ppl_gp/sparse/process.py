"""The posterior process behind q(u)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.gp import GP, Conditioned
from ppl_gp.model.predictor_prior import blocks_of
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.sparse.families import Whitened
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.projection import explained, explained_blocks, explained_jointly, gram
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
