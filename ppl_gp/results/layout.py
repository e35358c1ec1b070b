"""What a model declares at new inputs, found once in Python before anything is compiled."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Bool
from numpyro import handlers
from numpyro.distributions import constraints

from ppl_gp.deep.structure import feeds
from ppl_gp.errors import DataError, PplGpError
from ppl_gp.gp import unwrap
from ppl_gp.tracing import data_axis, is_gp, pin

MAX_SUPPORT = 1000  # outcomes beyond which probabilities are not enumerated


@dataclass(frozen=True)
class ObservedSite:
    """A site that was observed in training and is predicted now."""

    name: str  # in the trace
    label: str  # for the user: `name` without the "_observed" of an obs_mask
    axis: int | None  # of the data in the batch shape; None where one event holds all data
    support: tuple[int | float, ...] | None  # the outcomes, where they are finitely many scalars
    boolean: bool


@dataclass(frozen=True)
class Layout:
    """Static facts about a prediction. `num` is M, the number of rows of X_new."""

    sites: tuple[ObservedSite, ...]
    local_latents: tuple[str, ...]  # one a datum, so that those at new inputs are drawn anew
    num: int
    inner: tuple[str, ...] = ()  # GP sites that feed another GP


def layout(model, args: tuple, kwargs: dict, hyper: dict, num: int, latents: tuple[str, ...] = ()) -> Layout:
    """Read the layout off one run of the model at new inputs, GP sites at their prior means. O(M).

    `latents`: sites that are known to stand one a datum, beside those whose values in `hyper` do.

    Raises `DataError` where the model cannot be run with these arguments.
    """
    trace = _run(model, args, kwargs, hyper)
    predicted = {k: s for k, s in trace.items() if _is_predicted(k, s, trace, (*hyper, *latents))}
    sites = [_observed_site(k, s, trace, num) for k, s in predicted.items() if _holds_data(s, num)]
    plates = {f.name for site in sites for f in trace[site.name]["cond_indep_stack"] if f.size == num}
    local = [k for k in hyper if k in trace and any(f.name in plates for f in trace[k]["cond_indep_stack"])]
    gps = tuple(k for k, s in trace.items() if is_gp(s))

    def rerun(values):
        return _run(model, args, kwargs, {**hyper, **values})

    inner = tuple(g for g in gps if len(gps) > 1 and feeds(g, gps, trace, rerun))
    return Layout(tuple(sites), (*local, *latents), num, inner)


def _run(model, args, kwargs, hyper):
    def given(site):
        # A value of another shape belongs to the training data: a local latent, drawn anew at new inputs.
        value = hyper.get(site["name"])
        if value is None or site["type"] != "sample" or jnp.shape(value) == site["fn"].shape():
            return value
        return None

    seeded = handlers.seed(model, random.key(0))
    try:
        with handlers.block():
            return handlers.trace(pin(handlers.substitute(seeded, substitute_fn=given))).get_trace(*args, **kwargs)
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, PplGpError):
            raise
        shapes = [jnp.shape(a) for a in jax.tree.leaves((args, kwargs)) if hasattr(a, "shape")]
        raise DataError(
            f"the model does not run at the new inputs (array arguments of shapes {shapes}): {error} Give every array "
            "one entry a row of X_new, and take sizes in the model from X (numpyro.plate('data', X.shape[0]))."
        ) from error


def _is_predicted(name, site, trace, known) -> bool:
    if site["type"] != "sample":
        return False
    imputed = name.endswith("_unobserved") and name.removesuffix("_unobserved") + "_observed" in trace
    return not (site["is_observed"] or is_gp(site) or name in known or imputed)


def _holds_data(site, num) -> bool:
    fn = bare(site["fn"])
    return data_axis(site, fn.batch_shape, num) is not None or fn.event_shape[:1] == (num,)


def _observed_site(name, site, trace, num) -> ObservedSite:
    fn = bare(site["fn"])
    masked = name.endswith("_observed") and name.removesuffix("_observed") + "_unobserved" in trace
    axis = data_axis(site, fn.batch_shape, num)
    axis = axis if axis is None else axis + len(fn.batch_shape)
    label = name.removesuffix("_observed") if masked else name
    return ObservedSite(name, label, axis, _support(fn), unwrap(fn).support is constraints.boolean)


def bare(fn: dist.Distribution) -> dist.Distribution:
    """The distribution without masks and `to_event`, at its full batch shape."""
    core, shape = unwrap(fn), fn.shape()
    return core.expand(shape[: len(shape) - core.event_dim])


def mask_of(fn: dist.Distribution) -> Bool[Array, "..."]:
    """Which entries count, by every mask around a distribution; broadcasts against the batch shape of `bare(fn)`."""
    mask = jnp.ones((), bool)
    while fn is not unwrap(fn):
        if isinstance(fn, dist.MaskedDistribution):
            mask = mask & fn._mask
        if isinstance(fn, dist.Independent) and mask.ndim:
            mask = mask.reshape(mask.shape + (1,) * fn.reinterpreted_batch_ndims)
        fn = fn.base_dist  # pyright: ignore[reportAttributeAccessIssue]
    return mask


def _support(fn) -> tuple[int | float, ...] | None:
    core = unwrap(fn)
    if core.event_dim or not core.has_enumerate_support:
        return None
    try:
        values = np.ravel(core.enumerate_support(expand=False))
    except NotImplementedError:  # a binomial with totals that differ, say
        return None
    return tuple(values.tolist()) if values.size <= MAX_SUPPORT else None
