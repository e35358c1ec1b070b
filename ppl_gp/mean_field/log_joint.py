"""The model's log joint, one term a site, as a function of the values of its latent sites."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions.distribution import validation_enabled

from ppl_gp.errors import ModelError
from ppl_gp.gp import mask_of, unwrap
from ppl_gp.mean_field.family import Values
from ppl_gp.reading.roles import is_missing_part, is_observed, roles
from ppl_gp.reading.tracing import bare_trace

LOGISTIC = (dist.BernoulliLogits, dist.BinomialLogits)


class LogJoint(NamedTuple):
    """`latents`: what is inferred. `terms`: the sites that have a density: latents and
    observations. `bounded`: logistic ones that the local bound stands for.

    `weights`: how often each row counts, (B,), where not once. `axes`: (site, axis of the rows in
    its batch shape, negative) of terms that have one.
    """

    model: Any
    args: tuple
    kwargs: dict
    latents: tuple[str, ...]
    terms: tuple[str, ...]
    bounded: tuple[str, ...] = ()
    weights: Any = None
    axes: tuple[tuple[str, int], ...] = ()

    def trace(self, values: Values) -> dict:
        """One run of the model."""
        return bare_trace(self.model, self.args, self.kwargs, values, values)

    def term(self, name: str, values: Values) -> Array:
        """log p of a site given all latents, of its batch shape, nats; rows by their weights."""
        return self._weighed(name, scored(self.trace(values)[name]))

    def logistic(self, name: str, values: Values) -> "Logistic":
        """A bounded site's logits, rows by their weights."""
        form = logistic(self.trace(values)[name])
        y, total = (self._weighed(name, x) for x in (form.y, form.total))
        return form._replace(y=y, total=total)

    def _weighed(self, name: str, x: Array) -> Array:
        axis = dict(self.axes).get(name)
        if self.weights is None or axis is None:
            return x
        return self.weights.reshape(-1, *(1 for _ in range(-axis - 1))) * x

    def entries(self, names: tuple[str, ...], values: Values) -> list[Array]:
        """Terms before events are summed; of bounded ones a quadratic in the logits, at some xi."""
        trace = self.trace(values)
        return [self._probed(k, trace[k]) for k in names]

    def _probed(self, name: str, site: dict) -> Array:
        if name not in self.bounded:
            return scored(site, by_entry=True)
        eta, y, total = logistic(site)
        return (y - 0.5 * total) * eta - 0.1 * total * eta**2


def scored(site: dict, by_entry: bool = False) -> Array:
    """A site's log density with masks and scale; `by_entry`: before `to_event` sums its entries."""
    fn, scale = site["fn"], site["scale"]
    with _inside(site):
        if by_entry and isinstance(fn, dist.Independent):
            if scale is not None:
                scale = jnp.expand_dims(scale, tuple(range(-fn.reinterpreted_batch_ndims, 0)))
            fn = fn.base_dist
        log_prob: Array = fn.log_prob(site["value"])
    return log_prob if scale is None else scale * log_prob


def _inside(site: dict):
    """Where a latent's density is computed: without NumPyro's question whether the value is in its
    support, where that is the same set whatever the parameters, as families have no others. It
    costs eigenvalues of a Wishart site, and looks like a density that decides by its values.
    """
    known = not is_observed(site) and not jax.tree.leaves(site["fn"].support)
    return validation_enabled(False) if known else nullcontext()


class Logistic(NamedTuple):
    """y eta - total log(1 + e^eta) of each logit, y and total times its weight."""

    eta: Array
    y: Array
    total: Array


def logistic(site: dict) -> Logistic:
    """Of a Bernoulli or binomial site that observes, by its logits."""
    fn: Any = unwrap(site["fn"])
    weight = jnp.where(mask_of(site["fn"]), 1.0, 0.0)
    if site["scale"] is not None:
        weight = weight * site["scale"]
    y, total = site["value"], getattr(fn, "total_count", 1.0)
    return Logistic(fn.logits, *(weight * jnp.asarray(x, fn.logits.dtype) for x in (y, total)))


def is_logistic(site: dict) -> bool:
    """Whether the local bound of Jaakkola and Jordan is for it: scalar events, apart from masks."""
    fn = site["fn"]
    return is_observed(site) and type(unwrap(fn)) in LOGISTIC and not fn.event_shape


def log_joint_of(model, trace: dict, args, kwargs, others: bool = False) -> LogJoint:
    """The log joint of a trace. `ModelError` for params, mutable state, sites without elements, and
    masks around labels; `others`: of rows that follow too, whose masks are not known yet.
    """
    found = roles(trace)
    if found.params:
        raise ModelError(
            f"site '{found.params[0]}' is a numpyro.param, which has no distribution: MeanField() "
            "would leave it at its initial value. Declare it by numpyro.sample, with a prior."
        )
    if state := [k for k, s in trace.items() if s["type"] == "mutable"]:
        raise ModelError(f"MeanField() cannot follow the state of numpyro.mutable sites {state}.")
    latents = tuple(k for k in trace if k in (*found.hyper, *found.gps, *found.local_latents))
    if not latents:
        raise ModelError("MeanField(): nothing in the model is random but the observations.")
    if masked := [k for k in latents if _is_masked_label(trace[k], others)]:
        raise ModelError(
            f"MeanField(): a mask stands around the labels {masked}; a label that is masked has no "
            "prior, and each of its categories would count as one, log K nats of the bound a "
            "label. Mask the observations alone: labels of rows without any sum to one."
        )
    if empty := [k for k in latents if 0 in trace[k]["fn"].shape()]:
        raise ModelError(f"MeanField(): sites {empty} have no elements (a plate of size zero).")
    terms = tuple(
        k for k, s in trace.items() if s["type"] == "sample" and not is_missing_part(k, trace)
    )
    return LogJoint(model, args, kwargs, latents, terms)


def _is_masked_label(site: dict, others: bool) -> bool:
    mask = mask_of(site["fn"])
    masked = not bool(jnp.all(mask)) or (others and mask.ndim > 0)
    return masked and unwrap(site["fn"]).support.is_discrete
