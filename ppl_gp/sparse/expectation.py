"""E_q[log p(y_n | f_n)] for one function a datum, two or three, or many: Gauss-Hermite, its tensor
product, or draws.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.numerics.blocks import lower_root
from ppl_gp.numerics.quadrature import hermite, likelihood_nodes

MAX_CUBATURE = 3
NODES = {1: 20, 2: 12, 3: 8}
FINE = 384


class Expectation(NamedTuple):
    """How to integrate: `num_nodes` in each direction (`None`: 20, 12, 8 for one, two, three
    functions), or `num_draws`.

    Draws serve any number of functions; they are the default above three. `additive`: log p(y_n |
    f_n) is known to be a sum of terms that see one function each (several outputs, each with a
    function of its own): one set of nodes then serves all of them.
    """

    num_nodes: int | None = None
    num_draws: int | None = None
    additive: bool = False

    def nodes(self, num_functions: int) -> int | None:
        """Nodes in each direction, or `None` where draws are to be used."""
        if self.num_draws is not None or num_functions > MAX_CUBATURE:
            return None
        return self.num_nodes or NODES[num_functions]


def flatten(latent: dict) -> tuple[Float[Array, "F B"], Callable]:
    """All functions as rows, and the way back from (F, B) to {site: (*C, B)}."""
    shapes = {k: x.shape for k, x in latent.items()}
    rows = jnp.concatenate([jnp.reshape(x, (-1, x.shape[-1])) for x in latent.values()])

    def rebuild(rows):
        out, start = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape[:-1])
            out[name] = jnp.reshape(rows[start : start + size], shape)
            start += size
        return out

    return rows, rebuild


def expected_log_lik(
    log_lik: Callable, mean: dict, variance: dict, expectation: Expectation, key
) -> Float[Array, "B"]:
    """E[log p(y_n | f_n)] with independent f ~ N(mean, variance), {site: (*C, B)} each; (B,), nats.
    Functions of one site that are correlated have covariances (R, R, B) in place of variances.

    Gauss-Hermite is exact for polynomials of degree 2 num_nodes - 1 and converges slowly where log
    p is peaked on a scale far below f's standard deviation (StudentT(4) of scale 0.05 under sd 1:
    +0.56 nats a datum with 20 nodes, so a sum of it is no bound); `expectation_error` tells by how
    much.

    Cost: num_nodes^F (num_nodes where it is additive, or num_draws) evaluations of the likelihood.
    Raises `DataError` for `num_nodes` above three functions that are not additive.
    """
    m, rebuild = flatten(mean)
    if expectation.additive and expectation.num_draws is None:
        # each term sees one function, and so its marginal alone
        diagonal = lambda m, v: jnp.einsum("aan->an", v) if v.ndim > m.ndim else v  # noqa: E731
        own = {k: diagonal(mean[k], v) for k, v in variance.items()}
        scale = jnp.sqrt(_positive(flatten(own)[0]))
        x, w = hermite(expectation.num_nodes or NODES[1], 1)
        each = jax.vmap(lambda x: log_lik(rebuild(m + scale * x)))(jnp.asarray(x[:, 0], m.dtype))
        return jnp.asarray(w, m.dtype) @ each
    num = expectation.nodes(m.shape[0])
    if num is None:
        if expectation.num_nodes is not None and expectation.num_draws is None:
            raise DataError(
                f"num_nodes={expectation.num_nodes}: cubature serves up to 3 functions, this "
                f"model has {m.shape[0]}; leave it out, or give num_draws."
            )
        z = random.normal(key, (expectation.num_draws or 10, *m.shape), m.dtype)
        at = _coloured(mean, variance)
        return jnp.mean(jax.vmap(lambda z: log_lik(at(rebuild(z))))(z), 0)
    z, w = hermite(num, m.shape[0])
    at, ones = _coloured(mean, variance), jnp.ones_like(m)
    values = jax.vmap(lambda z: log_lik(at(rebuild(z[:, None] * ones))))(jnp.asarray(z, m.dtype))
    return jnp.asarray(w, m.dtype) @ values


def _positive(variance):
    """For roots, which have no derivative at the zeros of rows that see no unknown."""
    return jnp.maximum(variance, jnp.finfo(variance.dtype).tiny ** 0.5)


def _coloured(mean: dict, variance: dict) -> Callable:
    """z ~ N(0, I), {site: (*C, B)} -> f ~ N(mean, variance)."""

    def of_site(m, v):
        if v.ndim == m.ndim:
            sd = jnp.sqrt(_positive(v))
            return lambda z: m + sd * z
        L = lower_root(jnp.moveaxis(v, -1, 0))
        return lambda z: m + jnp.einsum("nab,bn->an", L, z)

    colour = {k: of_site(mean[k], v) for k, v in variance.items()}
    return lambda z: {k: colour[k](x) for k, x in z.items()}


def expectation_error(
    log_lik: Callable,
    mean: dict,
    variance: dict,
    expectation: Expectation,
    key,
    finer: Callable | None = None,
) -> Float[Array, "B"]:
    """Error of expected_log_lik(how), (B,), nats.

    One function: its distance to `FINE` nodes that follow the likelihood, good to about 1e-8, and
    positive where a bound made of it is too high. Several, and where a likelihood is an integral
    itself, of which `finer` has more nodes: twice the distance to three times the Gauss-Hermite
    nodes without its sign, the sum of which covers the error (tests/test_error_estimates.py). 0
    for draws, which are right on average.
    Cost: `FINE` or 3^F as many likelihood values; for reports.
    """
    m, rebuild = flatten(mean)
    if expectation.num_draws is not None or (
        expectation.nodes(m.shape[0]) is None and not expectation.additive
    ):
        return jnp.zeros_like(m[0])
    coarse = expected_log_lik(log_lik, mean, variance, expectation, key)
    if m.shape[0] > 1 or finer is not None:
        num = expectation.num_nodes or NODES[1 if expectation.additive else m.shape[0]]
        more = expectation._replace(num_nodes=3 * num)
        return 2.0 * jnp.abs(coarse - expected_log_lik(finer or log_lik, mean, variance, more, key))

    def one(f):
        return log_lik(rebuild(f[None]))

    f, log_w = likelihood_nodes(one, m[0], _positive(flatten(variance)[0][0]), num=FINE, tilt=1.0)
    w = jnp.exp(log_w)
    return coarse - jnp.sum(jnp.where(w > 0, w * jax.vmap(one)(f), 0.0), 0)
