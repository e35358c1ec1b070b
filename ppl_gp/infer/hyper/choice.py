"""What a local method does about the hyperparameters: one file of this folder for each choice."""

from functools import singledispatch
from typing import Any, NamedTuple

from ppl_gp.errors import DataError
from ppl_gp.local.method import LocalMethod
from ppl_gp.reading.roles import Roles, roles
from ppl_gp.results.fit import Fit


class LocalProblem(NamedTuple):
    """A declared model that a local method can take: everything was checked that does not depend on
    the choice.
    """

    method: LocalMethod
    model: Any
    trace: dict  # at the values that the choice gives, or draws
    rng_key: Any
    args: tuple
    kwargs: dict[str, Any]
    progress: bool

    @property
    def found(self) -> Roles:
        """The sites of the model by role."""
        return roles(self.trace)

    @property
    def names(self) -> tuple[str, ...]:
        """Hyperparameters and params."""
        return (*self.found.hyper, *self.found.params)

    @property
    def site(self) -> str:
        """The one GP site."""
        return self.found.gps[0]


@singledispatch
def infer_hyper(hyper: Any, problem: LocalProblem) -> Fit:
    """The fit of a local method under a choice: register an implementation for its class."""
    raise DataError(
        f"{type(problem.method).__name__}(hyper={hyper!r}): give MAP(), Fixed({{...}}), Grid() or "
        "Sample()."
    )
