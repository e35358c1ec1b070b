"""The proof of conjugacy for rows of data that it has not seen: those of later batches."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_gp.conjugate.conjugacy import conjugate_again, num_values
from ppl_gp.conjugate.discrete import Discrete
from ppl_gp.conjugate.family import Family
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.conjugate.structure import Structure
from ppl_gp.errors import LISTED, NotConjugateError
from ppl_gp.proofs.branches import decides


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

    values = {k: x for f in families for k, x in f.somewhere(jax.random.key(0)).items()}
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
