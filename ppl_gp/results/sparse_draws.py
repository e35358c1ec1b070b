"""q(f) of a sparse fit at its training inputs: moments, and draws."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random

from ppl_gp.numerics.linalg import default_jitter, robust_cholesky
from ppl_gp.results.mixing import Moments
from ppl_gp.results.record import prior_at
from ppl_gp.sparse.inducing_draws import factor_of_v

MAX_JOINT = 2000  # rows up to which draws of f have their full covariance


@eqx.filter_jit
def sparse_moments(model, site: str, hyper, latent, args, kwargs) -> Moments:
    """(S, *F, N) each."""

    def one(entry):
        hyper, latent = entry
        prior = prior_at(model, site, hyper, args, kwargs)
        return Moments(*latent.process(prior).marginals(prior))

    return lax.map(one, (hyper, latent))


@eqx.filter_jit
def draw_sparse(model, site: str, hyper, latent, args, kwargs, key, repeats: int):
    """(S repeats, *F, N) draws of q(f): jointly up to `MAX_JOINT` rows.

    Above, u is drawn jointly and f given u row by row, whose covariance is the short-range remainder k - Q alone: every marginal is
    exact, O(N M) a draw.
    """

    def one(entry):
        hyper, latent, key = entry
        prior = prior_at(model, site, hyper, args, kwargs)
        process = latent.process(prior)
        draw = _jointly if prior.X.shape[0] <= MAX_JOINT else draw_given_inducing
        return draw(process, prior, key, repeats)

    draws = lax.map(one, (hyper, latent, random.split(key, latent.num_draws)))
    return jnp.reshape(draws, (-1, *draws.shape[2:]))


def _factor(covariance, unit):
    factor = lambda c: robust_cholesky(c, unit)[0]  # noqa: E731
    for _ in covariance.shape[:-2]:
        factor = jax.vmap(factor)
    return factor(covariance)


def _jointly(process, prior, key, repeats):
    mean, covariance = process.joint(prior)
    L = _factor(covariance, default_jitter(prior.variance))
    white = random.normal(key, (repeats, *mean.shape), mean.dtype)
    return mean + jnp.einsum("...ij,r...j->r...i", L, white)


def draw_given_inducing(process, prior, key, repeats):
    """(repeats, *F, N): u jointly, f given u row by row."""
    A = process.root.whiten(process.inducing.cross(prior, prior.X))
    m = process.mean
    key_u, key_f = random.split(key)
    white = random.normal(key_u, (repeats, *m.shape), m.dtype)
    v = m + jnp.einsum("...ij,r...j->r...i", factor_of_v(process), white)
    rest = jnp.sqrt(jnp.maximum(prior.variance - jnp.sum(A**2, 0), 0.0))
    mean = process.at(prior).mean if process.basis is None else process.marginals(prior)[0] - m @ A
    return mean + v @ A + rest * random.normal(key_f, (repeats, *m.shape[:-1], A.shape[1]), m.dtype)
