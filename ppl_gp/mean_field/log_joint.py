"""The model's log joint, one term a site, as a function of the values of its latent sites."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_gp.errors import ModelError
from ppl_gp.gp import mask_of, unwrap
from ppl_gp.mean_field.family import Values
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.roles import is_missing_part, is_observed, roles, scored
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

    def seen(self, trace: dict) -> dict[str, frozenset]:
        """{term: the latent sites that its density is computed from}: a proof, by the jaxpr."""

        def terms(values):
            again = self.trace(values)
            return {k: scored(again[k]) for k in self.terms}

        return sources(terms, {k: jnp.asarray(trace[k]["value"]) for k in self.latents})

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
    """The log joint of a trace. `ModelError` for params, mutable state, sites without elements,
    masks around labels and scales of rows with latents; `others`: of rows that follow too, whose
    masks and scales are not known yet.
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
    joint = LogJoint(model, args, kwargs, latents, terms)
    _require_unscaled(joint, trace, found.local_latents, others)
    return joint


def _require_unscaled(joint: LogJoint, trace: dict, local: tuple[str, ...], others: bool) -> None:
    """No weights of what a row's latent is in: log sum_k (pi_k p_k)^w is not w log sum_k pi_k p_k.
    Nor of labels in no row, whose prior would not sum to one.
    """
    scaled = [k for k in joint.terms if _is_scaled(trace[k]["scale"], others)]
    seen = joint.seen(trace) if scaled else {}
    for name in scaled:
        is_label = name in joint.latents and unwrap(trace[name]["fn"]).support.is_discrete
        if own := sorted(seen[name].intersection((*local, name) if is_label else local)):
            raise ModelError(
                f"MeanField(): handlers.scale around '{name}' weighs densities of {own}, but not "
                "their entropy, so log_evidence is not a bound. Repeat rows of whole-number "
                f"weights, or sum {own} out of a row's density (MixtureSameFamily) and use NUTS()."
            )


def _is_scaled(scale, others: bool) -> bool:
    return scale is not None and (not np.all(np.equal(scale, 1)) or (others and np.ndim(scale) > 0))


def _is_masked_label(site: dict, others: bool) -> bool:
    mask = mask_of(site["fn"])
    masked = not bool(jnp.all(mask)) or (others and mask.ndim > 0)
    return masked and unwrap(site["fn"]).support.is_discrete
