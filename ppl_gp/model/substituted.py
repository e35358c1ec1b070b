"""Models inside of `handlers.substitute`: a site there has a value and is still random, which every
inference would set anew and the model then ignore.
"""

import jax
from jax import random
from numpyro import handlers
from numpyro.primitives import Messenger

from ppl_gp.errors import ModelError
from ppl_gp.model.arguments import Leaves


class _Named(Messenger):
    """Notes the unobserved sites that have a value already, before anybody draws one."""

    def __init__(self, fn, found: list[str]):
        self.found = found
        super().__init__(fn)

    def process_message(self, msg):
        """Inside of the seed, which draws."""
        if msg["type"] == "sample" and msg["value"] is not None and not msg["is_observed"]:
            self.found.append(msg["name"])


def require_drawn(model, leaves: Leaves) -> None:
    """Raise `ModelError` where the model itself substitutes a site's value. One trace, abstract
    unless the model looks at values.
    """
    found: list[str] = []

    def trace(arrays):
        found.clear()
        with handlers.block():
            args, kwargs = leaves.replaced(arrays)
            handlers.seed(_Named(model, found), random.key(0))(*args, **kwargs)

    try:
        jax.eval_shape(trace, leaves.arrays)
    except jax.errors.JAXTypeError:
        trace(leaves.arrays)
    if found:
        raise ModelError(
            f"sites {found} have their values from handlers.substitute inside the model, and are "
            "random all the same: what is inferred of them would be ignored. Hold them by "
            "hyper=Fixed({...}), or make data of them by handlers.condition."
        )
