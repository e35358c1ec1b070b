"""What the rows of the training data are called."""

from ppl_gp.model.arguments import argument_names
from ppl_gp.results.record import Record


def row_names(fit: Record, num: int) -> tuple[str | int, ...]:
    """A name for each of `num` training rows: the labels of the inputs' rows where these tell them
    apart, else those of another argument with an entry per row, else their numbers.
    """
    by_row = fit.model.reading.row_axes
    for path in (argument_names(fit.model, 1)[0], *fit.names):
        rows = (path in fit.names and fit.names[path].rows) or ()
        if by_row.get(path) == 0 and len(rows) == len(set(rows)) == num:
            return rows
    return tuple(range(num))
