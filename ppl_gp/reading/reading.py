"""A model read once, in training: axes, plates and arguments of the data, roles of sites. What was
read is kept with the function (`Declared`), and compiled code is keyed by both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any

import jax
import numpy as np

from ppl_gp.errors import (
    IN_ORDER,
    LISTED,
    ONE_PAIR,
    ONE_SITE,
    ONE_TABLE,
    ONE_TERM,
    DataError,
    ModelError,
    NotPointwiseError,
    PplGpError,
)
from ppl_gp.reading.arguments import Leaves, argument_of
from ppl_gp.reading.dependence import Sees, Sources, graph
from ppl_gp.reading.fingerprint import OPTIONS, Keyed, by_shapes, changed, digest, keyed
from ppl_gp.reading.roles import is_missing_part
from ppl_gp.reading.rows import Rows, rows_of
from ppl_gp.reading.tracing import Look, look_at
from ppl_gp.reading.walk import line_of

_MORE = {
    "mixes": "other rows",
    "pairs": "a second row, as f_i - f_j does",
    "unknown": "all rows by an operation that is not known to keep them apart, as jax.lax.map over "
    "the rows does",
    "number": "the row's number",
    "count": "the number of rows",
}
_OBSERVED = "_observed"  # what obs_mask adds to a site's name


@dataclass(frozen=True)
class Reading:
    """Static facts, by name.

    - `axes`: (site, axis of the data) of every sample site that holds data, as `tracing.annotated`
      counts them.
    - `plates`: the data's plates. `rows`: (path of an array argument, its axis of the data);
      `square`: those with several, an adjacency of the rows.
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
    - `spread`, `variance`, `priors`: (site, the random sites that its scale, its variance or all
      of it is computed from). `kernels`: (GP site, the arrays with one entry per datum that its
      kernel is computed from: a median of distances, say).
    - `mixing`: (site, what of it, how) where row n is computed from more than row n; `shared`: of
      sites without rows that see them (a prior at their mean); `drawn`: where a row sees which are
      drawn with it by a plate that subsamples; `coupled`: (site, how) of those that
      see values of other rows, and `lines` of the model that say so. `looked_up`: GP sites at other
      rows than the observations or latents that see them. `whole`: sites of the rows without an
      axis of theirs, one event.
    """

    axes: tuple[tuple[str, int], ...] = ()
    plates: tuple[str, ...] = ()
    rows: tuple[tuple[str, int], ...] = ()
    square: tuple[tuple[str, tuple[int, ...]], ...] = ()
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
    priors: tuple[tuple[str, tuple[str, ...]], ...] | None = None  # in files of before
    mixing: tuple[tuple[str, str, str], ...] = ()
    shared: tuple[tuple[str, str, str], ...] = ()
    drawn: tuple[tuple[str, str, str], ...] | None = None  # in files of before
    coupled: tuple[tuple[str, str], ...] = ()
    looked_up: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    lines: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def axis(self, site: str) -> int | None:
        """Of a site, also where an `obs_mask` is there now and was not, or the other way round."""
        axes = dict(self.axes)
        stem = site.removesuffix(_OBSERVED)
        return next((axes[k] for k in (site, stem, stem + _OBSERVED) if k in axes), None)

    @property
    def row_axes(self) -> dict[str, int]:
        """{path of an array argument with one entry per datum: its axis of the data}."""
        return dict(self.rows)

    def along(self, argument: str) -> int:
        """The axis of the data of an argument's arrays, the last one where they differ."""
        return max((a for p, a in self.rows if argument_of(p) == argument), default=0)

    def num_rows(self, leaves: Leaves) -> int | None:
        """N: the entries of what has one per datum; if nothing has, those of the first argument."""
        axes, arrays = self.row_axes, leaves.arrays
        own = [x.shape[axes[p]] for p, x in arrays.items() if p in axes]
        inputs = [x for p, x in arrays.items() if argument_of(p) == leaves.inputs and x.shape]
        return next(iter([*own, *(x.shape[0] for x in inputs)]), None)

    def inputs_of_rows(self, leaves: Leaves) -> tuple[int, ...] | None:
        """Places in the first argument of its arrays with an entry per datum; `None` if all."""
        own = [p for p in leaves.leaves if argument_of(p) == leaves.inputs]
        found = tuple(i for i, p in enumerate(own) if self.row_axes.get(p) == 0)
        return None if len(found) == len(own) else found

    @property
    def mixed(self) -> list[str]:
        """Sites without predictions, as their row n sees more than its own arguments."""
        return list(dict.fromkeys(k for k, *_ in self._refused))

    @property
    def _refused(self) -> tuple[tuple[str, str, str], ...]:
        """Without arrays that a model holds, if no other rows than training's can meet them."""
        return tuple(x for x in self.mixing if self.grows or x[-1] != "number")

    @property
    def held(self) -> str | None:
        """Why no other number of rows can be traced, and what to do."""
        if self.grows:
            return None
        if any(how == "number" for *_, how in (*self.mixing, *self.shared)):
            return (
                "the model holds arrays of its own with one entry per datum (in a closure, a "
                "partial, a global or handlers.condition), which new inputs would be paired with. "
                "Make them arguments of the model."
            )
        sizes = ", ".join(f"numpyro.plate({p!r}, ...)" for p in self.plates)
        return (
            f"the model writes the number of rows down, {sizes or 'or holds it'}, as no other one "
            "could be traced. Take it from an argument with one entry per row, X.shape[0]."
        )

    def why_mixed(self, in_batches: bool = False) -> str:
        """What `mixed` sites see, the user's line, and the remedy, for a message."""
        told = (*self._refused, *(self.shared if in_batches else ()))[0]
        outside = "Compute it before the fit, from the training data, and pass the result."
        return (
            f"{self._told(*told)}, so that predictions would depend on which rows are asked for "
            f"together. {ONE_PAIR if told[-1] == 'pairs' else outside}"
        )

    def _told(self, site: str, what: str, how: str) -> str:
        line = dict(self.lines).get(site)
        verb, what = ("see", "inputs or the mean") if what == "inputs" else ("sees", what)
        told = f"a row sees more than its own arguments: the {what} of '{site}' {verb} {_MORE[how]}"
        return f"{told} ({line})" if line else told

    def require_pointwise(self, who: str, gps: Iterable[str]) -> None:
        """Raise `NotPointwiseError` where the density of a datum, or an input of it, depends on
        random values of other rows, or on one of these functions at no row of its own; `ModelError`
        where the prior of a hyperparameter is computed from one.
        """
        sees = (k for k, seen in self.priors or () if self.axis(k) is None and {*seen} & {*gps})
        for name in sees:
            raise ModelError(
                f"the prior of site '{name}' is computed from a function or an effect, which {who} "
                f"integrates, and '{name}' itself is not integrated. {LISTED}"
            )
        how, looked = dict(self.coupled), {*gps} & {*self.looked_up}
        if not (how or looked):
            return
        below = [] if how else [k for k, seen in self.priors or () if looked & {*seen}]
        part, named = "prior" if below else "likelihood", (*how, *below)
        lines = ", ".join(dict.fromkeys(filter(None, (dict(self.lines).get(k) for k in named))))
        kind = kinds.pop() if len(kinds := {*how.values()}) == 1 else "mixes"
        sees = _MORE[kind] if kind in ("unknown", "pairs") else "other rows than its own"
        raise NotPointwiseError(
            f"the {part} of site {list(how) or below or list(self.observed)} couples values of "
            f"latent functions: the density of a datum depends on values at {sees}"
            f"{lines and f' ({lines})'}, and "
            f"{who} needs log p(y|f) = sum_n log p(y_n|f_n). {self.in_order} {LISTED}"
        )

    @property
    def without_rows(self) -> list[str]:
        """Observed sites that see functions and have other rows than the data's, or none."""
        return [k for k in self.observed if k in dict(self.coupled) and self.axis(k) is None]

    @property
    def in_order(self) -> str:
        """How each datum sees functions at a row of its own."""
        if self.held:
            return f"A linear predictor of several rows of f is read off, unless {self.held}"
        if {*dict(self.coupled).values()} == {"pairs"}:
            return ONE_PAIR
        if {*dict(self.coupled)} & {*self.scored}:
            return ONE_TERM
        if self.without_rows and all(self.axis(k) is None for k in self.observed):
            return f"{ONE_SITE} {IN_ORDER}"
        return f"{ONE_TABLE}." if self.without_rows else IN_ORDER

    def require_apart(self, whole: str, drawn: bool = False) -> None:
        """Raise `NotPointwiseError` where a density depends on which rows, or how many, are in a
        batch. `whole`: what takes all of them; `drawn`: a plate of the model draws batches.
        """
        for told in self.drawn or () if drawn else (*self._refused, *self.shared):
            raise NotPointwiseError(
                f"minibatches would read wrong rows: {self._told(*told)}. Compute it before the "
                f"fit and pass the result to fit, or take all data in a step, {whole}."
            )

    def require_row_by_row(self, faults: Mapping[str, str]) -> None:
        """Raise `NotPointwiseError` for a predictor, one of `faults`, whose row sees others."""
        for told in (*self._refused, *self.shared) if faults else ():
            raise NotPointwiseError(
                f"SVGP() needs a linear predictor at any rows: {self._told(*told)}. Compute it "
                "before the fit and pass the result to fit, or use Laplace(), EP() or VI()."
            )

    def require_own_masks(self) -> None:
        """Raise `ModelError` where it depends on other rows whether a row counts."""
        for told in (x for x in self.shared if x[1] == "mask"):
            raise ModelError(
                f"{self._told(*told)}, so that a density would depend on which rows are asked for "
                "together. Pass the mask to the model, an argument with one entry per row."
            )

    def predicts(self, site: str) -> bool:
        """Whether predictions are made of a site, with or without an `obs_mask` now."""
        stem = site.removesuffix(_OBSERVED)
        return any(k in self.predicted for k in (site, stem, stem + _OBSERVED))

    def observing(self, sites: tuple[str, ...]) -> "Reading":
        """Where the observations are gone, as in a saved fit: the sites that had them."""
        known = tuple(dict.fromkeys((*self.observed, *sites)))
        predicted = tuple(k for k in known if self.axis(k) is not None or k in self.predicted)
        return replace(self, observed=known, predicted=predicted)


@by_shapes
def read_off(model: Callable, args: tuple, kwargs: dict, tables=()) -> Reading:
    """The reading of `model(*args, **kwargs)`. Abstract traces only, five as a rule."""
    leaves = Leaves(model, args, kwargs)
    base = look_at(model, leaves)
    seen = graph(model, leaves, base)
    factors = {k: seen[k].fn.arguments for k, s in base.sites.items() if s.is_factor}
    shaping = _every(s.fn.arguments for k, s in seen.items() if k not in factors)
    found = rows_of(model, leaves, base, tables)
    _require_tables(tables, leaves, found)
    rows = {p: a[0] for p, a in found.rows.items() if len(a) == 1}
    observed = tuple(k for k, s in base.sites.items() if s.observed and k not in factors)
    part = {k: "inputs" if s.is_gp else "prior" for k, s in base.sites.items() if not s.observed}
    mixing = [(k, part.get(k, "density"), c) for k, c in found.mixing.items()]
    mixing += [(k, "kernel", c) for k, c in found.kernels.items()]
    shared = [(k, "density", c) for k, c in found.shared.items()]
    shared += [(k, what, c) for (k, what), c in found.around.items()]
    drawn = [(k, what, c) for (k, what), c in found.drawn.items()]
    causes = {k: c for k, _, c in (*drawn, *shared)}
    causes |= {**found.coupled, **{k: c for k, _, c in mixing}}
    predicted = tuple(k for k in observed if k in found.axes or _sees_gp(k, seen, base))
    needed = _needed(leaves, found, shaping, [seen[k].fn for k in predicted if k not in found.axes])
    free = {k: seen[k] for k, s in base.sites.items() if not (s.observed or s.is_gp)}
    # functions that a latent of a row sees elsewhere
    latents = [k for k in found.coupled if k in free and not is_missing_part(k, seen)]
    across = _every(free[k].fn.sites for k in latents)
    across -= {k for k, s in base.sites.items() if not s.is_gp}
    return Reading(
        axes=tuple(found.axes.items()),
        plates=found.plates,
        rows=tuple(rows.items()),
        square=tuple((p, a) for p, a in found.rows.items() if p not in rows),
        grows=found.grows,
        observed=observed,
        predicted=predicted,
        scored=tuple(k for k, arguments in factors.items() if arguments - shaping),
        shaping=tuple(sorted(shaping)),
        masking=tuple(sorted(_every(s.around.arguments for s in seen.values()))),
        needed=tuple(p for p in needed if argument_of(p) not in tables),
        factored=tuple(sorted(_every(factors.values()) - shaping)),
        spread=_any((k, s.spread.sites) for k, s in free.items()),
        variance=_any((k, s.variance.sites) for k, s in free.items()),
        priors=_any((k, s.fn.sites) for k, s in free.items() if not is_missing_part(k, seen)),
        kernels=_any((k, s.kernel.arguments & {*rows, "y"}) for k, s in seen.items()),
        mixing=tuple((k, what, c.kind) for k, what, c in mixing),
        shared=tuple((k, what, c.kind) for k, what, c in shared),
        drawn=tuple((k, what, c.kind) for k, what, c in drawn),
        coupled=tuple((k, c.kind) for k, c in found.coupled.items() if k not in free),
        looked_up=tuple(sorted({*found.looked_up, *across})),
        whole=found.whole,
        lines=tuple((k, line_of(c.source)) for k, c in causes.items()),
    )


def _every(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _any(pairs: Iterable[tuple[str, frozenset[str]]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(site, what something about it is computed from) where that is anything."""
    return tuple((k, tuple(sorted(names))) for k, names in pairs if names)


def _require_tables(tables, leaves: Leaves, found: Rows) -> None:
    """Raise `DataError` for names that are no arguments, `ModelError` for arrays of the rows."""
    known = sorted({argument_of(p) for p in leaves.arrays})
    if not isinstance(tables, tuple) or not {*tables} <= {*known}:
        raise DataError(f"tables={tables!r} must be a tuple of names of array arguments: {known}.")
    if rows := [p for p in found.rows if argument_of(p) in tables]:
        raise ModelError(
            f"tables={tables!r}: {rows} have an entry per datum, as the model uses them entry by "
            "entry with the observations. Leave them out of tables=."
        )


def _needed(
    leaves: Leaves, found: Rows, shaping: frozenset[str], loose: Iterable[Sources]
) -> tuple[str, ...]:
    """Shaping arrays with one entry per datum, and those of the `loose` sites, whose own data axis
    is not known (f[idx]: idx belongs to the new data).
    """
    arrays = [p for p, x in leaves.arrays.items() if x.shape and p in shaping]
    arrays = [p for p in arrays if argument_of(p) != leaves.inputs]
    if not found.grows:
        return tuple(arrays)
    told = _every(s.arguments for s in loose)
    return tuple(p for p in arrays if len(found.rows.get(p, ())) == 1 or p in told)


def _sees_gp(name: str, seen: Mapping[str, Sees], base: Look) -> bool:
    """Whether a site's distribution is computed from a GP's values, also through other sites."""
    front, known = [name], set()
    while front:
        new = seen[front.pop()].fn.sites - known
        known |= new
        front += [k for k in new if k in seen]
    return any(base.sites[k].is_gp for k in known if k in base.sites)


@dataclass(unsafe_hash=True, repr=False)
class Declared:
    """A model that knows which of its axes are the data's, and what it read when it was declared
    (globals, closures).

    It is called as the model is. Equal to another one of the same code, with the same constants and
    the same reading: so compiled code is found again, and not after a constant has changed.
    """

    function: Keyed
    reading: Reading
    options: str = ""  # of objects among its arguments, whose attributes may change

    def __post_init__(self):
        update_wrapper(self, self.function, updated=())

    def __call__(self, *args, **kwargs) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self):
        own = self.function.__wrapped__
        return f"Declared({getattr(own, '__qualname__', repr(own))})"


def declare(model: Callable, args: tuple, kwargs: dict, tables=()) -> Declared:
    """Read a model off its training arguments; a model that was declared before stays as it is.
    `tables`: arguments that are looked up, where the user says so.

    Raises `DataError` where the arguments do not fit together.
    """
    if isinstance(model, Declared):
        return model
    try:
        function, plain = keyed(model), (np.ndarray, jax.Array, *OPTIONS)
        objects = [x for x in jax.tree.leaves((args, kwargs)) if not isinstance(x, plain)]
        options = digest(objects) if objects else ""
        return Declared(function, read_off(function, args, kwargs, tables), options)
    except (TypeError, ValueError) as error:
        if isinstance(error, jax.errors.JAXTypeError):
            raise  # `told` has the line of the model
        named = {**dict(enumerate(args)), **kwargs}
        if lists := [k for k, v in named.items() if isinstance(v, list)]:
            raise DataError(
                f"the model does not run: {error} Arguments {lists} are lists, which are options; "
                "give arrays."
            ) from error
        lengths = {x.shape[0] for x in Leaves(model, args, kwargs).arrays.values() if len(x.shape)}
        if isinstance(error, PplGpError) or len(lengths) <= 1:
            raise
        raise DataError(
            f"the arguments' leading lengths {sorted(lengths)} do not fit together: {error}"
        ) from error


def own_function(model: Callable) -> Callable:
    """The user's function behind a declared model."""
    return model.function.__wrapped__ if isinstance(model, Declared) else model


def require_unchanged(model: Declared) -> None:
    """Raise `ModelError` where something that the model reads has changed since its declaration."""
    if differing := changed(model.function):
        raise ModelError(
            f"what the model reads has changed since the fit: {differing}. A prediction would mix "
            "old and new values: put the old value back, fit again, or make it an argument of "
            "the model, which a fit remembers."
        )
