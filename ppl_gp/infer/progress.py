"""Around long work: a bar with steps, the value reached and the seconds left, silent on request;
and LAPACK kept to itself.
"""

from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from threadpoolctl import threadpool_limits


@contextmanager
def track(description: str, total: int, show: bool):
    """Yields update(completed, text): moves the bar of `total` steps and writes `text` behind it.
    Draws on stderr.
    """
    if not show:
        yield lambda completed, text="": None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(description, total=total, text="")
        yield lambda completed, text="": bars.update(task, completed=completed, text=text)


@contextmanager
def one_blas_thread():
    """One thread for OpenBLAS, which factors small matrices between products that XLA spreads over
    all cores.

    Its own threads spin in wait for work and take the cores away: steps at M = 500 took 1.5 times
    as long on two cores.
    """
    with threadpool_limits(1, user_api="blas"):
        yield
