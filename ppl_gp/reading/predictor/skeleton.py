"""A model's arguments without their values: what the model is traced with at any number of rows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ppl_gp.errors import DataError
from ppl_gp.reading.arguments import Leaves, argument_of, is_array, wide
from ppl_gp.reading.tracing import reading_of, run
from ppl_gp.reading.walk import jaxprs_of


@dataclass(frozen=True)
class Skeleton:
    """The arguments that a model was declared with: paths, shapes and types of arrays, the options.

    `rows`: (path, axis of the data) of arrays with one entry per datum, `square` of those with
    several; `first`: the first entry of each, which a model that checks its arguments has accepted.
    """

    paths: tuple[str, ...]
    entries: tuple  # `ShapeDtypeStruct` in place of an array
    structure: Any
    rows: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]  # those among them that a prediction is given
    square: tuple[tuple[str, tuple[int, ...]], ...] = ()
    first: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def complete(self, given: Mapping[str, Any], num: int) -> dict[str, Any]:
        """{path: array} of all arrays for `num` rows; where nothing is given for a row-wise one
        (observations, weights, masks, at a prediction) it repeats the first row in training, or
        `True`.

        Raises `DataError` for another option than in training, and where a table is missing.
        """
        axes, found = dict(self.rows), {}
        if new := [p for p, x in given.items() if x is not None and p not in self.paths]:
            raise DataError(
                f"argument {new} was not given in training, where the model's predictor was read "
                "off: fit again with it, or leave it out."
            )
        for path, entry in zip(self.paths, self.entries, strict=True):
            value = given.get(path)
            if not is_array(entry):
                self._require_same(path, entry, given)
            elif value is not None:
                if entry.dtype == np.bool_ and jnp.result_type(value) != np.bool_:
                    # `new_inputs.numbers_explained` says which value
                    raise TypeError(f"{path} must be a bool array")
                found[path] = value
            elif path in axes:
                found[path] = self._stand_in(path, entry, axes[path], num)
            else:
                raise DataError(f"argument '{path}' is missing; give it as in training.")
        return found

    def _stand_in(self, path: str, entry, axis: int, num: int) -> jax.Array:
        # in a file without observations: zeros are no scale and no exposure, ones are
        first = self.first.get(path, jnp.issubdtype(entry.dtype, jnp.inexact))
        value = True if entry.dtype == bool else first
        full = jnp.full if isinstance(value, Tracer) else np.full  # on the host: no program
        return jnp.asarray(full(_resized(entry, (axis,), num).shape, value, entry.dtype))

    def arguments(self, arrays: Mapping[str, Any]) -> tuple[tuple, dict]:
        """(args, kwargs) with these arrays."""
        leaves = [arrays.get(p, x) for p, x in zip(self.paths, self.entries, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def num_rows(self, arrays: Mapping[str, Any]) -> int:
        """Rows of what is given."""
        return next(arrays[p].shape[a] for p, a in self.rows if arrays.get(p) is not None)

    def resized(self, arrays: Mapping[str, Any], num: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of the arrays, for another number of rows."""
        rows = {p: (a,) for p, a in self.rows} | dict(self.square)
        return {p: _resized(_shaped(x), rows.get(p, ()), num) for p, x in arrays.items()}

    def twice(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays with their rows repeated."""
        rows = dict(self.rows)
        return {p: jnp.concatenate([x, x], rows[p]) if p in rows else x for p, x in arrays.items()}

    def entry(self, path: str) -> jax.ShapeDtypeStruct:
        """Shape and type of an array in training."""
        return dict(zip(self.paths, self.entries, strict=True))[path]

    def packed(self, arrays: Mapping, num: int) -> jax.Array:
        """The columns as numbers, (N, D), a row per datum."""
        rows, dtype = dict(self.rows), jnp.result_type(float)
        moved = [jnp.moveaxis(arrays[p], rows[p], 0) for p in self.columns]
        return jnp.concatenate([jnp.reshape(x, (num, -1)).astype(dtype) for x in moved], 1)

    def unpacked(self, X) -> dict[str, jax.Array]:
        """{path: array} of the columns again, of their own shapes and types."""
        rows, found, at = dict(self.rows), {}, 0
        for path in self.columns:
            entry = self.entry(path)
            shape = [n for i, n in enumerate(entry.shape) if i != rows[path]]
            width = math.prod(shape)
            x = jnp.moveaxis(jnp.reshape(X[:, at : at + width], (len(X), *shape)), 0, rows[path])
            whole = not jnp.issubdtype(entry.dtype, jnp.inexact)
            found[path] = (jnp.rint(x) if whole else x).astype(entry.dtype)
            at += width
        return found

    def with_first(self, leaves: Leaves) -> "Skeleton":
        """With the first entries of these arguments, which have values."""
        known = {p: (leaves.leaves[p], a) for p, a in self.rows if p in leaves.arrays}
        known = {p: (x, a) for p, (x, a) in known.items() if not isinstance(x, Tracer)}
        first = {p: np.take(np.asarray(x), [0], a) for p, (x, a) in known.items() if x.shape[a]}
        for p in self.columns if jnp.result_type(float) == np.float32 else ():
            if p in known and np.asarray(known[p][0]).dtype.kind in "iu":
                require_apart(p, np.moveaxis(np.asarray(known[p][0]), known[p][1], 0))
        return replace(self, first=first)

    def _require_same(self, path, entry, given):
        if path in given and given[path] is not entry and given[path] != entry:
            raise DataError(
                f"argument '{path}' is {given[path]!r} and was {entry!r} in training, where the "
                "model's predictor was read off; fit again with it, or leave it as it was."
            )


def require_apart(path: str, x: np.ndarray) -> None:
    """Raise `DataError` where float32 moves a gap between rows of a whole column by more than a
    hundredth, and by a millionth of its range: times in seconds, say, and not numbers of people.
    """
    for column in np.reshape(x, (len(x), -1)).T:
        values = np.unique(column)
        gaps, rounded = np.diff(values), np.diff(values.astype(np.float32).astype(float))
        off = np.abs(rounded - gaps)
        if np.all((off <= 1e-2 * gaps) | (off <= 1e-6 * np.ptp(1.0 * values))):
            continue
        raise DataError(
            f"argument '{path}' has whole numbers up to {column.max()}, and float32 rounds their "
            "differences. Subtract an origin before the call, pass .astype(float) if they are "
            "amounts, or turn on float64, jax.config.update('jax_enable_x64', True)."
        )


def skeleton(model: Callable, args: tuple, kwargs: dict) -> Skeleton:
    """Of a declared model's arguments."""
    reading, leaves = reading_of(model), Leaves(model, args, kwargs)
    entries = tuple(_shaped(x) if is_array(x) else x for x in leaves.leaves.values())
    rows = tuple((p, a) for p, a in reading.rows if p in leaves.arrays)
    wanted = {*reading.needed, *(p for p in leaves.arrays if leaves.inputs in (p, p.split("[")[0]))}
    # what a factor is computed from may be what its predictor is, a group say; y is not
    wanted |= {p for p in reading.factored if argument_of(p) != "y"}
    columns = tuple(p for p, _ in rows if p in wanted)
    structure = jax.tree.structure((args, kwargs))
    found = Skeleton(tuple(leaves.leaves), entries, structure, rows, columns, reading.square)
    return _with_numbers(model, found.with_first(leaves))


def _with_numbers(model: Callable, bones: Skeleton) -> Skeleton:
    """Whole columns as floats where the model runs with floats: they are whole in training alone,
    as days may be. An index does not run so, and stays. An abstract trace for each.
    """
    for path in bones.columns:
        entry = bones.entry(path)
        number = jax.ShapeDtypeStruct(entry.shape, jnp.result_type(float))
        pairs = zip(bones.paths, bones.entries, strict=True)
        tried = replace(bones, entries=tuple(number if p == path else x for p, x in pairs))
        seen = None if jnp.issubdtype(entry.dtype, jnp.inexact) else _traced(model, tried)
        if seen is not None and not (entry.dtype == bool and _adds_truth(_traced(model, bones))):
            bones = tried
    return bones


def _traced(model: Callable, bones: Skeleton):
    """The jaxpr of all values; `None` where the model does not run."""

    def values(arrays):
        trace = run(model, *bones.arguments(arrays))
        return [s["value"] for s in trace.values() if s["type"] == "sample"]

    try:
        pairs = zip(bones.paths, bones.entries, strict=True)
        return jax.make_jaxpr(values)({p: x for p, x in pairs if is_array(x)}).jaxpr
    except Exception:  # whatever the user's code says of a float
        return None


def _adds_truth(jaxpr) -> bool:
    """Whether truth values are added: True + True is True, and 2 of numbers."""
    kinds = ((e.primitive.name, e.outvars[0].aval.dtype) for e in jaxpr.eqns if e.outvars)
    inside = (_adds_truth(inner) for e in jaxpr.eqns for inner in jaxprs_of(e))
    return ("or", bool) in kinds or any(inside)


def _shaped(x):
    return jax.ShapeDtypeStruct(jnp.shape(x), wide(x.dtype))


def _resized(x, axes: tuple[int, ...], num: int) -> jax.ShapeDtypeStruct:
    shape = tuple(num if i in axes else n for i, n in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)
