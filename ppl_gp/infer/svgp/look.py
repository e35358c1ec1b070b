"""What `SVGP` is asked to fit: the model, its batches, and what one run on a first batch showed."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jax import random
from numpyro import handlers

from ppl_gp.deep.structure import Structure, structure_of
from ppl_gp.errors import DataError, ModelError, warn
from ppl_gp.gp import unwrap
from ppl_gp.infer.batches import Source, as_batch, first_rows, is_finite, source_of
from ppl_gp.infer.hyper.autoguides import is_auto
from ppl_gp.infer.hyper.space import given, held, holding
from ppl_gp.infer.probes import first_trace, probe_layers
from ppl_gp.infer.sources import ArraySource, Rows, Stream, num_rows, take
from ppl_gp.infer.stream_source import MOST_LOOKED, StreamSource
from ppl_gp.reading.dependence import depends
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed, lacks_levels, require_levels
from ppl_gp.reading.reading import Declared, declare
from ppl_gp.reading.refusals import require_pairs, unpaired
from ppl_gp.reading.roles import is_whole, roles, subsampling
from ppl_gp.reading.tracing import run, run_at_once
from ppl_gp.settings import MAP, Fixed
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.inducing import MAX_CANDIDATES
from ppl_gp.sparse.svgp import SparseMethod

_DRAWN_ROWS = 1000
_NO_EFFECTS = " (where no effect is integrated with the function)"
_PER_POINT = 10  # rows of a stream's first batches that an inducing point is chosen from
_LOOKS = 20  # batches of a subsampling model that inducing points are chosen from


class Subject(NamedTuple):
    """A model with a first batch of its data; the names of its hyperparameters and GP sites."""

    model: Any
    source: Source
    first: Rows
    trace: dict
    names: tuple[str, ...]
    structure: Structure
    additive: bool  # whether each term of the likelihood sees one function
    levels: Callable[[Rows], None] | None = None  # of a stream: `_require_known_levels`

    @property
    def gps(self) -> tuple[str, ...]:
        return self.structure.gps

    @property
    def data(self) -> tuple[tuple, dict]:
        """(args, kwargs) of all data; of a stream, of its first batch."""
        return self.source.args, self.source.kwargs


def look_at(
    method: SparseMethod, model, args, kwargs, seed: int, declared: bool = False
) -> Subject:
    """Run the model on a first batch, and require that SVGP fits it. No factorisation. `declared`:
    effects are latents of the model as it is declared, and are not integrated.
    """
    if not (args and isinstance(args[0], Stream)):
        model = declare(model, args, kwargs)
    source = _source(method, model, args, kwargs, seed)
    first = first_rows(source)
    batch = as_batch(first, random.key(0))
    at = batch.args, batch.kwargs
    model = declare(model, *at)
    if source.plate is not None:
        model.reading.require_apart("without subsample_size", drawn=True)
    elif not (source.whole or model.reading.coupled):  # which `probe_layers` refuses by its cause
        model.reading.require_apart(f"SVGP(batch_size={source.num_data}){_NO_EFFECTS}")
    if isinstance(source, StreamSource):
        num, source.grows = method.num_inducing, model.reading.grows
        source.look(first, max(num, min(_PER_POINT * num, MOST_LOOKED)))
    # a guide of one's own is written for the sites that are declared
    if not declared and (isinstance(method.hyper, MAP | Fixed) or is_auto(method.hyper)):
        kept = dict(batch.given)
        if given(method.hyper)[1] or getattr(method.hyper, "maximise", ()):
            kept |= held(method.hyper, run(holding(model, method.hyper), *at, batch.given))
        point = isinstance(method.hyper, MAP)
        asked = method.layers.latents is not None or method.layers.num_importance > 1
        model = with_effects(model, *at, kept, point, asked)
    trace = first_trace(model, *at, batch.given or None)
    faults = unpaired({k: unwrap(trace[k]["fn"]) for k in roles(trace).gps})
    if isinstance(model, Collapsed):  # its predictor is a site that the user did not name
        model.reading.require_row_by_row(faults)
    require_pairs(faults)
    if source.plate is None and (plates := [*subsampling(trace)]):
        raise DataError(
            f"plate '{plates[0]}' subsamples minibatches once more; that works with all "
            "data in memory. Leave subsample_size out, and give SVGP(batch_size=...) or a Stream."
        )
    found = roles(trace)
    rerun = lambda values: run(model, *at, {**batch.given, **values})  # noqa: E731
    structure = structure_of(found, trace, rerun)
    unscaled = {k: {**trace[k], "scale": None} for k in structure.latents}
    if masked := [k for k, site in unscaled.items() if not is_whole(site)]:
        raise ModelError(
            f"handlers.mask around the latents {masked} takes the prior of the rows that it leaves "
            "out away. Put the mask around the observed site alone."
        )
    names = (*found.hyper, *found.params)
    hyper = {k: trace[k]["value"] for k in names}
    if isinstance(model, Collapsed):
        require_levels(model, source.args, source.kwargs, hyper)
    is_told = isinstance(model, Collapsed) and isinstance(source, StreamSource)
    levels = partial(_require_known_levels, model, hyper) if is_told else None
    additive = probe_layers(model, structure, {**hyper, **batch.given}, trace, batch)
    return Subject(model, source, first, trace, names, structure, additive, levels)


def _require_known_levels(model: Any, hyper: dict, rows: Rows) -> None:
    """As `require_levels`, of a batch, compiled; one with NaN is told of elsewhere."""
    batch = as_batch(rows, None)
    if is_finite(rows) and bool(lacks_levels(model, batch.args, batch.kwargs, hyper)):
        require_levels(model, batch.args, batch.kwargs, hyper)


def _source(method: SparseMethod, model, args, kwargs, seed):
    """Batches, as the model's own plate subsamples if one does, all observations checked first."""
    plates = {}
    # a memory map is not read as a whole for it: pass arrays, or let SVGP subsample
    if num_rows(args) is not None and not isinstance(args[0], np.memmap):
        plates = subsampling(first_trace(model, args, kwargs))
    if len(plates) > 1:
        raise DataError(f"plates {[*plates]} all subsample; SVGP() handles one.")
    for plate, (num_data, batch_size) in plates.items():
        return ArraySource(args, kwargs, batch_size, seed, plate, num_data)
    size = getattr(method, "rows", lambda num: num)  # of `CollapsedSVGP` all data
    return source_of(type(method).__name__, size, model, args, kwargs, seed)


def uses_inputs(model, batch: Batch) -> bool:
    """Whether the model depends on the values of its first argument, not on its length alone."""

    def everything(X):
        trace = run(model, (X, *batch.args[1:]), batch.kwargs, batch.given)
        return arrays_of([s["fn"] for s in trace.values() if s["type"] == "sample"])

    return bool(depends(everything, batch.args[0]))


def site_inputs(subject: Subject, hyper: dict, seed: int) -> dict[str, np.ndarray]:
    """Inputs of each GP site, up to `MAX_CANDIDATES` rows, to choose inducing points from."""
    source = subject.source
    if isinstance(source, StreamSource):
        looks = [source.looked]
    elif source.plate is not None:
        looks = [source.rows(source.indices(i)) for i in range(_LOOKS)]
    else:
        rng, num = np.random.default_rng([seed, 29]), min(source.num_data, MAX_CANDIDATES)
        looks = [source.rows(np.sort(rng.choice(source.num_data, num, replace=False)))]
    found = [_inputs(subject, hyper, rows) for rows in looks]
    every = {k: np.concatenate([f[k] for f in found]) for k in subject.gps}
    # a memory map is checked as it is read: its bad rows end the run, and are no points before
    return {k: x[np.isfinite(x).reshape(len(x), -1).all(1)] for k, x in every.items()}


def _inputs(subject: Subject, hyper: dict, rows: Rows) -> dict[str, np.ndarray]:
    """At the prior means; where those of the layers below give one input for all rows, at draws
    from the prior, of a part of the rows.
    """
    batch = as_batch(rows, random.key(0))
    given = {**hyper, **batch.given}
    inputs = lambda t: {k: np.asarray(unwrap(t[k]["fn"]).X) for k in subject.gps}  # noqa: E731
    found = inputs(run_at_once(subject.model, batch.args, batch.kwargs, given))
    if all(np.ptp(X, 0).any() for X in found.values()) or not subject.structure.inner:
        return found
    some = np.arange(min(batch.num, _DRAWN_ROWS))
    args, kwargs = take(batch.args, batch.kwargs, some, subject.source.axes)
    with handlers.block():
        seeded = handlers.substitute(handlers.seed(subject.model, random.key(0)), data=given)
        return inputs(handlers.trace(seeded).get_trace(*args, **kwargs))


def with_effects(
    model: Declared,
    args: tuple,
    kwargs: dict,
    given: Mapping,
    maximised: bool = False,
    latents: bool = False,
) -> Declared:
    """The model that `SVGP` sees: effects beside GPs are integrated with them, those that stand one
    a datum where a datum sees one function. Several GPs alone keep a q(u) each.

    Where it does not integrate them they are hyperparameters, and a warning says so; `maximised`
    with the others (`MAP`), `ModelError` for effects of several values. `latents`: whether the user
    asked for a q(h) of what is per datum, which then stays as it is.
    """
    found = collapse(model, args, kwargs, given)
    if not isinstance(found, Collapsed):
        return model
    trace = run_at_once(model, args, kwargs, dict(given) or None)
    gps = roles(trace).gps
    effects = sorted(set(found.plan.sites) - set(gps))
    own = sorted(set(dict(found.plan.axes)) - set(gps))  # one per datum: latents
    if not gps or not (effects or set(gps) & set(model.reading.looked_up)):
        return model
    if not own or (found.plan.functions == 1 and not latents):
        return found
    left = [k for k in effects if k not in own]
    why = f"{own} are per datum and have a q(h) each, as Layers(...) asks"
    if not latents:
        why = f"{own} are per datum, which sees several functions"
    many = [k for k in left if np.size(trace[k]["value"]) > 1]
    if maximised and many:
        raise ModelError(
            f"SVGP(hyper=MAP()) would maximise {many}, effects of several values: {why}, and "
            "SVGP() does not integrate effects beside those. Laplace(), EP() and VI() integrate "
            "all of them; SVGP(hyper=AutoNormal), of numpyro.infer.autoguide, gives "
            "them a Gaussian beside the hyperparameters; or hold them, hyper=Fixed({...})."
        )
    if left:
        warn(
            f"SVGP() takes {left} as hyperparameters, points under MAP(): {why}, and it does "
            "not integrate effects beside those. EP(), VI() and Laplace() integrate all of them."
        )
    return model
