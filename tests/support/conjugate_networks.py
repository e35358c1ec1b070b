"""Random conjugate networks for mean field, their data, and what they are checked by: NumPyro's own
log density.

A network is a precision and a root vector that up to two pieces share: trees of Gaussians, plates,
mixtures, switches, Wishart noise. Its numbers of rows and columns coincide in half of the seeds.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.infer.util import log_density

import ppl_gp as pg

sample = numpyro.sample


class Network(NamedTuple):
    """A model of `y`, a dictionary of observations drawn from it."""

    model: Any
    y: dict
    apart: list | None  # blocks without pairs: E[log p - log q] is then a sum over sites
    method: dict  # options of `MeanField`

    def fit(self):
        return pg.fit(self.model, pg.MeanField(**self.method), 1, self.y, throw=False)


def network(seed: int, gaussian: bool = False) -> Network:
    """Of this seed; all Gaussian, with known variances, where wanted."""
    rng = np.random.default_rng([seed, gaussian])
    sizes = np.full(2, 3) if rng.random() < 0.5 else rng.integers(2, 5, 2)
    noise = known(rng) if gaussian else (gamma, inverse_gamma, known(rng))[rng.integers(3)]
    kinds = GAUSSIAN if gaussian else GAUSSIAN + OTHERS
    pieces = [kinds[i](rng, *sizes) for i in rng.choice(len(kinds), rng.integers(1, 3), False)]
    if not gaussian and noise not in (gamma, inverse_gamma) and rng.random() < 0.5:
        pieces.append(OTHERS[rng.integers(len(OTHERS))](rng, *sizes))
    model = assembled(noise, dict(zip("pqr", pieces, strict=False)), int(sizes[1]))
    drawn = handlers.trace(handlers.seed(model, random.key(seed))).get_trace({})
    y = {k: np.asarray(s["value"]) for k, s in drawn.items() if k.startswith("y")}
    latents = [k for k, s in drawn.items() if s["type"] == "sample" and k not in y]
    apart = [[k] for k in latents] if rng.random() < 0.7 else None
    return Network(model, y, apart, {"factors": apart, "max_steps": 3000})


def assembled(noise, pieces: dict, D: int):
    """The model: a shared precision, a shared root, and the pieces."""

    def model(y):
        scale = noise()
        root = sample("root", dist.Normal(0.5, 1.0).expand([D]).to_event(1))
        for name, piece in pieces.items():
            piece(name, root, scale, y)

    return model


# The shared scale: known, or by a precision or a variance of its own.


def known(rng):
    value = rng.uniform(0.4, 1.5)
    return lambda: value


def gamma():
    return 1.0 / jnp.sqrt(1.7 * sample("tau", dist.Gamma(2.0, 1.5)))


def inverse_gamma():
    return jnp.sqrt(0.8 * sample("variance", dist.InverseGamma(3.0, 2.0)))


# Pieces: sites named by `name`, observations by "y" before it.


def tree(rng, N, D):
    """Gaussian vectors with random parents, the last two observed through a link of its own."""
    parents = [rng.integers(i) for i in range(1, 4)]
    couplings, A = rng.normal(size=(3, D, D)) / np.sqrt(D), rng.normal(size=(N, 2 * D))
    diagonal = bool(rng.random() < 0.5)

    def piece(name, root, scale, y):
        nodes = [root]
        for i, (parent, C) in enumerate(zip(parents, couplings, strict=True)):
            mean = C[0] * nodes[parent] if diagonal else C @ nodes[parent]
            with numpyro.plate(f"{name} columns", D):
                nodes.append(sample(f"{name}{i}", dist.Normal(mean, 0.3 + 0.2 * i)))
        mean = A @ jnp.concatenate([nodes[-1], nodes[-2]])
        sample(f"y{name}", dist.Normal(mean, scale).to_event(1), obs=y.get(f"y{name}"))

    return piece


def rows(rng, N, D):
    """A latent of each row about an entry of the root, and columns' loadings."""
    b = rng.normal(size=D)

    def piece(name, root, scale, y):
        with numpyro.plate(f"{name} rows", N, dim=-2):
            h = sample(f"{name}h", dist.Normal(root[0], 0.8))
            with numpyro.plate(f"{name} columns", D, dim=-1):
                sample(f"y{name}", dist.Normal(b * h + root, scale), obs=y.get(f"y{name}"))

    return piece


def chain(rng, N, D):
    """One scalar site after another, each observed."""
    a = rng.uniform(-1.2, 1.2, N)

    def piece(name, root, scale, y):
        x = root[-1]
        for i in range(N):
            x = sample(f"{name}{i}", dist.Normal(a[i] * x, 0.6))
            sample(f"y{name}{i}", dist.Normal(x, scale), obs=y.get(f"y{name}{i}"))

    return piece


def mixture(rng, N, D):
    """Rows that gather a mean, and in half of the seeds a precision, by their label."""
    own, K = bool(rng.random() < 0.5), int(D)
    concentration = rng.uniform(0.5, 2.0, K)

    def piece(name, root, scale, y):
        weights = sample(f"{name}weights", dist.Dirichlet(concentration))
        with numpyro.plate(f"{name} components", K):
            w = sample(f"{name}w", dist.Gamma(2.0, 1.0)) if own else None
            spread = jnp.full(K, 2.0) if w is None else 2.0 / jnp.sqrt(w)
            mean = sample(f"{name}mean", dist.Normal(0.0, spread))
        with numpyro.plate(f"{name} rows", 2 * N):
            z = sample(f"{name}z", dist.Categorical(weights))
            noise = scale if w is None else 1.0 / jnp.sqrt(w[z])
            sample(f"y{name}", dist.Normal(mean[z] + root[0], noise), obs=y.get(f"y{name}"))

    return piece


def switches(rng, N, D):
    """Rows that are on or off, with a probability of their column, a beta site."""
    a, b = rng.uniform(0.5, 3.0, 2)

    def piece(name, root, scale, y):
        with numpyro.plate(f"{name} columns", D):
            p = sample(f"{name}p", dist.Beta(a, b))
            with numpyro.plate(f"{name} rows", N):
                on = sample(f"{name}on", dist.Bernoulli(p))
                sample(f"y{name}", dist.Normal(on * root, scale), obs=y.get(f"y{name}"))

    return piece


def wishart(rng, N, D):
    """Rows about the root, or about a mean that the precision scales."""
    own, inverted = rng.random(2) < 0.5

    def piece(name, root, scale, y):
        kind = dist.InverseWishart if inverted else dist.Wishart
        W = sample(f"{name}W", kind(D + 2.0, scale_matrix=jnp.eye(D)))
        how = {"covariance_matrix": W} if inverted else {"precision_matrix": W}
        m = sample(f"{name}m", dist.MultivariateNormal(root, **how)) if own else root
        with numpyro.plate(f"{name} rows", 2 * N):
            sample(f"y{name}", dist.MultivariateNormal(m, **how), obs=y.get(f"y{name}"))

    return piece


GAUSSIAN, OTHERS = [tree, rows, chain], [mixture, switches, wishart]


# Second routes.


def log_joint(net: Network):
    """{site: value} -> log p(y, z) by NumPyro."""
    return lambda values: log_density(net.model, (net.y,), {}, values)[0]


def exact(net: Network, like: dict):
    """Of a Gaussian network: (log p(y), mean, precision) of all latents, flattened by
    `ravel_pytree`: log p(y, z) is a quadratic.
    """
    flat, back = jax.flatten_util.ravel_pytree(like)
    joint = jax.jit(lambda z: log_joint(net)(back(z)))
    precision = -np.asarray(jax.jit(jax.hessian(joint))(jnp.zeros_like(flat)))
    mean = np.linalg.solve(precision, jax.jit(jax.grad(joint))(jnp.zeros_like(flat)))
    log_det = np.linalg.slogdet(precision / (2.0 * np.pi))[1]
    return float(joint(mean)) - 0.5 * log_det, back(mean), precision


def log_weights(net: Network, fit, num: int, key) -> np.ndarray:
    """log p(y, z) - log r(z) at draws of r = prod of the marginals of q."""

    def one(key):
        keys = random.split(key, len(fit.sites))
        z = {k: d.sample(key) for key, (k, d) in zip(keys, fit.sites.items(), strict=True)}
        return log_joint(net)(z) - sum(jnp.sum(d.log_prob(z[k])) for k, d in fit.sites.items())

    return np.asarray(jax.jit(jax.vmap(one))(random.split(key, num)))
