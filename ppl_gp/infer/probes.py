"""What is checked before anything is computed: arguments, shapes, supports, and that the likelihood
is pointwise.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.primitives import Messenger

from ppl_gp.deep.latents import latent_form
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError, ModelError, NotPointwiseError
from ppl_gp.gp import unwrap
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.declared import declare
from ppl_gp.model.factors import JointLogLikelihood, LogLikelihood, require_equal_rows
from ppl_gp.model.predictor_prior import PredictorGP
from ppl_gp.model.reading import Reading
from ppl_gp.model.tracing import (
    is_factor,
    is_gp,
    is_observed,
    log_prob_per_datum,
    reading_of,
    roles,
    run,
)
from ppl_gp.model.user_errors import VALUE_WANTED
from ppl_gp.proofs.dependence import depends
from ppl_gp.quick import quick_jit
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.expectation import flatten

_ROUNDINGS = 1e3  # roundings within which numbers count as equal
_TRIALS = 6  # moves of half of the rows


def first_trace(model, args, kwargs, hyper=None) -> dict:
    """The model's trace, with every observed value checked against its distribution's shape and
    support.
    """
    declared = declare(model, args, kwargs) if reading_of(model) is None else model
    trace = run(declared, args, kwargs, hyper)
    for name in roles(trace).observed:
        _check_observed(name, trace, lambda f: _given(declared, args, kwargs, trace, f))
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
            f"has shape {tuple(fn.shape())}; give one observation a row of X, y of shape (N,) "
            "rather than (N, 1)."
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


@quick_jit
def _probe(log_lik: LogLikelihood, key):
    f, v = random.normal(key, (2, log_lik.num))
    g, along = jax.jvp(log_lik, (f,), (v,))
    rows = jax.jvp(log_lik, (f,), (jnp.ones_like(f),))[1]
    scale = jnp.abs(along) + jnp.abs(rows * v)
    tolerance = _ROUNDINGS * jnp.finfo(f.dtype).eps * (1.0 + scale)
    constant, shared = jax.value_and_grad(log_lik.shared)(f)
    pointwise = (jnp.abs(along - rows * v) <= tolerance) & _unmoved(log_lik, f, key)
    return jnp.all(jnp.isfinite(g)) & jnp.isfinite(constant), pointwise, jnp.all(shared == 0)


def _unmoved(log_lik, f, key):
    """Whether each term stays where it is while a random half of the *other* values moves far, up
    and down, (N,): what slopes cannot see, a step at the mean of f, say.
    """
    here = log_lik(f)
    rows = jax.tree.leaves(f)[0].shape[-1]

    def stays(trial):
        key_rows, key_size = random.split(random.fold_in(key, trial))
        moves = random.bernoulli(key_rows, 0.5, (rows,))
        size = (
            jnp.where(trial % 2 == 0, 1.0, -1.0)
            * 4.0 ** (trial // 2)
            * random.uniform(key_size, (rows,), minval=0.5)
        )
        there = log_lik(jax.tree.map(lambda x: x + (moves * size).astype(x.dtype), f))
        close = jnp.abs(there - here) <= _ROUNDINGS * jnp.finfo(here.dtype).eps * (
            1.0 + jnp.abs(here)
        )
        return moves | close | ~jnp.isfinite(here)

    return jnp.all(lax.map(stays, jnp.arange(_TRIALS)), 0)


def probe(log_lik: LogLikelihood) -> None:
    """Prove that the likelihood is pointwise, or raise `NotPointwiseError` naming the site.

    For a diagonal Jacobian J and any v, J v = (J 1) * v. One continuous random v finds any
    off-diagonal entry with probability one (random signs would miss a single coupled pair half of
    the time). Moves of half of the rows find steps, which have no slope. Two jvps and a few
    evaluations, O(N).
    """
    if log_lik.functions > 1:
        shape = (log_lik.functions, log_lik.num)
        return probe_joint(log_lik.joint, {log_lik.site: shape}, "a local method")
    finite, pointwise, free = _probe(log_lik, random.key(7))
    if not bool(finite):
        raise DataError(
            "the log-likelihood is not finite at random values of f; check the observations and "
            "the model."
        )
    if not (bool(jnp.all(pointwise)) and bool(free)):
        bad = np.flatnonzero(~np.asarray(pointwise))[:3].tolist()
        raise NotPointwiseError(
            f"the likelihood of site {_coupled_sites(log_lik)} couples values of "
            f"f{f' (data {bad}, ...)' if bad else ' into one number'}; Laplace, EP, VI and "
            "LocalBound need log p(y|f) = sum_n log p(y_n|f_n). Use NUTS() or EllipticalSlice()."
        )


def probe_predictor(model: Collapsed, prior: PredictorGP) -> None:
    """Prove that row n of the predictor sees row n alone of what stands one a datum, or raise
    `NotPointwiseError`. Two jvps a site, O(N).
    """
    if len(prior.X) < 2:
        return
    apart = np.asarray(_rows_of_predictor(prior.kernel, prior.X))
    if not apart.all():
        raise NotPointwiseError(
            f"the linear predictor of data {np.flatnonzero(~apart)[:3].tolist()}, ... sees other "
            f"rows of {[k for k, _ in model.plan.axes]} than its own (a permutation, a cumulative "
            "sum, a mean over the data). Give the GP its inputs in the data's order, GP(kernel, "
            "X[order]), or use NUTS()."
        )


@quick_jit
def _rows_of_predictor(kernel, X):
    return jnp.broadcast_to(kernel.model.rows_apart(kernel, X), (len(X),))


@quick_jit
def _probe_joint(log_lik: JointLogLikelihood, shapes: tuple, key):
    names = [name for name, _ in shapes]
    keys = random.split(key, 2)
    f = {k: random.normal(random.fold_in(keys[0], i), s) for i, (k, s) in enumerate(shapes)}

    def along(directions):
        return jax.jvp(log_lik, (f,), (directions,))[1]

    def sees_its_own_row(name, function):
        """J v = (J 1) * v for a random v, if and only if J of one function is diagonal."""

        def only(x):
            x = jnp.reshape(x, (-1, x.shape[-1]))
            row = jnp.where(jnp.arange(x.shape[0])[:, None] == function, x, 0.0)
            return {
                k: jnp.reshape(row, f[k].shape) if k == name else jnp.zeros_like(f[k])
                for k in names
            }

        direction = random.normal(random.fold_in(keys[1], function), (log_lik.num,))
        moved = along(only(jnp.broadcast_to(direction, f[name].shape)))
        alone = along(only(jnp.ones_like(f[name]))) * direction
        scale = jnp.abs(moved) + jnp.abs(alone)
        return jnp.abs(moved - alone) <= _ROUNDINGS * jnp.finfo(scale.dtype).eps * (1.0 + scale)

    def functions(name):
        return jnp.arange(math.prod(f[name].shape[:-1]))

    rows = [jnp.all(lax.map(lambda c, k=k: sees_its_own_row(k, c), functions(k)), 0) for k in names]
    rows.append(_unmoved(log_lik, f, keys[1]))
    free = jnp.all(
        jnp.stack([jnp.all(g == 0) for g in jax.tree.leaves(jax.grad(log_lik.shared)(f))])
    )
    return jnp.all(jnp.isfinite(log_lik(f))), jnp.all(jnp.stack(rows), 0), free


def probe_joint(log_lik: JointLogLikelihood, shapes: dict, who: str = "SVGP()") -> None:
    """Prove that y_n depends on no value of a latent function but the one in its own row, or raise
    `NotPointwiseError`, which says that `who` needs it.

    `shapes`: {GP site: (*C, N)}. Two jvps a function, O(N).
    """
    for name, shape in shapes.items():
        require_equal_rows([name], shape[-1], log_lik.num)
    finite, pointwise, free = _probe_joint(log_lik, tuple(shapes.items()), random.key(7))
    if not bool(finite):
        raise DataError(
            "the log-likelihood is not finite at random values of f; check the observations and "
            "the model."
        )
    if not (bool(jnp.all(pointwise)) and bool(free)):
        bad = np.flatnonzero(~np.asarray(pointwise))[:3].tolist()
        raise NotPointwiseError(
            "the likelihood of some data sees other values of a latent function than its "
            f"own{f' (data {bad}, ...)' if bad else ''}, and {who} needs log p(y|f) = sum_n log "
            "p(y_n|f_n): it couples rows, or looks them up. Give the GP its inputs in the data's "
            "order, GP(kernel, X[order]), or use NUTS()."
        )


def probe_layers(model, structure: Structure, hyper: dict, trace: dict, batch: Batch) -> bool:
    """Prove that row n of everything sees only row n of the layers and latents before it, or raise
    `NotPointwiseError`.

    Returns whether the likelihood is additive over the outer functions (`is_additive`).
    """
    num = batch.weights.shape[0]
    below = {k: trace[k]["value"] for k in (*structure.latents, *structure.inner)}
    below = {
        k: v
        + random.normal(random.fold_in(random.key(9), i), jnp.shape(v)) * (k in structure.inner)
        for i, (k, v) in enumerate(below.items())
    }
    log_lik = JointLogLikelihood(model, num, {**hyper, **below}, batch.args, batch.kwargs)
    outer = {k: tuple(trace[k]["fn"].shape()) for k in structure.outer}
    probe_joint(log_lik, outer)
    if below and not bool(
        _rows_are_apart(model, structure, hyper, below, batch, _data_axes(trace, below, num))
    ):
        raise NotPointwiseError(
            f"a row of a layer of this model sees other rows of {list(below)} (a normalisation "
            "over the data, say), so that minibatches would not be unbiased. Use NUTS()."
        )
    return is_additive(log_lik, outer)


@quick_jit
def _curvature_outside(log_lik: Callable, shapes: tuple, key):
    """The largest second derivative between functions of different sets, and the largest one of
    all.
    """
    f = {k: random.normal(random.fold_in(key, i), s) for i, (k, s) in enumerate(shapes)}
    rows, rebuild = flatten(f)
    slope = jax.grad(lambda rows: jnp.sum(log_lik(rebuild(rows))))

    def between(bit):
        inside = ((jnp.arange(len(rows)) >> bit) & 1).astype(rows.dtype)[:, None]
        along = jax.jvp(slope, (rows,), (inside * random.normal(random.key(11), rows.shape),))[1]
        return jnp.max(jnp.abs((1.0 - inside) * along)), jnp.max(jnp.abs(along))

    # Any two functions differ in one bit of their numbers.
    return lax.map(between, jnp.arange(max(1, (len(rows) - 1).bit_length())))


def is_additive(log_lik: Callable, shapes: dict) -> bool:
    """Whether log p(y_n | f_n) is a sum of terms that see one function each: no curvature between
    functions. O(log F) jvps.
    """
    if sum(math.prod(s[:-1]) for s in shapes.values()) < 2:
        return False
    outside, all_of_it = _curvature_outside(log_lik, tuple(shapes.items()), random.key(12))
    return bool(jnp.all(outside <= _ROUNDINGS * jnp.finfo(all_of_it.dtype).eps * (1.0 + all_of_it)))


def _data_axes(trace, names, num) -> tuple:
    gps = {k: len(trace[k]["fn"].shape()) - 1 for k in names if is_gp(trace[k])}
    return tuple((k, gps[k] if k in gps else latent_form(trace[k], num)[0]) for k in names)


@quick_jit
def _rows_are_apart(model, structure: Structure, hyper, below, batch: Batch, axes):
    """Move a random half of the rows: the inputs and the likelihood of the others may not
    change.
    """
    num = batch.weights.shape[0]
    moves = random.bernoulli(random.key(10), 0.5, (num,))

    def seen(below):
        trace = run(model, batch.args, batch.kwargs, {**hyper, **below})
        flat = [jnp.reshape(unwrap(trace[k]["fn"]).X, (num, -1)) for k in structure.gps]
        log_lik = JointLogLikelihood(model, num, {**hyper, **below}, batch.args, batch.kwargs)
        outer = {k: jnp.zeros(trace[k]["fn"].shape()) for k in structure.outer}
        return jnp.concatenate([*flat, log_lik(outer)[:, None]], 1)

    directions = {
        k: jnp.moveaxis(jnp.moveaxis(jnp.ones_like(below[k]), a, -1) * moves, -1, a)
        for k, a in axes
    }
    change = jax.jvp(seen, (below,), (directions,))[1]
    return jnp.all(jnp.where(moves[:, None], 0.0, change) == 0.0)


def _coupled_sites(log_lik):
    zero = jnp.zeros((log_lik.num,))
    f, v = random.normal(random.key(8), (2, log_lik.num))

    def part(name):
        return lambda f: log_prob_per_datum(log_lik.trace(f)[name], log_lik.num)

    def coupled(name):
        along, rows = (jax.jvp(part(name), (f,), (d,))[1] for d in (v, jnp.ones_like(f)))
        return bool(along != 0) if jnp.ndim(along) == 0 else not bool(jnp.allclose(along, rows * v))

    return [k for k, s in log_lik.trace(zero).items() if is_observed(s) and coupled(k)]


def require_bounded(
    trace: dict, reading: Reading, method: str, points: Sequence[str] | None = None
) -> None:
    """Raise `ModelError` where a joint maximum does not exist: a site whose spread is itself
    unknown, a group effect say.

    `points`: the sites that are maximised over, where others have a distribution.

    p(u | tau) p(tau) has no upper bound as tau falls and u goes to its location, whatever the data
    say.
    """
    found = roles(trace)
    unknown, sites = {*found.hyper, *found.params}, found.hyper if points is None else points
    for site, spread in reading.spread:
        if site in sites and (by := sorted(unknown.intersection(spread))):
            raise ModelError(
                f"site '{site}' has a spread that is computed from {by}: {method} would maximise "
                "both together, and their joint density has no maximum (it grows without bound "
                f"as the spread falls to zero and '{site}' to its centre). Integrate them: "
                "NUTS(), SparseNUTS(), or a local method with hyper=Sample(); or hold them: "
                f"hyper=Fixed({{...}}); or declare '{site}' with a unit spread and multiply."
            )


def perhaps_unbounded(trace: dict, reading: Reading) -> str | None:
    """What to say where a maximum was not found and may not exist: a site whose variance is itself
    unknown (a gamma frailty, say).

    Such a density need not be unbounded (it depends on the priors' tails), so that it is no ground
    to refuse the model.
    """
    found = roles(trace)
    unknown = {*found.hyper, *found.params}
    wide = {k: sorted(unknown.intersection(by)) for k, by in reading.variance if k in found.hyper}
    wide = {k: by for k, by in wide.items() if by}
    if not wide:
        return None
    named = ", ".join(f"'{k}' has a variance that is computed from {by}" for k, by in wide.items())
    return (
        f"a maximum may not exist: {named}; integrate them by NUTS() or hyper=Sample(), or "
        "hold them by hyper=Fixed({...})"
    )
