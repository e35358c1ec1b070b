"""The first run of a model: every observation is checked against its distribution's shape, support
and dtype, and every row for a log-likelihood that is a number. Then whether a likelihood is finite,
and a sum of terms of one function.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import mask_of, unwrap
from ppl_gp.numerics.blocks import flatten
from ppl_gp.quick import quick_jit
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.dependence import depends
from ppl_gp.reading.factors import JointLogLikelihood, LogLikelihood, require_equal_rows
from ppl_gp.reading.interactions import dependence
from ppl_gp.reading.predictor.skeleton import require_apart
from ppl_gp.reading.reading import declare
from ppl_gp.reading.refusals import VALUE_WANTED, require_dtype, require_observations
from ppl_gp.reading.roles import (
    cannot_be_drawn,
    is_factor,
    log_prob_per_datum,
    roles,
    sum_per_datum,
)
from ppl_gp.reading.tracing import reading_of, run, run_at_once
from ppl_gp.sparse.bound import Batch


def probe_finite(log_lik: JointLogLikelihood, shapes: dict) -> None:
    """Raise `DataError` where terms or slopes are not finite at random f, {site: shape}, O(N), or
    terms of no row at many draws: a constraint of hyperparameters may exclude the first.
    """
    rows, shared = _finite(log_lik, tuple(shapes.items()), random.key(7))
    require_finite(rows, "", "random values of f")
    found = {} if shared else _terms_of_no_row(log_lik, random.key(8))
    if found and not np.any(np.all(np.stack([*found.values()]), 0)):
        names = [k for k, finite in found.items() if not np.any(finite)] or [*found]
        raise DataError(
            f"the log density of site(s) {names}, which belong to no row, is not finite at any of "
            f"{_DRAWS} draws of the hyperparameters. If it is a constraint, choose priors that "
            "satisfy it more often, or a local method with hyper=MAP(init={...})."
        )


@quick_jit
def _finite(log_lik: JointLogLikelihood, shapes: tuple, key):
    keys = random.split(key, 2)
    f = {k: random.normal(random.fold_in(keys[0], i), s) for i, (k, s) in enumerate(shapes)}
    slopes = jax.jvp(log_lik, (f,), (jax.tree.map(jnp.ones_like, f),))[1]
    return jnp.isfinite(log_lik(f)) & ~jnp.isnan(slopes), jnp.isfinite(log_lik.shared(f))


@quick_jit
def _terms_of_no_row(log_lik: JointLogLikelihood, key) -> dict:
    """{observed site of no row: whether its term is finite, at draws of the prior}."""
    first = log_lik.trace(None)
    drawn = [k for k in roles(first).hyper if not cannot_be_drawn(first[k])]
    known = {k: x for k, x in log_lik.hyper.items() if k not in drawn}

    def one(key):
        trace = run(log_lik.model, log_lik.args, log_lik.kwargs, known, key=key)
        terms = {k: log_prob_per_datum(trace[k]) for k in roles(trace).observed}
        return {k: jnp.isfinite(x) for k, x in terms.items() if not x.ndim}

    return jax.lax.map(one, random.split(key, _DRAWS))


def is_additive(log_lik: Callable, shapes: dict) -> bool:
    """Whether log p(y_n | f_n) is proved a sum of terms of one function each, for any data."""
    if sum(math.prod(s[:-1]) for s in shapes.values()) < 2:
        return False
    rows, rebuild = flatten({k: jnp.zeros(s) for k, s in shapes.items()})
    met = dependence(lambda rows: log_lik(rebuild(rows)), len(rows), rows).coupled
    return not np.any(met & ~np.eye(len(rows), dtype=bool))


_CAUSE = "look at what their distribution is computed from (of an exposure of zero: 0 log 0 = NaN)"


def listed(rows) -> str:
    """The first rows of a mask (N,) as text, and how many there are."""
    bad = np.flatnonzero(np.asarray(rows))
    return f"{bad[:5].tolist()}{f', ... ({len(bad)} rows)' if len(bad) > 5 else ''}"


def require_finite(rows, of: str, where: str, cause: str = _CAUSE) -> None:
    """Raise `DataError` if terms of the log-likelihood, or their slopes, are not finite."""
    if not np.all(np.asarray(rows)):
        raise DataError(
            f"the log-likelihood of row(s) {listed(~np.asarray(rows))}{of}, or its slope, is not "
            f"finite at {where}: {cause}; leave such rows out."
        )


def probe(log_lik: LogLikelihood) -> None:
    """Require finite terms, and that rows see functions at their own row alone, and priors none."""
    reading_of(log_lik.joint.model).require_pointwise("a local method", (log_lik.site,))
    functions = () if log_lik.functions == 1 else (log_lik.functions,)
    probe_finite(log_lik.joint, {log_lik.site: (*functions, log_lik.num)})


def probe_layers(model, structure: Structure, hyper: dict, trace: dict, batch: Batch) -> bool:
    """Require rows that see none but themselves, and finite terms. `is_additive` of outer sites."""
    num, reading = batch.weights.shape[0], reading_of(model)
    for name in structure.outer:
        require_equal_rows([name], trace[name]["fn"].shape()[-1], num, reading.in_order)
    reading.require_pointwise("SVGP()", structure.gps)
    below = {k: trace[k]["value"] for k in (*structure.latents, *structure.inner)}
    below = {
        k: v
        + random.normal(random.fold_in(random.key(9), i), jnp.shape(v)) * (k in structure.inner)
        for i, (k, v) in enumerate(below.items())
    }
    log_lik = JointLogLikelihood(model, num, {**hyper, **below}, batch.args, batch.kwargs)
    outer = {k: tuple(trace[k]["fn"].shape()) for k in structure.outer}
    probe_finite(log_lik, outer)
    return is_additive(log_lik, outer)


_DRAWS = 20  # of the prior, in which a row has no log-likelihood before it is named


def first_trace(model, args, kwargs, hyper=None) -> dict:
    """The model's trace, with every observed value checked against its distribution's shape,
    support and dtype. Raises `ModelError` where nothing is observed that could be.
    """
    trace = checked_trace(model, args, kwargs, hyper)
    require_observations(model, args, kwargs, trace)
    return trace


def checked_trace(model, args, kwargs, hyper=None) -> dict:
    """As `first_trace`, also of a model that observes nothing."""
    trace = observed_trace(model, args, kwargs, hyper)
    require_numbers(model, args, kwargs, trace, hyper)
    return trace


def observed_trace(model, args, kwargs, hyper=None) -> dict:
    """As `checked_trace`; rows may be left that have no log-likelihood (`require_numbers`)."""
    model = declare(model, args, kwargs) if reading_of(model) is None else model
    trace = run_at_once(model, args, kwargs, hyper)
    for name in _judged(model, args, kwargs, trace):
        require_dtype(name, trace[name], Leaves(model, args, kwargs))
    if jnp.result_type(float) == np.float32:
        _require_precision(trace, Leaves(model, args, kwargs).arrays)
    return trace


def _require_precision(trace: dict, arrays: dict) -> None:
    """Raise `DataError` where a GP's inputs, in any unit, are whole numbers that float32 rounds."""
    inputs = [np.asarray(unwrap(trace[k]["fn"]).X) for k in roles(trace).gps]
    columns = [u for X in inputs for u in np.reshape(X, (len(X), -1)).T]
    whole = {p: np.asarray(x) for p, x in arrays.items() if x.dtype.kind in "iu" and x.ndim}
    for path, x in whole.items():
        for c in np.reshape(x, (len(x), -1)).T:
            own = [(u, c.astype(float)) for u in columns if u.shape == c.shape]
            if any(np.allclose(u * v[-1], v * u[-1], rtol=1e-6, atol=0.0) for u, v in own):
                require_apart(path, c)


def _judged(model, args, kwargs, trace: dict) -> dict[str, bool]:
    """{observed site: whether its support moves with latents}, each checked."""
    names = [k for k in roles(trace).observed if not is_factor(trace[k])]
    given = partial(_given, model, args, kwargs, trace)
    return {k: _check_observed(k, trace, given) for k in names}


def require_numbers(model, args, kwargs, trace: dict, hyper=None) -> None:
    """Raise `DataError` for rows of observed sites that have no log-likelihood, or no slope of it,
    at plain values of the latents, nor at any of several prior draws, f random.

    One point alone proves nothing: under a wide prior a rate may overflow at a draw. O(N).
    """
    model = declare(model, args, kwargs) if reading_of(model) is None else model
    names = [k for k, moves in _judged(model, args, kwargs, trace).items() if not moves]
    undrawn = {k: trace[k]["value"] for k in roles(trace).hyper if cannot_be_drawn(trace[k])}
    inputs = model, args, kwargs, dict(hyper or {}) | undrawn, names
    bad = dict.fromkeys(names, np.True_)
    with numpyro.validation_enabled(False):  # which raises for the parameters of any row
        for i in range(_DRAWS) if names else ():
            found = _numbers(*inputs, random.key(i), plain=i == 0)
            bad = {k: x & ~np.asarray(found[k]) for k, x in bad.items()}
            if not any(map(np.any, bad.values())):
                return
    for name, rows in bad.items():
        _require_number(name, rows, trace[name])


def _require_number(name: str, rows, site: dict) -> None:
    """Raise `DataError` where there are `rows` without a log-likelihood."""
    fn, value = unwrap(site["fn"]), np.asarray(site["value"])
    at_edge = [] if _has_edge(fn) or value.shape != rows.shape else value[rows]
    cause = f"{at_edge[:5]} are where the density of {type(fn).__name__} is zero or infinite"
    where = (f" of site '{name}'", f"{_DRAWS} values of the latent sites")
    require_finite(~rows, *where, *([cause] if len(at_edge) else []))


@quick_jit
def _numbers(model, args, kwargs, known: dict, names: list[str], key, plain: bool) -> dict:
    """{site: whether each datum's log-likelihood is finite, and its slope a number}."""
    first = run(model, args, kwargs, known)
    found, values = roles(first), {**(_plain_values(first) if plain else {}), **known}
    means = {k: first[k]["value"] for k in found.gps}
    f = {k: x + random.normal(key, jnp.shape(x)) for k, x in means.items()}
    there = run(model, args, kwargs, values, f, key)
    at = {k: there[k]["value"] for k in (*found.gps, *found.hyper, *found.local_latents)}
    moving = {k: x for k, x in at.items() if jnp.issubdtype(jnp.result_type(x), jnp.floating)}

    def terms(x):
        again = run(model, args, kwargs, {**values, **at, **x}, key=key)
        return {k: log_prob_per_datum(again[k]) for k in names}

    terms, slopes = jax.jvp(terms, (moving,), (jax.tree.map(jnp.ones_like, moving),))
    return jax.tree.map(lambda x, slope: jnp.isfinite(x) & ~jnp.isnan(slope), terms, slopes)


def _given(model, args, kwargs, trace: dict, latent: dict) -> dict:
    """The trace at given latents, without handlers around the model: they may look at values."""
    while isinstance(model, Messenger):
        model = model.fn
    params = {k: trace[k]["value"] for k in roles(trace).params}
    return run(model, args, kwargs, params | latent)


def _plain_values(trace: dict) -> dict:
    """{latent site, without GPs: the first value that its support names}, zero if it is real."""
    found, plain = roles(trace), {}
    for name in (*found.hyper, *found.local_latents):
        with suppress(NotImplementedError):  # its draw by the fixed key
            zeros = jnp.zeros_like(trace[name]["value"])
            plain[name] = trace[name]["fn"].support.feasible_like(zeros)
    return plain


def _has_edge(fn) -> bool:
    """Whether a parameter of a distribution is zero, where it is a rate, or infinite."""
    for k, constraint in fn.arg_constraints.items():
        number, is_rate = np.asarray(getattr(fn, k, 1.0)), hasattr(constraint, "lower_bound")
        if not np.all(np.isfinite(number)) or (is_rate and not np.all(number)):
            return True
    return False


def _check_observed(name, trace, rerun) -> bool:
    """Whether the support of the site moves with latent values, so that it was not judged."""
    site = trace[name]
    fn, value = site["fn"], site["value"]
    if jnp.shape(value) != tuple(fn.shape()):
        raise DataError(
            f"site '{name}' observes a value of shape {jnp.shape(value)} where its distribution "
            f"has shape {tuple(fn.shape())}; {_remedy_of_shape(site, trace)}"
        )
    inner = unwrap(fn)
    if inner.support is None:
        raise ModelError(
            f"site '{name}': {type(inner).__name__} has no support; declare in the class which "
            "values it takes, support = constraints.real."
        )
    checked = inner.support(np.asarray(value))  # on the host: nothing is compiled
    inside = np.broadcast_to(checked, np.shape(value)[: np.ndim(checked)])
    if not np.all(inside | ~np.asarray(mask_of(fn))):
        # Judged at one point, where y need not be possible; elsewhere NumPyro's validation judges.
        if inner._validate_args and _has_moving_support(name, rerun, trace):
            return True
        outside = ~inside & np.asarray(mask_of(fn))
        rows = sum_per_datum(site, outside)
        where = f" in row(s) {listed(rows > 0)}" if np.ndim(rows) else ""
        remedy = "correct these rows or leave them out"
        if inner.support is constraints.boolean:
            remedy = "recode the observations (binary labels are 0 and 1, not -1 and 1)"
        with np.printoptions(threshold=5, edgeitems=2):
            raise DataError(
                f"site '{name}' observes {np.asarray(value)[outside][:3].tolist()}{where}, "
                f"outside the support of {type(inner).__name__} ({inner.support}); {remedy}."
            )
    return False


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
                f"y has one entry per row of '{name}' {tuple(site['fn'].shape())}: use f as it is, "
                "without f[:, None], and declare other axes (units, repetitions) by plates."
            )
    if len(shape) == 1 < shape[0] and wanted == 2 * shape:
        return (
            "in the model an array of shape (N, 1) meets one of shape (N,): give "
            "one entry per row, X[:, 0], or write x[:, 0] in the model."
        )
    return "give one observation per row of X, y of shape (N,) rather than (N, 1)."


def _has_moving_support(name: str, rerun, trace: dict) -> bool:
    """Whether the support of an observed site is computed from a latent one; not of a model that
    looks at the values, which no method takes.
    """

    def support(latent):
        return jax.tree.leaves(unwrap(rerun(latent)[name]["fn"]).support)

    try:
        found = roles(trace)
        latent = (*found.gps, *found.hyper, *found.local_latents)
        return depends(support, {k: trace[k]["value"] for k in latent})
    except VALUE_WANTED:
        return False
