"""What a guide draws, against what its model samples: looked at before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ppl_gp.errors import ModelError
from ppl_gp.gp import unwrap
from ppl_gp.reading.refusals import VALUE_WANTED
from ppl_gp.reading.roles import is_missing_part, subsampling

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
    is_sampled = site["type"] == "sample" and not site["is_observed"]
    return is_sampled and not is_missing_part(name, trace)


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
