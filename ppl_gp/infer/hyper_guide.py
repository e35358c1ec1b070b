"""The hyperparameters' part of a guide: points, or any NumPyro autoguide, with no covariance of the data anywhere."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from ppl_gp.errors import ModelError
from ppl_gp.fingerprint import digest
from ppl_gp.hyperparameters import MAP, Fixed
from ppl_gp.tracing import roles, run, sample_hyper


class _WithoutPlates(Messenger):
    """Sites with the batch shape that their plates gave them, and without the plates, which stay hidden from the guide."""

    def process_message(self, msg):
        """Stands outside of the model's plates."""
        if msg["type"] == "sample":
            msg["cond_indep_stack"] = []


def hyper_model(model: Callable) -> Callable:
    """The model with GP sites pinned and hidden, and observations hidden: what an autoguide is built on.

    An autoguide's set-up evaluates its model's density and gradient; on the model itself that would factor an N x N matrix.
    """

    def hyper_only(*args, **kwargs):
        with _WithoutPlates():
            sample_hyper(model, args, kwargs, local=False)

    return hyper_only


@lru_cache(maxsize=64)
def _guide(model, make, sites):
    """One guide a model and set of sites, so that compiled code is found again."""
    return make(hyper_model(model))


def _described(name: str, value, support) -> tuple:
    """What a guide keeps of a site: its name, shape, type and support."""
    return name, jnp.shape(value), str(jnp.result_type(value)), digest(support)


class HyperGuide:
    """An autoguide over the hyperparameters with a prior, as functions of its unconstrained parameters, and points for the others."""

    def __init__(self, model, make: Callable, args, kwargs):
        own = run(model, args, kwargs)
        found = roles(own)
        self.sampled = found.hyper
        points = {k: own[k]["kwargs"].get("constraint", constraints.real) for k in found.params}
        sites = [_described(k, own[k]["value"], own[k]["fn"].support) for k in found.hyper]
        sites += [_described(k, own[k]["value"], c) for k, c in points.items()]
        self.guide: Any = _guide(model, make, tuple(sites))
        with handlers.block():
            # A guide of its own: the cached one has begun where the data of an earlier call told it to.
            start = handlers.trace(handlers.seed(make(hyper_model(model)), random.key(0))).get_trace(*args, **kwargs)
            handlers.seed(self.guide, random.key(0))(*args, **kwargs)
        self._require_fit(start)
        params = {k: s for k, s in start.items() if s["type"] == "param"}
        self.transforms = {k: biject_to(s["kwargs"].get("constraint", constraints.real)) for k, s in params.items()}
        self.points = {k: biject_to(c) for k, c in points.items()}
        self.initial = {k: self.transforms[k].inv(s["value"]) for k, s in params.items()}
        self.initial |= {k: t.inv(own[k]["value"]) for k, t in self.points.items()}

    def _require_fit(self, trace) -> None:
        drawn = {k for k, s in trace.items() if s["type"] == "sample" and not _is_auxiliary(s)}
        if drawn != set(self.sampled):
            raise ModelError(
                f"SVGP(hyper=...): the guide draws {sorted(drawn)}, and the model's hyperparameters are {sorted(self.sampled)}; "
                "give a NumPyro autoguide class, such as AutoNormal."
            )

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
        sites = [s for k, s in trace.items() if k in self.sampled or _is_auxiliary(s)]
        log_q = sum([jnp.sum(s["fn"].log_prob(s["value"])) for s in sites], jnp.zeros(()))
        points = {k: t(free[k]) for k, t in self.points.items()}
        return {**{n: trace[n]["value"] for n in self.sampled}, **points}, log_q


def _is_auxiliary(site) -> bool:
    return site["type"] == "sample" and bool(site["infer"].get("is_auxiliary"))


def is_point(hyper) -> bool:
    """Whether a `hyper=` argument stands for one value of the hyperparameters."""
    return isinstance(hyper, MAP | Fixed)
