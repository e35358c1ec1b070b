"""Steps on a batch of the rows: stochastic variational inference (Hoffman et al. 2013).

The factors of what is per datum, the local blocks, are brought to their optimum for the rows
of a batch; each other block then goes a step rho from its natural parameters towards the maximum of

    sum_terms in no row E[log p] + sum_rows of the batch w_n sum_terms E[log p_n],   w_n = N / B,

which is that of all rows on average over batches: its natural gradient is unbiased. All rows in a
batch with a step of one are coordinate ascent.

`RowsProof` is the proof of conjugacy for rows of data that it has not seen: those of later batches.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.errors import ModelError
from ppl_gp.mean_field.conjugacy import failing, looked_at, num_values, random_values
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.log_joint import LogJoint
from ppl_gp.mean_field.structure import Structure, not_conjugate
from ppl_gp.mean_field.sweep import energy, sweep
from ppl_gp.reading.dependence import decides

_MAX_PASSES = 100  # over local blocks, to their common optimum, or that of a local bound
_SETTLED = 1e-10  # change of their moments, beside one, below which they are there


def split(structure: Structure, trace: dict) -> Structure:
    """The structure with what is per datum, and the axes by which its log joint weighs rows,
    by the annotated trace of a batch. `ModelError` where q or a density joins rows.
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
    return structure._replace(joint=joint, local=local)


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
    structure: Structure, q: list[Family], rate: Float[Array, ""]
) -> tuple[list[Family], Float[Array, ""]]:
    """(q after a step on the rows of a batch, weighted; the bound before it as they estimate it,
    nats). `q` has local blocks of as many rows, at any values.
    """
    q = at_local_optimum(structure, q)
    value = shared_bound(structure, q) + rows_bound(structure, q)
    return shared_step(structure, q, rate), value


def shared_step(structure: Structure, q: list[Family], rate) -> list[Family]:
    """The blocks in no row, one after another."""
    return sweep(structure.joint, structure.terms, q, structure.shared(), rate)


def at_local_optimum(structure: Structure, q: list[Family]) -> list[Family]:
    """Local blocks at the maximum of the bound given the others, whatever the rows' weights."""
    alone, local = structure.joint._replace(weights=None), [j for j, _ in structure.local]
    q = sweep(alone, structure.terms, q, local)
    if len(local) < (1 if structure.joint.bounded else 2):  # a local bound is at the q before
        return q

    def going(state):
        _, change, num = state
        return (change > _SETTLED) & (num < _MAX_PASSES)

    def again(state):
        before, _, num = state
        after = sweep(alone, structure.terms, before, local)
        return after, _change(structure, before, after), num + 1

    return lax.while_loop(going, again, (q, jnp.asarray(jnp.inf), jnp.asarray(1)))[0]


def _change(structure: Structure, before: list[Family], after: list[Family]) -> Float[Array, ""]:
    old, new = ([q[j].coordinates() for j, _ in structure.local] for q in (before, after))
    apart = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b) / (1.0 + jnp.abs(b))), old, new)
    return jnp.max(jnp.stack(jax.tree.leaves(apart)))


def shared_bound(structure: Structure, q: list[Family]) -> Float[Array, ""]:
    """Of the bound what no row has: terms and entropies, nats."""
    terms = tuple(t for t in structure.terms if t.site not in dict(structure.joint.axes))
    entropies = [q[j].entropy() for j in structure.shared()]
    return energy(structure.joint, terms, q) + sum(entropies, jnp.zeros(()))


def rows_bound(structure: Structure, q: list[Family]) -> Float[Array, ""]:
    """Of the bound what the rows have, each as often as its weight says, nats."""
    terms = tuple(t for t in structure.terms if t.site in dict(structure.joint.axes))
    total, weights = energy(structure.joint, terms, q), structure.joint.weights
    for j, axis in structure.local:
        each = row_entropies(q[j], axis)
        total = total + jnp.sum(each if weights is None else weights * each)
    return total


def row_entropies(q: Family, axis: int) -> Float[Array, "B"]:
    """H of each row's factor, nats."""
    batch = (*q.batch[:axis], *q.batch[axis + 1 :])
    return jax.vmap(lambda row: dataclasses.replace(row, batch=batch).entropy(), axis)(q)


def of_rows(q: Family, axis: int, num: int) -> Family:
    """The factors of the first `num` rows."""
    return _with_rows(jax.tree.map(lambda x: lax.slice_in_dim(x, 0, num, axis=axis), q), axis, num)


def joined(parts: list[Family], axis: int, num: int | None = None) -> Family:
    """The factors of several batches of rows as one, of the first `num` rows."""
    alike = [_with_rows(q, axis, 0) for q in parts]  # trees of other batch shapes are others
    whole = jax.tree.map(lambda *x: jnp.concatenate(x, axis), *alike)
    return of_rows(whole, axis, sum(q.batch[axis] for q in parts) if num is None else num)


def with_blocks(q: list[Family], others: dict[int, Family]) -> list[Family]:
    """q with other blocks at some places."""
    return [others.get(j, family) for j, family in enumerate(q)]


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

    def __init__(self, structure: Structure, axes):
        start, self.checks, self.axes = structure.blocks, structure.to_prove(), axes
        self.joint = structure.joint._replace(axes=())  # that of the proof, which is compiled
        self._many = [num_values(self.joint, n, start[j], start) for j, n in self.checks]
        self._every = rows_decide(self.joint, axes, start)
        self._ranges: tuple[np.ndarray, np.ndarray] | None = None
        self._seen = 0

    def require(self, joint: LogJoint, start: list[Family], q: list[Family]) -> None:
        """Raise `NotConjugateError` where a density of a batch is not affine in the statistics of a
        factor; anywhere and about `q`. Both have factors of as many rows.
        """
        if not (self._widens(joint) or self._every):
            return
        self._seen += 1
        joint = self.joint._replace(args=joint.args, kwargs=joint.kwargs)
        keys = random.split(random.key(self._seen))
        for (j, names), many in zip(self.checks, self._many, strict=True):
            ways = zip((start, q), keys, (False, True), strict=True)
            found = [looked_at(joint, names, f[j], f, key, near, many) for f, key, near in ways]
            if failed := failing(names, found):
                where = "in some rows of the data, which the first batch may lack"
                raise not_conjugate(q[j], f"'{failed[0]}' {where}: their log density is")

    def _widens(self, joint: LogJoint) -> bool:
        """Whether these are the first rows, or a column that was constant so far is not here."""
        rows, _ = _parted(joint, self.axes)
        pairs = list(zip(*map(jax.tree.leaves, (rows, self.axes)), strict=True))
        ends = ([np.ravel(end(np.asarray(x), a)) for x, a in pairs] for end in (np.min, np.max))
        low, high = (np.concatenate([np.zeros(0), *columns]) for columns in ends)
        before, self._ranges = self._ranges, (low, high)
        if before is None:
            return True
        self._ranges = np.minimum(before[0], low), np.maximum(before[1], high)
        constant, still = (a == b for a, b in (before, self._ranges))
        return bool(np.any(constant & ~still))


def rows_decide(joint: LogJoint, axes, families: list[Family]) -> bool:
    """Whether a step's course in any density depends on the values of the rows. Abstract."""
    rows, shared = _parted(joint, axes)
    if any(jnp.result_type(x).kind in "biu" for x in jax.tree.leaves(rows)):
        return True

    def entries(rows, values):
        args, kwargs = eqx.combine(rows, shared)
        return joint._replace(args=args, kwargs=kwargs).entries(joint.terms, values)

    return decides(entries, rows, random_values(families, random.key(0)))


def _parted(joint: LogJoint, axes) -> tuple:
    """(args, kwargs) that batches differ in, and that all share; `None` for the other's leaves."""
    given = (joint.args, joint.kwargs)
    return eqx.partition(given, jax.tree.map(lambda _, axis: axis is not None, given, axes))
