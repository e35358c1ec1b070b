"""The hyperparameters' part of a guide: points, or any NumPyro autoguide, with no covariance of the data anywhere."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from ppl_gp.hyperparameters import MAP, Fixed
from ppl_gp.tracing import sample_hyper


def hyper_model(model: Callable) -> Callable:
    """The model with GP sites pinned and hidden, and observations hidden: what an autoguide is built on.

    An autoguide's set-up evaluates its model's density and gradient; on the model itself that would factor an N x N matrix.
    """

    def hyper_only(*args, **kwargs):
        sample_hyper(model, args, kwargs, local=False)

    return hyper_only


@lru_cache(maxsize=64)
def _guide(model, make, shapes):
    """One guide a model and set of shapes, so that compiled code is found again."""
    return make(hyper_model(model))


class HyperGuide:
    """An autoguide over the hyperparameters, as functions of its unconstrained parameters."""

    def __init__(self, model, make: Callable, args, kwargs):
        shapes = tuple(jnp.shape(a) for a in args if hasattr(a, "shape"))
        self.guide: Any = _guide(model, make, shapes)
        with handlers.block():
            self.trace = handlers.trace(handlers.seed(self.guide, random.key(0))).get_trace(*args, **kwargs)
        params = {k: s for k, s in self.trace.items() if s["type"] == "param"}
        self.transforms = {k: biject_to(s["kwargs"].get("constraint", constraints.real)) for k, s in params.items()}
        self.initial = {k: self.transforms[k].inv(s["value"]) for k, s in params.items()}

    def __hash__(self):
        return hash(id(self.guide))

    def __eq__(self, other):
        return isinstance(other, HyperGuide) and self.guide is other.guide

    def draw(self, free: dict, key, args, kwargs, names) -> tuple[dict, Any]:
        """(hyperparameters, log q of them in nats), one draw."""
        params = {k: t(free[k]) for k, t in self.transforms.items()}
        with handlers.block():
            guide = handlers.substitute(handlers.seed(self.guide, key), data=params)
            trace = handlers.trace(guide).get_trace(*args, **kwargs)
        sites = [s for s in trace.values() if s["type"] == "sample"]
        log_q = sum([jnp.sum(s["fn"].log_prob(s["value"])) for s in sites], jnp.zeros(()))
        return {n: trace[n]["value"] for n in names}, log_q


def is_point(hyper) -> bool:
    """Whether a `hyper=` argument stands for one value of the hyperparameters."""
    return isinstance(hyper, MAP | Fixed)
