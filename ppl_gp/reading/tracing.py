"""Running a model with hyperparameters and f given."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.quick import quick_jit
from ppl_gp.reading.roles import (
    cannot_be_drawn,
    is_factor,
    is_gp,
    is_missing_part,
    is_observed,
    roles,
)

# the shape of a gamma from which on its draws have a logarithm as a rule
_VAGUE = 0.1
_GAMMAS = (dist.Gamma, dist.InverseGamma)
# samplers of many steps
_LONG = (dist.Wishart, dist.WishartCholesky, dist.InverseWishart, dist.LKJ, dist.LKJCholesky)


class pin(Messenger):
    """Gives sites without a value one that needs no long computation: a GP site its `values`, by
    default its prior mean, so that tracing a model never factorises a matrix; one that cannot be
    drawn (an improper prior, a class without `sample`) some value of its support.

    `drawn(name)`, where it is given: whether a prediction is of a site, which is left to chance.
    Other vague gamma and inverse gamma sites (shape below 0.1) get shape / rate, or its inverse:
    their draws are zero or infinite in floating point, and what they scale is no number. And each
    site whose sampler takes many steps is drawn by one program: step by step a Wishart site
    compiles 74 of them, three seconds.
    """

    def __init__(
        self,
        fn=None,
        values: Mapping[str, Any] | None = None,
        drawn: Callable[[str], bool] | None = None,
    ):
        self.values, self.drawn = values or {}, drawn
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        fn, name = unwrap(msg["fn"]), msg["name"]
        if is_gp(msg):
            value = self.values.get(name)
            msg["value"] = _prior_mean(msg) if value is None else value
        elif cannot_be_drawn(msg) or isinstance(fn, dist.ImproperUniform):
            msg["value"] = msg["fn"].support.feasible_like(jnp.zeros(msg["fn"].shape()))
        elif self.drawn is not None and isinstance(fn, _GAMMAS) and not self.drawn(name):
            msg["value"] = _settled(msg, fn)
        elif self.drawn is not None and type(fn) in _LONG:  # of a subclass JAX need not know
            own = msg["kwargs"]
            msg["value"] = _drawn(msg["fn"], own["rng_key"], own.get("sample_shape", ()))


def _prior_mean(site):
    mean, shape = unwrap(site["fn"]).mean, site["fn"].shape()
    if mean.shape[:-1] and mean.shape != shape[len(shape) - mean.ndim :]:
        raise DataError(
            f"GP site '{site['name']}' has shape {shape}, and its mean function gives "
            f"{mean.shape}: a mean for each unit needs a plate of {mean.shape[0]} units around "
            f"the site, numpyro.plate('units', {mean.shape[0]})."
        )
    return jnp.broadcast_to(mean, shape)


def _settled(site, gamma: Any):
    """The draw of a gamma site, or its middle where it is vague."""
    ratio = gamma.concentration / gamma.rate
    middle = ratio if isinstance(gamma, dist.Gamma) else 1.0 / ratio
    drawn = site["fn"](*site["args"], **site["kwargs"])
    return jnp.where(gamma.concentration < _VAGUE, middle, drawn)


@quick_jit
def _drawn(fn, key, shape):
    return fn(rng_key=key, sample_shape=shape)


class _unique(handlers.trace):
    """A trace that refuses a name of two: NumPyro puts a plate in the place of a site before it."""

    def postprocess_message(self, msg):
        """Record it. A plate may be opened again, and a parameter asked for again."""
        name, kind = msg.get("name"), msg["type"]
        before = self.trace[name]["type"] if name in self.trace else None
        if before and (before != kind or kind in ("sample", "deterministic")):
            raise ModelError(
                f"the model has two sites named {name!r}, of the types {before} and {kind} of "
                "NumPyro; rename one of them."
            )
        super().postprocess_message(msg)


class set_gps(Messenger):
    """Gives every unset GP site the value `value(name, prior at the inputs that it has there)`."""

    def __init__(self, fn, value: Callable[[str, GP], Any]):
        self.value = value
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["value"] is None and is_gp(msg):
            msg["value"] = self.value(msg["name"], unwrap(msg["fn"]))


def run(model, args, kwargs, hyper=None, latent=None, key=None) -> dict:
    """Trace of the model with hyperparameters and GP sites given, its sites annotated; nothing
    leaks to outer handlers.

    Sites given in neither are drawn with `key`, by default a fixed one. O(N), no factorisation; a
    model that was not declared is read off first.
    """
    from ppl_gp.reading.declared import declare  # here, as it imports this file

    declared = model if reading_of(model) is not None else declare(model, args, kwargs)
    reading = reading_of(declared)

    def drawn(name: str) -> bool:
        return reading is not None and (reading.predicts(name) or reading.axis(name) is not None)

    return annotated(bare_trace(model, args, kwargs, hyper, latent, key, drawn), declared)


def bare_trace(
    model,
    args,
    kwargs,
    hyper=None,
    latent=None,
    key=None,
    drawn: Callable[[str], bool] = lambda name: False,
) -> dict:
    """As `run`, without annotations: what a model is read off. Vague gammas are settled, but for
    those that are `drawn`.
    """
    with handlers.block():
        seeded = handlers.seed(model, random.key(0) if key is None else key)
        given = handlers.substitute(seeded, data=dict(hyper or {}))
        return _unique(pin(given, latent, drawn)).get_trace(*args, **kwargs)


def annotated(trace: dict, model) -> dict:
    """A trace of a declared model whose sites know their axis of the data, `site["data_axis"]`, and
    whether they score observations.

    It counts from the border between batch and event: -1 is the last batch axis, 0 the first axis
    that `to_event` took; `None` is a site without data. A model that was not declared leaves the
    trace as it is.
    """
    reading = reading_of(model)
    if reading is not None:
        sites = {k: site for k, site in trace.items() if site["type"] == "sample"}
        observing = [sites[k] for k in reading.observed if k in sites and not is_factor(sites[k])]
        # a factor sees what is drawn in the place of observations that are not given
        factors = reading.scored if any(map(is_observed, observing)) or not observing else ()
        for name, site in sites.items():
            site["data_axis"] = reading.axis(name)
            site["is_scored"] = is_observed(site) and (not is_factor(site) or name in factors)
    return trace


def reading_of(model) -> Any:
    """What was read off a declared model, also where handlers stand around it; `None` of another
    one.
    """
    while not hasattr(model, "reading") and isinstance(model, Messenger):
        model = model.fn
    return getattr(model, "reading", None)


def sample_hyper(model, args, kwargs, local: bool = True, without: Collection[str] = ()) -> dict:
    """Run the model so that its hyperparameters alone talk to the outer handlers; {site: value} of
    them.

    `local=False` keeps latents that stand one a datum from them too, and `without` further sites.

    Only the model's own sites are hidden, by name: outer handlers send messages of their own
    through this stack, such as the log-Jacobian with which NumPyro's samplers transform a site, and
    those must pass. O(N), no factorisation.
    """
    own = run(model, args, kwargs)
    found = roles(own)
    hidden = {
        k
        for k, s in own.items()
        if s["type"] in ("plate", "deterministic") or is_observed(s) or is_gp(s)
    }
    # Missing observations integrate to one: any value does, and outer handlers, which give keys,
    # are not asked.
    drawn = {k for k in own if is_missing_part(k, own)} | (
        set(without) if local else {*without, *found.local_latents}
    )
    hidden |= drawn
    drawn -= set(found.gps)  # which are pinned

    def any_value(site):
        return site["fn"].sample(random.key(0)) if site["name"] in drawn else None

    with (
        handlers.trace() as trace,
        handlers.block(hide_fn=lambda site: site.get("name") in hidden),
        pin(),
    ):
        handlers.substitute(model, substitute_fn=any_value)(*args, **kwargs)
    wanted = (*found.hyper, *found.params, *(found.local_latents if local else ()))
    return {k: trace[k]["value"] for k in wanted if k not in without}
