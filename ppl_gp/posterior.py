"""Posterior processes: what conditioning a GP gives is again a process, callable at new inputs.

`Posterior`: from a pseudo-likelihood, or from values of f, at one setting of the hyperparameters; from inducing variables it
is a `sparse.process.SparseProcess`, with the same calls.
`Mixture`: an equal-weight mixture of those over draws of the hyperparameters (and of f).
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, Conditioned
from ppl_gp.local.pseudo import Root, Sites, prediction_root
from ppl_gp.numerics.lapack import cholesky
from ppl_gp.numerics.linalg import add_diagonal, tril_inverse
from ppl_gp.sparse.process import SparseLatent, SparseProcess


class Latent(eqx.Module):
    """What is kept of q(f) at the training inputs, for S draws of the hyperparameters (S = 1 where they are fixed).

    Where f itself was drawn, `mean` holds the draws, `variance` is zero, and `alpha` and `sites` are `None`. Several
    latent functions at one site have shape (S, C, N), draws only.
    """

    mean: Float[Array, "S *C N"]
    variance: Float[Array, "S *C N"]
    alpha: Float[Array, "S N"] | None  # K^-1 (mean - m)
    sites: Sites | None  # nat1, nat2 of shape (S, N)

    @property
    def num_draws(self) -> int:
        """S."""
        return self.mean.shape[0]

    @property
    def is_draws(self) -> bool:
        """Whether f itself was drawn."""
        return self.sites is None

    @property
    def at_training_inputs(self) -> Float[Array, "*C N"] | None:
        """A value of f at the training inputs, for running the model on them."""
        return self.mean[0]

    def draw(self, s) -> "Latent":
        """Entry s, without the leading axis."""
        return jax.tree.map(lambda x: x[s], self)

    def covariance(self, prior: GP) -> Float[Array, "N N"]:
        """Covariance K - K (K + T^-1)^-1 K of q(f) for one entry (no leading axis), a pseudo-likelihood. O(N^3)."""
        K = prior.covariance_matrix
        root = prediction_root(K, self.sites)  # pyright: ignore[reportArgumentType]
        WK = root.W @ K
        return K - root.sign * WK.T @ WK - (K * root.diagonal) @ K


class Posterior(Conditioned):
    """p(f(X*) | data) = N(m* + k*^T alpha, k** - k*^T R k*) with R = (K + T^-1)^-1 factored once (R&W 3.21, 3.24).

    `posterior(X_new)` gives marginals as `Normal`, (M,); `posterior(X_new, joint=True)` a `MultivariateNormal`.
    X_new are the GP site's own inputs, or a `GP` at them (then its kernel and mean are taken). O(M N^2).
    """

    alpha: Float[Array, "N"]
    root: Root

    def marginals(self, new: GP):
        """(mean, variance), (M,) each; rounding below zero is raised to zero."""
        k = new.kernel(self.prior.X, new.X)
        reduction = jnp.sum((self.root.W @ k) ** 2, 0) * self.root.sign + self.root.diagonal @ k**2
        return new.mean + k.T @ self.alpha, jnp.maximum(new.variance - reduction, 0.0)

    def joint(self, new: GP):
        """(mean (M,), covariance (M, M))."""
        k = new.kernel(self.prior.X, new.X)
        Wk = self.root.W @ k
        reduction = self.root.sign * Wk.T @ Wk + (k.T * self.root.diagonal) @ k
        return new.mean + k.T @ self.alpha, new.covariance_matrix - reduction


def condition_on_sites(prior: GP, alpha, sites: Sites) -> Posterior:
    """The posterior process behind a pseudo-likelihood. O(N^3)."""
    return Posterior(prior, alpha, prediction_root(prior.covariance_matrix, sites))


def condition_on_values(prior: GP, f) -> Posterior:
    """p(f(X*) | f(X) = f). O(N^3)."""
    inverse = tril_inverse(prior.scale_tril)
    alpha = inverse.T @ (inverse @ (f - prior.mean))
    return Posterior(prior, alpha, Root(inverse, jnp.zeros_like(f), jnp.ones((), f.dtype)))


def process(prior: GP, latent: Latent | SparseLatent) -> Posterior | SparseProcess:
    """The posterior process of one entry (no leading axis) of a `Latent`."""
    if isinstance(latent, SparseLatent):
        return latent.process(prior)
    if latent.sites is None:
        return condition_on_values(prior, latent.mean)
    return condition_on_sites(prior, latent.alpha, latent.sites)


class Mixture(eqx.Module):
    """Equal-weight mixture of posterior processes over S draws; each call rebuilds them one by one, O(S (N^3 + M
    N^2))."""

    prior_of: Callable = eqx.field(static=True)  # hyper -> GP at the training inputs
    hyper: dict
    latent: Latent | SparseLatent

    def __call__(self, X_new, joint: bool = False) -> dist.Distribution:
        """Marginals: a `MixtureSameFamily` of normals, batch (M,); joint: of multivariate normals."""

        def one(entry):
            posterior = process(self.prior_of(entry[0]), entry[1])
            new = posterior.at(X_new)
            return posterior.joint(new) if joint else posterior.marginals(new)

        mean, spread = lax.map(one, (self.hyper, self.latent))  # (S, M), or (S, C, M) and so on for several functions
        if mean.ndim > 2:
            raise ModelError(
                "a mixture of several functions at one GP site has no one distribution; use fit.predict or fit.sample."
            )
        weights = dist.CategoricalProbs(jnp.full(self.latent.num_draws, 1.0 / self.latent.num_draws))
        if joint:
            spread = jax.vmap(lambda c: add_diagonal(c, 1e-10 * jnp.mean(jnp.diagonal(c))))(spread)
            return dist.MixtureSameFamily(weights, dist.MultivariateNormal(mean, scale_tril=jax.vmap(cholesky)(spread)))
        return dist.MixtureSameFamily(weights, dist.Normal(mean.T, jnp.sqrt(spread.T)))


Process = Posterior | Mixture | SparseProcess
