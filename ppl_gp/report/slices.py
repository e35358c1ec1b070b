"""A slice through several inputs: rows along which one column varies and the others are held, and
the picture of predictions along it, whose title says where.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.frames.names import arrays
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.reading.arguments import Leaves, argument_names, argument_of
from ppl_gp.report import panels
from ppl_gp.results.fit import Fit
from ppl_gp.results.query.layout import by_names
from ppl_gp.results.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LISTED = 6  # columns that a title tells of one by one


def place(columns: Sequence[panels.Column], what: str, column: str | int) -> int:
    """Where a column stands. Raises `DataError` for one that is not there."""
    names = [x.name for x in columns]
    if isinstance(column, str) and column in names:
        return names.index(column)
    if isinstance(column, int | np.integer) and 0 <= column < len(names):
        return int(column)
    raise DataError(
        f"{what} names the column {column!r}; the inputs are {names} (by name, or by place from 0)."
    )


class Slice(NamedTuple):
    """`X` (M, D): rows; `along`: the column that varies; `held`: {column: value} of the others, as
    text; `given`: those of them that the user set.
    """

    X: np.ndarray
    along: panels.Column
    held: dict[str, str]
    given: frozenset[str]

    def title(self, shown: Mapping[str, str], width: int) -> str:
        """In lines, the columns `shown`: of many those that the user set, and how many others."""
        listed = [k for k in shown if len(shown) <= _LISTED or k in self.given]
        told = [f"{k} = {shown[k]}" for k in listed]
        if others := len(shown) - len(listed):
            told.append(f"{others} others at medians and most frequent labels")
        return textwrap.fill(f"at {', '.join(told)}", width) if told else ""


def inputs_in_columns(
    fit: Record, X: Any, units: Mapping[Any, tuple[float, float]] | None = None
) -> list[panels.Column]:
    """Inputs by the names of the fit, else by their own, else called x0, x1, ... `units`: {column:
    (shift, scale)} of columns that hold (value - shift) / scale. Raises `DataError` if they are not
    a table of rows and columns, and for units of other columns.
    """
    first = argument_names(fit.model, 1)[0]
    own = arrays([first], (X,), {})[2].get(first)
    names = fit.names.get(first) or own or ArrayNames()
    X = by_names(fit, X, (), {})[0]
    table: Any = np.asarray(X) if hasattr(X, "shape") or isinstance(X, list) else np.zeros(())
    if table.ndim != 2 or not len(table):
        raise DataError(
            f"a slice needs inputs of N rows and D columns; '{first}' is of shape {table.shape} "
            f"and type {type(X).__name__}. Predict at rows of your choice, and draw by matplotlib."
        )
    called = names.columns or tuple(f"x{j}" for j in range(table.shape[1]))
    columns = [panels.Column(table[:, j], name, names.level(j)) for j, name in enumerate(called)]
    for k, (shift, scale) in (units or {}).items():
        j = place(columns, "units", k)
        columns[j] = columns[j]._replace(shift=shift, scale=scale)
    return columns


def slice_through(
    columns: Sequence[panels.Column], along: str | int, at: Mapping[Any, Any], num: int
) -> Slice:
    """`num` rows from the smallest to the largest value of a column (its integers, or labels, where
    it holds such), the other columns at `at`, {column: value in its own units, or label}, by
    default at their middle. Raises `DataError` for columns and labels that are not there, and where
    `at` holds the column that varies.
    """
    j, given = place(columns, "along", along), {place(columns, "at", k): v for k, v in at.items()}
    if j in given:
        raise DataError(f"at holds {columns[j].name!r}, which varies; leave it out there.")
    values, held = columns[j].spread(num), {}
    for k, column in enumerate(columns):
        if k != j:
            held[k] = column.code(given[k]) if k in given else column.middle()
    X = np.repeat([[column.values[0] for column in columns]], len(values), 0)
    for k, column in {j: values, **held}.items():
        X[:, k] = column
    told = {columns[k].name: columns[k].told(v) for k, v in held.items()}
    variable = panels.Column(columns[j].own(values), columns[j].name, columns[j].called)
    return Slice(X, variable, told, frozenset(columns[k].name for k in given))


_REMEDY = "Give a number for all rows of the picture, or one entry per row of X for their median"


def with_arguments(cut: Slice, call: str, fit: Record, X, args: tuple, kwargs: dict):
    """(the slice, args, kwargs): the model's other arguments at the rows of a slice. Those with one
    entry per row of X are fixed at their middle, as columns are. Raises `DataError` for those that
    are missing or have other rows; `call` begins the remedy.
    """
    X, args, kwargs = by_names(fit, X, args, kwargs)
    leaves, held, new = Leaves(fit.model, (X, *args), kwargs), dict(cut.held), {}
    _require_given(fit, leaves, call)
    for path, axis in fit.model.reading.row_axes.items():
        x = np.asarray(leaves.arrays.get(path, 0.0))
        if argument_of(path) == leaves.inputs or x.ndim <= axis:
            continue
        if len(rows := np.moveaxis(x, axis, 0)) == len(X):
            one, held[path] = _middle(path, rows, fit.names.get(path, ArrayNames()))
            new[path] = np.moveaxis(np.repeat(one, len(cut.X), 0), 0, axis)
        elif len(rows) != len(cut.X):
            shapes = f"argument '{path}' has shape {x.shape}, and X has {len(X)} rows"
            raise DataError(f"{shapes}. {_REMEDY}.")
    (_, *args), kwargs = leaves.replaced(new)
    return cut._replace(held=held), args, kwargs


def _require_given(fit: Record, leaves: Leaves, call: str) -> None:
    given = {"y", *map(argument_of, leaves.leaves)}
    if missing := [p for p in fit.model.reading.needed if p == argument_of(p) and p not in given]:
        raise DataError(
            f"the picture needs '{missing[0]}', of which the model took one entry per row in "
            f"training. {_REMEDY}: {call}{missing[0]}=1.0)."
        )


def _middle(path: str, rows: np.ndarray, names: ArrayNames) -> tuple[np.ndarray, str]:
    """((1, ...) the middle of an argument's entries, rows (N, ...), and what it is, in words)."""
    table = rows.reshape(len(rows), -1).T
    columns = [panels.Column(x, path, names.level(j)) for j, x in enumerate(table)]
    found = [c.middle() for c in columns]
    told = ", ".join(c.told(x) for c, x in zip(columns, found, strict=True))
    few = len(columns) <= _LISTED
    return np.reshape(found, (1, *rows.shape[1:])), told if few else "its medians"


_LINES = panels.COLOURS[2:]  # the first two are the classes' and the data's
_DASHES = ("-", "--", ":", "-.")


def plot_predictions(
    fits: Fit | Mapping[str, Fit],
    X,
    y,
    *,
    along: str | int | None = None,
    at: Mapping[Any, Any] | None = None,
    X_new=None,
    units: Mapping[Any, tuple[float, float]] | None = None,
    num: int = 100,
    xlabel: str | None = None,
    flabel: str = "f",
    observed: bool = True,
    **kwargs,
) -> "Figure":
    """Plot predictions with the data: mean and central 95 % interval along one input.

    If NumPyro's distribution of y does not have a mean, the picture shows the median.

    Parameters
    ----------
    fits : Fit or mapping
        A fit, or {name: fit} with one panel per fit.
    X, y : array or frame
        The data to show, (N,) or (N, D) and (N,).
    along : str or int, default None
        The column that varies, by name or by place, if X has several: `num` values from its
        smallest to its largest, or its integers. Labels, and whole numbers that differ by less than
        ten, get points with bars.
    at : mapping, default None
        {column: value or label} at which other columns are fixed. By default a column's median (the
        lower middle value of an even number), and the most frequent of labels. One column may have
        several values, `{"ward": ["north", "south"]}`, with one line each.
    X_new : array, default None
        Where to predict, (M,) or (M, 1), if X has one column. None is `num` points over X.
    units : mapping, default None
        {column: (shift, scale)} of columns that contain (value - shift) / scale. Axis, title and
        `at` are then in the original units.
    num : int, default 100
        The number of points.
    xlabel, flabel : str, default None, "f"
        Names of the axis (None: the name of the column, if the fit or X has one), and of the
        function if `observed` is False.
    observed : bool, default True
        True shows y: mean and interval of new observations, with the data as points. For classes it
        shows probabilities, with the data as marks. False shows f, with the data as marks on the
        axis, because their units differ.
    **kwargs
        The model's other arguments: a number for all rows, or one value per row of `X_new` if you
        pass it, else of X. Values of X's rows are fixed at their middle, like columns.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    DataError
        For several columns without `along`, unknown columns and labels, inputs that are not a
        table, and a fit that predicts several functions or sites.

    Notes
    -----
    Cost: that of `predict` at the M rows.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x, y = np.linspace(0.0, 1.0, 10), np.sin(np.linspace(0.0, 6.0, 10))
    >>> figure = pg.plot_predictions(pg.fit(model, pg.Laplace(), 0, x, y=y), x, y, num=20)
    """
    fits = panels.as_fits(fits)
    first = next(iter(fits.values()))
    data = panels.shown(first, X, y)
    if along is None and np.size(data.X) == len(data.X):
        slices, x = {"mean": _whole(first, data, X_new, xlabel, num)}, data.X.ravel()
    else:
        columns = inputs_in_columns(first, X, units)
        if along is None or X_new is not None:
            given = "X_new= is for one column: leave it out" if along is not None else "give along="
            raise DataError(
                f"plot_predictions: X has the columns {[c.name for c in columns]}; {given}, the "
                "one to draw along. The others are held (at=). plot_surface shows two columns."
            )
        slices = _slices(columns, along, dict(at or {}), num)
        column = columns[place(columns, "along", along)]
        x = column.own(column.values)
    if X_new is None:
        call = f"fit.plot({'' if along is None else f'along={along!r}, '}"
        cuts = {k: with_arguments(cut, call, first, X, (), kwargs) for k, cut in slices.items()}
        slices, kwargs = {k: cut for k, (cut, *_) in cuts.items()}, next(iter(cuts.values()))[2]
    figure, axes = draw_slices(fits, slices, x, data, flabel, observed, kwargs)
    told = next(iter(axes.values())).get_legend_handles_labels()
    figure.legend(*told, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _whole(first: Fit, data: panels.Shown, X_new, xlabel: str | None, num: int) -> Slice:
    """Along the only column."""
    trained = np.shape(first.args[0] if first.args else data.X)  # (N,) or (N, 1)
    labels = first.names.get(argument_names(first.model, 1)[0], ArrayNames()).level(0)
    between = np.arange(len(labels)) if labels else np.linspace(data.X.min(), data.X.max(), num)
    given = between if X_new is None else X_new
    if isinstance(given, np.ndarray):
        given = given.reshape(-1, *trained[1:])
    X_new = np.asarray(by_names(first, given, (), {})[0])
    along = panels.Column(X_new.ravel(), xlabel or (data.columns or ("x",))[0], labels)
    return Slice(X_new, along, {}, frozenset())


def draw_slices(fits, slices: Mapping[str, Slice], x, data: panels.Shown, flabel, observed, kwargs):
    """(figure, {name: axes}): a panel per fit with a line per slice over the data, at `x`."""
    what = (data.response or "y") if observed else flabel
    told = f"{what} and its 95 % interval{_held(slices, 60 if len(fits) == 1 else 90)}"
    figure, axes = panels.one_each(list(fits), "")
    for name, ax in axes.items():
        for i, (label, cut) in enumerate(slices.items()):
            mean, ends, centre = panels.mean_and_interval(name, fits[name], cut.X, kwargs, observed)
            if ends is not None:
                _draw(ax, cut, mean, ends, centre if len(slices) == 1 else label, i, len(slices))
            elif len(slices) > 1:
                remedy = "classes have a line each; give one value per column."
                raise DataError(f"at asks for the lines {list(slices)}, and {remedy}")
        if ends is None:
            mark = "o" if cut.along.labels else ""
            panels.draw_classes(ax, cut.along.values, mean, x, data.y, data.levels, mark)
            what, where = f"Probability of each {data.response or 'class'}", "marks above"
            if mean.shape[1] == 1:
                second = data.levels[1] if data.levels else 1
                what, where = f"Probability of {data.response or 'y'} = {second}", "marks"
            figure.suptitle(f"{what}; the data are the {where}{_held(slices, 90)}")
        else:
            figure.suptitle(f"{centre.capitalize()} of {told}")
            _data(ax, x, data, cut, observed)
        ax.set(title=name, xlabel=cut.along.name, ylabel=what)
        if cut.along.labels is not None:
            ax.set_xticks(cut.along.values, cut.along.labels)
            ax.set_xlim(cut.along.values[0] - 0.6, cut.along.values[-1] + 0.6)
    return figure, axes


def _slices(columns: Sequence[panels.Column], along, at: dict, num: int) -> dict[str, Slice]:
    """{label of a line: its slice}; a single one is called "mean"."""
    several = [k for k, v in at.items() if np.ndim(v) == 1]
    if len(several) > 1 or any(np.ndim(v) > 1 or np.size(v) == 0 for v in at.values()):
        raise DataError(f"at={at}: one column may have several values, in a list; the others one.")
    if not several:
        return {"mean": slice_through(columns, along, at, num)}
    (k,) = several
    name = columns[place(columns, "at", k)].name
    cuts = [slice_through(columns, along, {**at, k: v}, num) for v in at[k]]
    told = [f"{v:.10g}" if isinstance(v, float | np.floating) else f"{v}" for v in at[k]]
    return {f"{name} = {value}": cut for value, cut in zip(told, cuts, strict=True)}


def _held(slices: Mapping[str, Slice], width: int) -> str:
    """What all lines share, as further lines of the title."""
    first, *others = slices.values()
    same = {k: v for k, v in first.held.items() if all(c.held[k] == v for c in others)}
    told = first.title(same, width)
    return f"\n{told}" if told else ""


def _draw(ax, cut: Slice, mean, ends, label: str, i: int, num: int) -> None:
    """Line i of `num`, told from the others by dashes or marks too; bars stand side by side."""
    colour = "black" if num == 1 else _LINES[i % len(_LINES)]
    if cut.along.labels is None:
        panels.draw_band(ax, cut.along.values, mean, ends, colour, _DASHES[i % len(_DASHES)], label)
    else:
        x = cut.along.values + 0.5 * (i - 0.5 * (num - 1)) / num
        panels.draw_bars(ax, x, mean, ends, colour, panels.MARKERS[i % len(panels.MARKERS)], label)


def _data(ax, x, data: panels.Shown, cut: Slice, observed: bool) -> None:
    """Beneath the lines; along labels a rug would show the same mark again and again."""
    if observed:
        label = "data, all rows" if cut.held else "data"
        how = {"color": panels.CLASS_COLOURS[0], "markersize": 3, "alpha": 0.7, "label": label}
        ax.plot(x, data.y, "o", **how)
    elif cut.along.labels is None:
        panels.draw_rug(ax, x, data.y, data.levels)
