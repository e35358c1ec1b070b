"""The arguments of a prediction: inputs checked against those of training, others completed."""

from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ppl_gp.errors import DataError
from ppl_gp.reading.arguments import (
    Leaves,
    argument_names,
    argument_of,
    as_array,
    as_arrays,
    is_array,
    optional_arguments,
    parameters_of,
    wide,
)
from ppl_gp.results.record import Record


def new_arguments(fit: Record, X_new, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """(positional, keyword) arguments of the model at new inputs, those after X_new by name.

    What the model took in training with one entry per datum is given again, by position or by name;
    options, numbers and tables that belong to no datum are remembered; observations and masks are
    left out. Which is which was read off the model in training. Raises `DataError`: X_new with NaN,
    infinity, no rows, or other columns than in training; an array that is missing or given twice.
    """
    args, kwargs = as_arrays(args, kwargs)
    names = argument_names(fit.model, max(1 + len(args), len(fit.args)))
    rows = fit.model.reading.row_axes
    is_table = bool(rows) and names[0] not in map(argument_of, rows)
    X = _checked_inputs(X_new, fit.args, is_table)
    positional = dict(zip(names[1:], args, strict=False))
    if twice := sorted({names[0], *positional} & set(kwargs)):
        raise DataError(f"{twice} given by position and by keyword; give each argument once.")
    given = {**positional, **kwargs}
    trained = {**dict(zip(names[1:], fit.args[1:], strict=False)), **fit.kwargs}
    given |= dict(found for name in trained if name not in given for found in _completed(fit, name))
    return _as_in_training(fit, *_in_place(fit.model, X, names[1:], given))


def _as_in_training(fit: Record, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with the shapes of training but for the rows, and its types. A plain number
    stands for all rows of an argument with one entry per datum.
    """
    num, leaves = num_rows(fit, args, kwargs), Leaves(fit.model, args, kwargs)
    trained, axes = Leaves(fit.model, fit.args, fit.kwargs).arrays, fit.model.reading.row_axes

    def again(path, x):
        is_number = isinstance(x, int | float) or (is_array(x) and not x.shape)
        if num and path in axes and path in trained and is_number:
            x = jnp.full(_with_rows(trained[path].shape, axes[path], num), x)
        if num and path in axes and is_array(x) and np.ndim(x) and argument_of(path) != "y":
            _require_rows(path, x, axes[path], num, trained.get(path))
        return _of_type(x, trained[path].dtype) if path in trained and is_array(x) else x

    return leaves.replaced({path: again(path, x) for path, x in leaves.leaves.items()})


def _of_type(x, dtype):
    """Truth values and integers where the model had them in training, if no value changes; floats,
    which `~` and an index refuse, for integers that are no truth values.
    """
    if jnp.issubdtype(dtype, jnp.inexact) or isinstance(x, Tracer):
        return x
    same = jnp.asarray(x).astype(wide(dtype))
    other = x.astype(float) if dtype.kind == "b" else x
    return same if bool(jnp.all(same == x)) else other


@contextmanager
def numbers_explained(fit: Record, args: tuple, kwargs: dict):
    """Where the model takes integers alone, an error that names the arguments with other values."""
    try:
        yield
    except DataError as error:
        trained = Leaves(fit.model, fit.args, fit.kwargs).arrays
        changed = [
            f"argument '{p}' was {trained[p].dtype} in training and has {_other(x, trained[p])} now"
            for p, x in Leaves(fit.model, args, kwargs).arrays.items()
            if p in trained and x.dtype.kind == "f" and trained[p].dtype.kind != "f"
        ]
        if not changed or not any(x in str(error.__cause__) for x in ("type float", "bool array")):
            raise
        raise DataError(
            f"{'; '.join(changed)}, which the model does not take there: give values "
            f"of that type, as in training. It raised: {error.__cause__}"
        ) from error


def _other(x, trained) -> float:
    """The first value that the type in training would change."""
    x = np.ravel(x)
    return x[np.argmax(np.asarray(jnp.asarray(x).astype(trained.dtype)) != x)]


def _completed(fit, name: str) -> list[tuple[str, Any]]:
    """(name, value) of an argument that was left out; nothing where it keeps its default."""
    reading, leaves = fit.model.reading, Leaves(fit.model, fit.args, fit.kwargs)
    own = [p for p in leaves.arrays if argument_of(p) == name]
    if name != "y" and (missing := [p for p in own if p in reading.needed]):
        # an array whose rows are proved is no table
        table = f" Of a table that is only looked up, fit with tables=({name!r},)."
        table *= all(reading.row_axes.get(p) is None for p in missing)
        raise DataError(
            f"predicting needs '{name}' at the new inputs: in training the model took {missing} "
            f"with one entry per datum. Pass it by keyword, predict(X_new, {name}=...), or in its "
            f"place; log_density(X_new, y_new, ...) has y_new in the second one.{table}"
        )
    # observations and masks
    gone = [p for p in own if name == "y" or reading.row_axes.get(p) is not None]
    if gone == own and own:
        return [] if name in optional_arguments(fit.model) else [(name, None)]
    args, kwargs = leaves.replaced(dict.fromkeys(gone))
    names = argument_names(fit.model, len(args))
    return [(name, dict(zip(names, args, strict=True)).get(name, kwargs.get(name)))]


def _in_place(model, X, order: list[str], given: dict) -> tuple[tuple, dict]:
    """Arguments without a name that can be used by keyword keep their positions."""
    known = parameters_of(model).items()
    free = {n for n, p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    fixed = [n for n in order if n in given and n not in free]
    # What stands before an argument without a name must be given by position too.
    placed = order[: max((order.index(n) for n in fixed), default=-1) + 1]
    return (X, *(given.get(n) for n in placed)), {k: v for k, v in given.items() if k not in placed}


def _checked_inputs(X_new, trained: tuple, is_table: bool):
    """`is_table`: the first argument holds no rows, and others do."""
    if not trained:
        raise DataError(
            "the model was fitted without a positional argument for X_new; pass X positionally."
        )
    X, first = as_array("X_new", X_new), trained[0]
    if eqx.is_array(first) and not eqx.is_array(X):
        raise DataError(
            f"X_new is a {type(X_new).__name__}, and the training inputs were an array of shape "
            f"{first.shape}; give an array, or a frame."
        )
    if eqx.is_array(first) and (X.ndim == 0 or 0 in X.shape):
        raise DataError(f"X_new has shape {X.shape}; give at least one row of inputs.")
    if jax.tree.structure(X) != jax.tree.structure(first):
        return X
    both = lambda a, b: eqx.is_array(a) and eqx.is_array(b)  # noqa: E731
    pairs = zip(jax.tree.leaves(X), jax.tree.leaves(first), strict=True)
    shapes = [(a.shape, b.shape) for a, b in pairs if both(a, b)]
    wrong = [(a, b) for a, b in shapes if a[1:] != b[1:] or 0 in a]
    if wrong and not is_table:
        raise DataError(_only_rows(wrong, eqx.is_array(first)))
    # in the precision of training, so that one set of compiled functions serves
    is_float = lambda a, b: both(a, b) and jnp.issubdtype(b.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda a, b: a.astype(b.dtype) if is_float(a, b) else a, X, first)


# how one column is written for a model that was fitted to it in the other form
_OTHER_FORMS = {
    ((1,), ()): " Give the column, X_new[:, 0], or frame['name'] for frame[['name']].",
    ((), (1,)): " Give one column, X_new[:, None], or frame[['name']] for frame['name'].",
}


def _only_rows(wrong: list, is_array: bool) -> str:
    given, wanted = zip(*wrong, strict=True)
    if not is_array:
        return (
            f"X_new holds arrays of shapes {[*given]}, and the training inputs {[*wanted]}: only "
            "the rows may differ in number."
        )
    return (
        f"X_new has shape {given[0]}, and the training inputs {wanted[0]}: only the rows may "
        f"differ in number.{_OTHER_FORMS.get((given[0][1:], wanted[0][1:]), '')}"
    )


def require_own_rows(fit: Record, new_args: tuple) -> None:
    """Raise `DataError` for new inputs of a model that holds arrays of the training rows."""
    trained, new = (Leaves(fit.model, a[:1], {}).arrays for a in (fit.args, new_args))
    same = trained.keys() == new.keys() and all(np.array_equal(trained[p], new[p]) for p in trained)
    if not same and (why := fit.model.reading.held) is not None:
        raise DataError(f"no prediction at new rows: {why}")


def _require_rows(path: str, x, axis: int, num: int, trained) -> None:
    """Raise `DataError` where an argument with one entry per datum has another shape than the
    `trained` one, but for its number of rows.

    An array of another shape would be broadcast, (M, 1) with M values of f to (M, M).
    """
    if axis >= x.ndim or x.shape[axis] != num:
        raise DataError(
            f"argument '{path}' has shape {x.shape} and X_new {num} row(s); give one entry per row."
        )
    if trained is not None and (wanted := _with_rows(trained.shape, axis, num)) != x.shape:
        raise DataError(
            f"argument '{path}' has shape {x.shape}, and in training {trained.shape}: "
            f"only the rows may differ in number. Give shape {wanted}."
        )


def _with_rows(shape: tuple, axis: int, num: int) -> tuple:
    return (*shape[:axis], num, *shape[axis + 1 :])


def num_rows(fit: Record, args: tuple, kwargs: dict) -> int:
    """M: the rows of the new inputs; of arrays that look the first argument up, theirs."""
    first, reading = argument_names(fit.model, 1)[0], fit.model.reading
    arrays = Leaves(fit.model, args, kwargs).arrays
    own = {p: x for p, x in arrays.items() if argument_of(p) == first}
    asked = {p: arrays[p] for p in reading.needed if p in arrays}
    for group in (own, asked):
        axes = ((x, reading.row_axes.get(p)) for p, x in group.items())
        if rows := [x.shape[a] for x, a in axes if a is not None and a < x.ndim]:
            return rows[0]
    return next((x.shape[0] for x in own.values() if x.shape), 0)
