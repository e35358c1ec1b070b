"""What `collapse` finds in a model: which sites are integrated, and what the observed sites are
computed from.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ppl_gp.model.reading import Reading


class Observed(NamedTuple):
    """An observed site: its name without what `obs_mask` adds, and the paths of the arguments that
    its distribution and its value are computed from.
    """

    label: str
    fn: tuple[str, ...]
    value: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What was found: the integrated sites, how many functions of them a datum sees, the axis of
    the data of those with one entry per datum, from the right, and what the predictor's site is
    called. `seen`: paths of arguments with one entry per datum that the predictor is computed from,
    and no distribution: of a likelihood that is a factor.
    """

    sites: tuple[str, ...]
    functions: int
    independent: bool  # whether the functions are, a priori
    softmax: tuple[int, ...]  # which function each score of the one categorical site is, if any
    axes: tuple[tuple[str, int], ...]
    observed: tuple[tuple[str, Observed], ...]
    hyper: tuple[str, ...]
    name: str
    seen: tuple[str, ...] = ()


def with_predictor(reading: Reading, plan: Plan) -> Reading:
    """The reading with the predictor in place of what it integrates."""
    left = lambda pairs: tuple((k, v) for k, v in pairs if k not in plan.sites)  # noqa: E731
    paths = tuple(dict.fromkeys(p for k, v in reading.kernels if k in plan.sites for p in v))
    return replace(
        reading,
        axes=(*left(reading.axes), (plan.name, 0)),
        shaping=(*reading.shaping, *plan.seen),
        needed=(*reading.needed, *plan.seen),
        spread=left(reading.spread),
        variance=left(reading.variance),
        kernels=(*left(reading.kernels), *([(plan.name, paths)] if paths else [])),
    )
