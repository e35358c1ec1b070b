"""What every fit by mean field needs: the log joint of a model, a start, draws of q."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.draws import Draws
from ppl_gp.errors import ModelError
from ppl_gp.gp import mask_of, unwrap
from ppl_gp.kept import FromDraws
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.log_joint import LogJoint
from ppl_gp.mean_field.structure import Structure
from ppl_gp.mean_field.sweep import start
from ppl_gp.quick import quick_jit
from ppl_gp.reading.roles import is_missing_part, roles
from ppl_gp.reading.tracing import bare_trace
from ppl_gp.results.fit import Fit


def log_joint_of(model, trace: dict, args, kwargs, others: bool = False) -> LogJoint:
    """Of all latents and observations of a trace. `ModelError` for params, mutable state, sites
    without elements, and masks around labels; `others`: of rows that follow too, whose masks are
    not known yet.
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


def start_of(init: dict | None, structure: Structure, trace: dict, key) -> list[Family]:
    """A first q: latents drawn by this key, values of `init` where given."""
    joint = structure.joint
    drawn = bare_trace(joint.model, joint.args, joint.kwargs, key=key)
    with_values = {
        k: {**s, "value": drawn[k]["value"]} if k in joint.latents else s
        for k, s in trace.items()
        if k in drawn
    }
    return start(structure, with_values, init or {}, np.random.default_rng(number_of(key)))


def number_of(key) -> int:
    """A seed for what the host draws."""
    return int(np.asarray(random.key_data(key)).ravel()[-1])


def caution_of(q) -> dict[str, str]:
    """What a bound that is no number comes from, where it is known."""
    if not (improper := _improper(q)):
        return {}
    return {
        "caution": f"q of {improper} is no distribution, as where the data do not make up for an "
        "improper prior, or a mask takes both away; give these sites a proper one"
    }


def _improper(q) -> list[str]:
    """Sites of blocks whose moments are no numbers."""
    moments = [jax.tree.leaves(f.coordinates()) for f in q]
    finite = [all(bool(jnp.all(jnp.isfinite(x))) for x in m) for m in moments]
    return [k for f, ok in zip(q, finite, strict=True) if not ok for k in f.sites]


def fit_of(method, model, args, kwargs, trace: dict, key, q: list[Family], bound, ended) -> Fit:
    """The fit behind independent draws of q, those of GP sites apart; `ended`: (result, stats)."""
    values, gps = _drawn(q, key, method.num_draws), roles(trace).gps
    known = {k: x for k, x in values.items() if k not in gps}
    return Fit(
        model=model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal(known, {k: FromDraws(values[k]) for k in gps}),
        log_evidence=bound,
        result=ended[0],
        stats=ended[1],
        sampled=True,
        blocks=tuple(q),
    )


@quick_jit
def _drawn(q: list[Family], key, num: int) -> dict:
    values = {}
    for family, k in zip(q, random.split(key, len(q)), strict=True):
        values |= family.draw(k, num)
    return values
