"""Proofs about a likelihood of one or several functions: each datum depends on its own row of them,
and of a linear predictor; the likelihood is a sum of terms of one function; row n of each layer
depends only on row n of what lies below.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.deep.latents import latent_form
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import IN_ORDER, LISTED, DataError, NotPointwiseError
from ppl_gp.gp import unwrap
from ppl_gp.quick import quick_jit
from ppl_gp.reading.factors import JointLogLikelihood, LogLikelihood, require_equal_rows
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.roles import is_gp, is_observed, log_prob_per_datum
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.expectation import flatten

# where what couples them has no axis of the data
ONE_NUMBER = (
    " If no datum couples them: data are the rows of the first positional argument, along one axis "
    "of an observed site. If a GP is at a table of places, give an array with one entry per datum "
    "first, model(place, table, y=...); and declare one site in a plate, not a site for each "
    "datum."
)
ROUNDINGS = 1e3  # roundings within which numbers count as equal
_TRIALS = 6  # moves of half of the rows


def probe_joint(log_lik: JointLogLikelihood, shapes: dict, who: str = "SVGP()") -> None:
    """Prove that y_n depends on no value of a latent function but the one in its own row, or raise
    `NotPointwiseError`, which says that `who` needs it.

    `shapes`: {GP site: (*C, N)}. For a diagonal Jacobian J and any v, J v = (J 1) * v. One
    continuous random v finds any off-diagonal entry with probability one (random signs would miss a
    single coupled pair half of the time). Moves of half of the rows find steps, which have no
    slope. Two jvps a function, O(N).
    """
    for name, shape in shapes.items():
        require_equal_rows([name], shape[-1], log_lik.num)
    finite, pointwise, free = _probe_joint(log_lik, tuple(shapes.items()), random.key(7))
    require_finite(finite, "", "random values of f")
    if not (bool(jnp.all(pointwise)) and bool(free)):
        bad = np.flatnonzero(~np.asarray(pointwise))[:3].tolist()
        raise NotPointwiseError(
            f"the likelihood of site {_coupled_sites(log_lik, shapes)} couples values of latent "
            "functions: the density of a datum depends on values at other rows than its "
            f"own{f' (data {bad}, ...)' if bad else ''}, and {who} needs log p(y|f) = sum_n log "
            f"p(y_n|f_n). {IN_ORDER} {LISTED}{'' if bad else ONE_NUMBER}"
        )


def _coupled_sites(log_lik: JointLogLikelihood, shapes: dict) -> list[str]:
    """The observed sites of which one slope in all functions shows it, or a step."""
    f = {
        k: random.normal(random.fold_in(random.key(8), i), s)
        for i, (k, s) in enumerate(shapes.items())
    }
    v = random.normal(random.key(9), (log_lik.num,))

    def coupled(name):
        part = lambda f: log_prob_per_datum(log_lik.trace(f)[name])  # noqa: E731
        along, rows = (
            jax.jvp(part, (f,), ({k: jnp.broadcast_to(d, s) for k, s in shapes.items()},))[1]
            for d in (v, jnp.ones_like(v))
        )
        if jnp.ndim(along) == 0:
            return bool(along != 0)
        steps = not bool(jnp.all(unmoved(part, f, random.key(10))))
        return steps or not bool(jnp.allclose(along, rows * v))

    observed = [k for k, s in log_lik.trace(f).items() if is_observed(s)]
    return [k for k in observed if coupled(k)] or observed


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
        return jnp.abs(moved - alone) <= ROUNDINGS * jnp.finfo(scale.dtype).eps * (1.0 + scale)

    def functions(name):
        return jnp.arange(math.prod(f[name].shape[:-1]))

    rows = [jnp.all(lax.map(lambda c, k=k: sees_its_own_row(k, c), functions(k)), 0) for k in names]
    rows.append(unmoved(log_lik, f, keys[1]))
    shared, slopes = jax.value_and_grad(log_lik.shared)(f)
    free = jnp.all(jnp.stack([jnp.all(g == 0) for g in jax.tree.leaves(slopes)]))
    finite = jnp.isfinite(log_lik(f) + shared) & ~jnp.isnan(along(f))
    return finite, jnp.all(jnp.stack(rows), 0), free


def is_additive(log_lik: Callable, shapes: dict) -> bool:
    """Whether log p(y_n | f_n) is a sum of terms that see one function each: no curvature between
    functions. O(log F) jvps.
    """
    if sum(math.prod(s[:-1]) for s in shapes.values()) < 2:
        return False
    outside, all_of_it = _curvature_outside(log_lik, tuple(shapes.items()), random.key(12))
    return bool(jnp.all(outside <= ROUNDINGS * jnp.finfo(all_of_it.dtype).eps * (1.0 + all_of_it)))


@quick_jit
def _curvature_outside(log_lik: Callable, shapes: tuple, key):
    """The largest second derivative between functions of different sets, and of all."""
    f = {k: random.normal(random.fold_in(key, i), s) for i, (k, s) in enumerate(shapes)}
    rows, rebuild = flatten(f)
    slope = jax.grad(lambda rows: jnp.sum(log_lik(rebuild(rows))))

    def between(bit):
        inside = ((jnp.arange(len(rows)) >> bit) & 1).astype(rows.dtype)[:, None]
        along = jax.jvp(slope, (rows,), (inside * random.normal(random.key(11), rows.shape),))[1]
        return jnp.max(jnp.abs((1.0 - inside) * along)), jnp.max(jnp.abs(along))

    # Any two functions differ in one bit of their numbers.
    return lax.map(between, jnp.arange(max(1, (len(rows) - 1).bit_length())))


_CAUSE = "look at what their distribution is computed from (of an exposure of zero: 0 log 0 = NaN)"


def listed(rows) -> str:
    """The first rows of a mask (N,) as text, and how many there are."""
    bad = np.flatnonzero(np.asarray(rows))
    return f"{bad[:5].tolist()}{f', ... ({len(bad)} rows)' if len(bad) > 5 else ''}"


def require_finite(rows, of: str, where: str, cause: str = _CAUSE) -> None:
    """Raise `DataError` if terms of the log-likelihood, or their slopes, are not finite."""
    if not np.all(rows):
        raise DataError(
            f"the log-likelihood of row(s) {listed(~np.asarray(rows))}{of}, or its slope, is not "
            f"finite at {where}: {cause}; leave such rows out."
        )


def unmoved(log_lik, f, key):
    """Whether each term stays where it is while a random half of the *other* values moves far, up
    and down, (N,): what slopes cannot see, a step at the mean of f, say.
    """
    rows = jax.tree.leaves(f)[0].shape[-1]

    def moved(trial):
        key_rows, key_size = random.split(random.fold_in(key, trial))
        moves = random.bernoulli(key_rows, 0.5, (rows,)) & (trial > 0)
        size = (
            jnp.where(trial % 2 == 0, 1.0, -1.0)
            * 4.0 ** (trial // 2)
            * random.uniform(key_size, (rows,), minval=0.5)
        )
        there = log_lik(jax.tree.map(lambda x: x + (moves * size).astype(x.dtype), f))
        return moves, there

    # The values where nothing moved come from the same program: terms in float32, as of integer
    # counts of 32 bits, are rounded differently by another one.
    moves, there = lax.map(moved, jnp.arange(_TRIALS + 1))
    here = there[0]
    close = jnp.abs(there - here) <= ROUNDINGS * jnp.finfo(here.dtype).eps * (1.0 + jnp.abs(here))
    return jnp.all(moves | close | ~jnp.isfinite(here), 0)


def probe(log_lik: LogLikelihood) -> None:
    """Prove that the likelihood is pointwise, or raise `NotPointwiseError` naming the site."""
    functions = () if log_lik.functions == 1 else (log_lik.functions,)
    probe_joint(log_lik.joint, {log_lik.site: (*functions, log_lik.num)}, "a local method")


def probe_predictor(model: Collapsed, prior: PredictorGP) -> None:
    """Prove that row n of the predictor sees row n alone of what stands one a datum, or raise
    `NotPointwiseError`. Two jvps a site, O(N).
    """
    # One row is traced as two: what sees its double has another evidence there.
    rows = prior.X if len(prior.X) > 1 else jnp.concatenate([prior.X, prior.X])
    apart = np.asarray(_rows_of_predictor(prior.kernel, rows))[: len(prior.X)]
    if not apart.all():
        raise NotPointwiseError(
            f"the linear predictor of data {np.flatnonzero(~apart)[:3].tolist()}, ... sees other "
            f"rows of {[k for k, _ in model.plan.axes]} than its own (a permutation, a cumulative "
            f"sum, a mean over the data). {IN_ORDER} {LISTED}"
        )


@quick_jit
def _rows_of_predictor(kernel, X):
    return jnp.broadcast_to(kernel.model.rows_apart(kernel, X), (len(X),))


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
            f"over the data, say), so that minibatches would not be unbiased. {LISTED}"
        )
    return is_additive(log_lik, outer)


def _data_axes(trace, names, num) -> tuple:
    gps = {k: len(trace[k]["fn"].shape()) - 1 for k in names if is_gp(trace[k])}
    return tuple((k, gps[k] if k in gps else latent_form(trace[k], num)[0]) for k in names)


@quick_jit
def _rows_are_apart(model, structure: Structure, hyper, below, batch: Batch, axes):
    """Move a random half of the rows: inputs and likelihood of the others may not change."""
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
