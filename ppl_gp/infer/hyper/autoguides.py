"""Guides of the hyperparameters, points or NumPyro's: what they are of, hold, and may not do; what
a guide draws, against what its model samples, before the first step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.infer.autoguide import AutoDAIS, AutoGuide, AutoSemiDAIS
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError, ModelError, PplGpError
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper.space import support, transform
from ppl_gp.reading.dependence import reached
from ppl_gp.reading.fingerprint import digest
from ppl_gp.reading.refusals import VALUE_WANTED
from ppl_gp.reading.roles import is_missing_part, roles, subsampling
from ppl_gp.reading.tracing import run, sample_hyper

ANNEALED = AutoDAIS, AutoSemiDAIS


@lru_cache(maxsize=64)
def _guide(model, make, sites):
    """One guide a model and set of sites, so that compiled code is found again."""
    return make_guide(make, model)


def _described(name: str, site: dict) -> tuple:
    """What a guide keeps of a site: its name, shape, type and support."""
    value = site["value"]
    return name, jnp.shape(value), str(jnp.result_type(value)), digest(support(site))


def traced(guide: Callable, params: dict, key, args, kwargs) -> dict:
    """The sites of a guide with parameters and a key; outer handlers see none."""
    with handlers.block():
        seeded = handlers.seed(handlers.substitute(guide, data=params), key)
        return handlers.trace(seeded).get_trace(*args, **kwargs)


class HyperGuide:
    """An autoguide over the hyperparameters with a prior (`sampled`; `held`: those of them that it
    does not draw), as functions of its unconstrained parameters, and points for the others.
    """

    def __init__(self, model, make: Callable, args, kwargs):
        own = run(model, args, kwargs)
        found = roles(own)
        self.sampled = found.hyper
        sites = tuple(_described(k, own[k]) for k in (*found.hyper, *found.params))
        self.guide: Any = _guide(model, make, sites)
        # A guide of its own: the cached one has begun where the data of an earlier call told it to.
        first = make_guide(make, model)
        with set_up(make):
            start = traced(first, {}, random.key(0), args, kwargs)
            traced(self.guide, {}, random.key(0), args, kwargs)
        self.held = points_of(first, start, make, {k: own[k] for k in found.hyper}, args, kwargs)
        params = {k: s for k, s in start.items() if s["type"] == "param"}
        self.transforms = {k: transform(s) for k, s in params.items()}
        self.points = {k: transform(own[k]) for k in found.params}
        self.initial = {k: self.transforms[k].inv(s["value"]) for k, s in params.items()}
        self.initial |= {k: t.inv(own[k]["value"]) for k, t in self.points.items()}

    @property
    def draws(self) -> bool:
        """Whether the hyperparameters have a distribution; under AutoDelta they are points."""
        return set(self.held) != set(self.sampled)

    def __hash__(self):
        return hash(id(self.guide))

    def __eq__(self, other):
        return isinstance(other, HyperGuide) and self.guide is other.guide

    def draw(self, free: dict, key, args, kwargs) -> tuple[dict, Any]:
        """(hyperparameters, log q of them in nats), one draw."""
        params = {k: t(free[k]) for k, t in self.transforms.items()}
        trace = traced(self.guide, params, key, args, kwargs)
        sites = [s for k, s in trace.items() if k in self.sampled or is_auxiliary(s)]
        total = sum([jnp.sum(log_q(s)) for s in sites], jnp.zeros(()))
        points = {k: t(free[k]) for k, t in self.points.items()}
        return {**{n: trace[n]["value"] for n in self.sampled}, **points}, total


_REMEDY = "MAP() is a point, AutoNormal and AutoMultivariateNormal are distributions."


class _WithoutPlates(Messenger):
    """Sites in the batch shape that plates gave them, without the plates: guides see none."""

    def process_message(self, msg):
        """Stands outside of the model's plates."""
        if msg["type"] == "sample":
            msg["cond_indep_stack"] = []


def make_guide(make: Callable, model: Callable) -> Any:
    """`make`'s guide, not set up yet; `DataError` for what makes none, and for annealed guides."""
    # they run Hamiltonian steps on the model that they see, the prior alone, scored by a factor
    if issubclass(kind := kind_of(make), ANNEALED):
        raise DataError(
            f"hyper={kind.__name__} anneals towards the model's density, of which a guide of the "
            f"hyperparameters sees the prior alone; {_REMEDY}"
        )

    def hyper_only(*args, **kwargs):
        """Without GP sites and observations: an autoguide's set-up evaluates its model's density
        and gradient, which would factor an N x N matrix.
        """
        with _WithoutPlates():
            sample_hyper(model, args, kwargs, local=False)

    with set_up(make):
        guide = make(hyper_only)
    if not callable(guide):
        raise DataError(
            f"hyper={guide_name(make)} is called with a model and has to return a guide, a "
            f"function; {_REMEDY}"
        )
    return guide


def kind_of(make: Any) -> type:
    """The class behind a class, a `functools.partial` of one, or an instance."""
    made = make.func if isinstance(make, partial) else make
    return made if isinstance(made, type) else type(made)


def is_auto(make: Any) -> bool:
    """Whether `make` is a class of NumPyro's autoguides, which guide whatever sites there are, or a
    `functools.partial` of one.
    """
    return issubclass(kind_of(make), AutoGuide) and not isinstance(make, AutoGuide)


@contextmanager
def set_up(make: Callable) -> Iterator[None]:
    """What a guide raises while it is made and first run, with the argument's name."""
    try:
        yield
    except PplGpError:
        raise
    except Exception as error:  # autoguides raise whatever they like
        raise DataError(
            f"hyper={guide_name(make)} makes no guide of this model's hyperparameters "
            f"({type(error).__name__}: {error}); give a NumPyro autoguide class, or a function of "
            f"a model that returns a guide: {_REMEDY}"
        ) from error


def points_of(guide: Callable, trace: dict, make: Callable, own: dict, args, kwargs) -> tuple:
    """The hyperparameters that a guide, set up already, does not draw: their values depend on no
    key, a proof by its jaxpr. `ModelError` where its sites are not the model's `own`, `DataError`
    where it is trained as another than it stands for: a joint vector held at a point, as
    AutoLaplaceApproximation's, or weights of its own.
    """
    drawn = {k: s for k, s in trace.items() if s["type"] == "sample"}
    require_guide(trace, own, f"hyper={guide_name(make)}")
    params = {k: s["value"] for k, s in trace.items() if s["type"] == "param"}

    def values(key):
        again = traced(guide, params, key, args, kwargs)
        return {k: again[k]["value"] for k in drawn}

    random_sites = reached(values, random.key(0))
    for name, site in drawn.items():
        if site["is_observed"]:
            raise DataError(
                f"hyper={guide_name(make)}: the guide scores itself by '{name}', a factor, which "
                f"no bound here counts; {_REMEDY}"
            )
        if is_auxiliary(site) and not random_sites[name]:
            raise DataError(
                f"hyper={guide_name(make)} is trained as a point ('{name}' is not random) in "
                "unconstrained coordinates, and would stand for a distribution afterwards that "
                f"no bound was computed for; {_REMEDY}"
            )
    return tuple(k for k in own if not random_sites[k])


def log_q(site):
    """log q of what a guide drew; a flow without an inverse knows what it was drawn from."""
    extra = site.get("intermediates")
    return site["fn"].log_prob(site["value"], *([extra] if extra else []))


def guide_name(make) -> str:
    """How a `hyper=` argument is named in messages."""
    return getattr(make, "__name__", repr(make))


_FAR = 1e30  # inside of every unbounded support of numbers, and of no bounded one


def require_guide(drawn: dict, trace: dict, who: str) -> None:
    """Require that a guide's trace has every latent of the model's, of its shape and inside its
    support, in its subsampling plates, and no other site. `ModelError` names the site.
    """
    own, latents = ({k: s for k, s in t.items() if _is_latent(k, t)} for t in (drawn, trace))
    if further := [k for k in own if k not in latents and not is_auxiliary(own[k])]:
        raise ModelError(
            f"{who}: the guide draws {further}, which are no latent sites of the model; leave them "
            "out, or say infer={'is_auxiliary': True} where they only make other sites."
        )
    if missing := {k: s["fn"].shape() for k, s in latents.items() if k not in own}:
        raise ModelError(
            f"{who}: the guide draws no {list(missing)}, which the model samples with shapes "
            f"{missing}; add numpyro.sample('{min(missing)}', ...) to the guide."
        )
    for name, site in latents.items():
        if wrong := _wrong(own[name], site) or _other_rows(site, drawn, trace):
            raise ModelError(f"{who}: the guide draws '{name}' {wrong}.")


def _is_latent(name: str, trace: dict) -> bool:
    site = trace[name]
    return site["type"] == "sample" and not site["is_observed"] and not is_missing_part(name, trace)


def is_auxiliary(site: dict) -> bool:
    """Whether a site is the guide's alone, such as the joint vector of `AutoMultivariateNormal`."""
    return bool(site.get("infer", {}).get("is_auxiliary"))  # a `param` has no such entry


def _wrong(own: dict, site: dict) -> str | None:
    q, p = own["fn"], site["fn"]
    found, wanted = jnp.shape(own["value"]), p.shape()
    if found != wanted or (site.get("data_axis") is not None and q.event_dim != p.event_dim):
        return (
            f"with shape {found}, {q.event_dim} of its axes from to_event, and the model with "
            f"shape {wanted}, {p.event_dim} of them; use the model's plates and its to_event"
        )
    inner, outer = unwrap(p).support, unwrap(q).support
    for far in () if isinstance(unwrap(q), dist.Delta) else (-_FAR, _FAR):
        if _holds(outer, far, found) and _holds(inner, far, found) is False:
            return (
                f"from a distribution with support {outer}, and the model with support {inner}; "
                "transform it, for example dist.LogNormal for positive values"
            )
    return None


def _holds(support, far: float, shape: tuple) -> bool | None:
    """Whether a support has this value; `None` where its ends are not known yet."""
    try:
        with jax.ensure_compile_time_eval():
            return bool(np.all(support(np.full(shape, far))))
    except VALUE_WANTED:
        return None


def _other_rows(site: dict, drawn: dict, trace: dict) -> str | None:
    own = {f.name for f in site["cond_indep_stack"]}
    for name, (size, batch) in subsampling(trace).items():
        if name in own and name not in drawn:
            return (
                f"without the plate '{name}', in which the model draws {batch} of {size} rows: "
                "open it in the guide too"
            )
    return None
