"""Steps on a batch of the rows: stochastic variational inference (Hoffman et al. 2013).

The factors of what stands one a datum, the local blocks, are brought to their optimum for the rows
of a batch; each other block then goes a step rho from its natural parameters towards the maximum of

    sum_terms in no row E[log p] + sum_rows of the batch w_n sum_terms E[log p_n],   w_n = N / B,

which is that of all rows on average over batches: its natural gradient is unbiased. All rows in a
batch with a step of one are coordinate ascent.

`RowsProof` is the proof of conjugacy for rows of data that it has not seen: those of later batches.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.errors import LISTED, ModelError, NotConjugateError
from ppl_gp.mean_field.conjugacy import conjugate_again, num_values
from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.expected import Term, expected
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.log_joint import LogJoint
from ppl_gp.mean_field.structure import Structure
from ppl_gp.mean_field.sweep import updated
from ppl_gp.reading.dependence import decides

_MAX_PASSES = 100  # over several local blocks, to their common optimum
_SETTLED = 1e-10  # change of their moments, beside one, below which they are there


class Split(NamedTuple):
    """`local`: (block, axis of the rows in its batch) of what stands one a datum. `of_rows`: terms
    that have an entry per row.
    """

    terms: tuple[Term, ...]
    local: tuple[tuple[int, int], ...]
    of_rows: tuple[str, ...]

    def shared(self, q: list[Family]) -> list[int]:
        """The other blocks."""
        local = {j for j, _ in self.local}
        return [j for j in range(len(q)) if j not in local]


def split(structure: Structure, trace: dict) -> tuple[LogJoint, Split]:
    """The log joint that can weigh rows, and what stands in them, by the annotated trace of a
    batch. `ModelError` where q or a density joins rows.
    """
    axes = {k: trace[k]["data_axis"] for k in structure.joint.terms}
    axes = {k: a for k, a in axes.items() if a is not None}
    if joined := [k for k, a in axes.items() if a >= 0]:
        raise ModelError(
            f"MeanField(batch_size=...): one event of site '{joined[0]}' holds all rows, so that a "
            "batch of them has no density of its own. Declare the site in a plate of the data, or "
            "take all rows, batch_size=None."
        )
    joint = structure.joint._replace(axes=tuple(axes.items()))
    found = [(j, _row_axis(q, axes, trace)) for j, q in enumerate(structure.blocks)]
    local = tuple((j, axis) for j, axis in found if axis is not None)
    return joint, Split(structure.terms, local, tuple(axes))


def _row_axis(q: Family, axes: dict, trace: dict) -> int | None:
    """Of the rows in a block's batch; `None` of a block that stands in no row."""
    at = {len(trace[k]["fn"].batch_shape) + axes[k] if k in axes else None for k in q.sites}
    if at == {None}:
        return None
    axis = at.pop()
    if at or axis is None or axis >= len(q.batch):
        raise ModelError(
            f"MeanField(batch_size=...): the factor of {list(q.sites)} holds several rows of the "
            "data, whose posterior does not factorise over them. Take all rows, batch_size=None."
        )
    return axis


def step(
    joint: LogJoint, parts: Split, q: list[Family], rate: Float[Array, ""]
) -> tuple[list[Family], Float[Array, ""]]:
    """(q after a step on the rows of `joint`, weighted; the bound before it as these rows estimate
    it, nats). `q` has local blocks of as many rows, at any values.
    """
    q = at_local_optimum(joint, parts, q)
    value = shared_bound(joint, parts, q) + rows_bound(joint, parts, q)
    return shared_step(joint, parts, q, rate), value


def shared_step(joint: LogJoint, parts: Split, q: list[Family], rate) -> list[Family]:
    """The blocks in no row, one after another."""
    for j in parts.shared(q):
        q = [*q[:j], updated(joint, parts.terms, q, j, rate), *q[j + 1 :]]
    return q


def at_local_optimum(joint: LogJoint, parts: Split, q: list[Family]) -> list[Family]:
    """Local blocks at the maximum of the bound given the others, which does not depend on the rows'
    weights.
    """
    alone = joint._replace(weights=None)

    def once(q):
        for j, _ in parts.local:
            q = [*q[:j], updated(alone, parts.terms, q, j), *q[j + 1 :]]
        return q

    q = once(q)
    if len(parts.local) < 2:
        return q

    def going(state):
        _, change, num = state
        return (change > _SETTLED) & (num < _MAX_PASSES)

    def again(state):
        before, _, num = state
        after = once(before)
        return after, _change(parts, before, after), num + 1

    return lax.while_loop(going, again, (q, jnp.asarray(jnp.inf), jnp.asarray(1)))[0]


def _change(parts: Split, before: list[Family], after: list[Family]) -> Float[Array, ""]:
    pairs = [(before[j].coordinates(), after[j].coordinates()) for j, _ in parts.local]
    apart = [
        jnp.max(jnp.abs(a - b) / (1.0 + jnp.abs(b)))
        for old, new in pairs
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    ]
    return jnp.max(jnp.stack(apart))


def shared_bound(joint: LogJoint, parts: Split, q: list[Family]) -> Float[Array, ""]:
    """Of the bound what no row has: terms and entropies, nats."""
    terms = tuple(t for t in parts.terms if t.site not in parts.of_rows)
    entropies = [q[j].entropy() for j in parts.shared(q)]
    return _energy(joint, terms, q) + sum(entropies, jnp.zeros(()))


def rows_bound(joint: LogJoint, parts: Split, q: list[Family]) -> Float[Array, ""]:
    """Of the bound what the rows have, each as often as its weight says, nats."""
    terms = tuple(t for t in parts.terms if t.site in parts.of_rows)
    total = _energy(joint, terms, q)
    for j, axis in parts.local:
        each = row_entropies(q[j], axis)
        total = total + jnp.sum(each if joint.weights is None else joint.weights * each)
    return total


def _energy(joint: LogJoint, terms, q: list[Family]) -> Float[Array, ""]:
    coordinates = [f.coordinates() for f in q]
    return sum((expected(joint, t, q, coordinates) for t in terms), jnp.zeros(()))


def row_entropies(q: Family, axis: int) -> Float[Array, "B"]:
    """H of each row's factor, nats."""
    leaves, structure = jax.tree.flatten(q)
    batch = (*q.batch[:axis], *q.batch[axis + 1 :])

    def one(leaves):
        return dataclasses.replace(jax.tree.unflatten(structure, leaves), batch=batch).entropy()

    return jax.vmap(one, in_axes=axis)(leaves)


def of_rows(q: Family, axis: int, num: int) -> Family:
    """The factors of the first `num` rows."""
    taken = jax.tree.map(lambda x: lax.slice_in_dim(x, 0, num, axis=axis), q)
    return _with_rows(taken, axis, num)


def joined(parts: list[Family], axis: int) -> Family:
    """The factors of several batches of rows as one."""
    leaves = zip(*(jax.tree.leaves(q) for q in parts), strict=True)
    whole = [jnp.concatenate(x, axis) for x in leaves]  # trees of other batch shapes are others
    num = sum(q.batch[axis] for q in parts)
    return _with_rows(jax.tree.unflatten(jax.tree.structure(parts[0]), whole), axis, num)


def _with_rows(q: Family, axis: int, num: int) -> Family:
    return dataclasses.replace(q, batch=(*q.batch[:axis], num, *q.batch[axis + 1 :]))


class RowsProof:
    """What was proved of a structure on the rows of its own joint, for others.

    Where no step's course depends on the rows, densities are analytic in them, and rows in general
    position prove all; a column that has been constant is in none (a zero hides what it
    multiplies). Where rows decide (a comparison with one, or whole numbers, which index and count),
    each batch is looked at: some fifty gradients of its densities.

    `axes`: of the rows in (args, kwargs), `None` for what all batches share.
    """

    def __init__(self, structure: Structure, start: list[Family], axes):
        self.structure, self.start, self.axes = structure, start, axes
        self._checks = [(j, names) for j, names in enumerate(_names(structure)) if names]
        joint = structure.joint
        self._many = {j: num_values(joint, n, start[j], start) for j, n in self._checks}
        self._every = rows_decide(joint, axes, start)
        self._ranges: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._seen = 0

    def require(self, args: tuple, kwargs: dict, start: list[Family], q: list[Family]) -> None:
        """Raise `NotConjugateError` where a density of these rows is not affine in the statistics
        of a factor; anywhere and about `q`. Both have factors of as many rows.
        """
        if not (self._widens(args, kwargs) or self._every):
            return
        self._seen += 1
        joint = self.structure.joint._replace(args=args, kwargs=kwargs)
        for j, names in self._checks:
            kept = (start[j], q[j]), (start, q)
            passed = conjugate_again(joint, names, *kept, self._seen, self._many[j])
            if failed := [k for k, ok in zip(names, passed, strict=True) if not ok]:
                raise _error(q[j], failed[0])

    def _widens(self, args: tuple, kwargs: dict) -> bool:
        """Whether these are the first rows, or a column that was constant so far is not here."""
        columns = [_range(x, axis) for x, axis in _of_rows(args, kwargs, self.axes)]
        old, self._ranges = self._ranges, columns
        if old is None:
            return True
        self._ranges = [
            (np.minimum(a, c), np.maximum(b, d))
            for (a, b), (c, d) in zip(old, columns, strict=True)
        ]
        pairs = zip(old, self._ranges, strict=True)
        return any(bool(np.any((a == b) & (c != d))) for (a, b), (c, d) in pairs)


def rows_decide(joint: LogJoint, axes, families: list[Family]) -> bool:
    """Whether a step's course in any density depends on the values of the rows. Abstract."""
    given = (joint.args, joint.kwargs)
    rows = [x for x, _ in _of_rows(*given, axes)]
    if any(jnp.result_type(x).kind in "biu" for x in rows):
        return True
    leaves, structure = jax.tree.flatten(given)
    at = [i for i, axis in enumerate(_axes(*given, axes)) if axis is not None]

    def entries(rows: list[Array], values):
        full = list(leaves)
        for i, x in zip(at, rows, strict=True):
            full[i] = x
        args, kwargs = jax.tree.unflatten(structure, full)
        return joint._replace(args=args, kwargs=kwargs).entries(joint.terms, values)

    values = {k: x for f in families for k, x in f.random_values(jax.random.key(0)).items()}
    return decides(entries, rows, values)


def _axes(args, kwargs, axes) -> list[int | None]:
    """One a leaf."""
    shared = jax.tree.map(lambda _, axis: -1 if axis is None else axis, (args, kwargs), axes)
    return [None if axis == -1 else axis for axis in jax.tree.leaves(shared)]


def _of_rows(args, kwargs, axes) -> list[tuple]:
    """(array, axis of its rows) of what differs from batch to batch."""
    pairs = zip(jax.tree.leaves((args, kwargs)), _axes(args, kwargs, axes), strict=True)
    return [(x, axis) for x, axis in pairs if axis is not None]


def _range(x, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest entry of each column."""
    x = np.asarray(x)
    return np.asarray(np.min(x, axis)), np.asarray(np.max(x, axis))


def _names(structure: Structure) -> list[tuple[str, ...]]:
    """By block, the terms that see it; none of a discrete one, whose elements are summed."""
    return [
        () if isinstance(f, Discrete) else tuple(t.site for t in structure.terms if j in t.blocks)
        for j, f in enumerate(structure.blocks)
    ]


def _error(family: Family, term: str) -> NotConjugateError:
    sites = " and ".join(f"'{k}'" for k in family.sites)
    return NotConjugateError(
        f"site {sites} is not conjugate to '{term}' in some rows of the data, which the first "
        "batch may lack: their log density is not affine in the statistics of a "
        f"{type(family).__name__} factor. {LISTED}"
    )
