"""The sites of a trace by the role they play, what is asked of them and of its plates, and what a
site says of each datum: where its axis of the data is, and sums of all other axes.
"""

import math
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions.distribution import validation_enabled

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, bare, hidden_axes, mask_of, unwrap


def is_gp(site) -> bool:
    """Whether a site is an unobserved Gaussian process."""
    is_latent = site["type"] == "sample" and not site["is_observed"]
    return is_latent and isinstance(unwrap(site["fn"]), GP)


def is_observed(site) -> bool:
    """Whether a site is part of the likelihood, as data and each `numpyro.factor` are."""
    return site["type"] == "sample" and site["is_observed"]


def cannot_be_drawn(site: dict) -> bool:
    """Whether a site's distribution has no draws, such as `ImproperUniform`."""
    is_other = site["type"] == "sample" and not is_gp(site)
    return is_other and type(unwrap(site["fn"])).sample is dist.Distribution.sample


def is_factor(site) -> bool:
    """Whether a site is a `numpyro.factor`: a term of the log density that observes nothing."""
    return is_observed(site) and isinstance(unwrap(site["fn"]), dist.Unit)


def is_missing_part(name: str, trace: dict) -> bool:
    """Whether a site stands for the observations that an `obs_mask` leaves out."""
    return name.endswith("_unobserved") and name.removesuffix("_unobserved") + "_observed" in trace


def is_whole(site: dict) -> bool:
    """Whether no `scale` or `mask` handler around a site changes its prior."""
    scale, fn = site["scale"], site["fn"]
    while fn is not unwrap(fn):
        masked = isinstance(fn, dist.MaskedDistribution)
        if masked and not (isinstance(fn._mask, bool) and fn._mask):
            return False
        fn = fn.base_dist
    return scale is None or (jnp.ndim(scale) == 0 and scale == 1)


class Roles(NamedTuple):
    """Names of a trace's sites by role."""

    gps: tuple[str, ...]
    observed: tuple[str, ...]
    hyper: tuple[str, ...]
    params: tuple[str, ...]
    local_latents: tuple[str, ...]


def roles(trace: dict) -> Roles:
    """Sort the sites of a declared model: GP sites, observed sites, hyperparameters,
    `numpyro.param`s, per-datum latents.

    `<y>_unobserved` of NumPyro's `obs_mask` is a prediction that integrates to one: it has no role.
    """
    latent = [k for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]
    free = [k for k in latent if not (is_gp(trace[k]) or is_missing_part(k, trace))]
    return Roles(
        tuple(k for k in latent if is_gp(trace[k])),
        tuple(k for k, s in trace.items() if is_observed(s)),
        tuple(k for k in free if trace[k]["data_axis"] is None),
        tuple(k for k, s in trace.items() if s["type"] == "param"),
        tuple(k for k in free if trace[k]["data_axis"] is not None),
    )


def data_plates(trace: dict) -> set[str]:
    """Names of the plates of the data in the trace of a declared model."""
    sites = [s for s in trace.values() if s["type"] == "sample" and s["data_axis"] is not None]
    return {f.name for s in sites for f in s["cond_indep_stack"] if f.dim == s["data_axis"]}


def plate_scale(trace: dict) -> float:
    """N / B of the data's plates that subsample in the model itself; 1 where none does."""
    plates, parts = data_plates(trace), subsampling(trace).items()
    return float(math.prod(size / batch for k, (size, batch) in parts if k in plates))


def subsampling(trace: dict) -> dict[str, tuple]:
    """{plate of the model that subsamples: (its rows, rows of a batch)}."""
    plates = {k: s["args"] for k, s in trace.items() if s["type"] == "plate"}
    return {k: sizes for k, sizes in plates.items() if sizes[1] not in (None, sizes[0])}


def require_no_subsampling(trace: dict, method: str) -> None:
    """Raise `ModelError` where a plate of the model subsamples: `method` takes all data."""
    for name, (size, batch) in subsampling(trace).items():
        raise ModelError(
            f"plate '{name}' subsamples {batch} of {size} rows, and {method} takes all data "
            "in every step; leave subsample_size out, or fit by SVGP()."
        )


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


def log_prob_per_datum(site):
    """A site's log p with `scale` and `mask`, nats, summed to (N,); to () without a data axis."""
    fn, value = site["fn"], site["value"]
    # `to_event` took the data axis
    hidden = site["data_axis"] is not None and site["data_axis"] >= 0
    log_prob = (
        jnp.where(mask_of(fn), bare(fn).log_prob(value), 0.0) if hidden else fn.log_prob(value)
    )
    if (scale := site["scale"]) is not None:
        more = jnp.ndim(log_prob) - len(fn.batch_shape)  # axes that `to_event` took
        log_prob = log_prob * jnp.reshape(scale, (*jnp.shape(scale), *[1] * more))
    return sum_per_datum(site, log_prob)


def sum_per_datum(site, values):
    """Values of the batch shape of fn or `bare(fn)`, summed to (N,); to () without a data axis."""
    ndim = jnp.ndim(values)
    if (axis := data_axis(site, ndim)) is None:
        return jnp.sum(values)
    return jnp.sum(values, tuple(i for i in range(ndim) if i != axis + ndim))


def data_axis(site, ndim: int) -> int | None:
    """The axis of the data, negative, in an array of the batch shape of fn or `bare(fn)`."""
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
