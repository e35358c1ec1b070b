"""A member of every family of mean field, two elements of each."""

import jax.numpy as jnp
import numpy as np

from ppl_gp.mean_field.discrete import Dirichlet, discrete
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.gaussian import Gaussian, gaussian
from ppl_gp.mean_field.paired import NormalGamma, NormalWishart
from ppl_gp.mean_field.positive import Gamma, Wishart

NAMES = (
    "gaussian",
    "gaussian of two sites",
    "gamma",
    "inverse gamma",
    "wishart",
    "inverse wishart",
    "dirichlet",
    "beta",
    "normal-gamma",
    "normal-wishart",
    "discrete",
)


def families(rng: np.random.Generator) -> dict[str, Family]:
    """{name: a member}, with parameters of this generator."""
    A = rng.normal(size=(2, 3, 3))
    P = jnp.asarray(A @ np.swapaxes(A, -1, -2) + np.eye(3))
    alpha = jnp.asarray([[0.001, 3.0, 0.001, 40.0], [1.0, 2.0, 3.0, 4.0]])
    alpha = alpha * rng.uniform(0.5, 2.0, (2, 4))
    a, b = jnp.asarray(rng.uniform([0.5, 3.0], [2.0, 8.0])), jnp.asarray(rng.uniform(0.1, 2.0, 2))
    m = jnp.asarray(rng.normal(size=(2, 3)))
    own = [
        Gaussian(("z",), (2,), ((3,),), m, P),
        gaussian(("a", "b"), (), ((2,), ()), m[0], jnp.asarray(rng.uniform(0.1, 2.0, 3))),
        Gamma(("w",), (2,), False, a, b),
        Gamma(("w",), (2,), True, a + 2.0, b),
        Wishart(("W",), (2,), False, a + 4.0, P),
        Wishart(("W",), (2,), True, a + 6.0, P),
        Dirichlet(("p",), (2,), False, alpha),
        Dirichlet(("p",), (2,), True, alpha[:, :2]),
        NormalGamma(("m", "w"), (2,), (3,), a, b, m, P),
        NormalWishart(("m", "W"), (2,), a + 4.0, P, a, m),
        discrete(("k",), (2,), (0, 1, 2), jnp.asarray(rng.dirichlet(np.ones(3), 2))),
    ]
    return dict(zip(NAMES, own, strict=True))
