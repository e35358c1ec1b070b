"""The first run of a model: every observation is checked against its distribution's shape, support
and dtype.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError
from ppl_gp.gp import unwrap
from ppl_gp.model.arguments import Leaves
from ppl_gp.model.declared import declare
from ppl_gp.model.forgotten import require_observations
from ppl_gp.model.observed_dtype import require_dtype
from ppl_gp.model.roles import is_factor, roles
from ppl_gp.model.tracing import reading_of, run
from ppl_gp.model.user_errors import VALUE_WANTED
from ppl_gp.proofs.dependence import depends


def first_trace(model, args, kwargs, hyper=None) -> dict:
    """The model's trace, with every observed value checked against its distribution's shape,
    support and dtype. Raises `ModelError` where nothing is observed that could be.
    """
    trace = checked_trace(model, args, kwargs, hyper)
    require_observations(model, args, kwargs, trace)
    return trace


def checked_trace(model, args, kwargs, hyper=None) -> dict:
    """As `first_trace`, also of a model that observes nothing."""
    declared = declare(model, args, kwargs) if reading_of(model) is None else model
    trace = run(declared, args, kwargs, hyper)
    for name in roles(trace).observed:
        _check_observed(name, trace, lambda f: _given(declared, args, kwargs, trace, f))
        require_dtype(name, trace[name], Leaves(declared, args, kwargs))
    return trace


def _given(model, args, kwargs, trace: dict, f: dict) -> dict:
    """The trace again with GP sites given; nothing that stands around the model is asked, which may
    look at values.
    """
    while isinstance(model, Messenger):
        model = model.fn
    found = roles(trace)
    free = (*found.hyper, *found.params, *found.local_latents)
    return run(model, args, kwargs, {k: trace[k]["value"] for k in free}, f)


def _check_observed(name, trace, rerun):
    site = trace[name]
    fn, value = site["fn"], site["value"]
    if is_factor(site):
        return
    if jnp.shape(value) != tuple(fn.shape()):
        raise DataError(
            f"site '{name}' observes a value of shape {jnp.shape(value)} where its distribution "
            f"has shape {tuple(fn.shape())}; {_remedy_of_shape(site, trace)}"
        )
    inner = unwrap(fn)
    checked = inner.support(np.asarray(value))  # on the host: nothing is compiled
    inside = np.broadcast_to(checked, np.shape(value)[: np.ndim(checked)])
    if not np.all(inside | ~np.asarray(_mask(fn))):
        # Judged here at f = 0, where y need not be possible; elsewhere NumPyro's validation judges.
        if inner._validate_args and _has_moving_support(name, rerun, trace):
            return
        bad = np.asarray(value)[~inside].ravel()[:3]
        raise DataError(
            f"site '{name}' observes {bad.tolist()}, outside the support of {type(inner).__name__} "
            f"({inner.support}); recode the observations (binary labels are 0 and 1, not -1 and 1)."
        )


def _remedy_of_shape(observed: dict, trace: dict) -> str:
    """A GP inside a plate of as many members as it has rows is a function for each of them."""
    shape, wanted = jnp.shape(observed["value"]), tuple(observed["fn"].shape())
    for name in roles(trace).gps:
        site = trace[name]
        num = site["fn"].shape()[-1]
        if inside := [f.name for f in site["cond_indep_stack"] if f.size == num > 1]:
            return (
                f"the GP site '{name}' stands inside the plate '{inside[0]}' of the data, which "
                f"makes {num} functions: sample it before `with numpyro.plate(...)`."
            )
        if shape == (num,) and wanted == (num, num) != (1, 1):
            return (
                f"y has one entry a row of '{name}' {tuple(site['fn'].shape())}: use f as it is, "
                "without f[:, None], and declare other axes (units, repetitions) by plates."
            )
    return "give one observation a row of X, y of shape (N,) rather than (N, 1)."


def _has_moving_support(name: str, rerun, trace: dict) -> bool:
    """Whether the support of an observed site is computed from a GP site; not of a model that looks
    at the values of f, which no method takes.
    """

    def support(f):
        return jax.tree.leaves(unwrap(rerun(f)[name]["fn"]).support)

    try:
        return depends(support, {k: trace[k]["value"] for k in roles(trace).gps})
    except VALUE_WANTED:
        return False


def _mask(fn):
    mask = jnp.ones((), bool)
    while fn is not unwrap(fn):
        mask = mask & fn._mask if hasattr(fn, "_mask") else mask
        fn = fn.base_dist
    return mask
