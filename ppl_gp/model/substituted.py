"""Models inside of `handlers.substitute`: a site there has a value and is still random, which every
inference would set anew and the model then ignore.
"""

import functools

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
    """Raise `ModelError` where handlers around the model substitute the value of a site that is
    drawn; values of params are theirs to give. One abstract trace, where there is such a handler.

    `substitute` entered inside the model's function is not seen.
    """
    around = [h for h in _handlers(model) if isinstance(h, handlers.substitute)]
    if not around:
        return
    named = frozenset().union(*(h.data or () for h in around))
    every = any(h.substitute_fn is not None for h in around)
    given = _with_values(model, leaves)
    # a scope around a handler puts its own name before the site's
    found = [k for k in given if every or k.split("/")[-1] in named]
    if found:
        raise ModelError(
            f"sites {found} have their values from handlers.substitute around the model, and are "
            "random all the same: what is inferred of them would be ignored. Hold them by "
            "hyper=Fixed({...}), or make data of them by handlers.condition."
        )


def _handlers(model) -> list:
    """Around a function, the outermost first."""
    found = []
    while True:
        inner = model.func if isinstance(model, functools.partial) else getattr(model, "fn", None)
        if inner is None:
            return found
        found.append(model)
        model = inner


def _with_values(model, leaves: Leaves) -> list[str]:
    """The unobserved sites that have a value before one is drawn; those of a scan are among
    them.
    """
    found: list[str] = []

    def trace(arrays):
        found.clear()
        with handlers.block():
            args, kwargs = leaves.replaced(arrays)
            handlers.seed(_Named(model, found), random.key(0))(*args, **kwargs)

    try:
        jax.eval_shape(trace, leaves.arrays)
    except jax.errors.JAXTypeError:  # the model looks at values
        trace(leaves.arrays)
    return found
