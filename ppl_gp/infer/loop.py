"""The loop around long work: a bar, LAPACK kept to itself, Ctrl-C that loses nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
from rich import progress as bars
from rich.console import Console
from threadpoolctl import threadpool_limits

from ppl_gp.runtime import check_interrupt, verb, was_interrupt

S = TypeVar("S")


class Stage(NamedTuple, Generic[S]):
    """A state that is whole, after `done` steps; the bar says `text` behind them."""

    state: S
    done: int
    text: str = ""
    keep: bool = True  # False: no result can be made of it yet


def interruptible(
    stages: Iterator[Stage[S]], label: str, total: int, progress: bool
) -> tuple[S, bool]:
    """The last state of `stages`, and whether Ctrl-C ended them.

    `stages` is a generator: it yields where the work starts, then does it stage by stage, and ends
    where the work does. Of a stage that Ctrl-C meets halfway nothing remains; where no stage before
    it is to be kept, it propagates.
    """
    with _bar(label, total, progress) as update, one_blas_thread():
        last = next(stages)

        def advance() -> None:
            nonlocal last
            update(last.done, last.text)
            for stage in stages:
                # at once: arrays that are still being computed are no state to keep
                last = jax.block_until_ready(stage)
                update(last.done, last.text)
                check_interrupt()

        _, stopped = unless_stopped(advance, None)
        if stopped and not last.keep:
            raise KeyboardInterrupt
    return last.state, stopped


def unless_stopped(work: Callable[[], S], otherwise: S) -> tuple[S, bool]:
    """(what `work` gives, or `otherwise` if Ctrl-C ended it, and whether that was so). Afterwards
    there is a state to keep, and a press waits: other work of this kind does not begin, and the
    rest of the fit is completed. A second press raises, as that may take long.
    """
    verb.waits = False
    try:
        check_interrupt()
        found = jax.block_until_ready(work())
        check_interrupt()
        verb.waits = True
        return found, False
    except (KeyboardInterrupt, Exception) as error:
        verb.waits = True
        if not was_interrupt(error):
            raise
        return otherwise, True


@contextmanager
def _bar(label: str, total: int, show: bool):
    """Yields update(completed, text) of a bar of `total` steps on stderr."""
    if not show:
        yield lambda completed, text="": None
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=24),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[text]}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, text="")
        yield lambda completed, text="": bar.update(task, completed=completed, text=text)


# One thread for OpenBLAS, which factors small matrices between products that XLA spreads over all
# cores. Its own threads spin in wait for work and take the cores away: steps at M = 500 took 1.5
# times as long on two cores.
one_blas_thread = partial(threadpool_limits, 1, user_api="blas")
