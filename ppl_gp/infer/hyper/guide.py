"""The hyperparameters' part of a guide: points, or any NumPyro autoguide, with no covariance of the
data anywhere.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from ppl_gp.hyperparameters import MAP, Fixed
from ppl_gp.infer.hyper.autoguides import log_q, make_guide, points_of, set_up
from ppl_gp.infer.probes.guides import is_auxiliary
from ppl_gp.model.fingerprint import digest
from ppl_gp.model.roles import roles
from ppl_gp.model.tracing import run


@lru_cache(maxsize=64)
def _guide(model, make, sites):
    """One guide a model and set of sites, so that compiled code is found again."""
    return make_guide(make, model)


def _described(name: str, value, support) -> tuple:
    """What a guide keeps of a site: its name, shape, type and support."""
    return name, jnp.shape(value), str(jnp.result_type(value)), digest(support)


class HyperGuide:
    """An autoguide over the hyperparameters with a prior, as functions of its unconstrained
    parameters, and points for the others.

    `sampled`: the sites with a prior. `held`: those among them whose values the guide does not
    draw.
    """

    def __init__(self, model, make: Callable, args, kwargs):
        own = run(model, args, kwargs)
        found = roles(own)
        self.sampled = found.hyper
        points = {k: own[k]["kwargs"].get("constraint", constraints.real) for k in found.params}
        sites = [_described(k, own[k]["value"], own[k]["fn"].support) for k in found.hyper]
        sites += [_described(k, own[k]["value"], c) for k, c in points.items()]
        self.guide: Any = _guide(model, make, tuple(sites))
        # A guide of its own: the cached one has begun where the data of an earlier call told it to.
        first = make_guide(make, model)
        with handlers.block(), set_up(make):
            start = handlers.trace(handlers.seed(first, random.key(0))).get_trace(*args, **kwargs)
            handlers.seed(self.guide, random.key(0))(*args, **kwargs)
        self.held = points_of(first, start, make, {k: own[k] for k in found.hyper}, args, kwargs)
        params = {k: s for k, s in start.items() if s["type"] == "param"}
        self.transforms = {
            k: biject_to(s["kwargs"].get("constraint", constraints.real)) for k, s in params.items()
        }
        self.points = {k: biject_to(c) for k, c in points.items()}
        self.initial = {k: self.transforms[k].inv(s["value"]) for k, s in params.items()}
        self.initial |= {k: t.inv(own[k]["value"]) for k, t in self.points.items()}

    @property
    def draws(self) -> bool:
        """Whether the hyperparameters have a distribution; under AutoDelta, say, they are
        points.
        """
        return set(self.held) != set(self.sampled)

    def __hash__(self):
        return hash(id(self.guide))

    def __eq__(self, other):
        return isinstance(other, HyperGuide) and self.guide is other.guide

    def draw(self, free: dict, key, args, kwargs) -> tuple[dict, Any]:
        """(hyperparameters, log q of them in nats), one draw."""
        params = {k: t(free[k]) for k, t in self.transforms.items()}
        with handlers.block():
            guide = handlers.substitute(handlers.seed(self.guide, key), data=params)
            trace = handlers.trace(guide).get_trace(*args, **kwargs)
        sites = [s for k, s in trace.items() if k in self.sampled or is_auxiliary(s)]
        total = sum([jnp.sum(log_q(s)) for s in sites], jnp.zeros(()))
        points = {k: t(free[k]) for k, t in self.points.items()}
        return {**{n: trace[n]["value"] for n in self.sampled}, **points}, total


def is_point(hyper) -> bool:
    """Whether a `hyper=` argument stands for one value of the hyperparameters."""
    return isinstance(hyper, MAP | Fixed)
