"""Running a model with f given, and sorting its sites by the role they play."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.wrappers import bare, hidden_axes, mask_of


class pin(Messenger):
    """Gives every GP site a value, by default its prior mean, so that tracing a model never
    factorises a matrix.

    Sites that cannot be drawn (an improper prior) get some value of their support.
    """

    def __init__(self, fn=None, values: Mapping[str, Any] | None = None):
        self.values = values or {}
        super().__init__(fn)

    def process_message(self, msg):
        """Set the value of an unset GP site."""
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        if is_gp(msg):
            value = self.values.get(msg["name"])
            msg["value"] = _prior_mean(msg) if value is None else value
        elif isinstance(unwrap(msg["fn"]), dist.ImproperUniform):
            msg["value"] = msg["fn"].support.feasible_like(jnp.zeros(msg["fn"].shape()))


def _prior_mean(site):
    mean, shape = unwrap(site["fn"]).mean, site["fn"].shape()
    if mean.shape[:-1] and mean.shape != shape[len(shape) - mean.ndim :]:
        raise DataError(
            f"GP site '{site['name']}' has shape {shape}, and its mean function gives "
            f"{mean.shape}: a mean for each unit needs a plate of {mean.shape[0]} units around "
            f"the site, numpyro.plate('units', {mean.shape[0]})."
        )
    return jnp.broadcast_to(mean, shape)


class set_gps(Messenger):
    """Gives every unset GP site the value `value(name, prior at the inputs that it has there)`."""

    def __init__(self, fn, value: Callable[[str, GP], Any]):
        self.value = value
        super().__init__(fn)

    def process_message(self, msg):
        """Set the value of an unset GP site."""
        if msg["type"] == "sample" and msg["value"] is None and is_gp(msg):
            msg["value"] = self.value(msg["name"], unwrap(msg["fn"]))


# How a model that was not declared is read off: `ppl_gp.model.declared` sets it, which stands above
# this file.
_declare: list[Callable] = []


def declare_by(function: Callable) -> None:
    """Let `run` declare models by this function of (model, args, kwargs)."""
    _declare[:] = [function]


def run(model, args, kwargs, hyper=None, latent=None, key=None) -> dict:
    """Trace of the model with hyperparameters and GP sites given, its sites annotated; nothing
    leaks to outer handlers.

    Sites given in neither are drawn with `key`, by default a fixed one. O(N), no factorisation; a
    model that was not declared is read off first.
    """
    declared = model if reading_of(model) is not None else _declare[0](model, args, kwargs)
    return annotated(bare_trace(model, args, kwargs, hyper, latent, key), declared)


def bare_trace(model, args, kwargs, hyper=None, latent=None, key=None) -> dict:
    """As `run`, without annotations: what a model is read off."""
    with handlers.block():
        given = handlers.substitute(
            handlers.seed(model, random.key(0) if key is None else key), data=dict(hyper or {})
        )
        return handlers.trace(pin(given, latent)).get_trace(*args, **kwargs)


def annotated(trace: dict, model) -> dict:
    """A trace of a declared model whose sites know their axis of the data, `site["data_axis"]`, and
    whether they score observations.

    It counts from the border between batch and event: -1 is the last batch axis, 0 the first axis
    that `to_event` took; `None` is a site
    without data. A model that was not declared leaves the trace as it is.
    """
    reading = reading_of(model)
    if reading is not None:
        for name, site in trace.items():
            if site["type"] == "sample":
                site["data_axis"] = reading.axis(name)
                site["is_scored"] = is_observed(site) and (
                    not is_factor(site) or name in reading.scored
                )
    return trace


def reading_of(model) -> Any:
    """What was read off a declared model, also where handlers stand around it; `None` of another
    one.
    """
    while not hasattr(model, "reading") and isinstance(model, Messenger):
        model = model.fn
    return getattr(model, "reading", None)


def is_gp(site) -> bool:
    """Whether a site is an unobserved Gaussian process."""
    return (
        site["type"] == "sample" and not site["is_observed"] and isinstance(unwrap(site["fn"]), GP)
    )


def is_observed(site) -> bool:
    """Whether a site is part of the likelihood. A `numpyro.factor` is, though it holds no data
    (`is_factor`).
    """
    return site["type"] == "sample" and site["is_observed"]


def is_factor(site) -> bool:
    """Whether a site is a `numpyro.factor`: a term of the log density that observes nothing."""
    return is_observed(site) and isinstance(unwrap(site["fn"]), dist.Unit)


class Roles(NamedTuple):
    """Names of a trace's sites by role."""

    gps: tuple[str, ...]
    observed: tuple[str, ...]
    hyper: tuple[str, ...]
    params: tuple[str, ...]
    local_latents: tuple[str, ...]


def roles(trace: dict) -> Roles:
    """Sort the sites of a declared model: GP sites, observed sites, hyperparameters,
    `numpyro.param`s, latents one a datum.

    `<y>_unobserved` of NumPyro's `obs_mask` is a prediction that integrates to one: it has no role.
    """
    free = [
        k for k, s in trace.items() if s["type"] == "sample" and not (s["is_observed"] or is_gp(s))
    ]
    free = [k for k in free if not is_missing_part(k, trace)]
    return Roles(
        tuple(k for k, s in trace.items() if is_gp(s)),
        tuple(k for k, s in trace.items() if is_observed(s)),
        tuple(k for k in free if trace[k]["data_axis"] is None),
        tuple(k for k, s in trace.items() if s["type"] == "param"),
        tuple(k for k in free if trace[k]["data_axis"] is not None),
    )


def require_gp(found: Roles, trace: dict) -> None:
    """Raise `ModelError` for a model without a GP site that could be inferred."""
    if found.gps:
        return
    observed = [k for k in found.observed if isinstance(unwrap(trace[k]["fn"]), GP)]
    if observed:
        raise ModelError(
            f"the GP site '{observed[0]}' is observed itself, so that no function is left to "
            "infer. Leave f unobserved, f = numpyro.sample('f', pg.GP(kernel, X)), and observe "
            f"it with some noise in the data's plate: numpyro.sample('{observed[0]}', "
            "dist.Normal(f, 0.001), obs=y), or an unknown noise scale."
        )
    raise ModelError(
        "the model has no GP site; declare one: f = numpyro.sample('f', pg.GP(kernel, X))."
    )


def data_plates(trace: dict) -> set[str]:
    """Names of the plates of the data in the trace of a declared model."""
    sites = [s for s in trace.values() if s["type"] == "sample" and s["data_axis"] is not None]
    return {f.name for s in sites for f in s["cond_indep_stack"] if f.dim == s["data_axis"]}


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


def is_whole(site: dict) -> bool:
    """Whether no `scale` or `mask` handler stands around a site, so that its distribution is all of
    its prior.
    """
    scale, fn = site["scale"], site["fn"]
    while fn is not unwrap(fn):
        masked = isinstance(fn, dist.MaskedDistribution)
        if masked and not (isinstance(fn._mask, bool) and fn._mask):
            return False
        fn = fn.base_dist
    return scale is None or (jnp.ndim(scale) == 0 and scale == 1)


def is_missing_part(name: str, trace: dict) -> bool:
    """Whether a site stands for the observations that an `obs_mask` leaves out."""
    return name.endswith("_unobserved") and name.removesuffix("_unobserved") + "_observed" in trace


def log_prob_per_datum(site, num: int | None = None):
    """A site's log-probability with `scale` and `mask`, summed to one number a datum; to () where
    it has no axis of data, nats.
    """
    fn, value = site["fn"], site["value"]
    # `to_event` took the data axis
    hidden = site["data_axis"] is not None and site["data_axis"] >= 0
    log_prob = (
        jnp.where(mask_of(fn), bare(fn).log_prob(value), 0.0) if hidden else fn.log_prob(value)
    )
    if site["scale"] is not None:
        log_prob = site["scale"] * log_prob
    return sum_per_datum(site, log_prob)


def sum_per_datum(site, values, num: int | None = None):
    """Values of a site's batch shape (with or without what `to_event` took) summed to (N,); to ()
    where there is no axis of data.
    """
    axis = data_axis(site, jnp.ndim(values))
    if axis is None:
        return jnp.sum(values)
    return jnp.sum(
        values, tuple(i for i in range(jnp.ndim(values)) if i != axis + jnp.ndim(values))
    )


def data_axis(site, ndim: int) -> int | None:
    """The axis of the data, negative, in an array of the site's batch shape, without or with what
    `to_event` took.
    """
    axis, hidden = site["data_axis"], hidden_axes(site["fn"])
    if axis is None:
        return None
    if ndim == len(site["fn"].batch_shape):
        return axis if axis < 0 else None
    return axis - hidden


def without_wrappers(site: dict) -> dict:
    """The site with its distribution without masks and `to_event`, at its full batch shape."""
    axis = site["data_axis"]
    moved = axis if axis is None else axis - hidden_axes(site["fn"])
    return {**site, "fn": bare(site["fn"]), "data_axis": moved}


def plate_scale(trace: dict) -> float:
    """N / B of the plates that subsample in the model itself; 1 where none does."""
    plates = [s["args"] for s in trace.values() if s["type"] == "plate"]
    return float(math.prod(size / (subsample or size) for size, subsample in plates))


def require_no_subsampling(trace: dict, method: str) -> None:
    """Raise `ModelError` where a plate of the model subsamples: `method` would see one random batch
    of the data.
    """
    for name, site in trace.items():
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            size, batch = site["args"]
            raise ModelError(
                f"plate '{name}' subsamples {batch} of {size} rows, and {method} takes all data "
                "in every step; leave subsample_size out, or fit by SVGP()."
            )
