"""Where batches come from, those on the device, and whether they are finite."""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError, Result
from ppl_gp.infer.sources import ArraySource, Rows, Stream
from ppl_gp.infer.stream_source import StreamSource
from ppl_gp.reading.arguments import Leaves
from ppl_gp.sparse.bound import Batch

Source = ArraySource | StreamSource


def source_of(name: str, size: Callable, model, args, kwargs, seed: int) -> Source:
    """Batches of a stream, or of arrays, `size(N)` rows each; `DataError` where there are none."""
    if args and isinstance(args[0], Stream):
        if len(args) > 1 or kwargs.get("y") is not None:
            raise DataError(
                "a Stream is the only positional argument: its batches hold the model's arguments, "
                "y too."
            )
        return StreamSource(args[0], model, kwargs)
    leaves, reading = Leaves(model, args, kwargs), model.reading
    if not args or (num := reading.num_rows(leaves)) is None:
        raise DataError(
            f"{name}() takes batches of rows and needs inputs as the first positional argument: an "
            "array with one row per datum, or a Stream."
        )
    if size(num) < num and (why := reading.held) is not None:
        raise DataError(
            f"no minibatches: {why} Or take all data in a step, {name}(batch_size={num})."
        )
    # the axis of the data of each array that has one
    axes = leaves.replaced(reading.row_axes, others=None)
    return ArraySource(args, kwargs, size(num), seed, num_data=num, axes=axes)


def first_rows(source: Source) -> Rows:
    """The first batch, which has to be finite."""
    first = source.peek()
    if not is_finite(first):
        raise DataError(f"{where_not_finite(first, 0, source)}.")
    return first


def usable(
    source: Source, done: int, levels: Callable[[Rows], None] | None = None
) -> Iterator[Rows | dict]:
    """Batches from a step on; in place of one that cannot be used, the `result`, `message` and
    `cause` that a run ends with: a bad file does not end hours of work. `levels` raises `DataError`
    for a level that the model lacks.
    """
    batches = source.batches(done)
    for step in itertools.count(done):
        try:
            rows = next(batches, None)
            if levels is not None and rows is not None:
                levels(rows)
        except Exception as error:
            told = f"batch {step} (counted from 0): {type(error).__name__}: {error}"
            yield {"result": Result.stream_ended, "message": told, "cause": error}
            return
        if rows is None:
            return
        if not source.checked and not is_finite(rows):
            yield {"result": Result.nonfinite, "message": where_not_finite(rows, step, source)}
            return
        yield rows


def as_batch(rows: Rows, key) -> Batch:
    """A batch on the device."""
    on_device = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, rows)
    return on_device._replace(key=key)


def stack(chunk: list[Rows], keys) -> tuple[Batch, Batch]:
    """(what all batches share, the rest stacked on a leading axis), each `None` for the other's."""
    leaves = [jax.tree.flatten((b.args, b.kwargs)) for b in chunk]
    structure = leaves[0][1]
    columns = list(zip(*(leaf for leaf, _ in leaves), strict=True))
    constant = [c[0] if _is_shared(c) else None for c in columns]
    stacked = [None if _is_shared(c) else jnp.asarray(np.stack(c)) for c in columns]
    weights = jnp.asarray(np.stack([b.weights for b in chunk]))
    several = [(b.given, b.rows) for b in chunk]
    given, rows = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *several)
    none = jax.tree.map(lambda _: None, given)
    args, kwargs = jax.tree.unflatten(structure, constant)
    varying = Batch(*jax.tree.unflatten(structure, stacked), weights, keys, given, rows)
    return Batch(args, kwargs, None, None, none), varying  # pyright: ignore[reportArgumentType]


def repeated(batch: Batch, keys) -> tuple[Batch, Batch]:
    """As `stack`, of one batch with a key for each time."""
    return batch._replace(key=None), Batch(*[None] * 3, keys, None)  # pyright: ignore


def _is_shared(column) -> bool:
    """NumPy arrays differ from batch to batch, JAX arrays do not, and a stream's numbers may."""
    first = column[0]
    if isinstance(first, np.ndarray | jax.Array):
        return isinstance(first, jax.Array)
    return all(x == first for x in column)


def is_finite(rows: Rows) -> bool:
    """Whether every number of a batch that came from the host is finite."""
    leaves = jax.tree.leaves((rows.args, rows.kwargs))
    return all(np.isfinite(x).all() for x in leaves if _is_floats(x))


def _is_floats(x) -> bool:
    return isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)


def where_not_finite(rows: Rows, step: int, source: Source) -> str:
    """Names the batch, the argument and the entry, where not `is_finite`."""
    named = {**{f"positional argument {i}": x for i, x in enumerate(rows.args)}, **rows.kwargs}
    leaves = ((k, *leaf) for k, v in named.items() for leaf in jax.tree.leaves_with_path(v))
    parts = [(k + jax.tree_util.keystr(path), x) for k, path, x in leaves]
    name, x = next((k, x) for k, x in parts if _is_floats(x) and not np.isfinite(x).all())
    row, *rest = (int(i) for i in np.argwhere(~np.isfinite(x))[0]) if x.ndim else (0,)
    column = f", column {', '.join(map(str, rest))}" if rest else ""
    return (
        f"batch {step} (counted from 0) has {x[(row, *rest)] if x.ndim else x} in {name} "
        f"at {source.where(step, row)}{column}; drop or impute the row"
    )
