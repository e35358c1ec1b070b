"""What every sampler is told of its chains, and which numbers it takes.

A protocol and no base class: the samplers have their own order of these fields, among others, and
their own defaults, which calls by position rely on.
"""

from numbers import Integral
from typing import Protocol, runtime_checkable

from ppl_gp.errors import DataError


@runtime_checkable
class ChainSettings(Protocol):
    """`num_chains` chains; in each, `num_warmup` transitions that adapt, and `num_samples` that are
    kept.
    """

    @property
    def num_warmup(self) -> int: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def num_chains(self) -> int: ...

    @property
    def target_accept_prob(self) -> float: ...


def require_settings(config: ChainSettings, *further: str) -> None:
    """Raise `DataError` unless the chains' numbers, and those named in `further`, are whole and
    from 1 on, and the acceptance lies in (0, 1).
    """
    name = type(config).__name__
    for count in (*further, "num_warmup", "num_samples", "num_chains"):
        value = getattr(config, count)
        if not isinstance(value, Integral) or value < 1:
            raise DataError(f"{name}({count}={value!r}): give a whole number, at least 1.")
    if not 0.0 < config.target_accept_prob < 1.0:
        raise DataError(
            f"{name}(target_accept_prob={config.target_accept_prob!r}): give a number between 0 "
            "and 1."
        )
