"""The posterior process at one setting of the hyperparameters: what conditioning a GP gives is
again a process.

Here from a pseudo-likelihood, or from values of f; from inducing variables it is a
`sparse.process.SparseProcess`, over draws a `draws.Mixture`, with the same calls.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.gp import GP, Conditioned
from ppl_gp.local.condition import prediction_root
from ppl_gp.local.factor import Root
from ppl_gp.local.natural import PseudoLikelihood
from ppl_gp.model.predictor_prior import covariance_of
from ppl_gp.numerics.linalg import tril_inverse


class Posterior(Conditioned):
    """p(f(X*) | data) = N(m* + k*^T alpha, k** - k*^T R k*) with R = (K + T^-1)^-1 factored once
    (R&W 3.21, 3.24).

    `posterior(X_new)` gives marginals as `Normal`, (M,); `posterior(X_new, joint=True)` a
    `MultivariateNormal`. X_new are the GP site's own inputs, or a `GP` at them (then its kernel and
    mean are taken). O(M N^2).
    """

    alpha: Float[Array, "N"]
    root: Root

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


def condition_on_sites(prior: GP, alpha, sites: PseudoLikelihood) -> Posterior:
    """The posterior process behind a pseudo-likelihood. O(N^3)."""
    return Posterior(prior, alpha, prediction_root(covariance_of(prior), sites))


def condition_on_values(prior: GP, f, root: Root | None = None) -> Posterior:
    """p(f(X*) | f(X) = f). O(N^3), or O(N^2) with its `root`."""
    root = root_of_values(prior) if root is None else root
    return Posterior(prior, root.W.T @ (root.W @ (f - prior.mean)), root)


def root_of_values(prior: GP) -> Root:
    """K^-1 = W^T W, of values without noise. O(N^3)."""
    inverse = tril_inverse(prior.scale_tril)
    return Root(inverse, jnp.zeros(inverse.shape[-1], inverse.dtype), jnp.ones((), inverse.dtype))
