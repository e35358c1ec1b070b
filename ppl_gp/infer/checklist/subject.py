"""A model under `check`: its arguments, and what one run of it showed."""

from collections.abc import Callable
from typing import NamedTuple

from ppl_gp.infer.hyper.space import Space, space
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.declared import Declared
from ppl_gp.model.roles import Roles


class Subject(NamedTuple):
    """A model with its arguments and what one run of it showed; `whole`: as the local methods see
    it.
    """

    model: Callable
    args: tuple
    kwargs: dict
    trace: dict
    found: Roles
    whole: Declared

    @property
    def integrated(self) -> tuple[str, ...]:
        """Sites that local methods integrate into a predictor."""
        return self.whole.plan.sites if isinstance(self.whole, Collapsed) else ()

    @property
    def subsampling(self) -> dict[str, tuple[int, int]]:
        """{plate of the model that subsamples: (its rows, rows of a batch)}."""
        plates = {k: s["args"] for k, s in self.trace.items() if s["type"] == "plate"}
        return {k: sizes for k, sizes in plates.items() if sizes[1] not in (None, sizes[0])}


def space_of(subject: Subject) -> Space:
    """Its hyperparameters. Raises `ModelError` for a discrete one."""
    return space(subject.trace, subject.model, subject.args, subject.kwargs)
