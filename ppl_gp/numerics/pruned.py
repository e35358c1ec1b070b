"""Functions without the steps that their result does not need."""

from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr


def pruned(function: Callable, x) -> Callable:
    """A function of one array to one without the steps that its result does not need: a model's
    draws of what it would observe, NumPyro's checks of parameters. Differentiating them twice costs
    tracing, and JAX 0.9 cannot do it to a loop.
    """
    closed = jax.make_jaxpr(function)(x)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True], instantiate=True)
    return lambda x: jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(x)[0]
