"""A model read off once, in training, from what depends on what: axes, plates and arguments of the
data, roles of sites.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ppl_gp.model.arguments import Leaves, argument_of
from ppl_gp.model.graph import NOTHING, Graph, Seen, graph
from ppl_gp.model.growth import Axes, Look, grow, lengths, look_at
from ppl_gp.model.moving import acting_by_row, by_moving
from ppl_gp.model.same_length import tied

_OBSERVED = "_observed"  # what obs_mask adds to a site's name


@dataclass(frozen=True)
class Reading:
    """Static facts, by name.

    - `axes`: (site, axis of the data) of every sample site that holds data, as `tracing.annotated`
      counts them.
    - `plates`: the data's plates. `rows`: (path of an array argument, its axis of the data);
      `acting`: those among them that need not grow with the inputs, and belong to the rows by what
      they do (y[rows]).
    - `grows`: whether another number of rows could be traced; where not, arrays of N rows are
      caught in a closure.
    - `observed`: sites with observations. `predicted`: those that a prediction is made of: they
      hold data, or see a GP.
    - `scored`: factors that see observations, and so are part of the likelihood of y; other factors
      are penalties.
    - `shaping`: paths of array arguments that distributions are computed from; `masking`: masks and
      scales. `needed`: the shaping ones that a prediction is given anew, one entry per datum;
      tables and numbers are remembered. `factored`: those that factors alone are computed from,
      data or inputs, who can tell.
    - `spread`, `variance`: (site, the random sites that its scale, or its variance, is computed
      from). `kernels`: (GP site, the arrays with one entry per datum that its kernel is computed
      from: a median of distances, say).
    """

    axes: tuple[tuple[str, int], ...] = ()
    plates: tuple[str, ...] = ()
    rows: tuple[tuple[str, int], ...] = ()
    acting: tuple[str, ...] = ()
    grows: bool = True
    observed: tuple[str, ...] = ()
    predicted: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()
    shaping: tuple[str, ...] = ()
    masking: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    factored: tuple[str, ...] = ()
    spread: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kernels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    variance: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def axis(self, site: str) -> int | None:
        """Of a site, also where an `obs_mask` is there now and was not, or the other way round."""
        axes = dict(self.axes)
        stem = site.removesuffix(_OBSERVED)
        return next((axes[k] for k in (site, stem, stem + _OBSERVED) if k in axes), None)

    @property
    def row_axes(self) -> dict[str, int]:
        """{path of an array argument with one entry per datum: its axis of the data}."""
        return dict(self.rows)

    def axis_of(self, path: str) -> int | None:
        """The axis of the data of an array argument."""
        return dict(self.rows).get(path)

    def predicts(self, site: str) -> bool:
        """Whether predictions are made of a site, with or without an `obs_mask` now."""
        stem = site.removesuffix(_OBSERVED)
        return any(k in self.predicted for k in (site, stem, stem + _OBSERVED))

    def observing(self, sites: tuple[str, ...]) -> "Reading":
        """Where the observations are gone, as in a saved fit: the sites that had them."""
        known = tuple(dict.fromkeys((*self.observed, *sites)))
        return replace(
            self,
            observed=known,
            predicted=tuple(k for k in known if self.axis(k) is not None or k in self.predicted),
        )


def read_off(model: Callable, args: tuple, kwargs: dict) -> Reading:
    """The reading of `model(*args, **kwargs)`. Abstract traces only, a few more than there are
    arrays of N rows.

    Raises `ModelError` where neither growing nor moving tells one axis from another.
    """
    leaves = Leaves(model, args, kwargs)
    base = look_at(model, leaves, {})
    seen, factors = graph(model, leaves, base)
    options = frozenset().union(*(s.arguments for s in seen.kernels.values()))
    together = tied(model, leaves, base)
    trials = (grow(model, leaves, base, num, options, together) for num in lengths(leaves))
    grown = next((a for a in trials if a is not None), None)
    axes = by_moving(model, leaves, base) if grown is None else grown
    acting = acting_by_row(model, leaves, axes)
    axes = axes._replace(rows=axes.rows | acting)
    observed = tuple(k for k, s in base.sites.items() if s.observed and k not in factors)
    predicted = tuple(k for k in observed if k in axes.sites or _sees_gp(k, seen, base))
    return Reading(
        axes=tuple(axes.sites.items()),
        plates=axes.plates,
        rows=tuple(axes.rows.items()),
        acting=tuple(acting),
        grows=grown is not None,
        observed=observed,
        predicted=predicted,
        scored=tuple(k for k, s in factors.items() if s.arguments - seen.shaping),
        shaping=tuple(sorted(seen.shaping)),
        masking=tuple(sorted(frozenset().union(*(s.arguments for s in seen.around.values())))),
        needed=_needed(leaves, axes if grown is not None else None, seen, predicted),
        factored=tuple(
            sorted(frozenset().union(*(s.arguments for s in factors.values())) - seen.shaping)
        ),
        spread=_from_random(seen.spreads, base),
        variance=_from_random(seen.variances, base),
        kernels=_kernels_of_data(seen, axes),
    )


def _needed(
    leaves: Leaves, axes: Axes | None, seen: Graph, predicted: tuple[str, ...]
) -> tuple[str, ...]:
    """Shaping arrays with one entry per datum, and those of sites whose own data axis is not known
    (f[idx]: idx belongs to the new data).
    """
    arrays = [
        p
        for p, x in leaves.arrays.items()
        if x.shape and p in seen.shaping and argument_of(p) != leaves.inputs
    ]
    if axes is None:
        return tuple(arrays)
    loose = frozenset().union(
        *(seen.distributions[k].arguments for k in predicted if k not in axes.sites)
    )
    return tuple(p for p in arrays if p in axes.rows or p in loose)


def _sees_gp(name: str, seen: Graph, base: Look) -> bool:
    """Whether a site's distribution is computed from a GP's values, also through other sites."""
    front, known = [name], set()
    while front:
        new = seen.distributions.get(front.pop(), NOTHING).sites - known
        known |= new
        front += new
    return any(base.sites[k].is_gp for k in known if k in base.sites)


def _kernels_of_data(seen: Graph, axes: Axes) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = {k: tuple(sorted(s.arguments & {*axes.rows, "y"})) for k, s in seen.kernels.items()}
    return tuple((k, paths) for k, paths in found.items() if paths)


def _from_random(seen: dict[str, Seen], base: Look) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(site, the random sites that something about it is computed from)."""
    free = [k for k, s in base.sites.items() if not (s.observed or s.is_gp)]
    return tuple((k, tuple(sorted(seen[k].sites))) for k in free if seen.get(k, NOTHING).sites)
