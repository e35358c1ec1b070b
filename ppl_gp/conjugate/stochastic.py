"""Steps on a batch of the rows: stochastic variational inference (Hoffman et al. 2013).

The factors of what stands one a datum, the local blocks, are brought to their optimum for the rows
of a batch; each other block then goes a step rho from its natural parameters towards the maximum of

    sum_terms in no row E[log p] + sum_rows of the batch w_n sum_terms E[log p_n],   w_n = N / B,

which is that of all rows on average over batches: its natural gradient is unbiased. All rows in a
batch with a step of one are coordinate ascent.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.conjugate.expected import Term, expected
from ppl_gp.conjugate.family import Family
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.structure import Structure
from ppl_gp.conjugate.sweep import updated
from ppl_gp.errors import ModelError

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
