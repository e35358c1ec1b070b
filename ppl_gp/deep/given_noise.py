"""The likelihood of a model whose inner layers' noise is given: what MCMC over inducing variables
needs, with nothing drawn inside.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import random
from jaxtyping import Array, Float
from numpyro import handlers

from ppl_gp.deep.structure import Structure
from ppl_gp.gp import GP
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.tracing import set_gps
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.process import SparseProcess


def log_lik_given_noise(
    model: Callable,
    expectation: Expectation,
    structure: Structure,
    given: dict,
    processes: dict[str, SparseProcess],
    noise: dict,
    args,
    kwargs,
) -> Float[Array, ""]:
    """sum_n E[log p(y_n | f_n)] over f of the outer layers, inner ones at f_n = m_n + s_n noise_n;
    nats. O(M^2 N) a GP site.

    `given`: hyperparameters and latents; `noise`: {inner GP site: standard normal numbers, (*F,
    N)}.
    """
    mean, variance, inner = {}, {}, {}

    def value(name, new: GP):
        m, v = processes[name].marginals(new)
        if name in noise:
            inner[name] = m + jnp.sqrt(v) * noise[name]
            return inner[name]
        mean[name], variance[name] = m, v
        return m

    with handlers.block():
        set_gps(handlers.substitute(handlers.seed(model, random.key(0)), data=given), value)(
            *args, **kwargs
        )
    num = next(iter(mean.values())).shape[-1]
    log_lik = JointLogLikelihood(model, num, {**given, **inner}, args, kwargs)
    return (
        jnp.sum(expected_log_lik(log_lik, mean, variance, expectation, random.key(0)))
        + log_lik.shared()
    )
