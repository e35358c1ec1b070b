"""What `SVGP` is asked to fit: the model, the source of its batches, and what one run on a first
batch showed; whether the likelihood is a sum of terms of one function each, for all data; whether a
datum's row means the same in every batch, which is checked before any is drawn.
"""

from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers

from ppl_gp.deep.latents import latent_form
from ppl_gp.deep.structure import Structure, structure_of
from ppl_gp.errors import HERE, IN_ORDER, DataError, NotPointwiseError
from ppl_gp.gp import unwrap
from ppl_gp.hyperparameters import MAP, Fixed
from ppl_gp.infer.batches import as_batch, first_rows, source_of
from ppl_gp.infer.hyper.autoguides import is_auto
from ppl_gp.infer.hyper.given import held, holding
from ppl_gp.infer.integrated import with_effects
from ppl_gp.infer.probes.joint import is_additive, probe_layers, probe_predictor
from ppl_gp.infer.probes.observed import first_trace
from ppl_gp.infer.sources import ArraySource, Rows, Stream, num_rows, take
from ppl_gp.infer.stream_source import MOST_LOOKED, StreamSource
from ppl_gp.quick import quick_jit
from ppl_gp.reading.declared import declare
from ppl_gp.reading.dependence import depends
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.levels import require_levels
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.roles import (
    is_factor,
    is_observed,
    log_prob_per_datum,
    roles,
)
from ppl_gp.reading.row_independence import require_pairs, unpaired
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.select import MAX_CANDIDATES
from ppl_gp.sparse.svgp import SVGP


def require_rows_apart(
    model, structure: Structure, hyper: dict, trace: dict, batch: Batch, axes, num_data: int
) -> None:
    """Raise `NotPointwiseError` where a datum's likelihood, inputs or prior depend on which other
    rows its batch holds.

    The rows of a batch are drawn anew, with repetitions and in another order: at the same values of
    f and latents each must have the terms that it had. An array that has N rows and is no data (a
    table of places) does not pass, nor does a lookup f[order], nor a normalisation over the rows.
    Rows in another order alone tell a lookup from a normalisation. Two evaluations of the model, a
    third where it fails, one compilation, O(B).
    """
    num = batch.weights.shape[0]
    values = {
        k: random.normal(random.fold_in(random.key(4), i), trace[k]["fn"].shape())
        for i, k in enumerate(structure.gps)
    }
    axis = {k: v.ndim - 1 for k, v in values.items()} | {
        k: latent_form(trace[k], num)[0] for k in structure.latents
    }
    values |= {k: trace[k]["value"] for k in structure.latents}
    by_row, shared = _seen(model, structure, num, hyper, values, batch.args, batch.kwargs)

    def moved_by(rows) -> list[str]:
        moved = {k: jnp.take(v, rows, axis[k]) for k, v in values.items()}
        args, kwargs = jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x,
            take(batch.args, batch.kwargs, rows, axes),
        )
        by_row_after, shared_after = _seen(model, structure, num, hyper, moved, args, kwargs)
        wrong = [k for k, x in by_row.items() if not _same(x[rows], by_row_after[k])]
        return wrong + [k for k, x in shared.items() if not all(map(_same, x, shared_after[k]))]

    rng = np.random.default_rng(3)
    if not (wrong := moved_by(rng.integers(0, num, num))):
        return
    begin, whole = "minibatches would read wrong rows", f"SVGP(batch_size={num_data})"
    if moved_by(rng.permutation(num)):
        raise NotPointwiseError(
            f"{begin}: the model looks {wrong[0]} up by numbers of rows, or in an array of as many "
            f"rows as there are data. {IN_ORDER} Or take all data in a step, {whole}."
        )
    line = _line_over_rows(model, structure, num, hyper, values, batch.args, batch.kwargs)
    raise NotPointwiseError(
        f"{begin}: the model computes {wrong[0]} from all rows of a batch{line}, by a mean or a "
        "scale over the rows, for example. Compute it before the fit and pass the result to fit, "
        f"or take all data in a step, {whole}."
    )


def _line_over_rows(model, structure: Structure, num: int, *values) -> str:
    """Where the user's code reduces an axis of all rows: (function, line)."""
    closed, *_ = eqx.filter_make_jaxpr(_seen.__wrapped__)(model, structure, num, *values)
    for equation in closed.jaxpr.eqns:
        over, left = ([num in v.aval.shape for v in x] for x in (equation.invars, equation.outvars))
        for frame in equation.source_info.traceback.frames if any(over) and not any(left) else ():
            if not frame.file_name.startswith(HERE) and "/lib/python" not in frame.file_name:
                return f" ({frame.function_name}, line {frame.line_num})"
    return ""


@quick_jit
def _seen(model, structure: Structure, num: int, hyper, values, args, kwargs) -> tuple[dict, dict]:
    """({what: of each row (B, ...)}, {what: that all rows share}) of a model at given values of f
    and latents.
    """
    gps = {k: values[k] for k in structure.gps}
    given = {**hyper, **{k: values[k] for k in structure.latents}}
    trace = run(model, args, kwargs, given, gps)
    by_row = {"the likelihood": JointLogLikelihood(model, num, given, args, kwargs)(gps)}
    by_row |= {f"the prior of '{k}'": log_prob_per_datum(trace[k]) for k in structure.latents}
    priors = {k: unwrap(trace[k]["fn"]) for k in structure.gps}
    for name, prior in priors.items():
        by_row[f"the inputs of '{name}'"] = jnp.asarray(prior.X, float).reshape(num, -1)
        by_row[f"the mean of '{name}'"] = jnp.moveaxis(prior.mean, -1, 0)
    kernels = {f"the kernel of '{k}'": jax.tree.leaves(p.kernel) for k, p in priors.items()}
    return by_row, {
        k: [x for x in leaves if jnp.shape(x)[:1] != (num,)] for k, leaves in kernels.items()
    }


def _same(a, b) -> bool:
    """Up to the order of sums."""
    a, b = jnp.asarray(a, float), jnp.asarray(b, float)
    # Values without a number, as at random f of an inner layer, have to be alike.
    known = jnp.isfinite(a) & jnp.isfinite(b)
    scale = jnp.max(jnp.where(known, jnp.abs(a), 0.0), initial=jnp.finfo(a.dtype).tiny)
    close = jnp.abs(a - b) <= jnp.sqrt(jnp.finfo(a.dtype).eps) * scale
    return bool(jnp.all(jnp.where(known, close, (a == b) | (jnp.isnan(a) & jnp.isnan(b)))))


_COUNTS = (0, 1, 2)  # observations at which mixtures of discrete likelihoods change their form
_DRAWS = 3
_DRAWN_ROWS = 1000
_PER_POINT = 10  # rows of a stream's first batches that an inducing point is chosen from
_LOOKS = 20  # batches of a subsampling model that inducing points are chosen from


class Subject(NamedTuple):
    """A model with a first batch of its data; the names of its hyperparameters and GP sites."""

    model: Any
    source: ArraySource | StreamSource
    first: Rows
    trace: dict
    names: tuple[str, ...]
    structure: Structure
    additive: bool  # whether each term of the likelihood sees one function

    @property
    def gps(self) -> tuple[str, ...]:
        """Names of the GP sites."""
        return self.structure.gps

    @property
    def data(self) -> tuple[tuple, dict]:
        """(args, kwargs) of all data; of a stream, of its first batch."""
        kept = self.first if isinstance(self.source, StreamSource) else self.source
        return kept.args, kept.kwargs


def look_at(method: SVGP, model, args, kwargs, seed: int, declared: bool = False) -> Subject:
    """Run the model on a first batch, and require that SVGP fits it. No factorisation. `declared`:
    effects are latents of the model as it is declared, and are not integrated.
    """
    if not (args and isinstance(args[0], Stream)):
        model = declare(model, args, kwargs)
    source = _source(method, model, args, kwargs, seed)
    first = first_rows(source)
    batch = as_batch(first, random.key(0))
    model = declare(model, batch.args, batch.kwargs)
    if isinstance(source, StreamSource):
        num, source.grows = method.num_inducing, model.reading.grows
        source.look(first, max(num, min(_PER_POINT * num, MOST_LOOKED)))
    # a guide of one's own is written for the sites that are declared
    if not declared and (isinstance(method.hyper, MAP | Fixed) or is_auto(method.hyper)):
        at_values = run(holding(model, method.hyper), batch.args, batch.kwargs, batch.given)
        kept = {**batch.given, **held(method.hyper, at_values)}
        point = isinstance(method.hyper, MAP)
        asked = method.latents is not None or method.num_importance > 1
        model = with_effects(model, batch.args, batch.kwargs, kept, point, asked)
    trace = first_trace(model, batch.args, batch.kwargs, batch.given)
    require_pairs(unpaired({k: unwrap(trace[k]["fn"]) for k in roles(trace).gps}))
    if source.plate is None and (plates := _subsampling_plates(trace)):
        raise DataError(
            f"plate '{plates[0]['name']}' subsamples minibatches once more; that works with all "
            "data in memory. Leave subsample_size out, and give SVGP(batch_size=...) or a Stream."
        )
    found = roles(trace)
    structure = structure_of(
        found, trace, lambda values: run(model, batch.args, batch.kwargs, {**batch.given, **values})
    )
    names = (*found.hyper, *found.params)
    hyper = {k: trace[k]["value"] for k in names}
    if isinstance(model, Collapsed):  # of a stream, in its first batch
        whole = first if isinstance(source, StreamSource) else source
        require_levels(model, whole.args, whole.kwargs, hyper)
        probe_predictor(model, cast(PredictorGP, unwrap(trace[model.plan.name]["fn"])))
    additive = probe_layers(model, structure, {**hyper, **batch.given}, trace, batch)
    if not source.whole and source.plate is None:
        require_rows_apart(model, structure, hyper, trace, batch, source.axes, source.num_data)
    additive = additive and additive_throughout(
        source, model, structure, {**hyper, **batch.given}, trace, batch
    )
    return Subject(model, source, first, trace, names, structure, additive)


def _source(method: SVGP, model, args, kwargs, seed):
    # a memory map is not read as a whole for it: pass arrays, or let SVGP subsample
    read = num_rows(args) is not None and not isinstance(args[0], np.memmap)
    if read and (plate := _subsampling(model, args, kwargs)):
        name, num_data, batch_size = plate
        return ArraySource(args, kwargs, batch_size, seed, name, num_data)
    return source_of("SVGP", method.rows, model, args, kwargs, seed)


def _subsampling(model, args, kwargs) -> tuple[str, int, int] | None:
    """(name, N, batch size) of a plate that subsamples in the model itself, if there is one. O(N).

    All observations are checked against their supports on the way.
    """
    plates = _subsampling_plates(first_trace(model, args, kwargs))
    if len(plates) > 1:
        raise DataError(f"plates {[s['name'] for s in plates]} all subsample; SVGP() handles one.")
    return (plates[0]["name"], *plates[0]["args"]) if plates else None


def _subsampling_plates(trace) -> list:
    return [
        s
        for s in trace.values()
        if s["type"] == "plate" and s["args"][1] not in (None, s["args"][0])
    ]


def uses_inputs(model, batch: Batch) -> bool:
    """Whether anything of the model is computed from the values of its first argument (not from its
    length alone).
    """

    def everything(X):
        trace = run(model, (X, *batch.args[1:]), batch.kwargs, batch.given)
        return arrays_of([s["fn"] for s in trace.values() if s["type"] == "sample"])

    return bool(depends(everything, batch.args[0]))


def site_inputs(subject: Subject, hyper: dict, seed: int) -> dict[str, np.ndarray]:
    """Inputs that each GP site sees, up to `MAX_CANDIDATES` rows of them: what inducing points are
    chosen from.
    """
    source = subject.source
    if isinstance(source, StreamSource):
        looks = [source.looked]
    elif source.plate is not None:
        looks = [source.rows(source.indices(i)) for i in range(_LOOKS)]
    else:
        rng = np.random.default_rng([seed, 29])
        few = source.num_data <= MAX_CANDIDATES
        rows = (
            np.arange(source.num_data)
            if few
            else np.sort(rng.choice(source.num_data, MAX_CANDIDATES, replace=False))
        )
        looks = [source.rows(rows)]
    found = [_inputs(subject, hyper, rows) for rows in looks]
    every = {k: np.concatenate([f[k] for f in found]) for k in subject.gps}
    # a memory map is checked as it is read: its bad rows end the run, and are no points before
    return {k: x[np.isfinite(x).reshape(len(x), -1).all(1)] for k, x in every.items()}


def _inputs(subject, hyper, rows: Rows):
    batch = as_batch(rows, random.key(0))
    trace = run(subject.model, batch.args, batch.kwargs, {**hyper, **batch.given})
    found = {k: np.asarray(unwrap(trace[k]["fn"]).X) for k in subject.gps}
    if all(np.ptp(X, 0).any() for X in found.values()) or not subject.structure.inner:
        return found
    return _drawn_inputs(subject, {**hyper, **batch.given}, batch)


def _drawn_inputs(subject: Subject, given: dict, batch: Batch) -> dict[str, np.ndarray]:
    """Where the means of the layers below give one input for all rows: inputs at draws from the
    prior, of a part of the rows.
    """
    num = batch.weights.shape[0]
    rows = np.arange(min(num, _DRAWN_ROWS))
    args, kwargs = take(batch.args, batch.kwargs, rows, subject.source.axes)
    with handlers.block():
        seeded = handlers.substitute(handlers.seed(subject.model, random.key(0)), data=given)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    return {k: np.asarray(unwrap(trace[k]["fn"]).X) for k in subject.gps}


class _OtherValues(eqx.Module):
    """A likelihood with other observations in place of the model's own."""

    joint: JointLogLikelihood
    values: dict

    def __call__(self, latent: dict):
        trace, num = self.joint.trace(latent), self.joint.num
        sites = [
            {**s, "value": self.values.get(k, s["value"])}
            for k, s in trace.items()
            if is_observed(s)
        ]
        terms = [log_prob_per_datum(s) for s in sites]
        return sum([t for t in terms if t.ndim], jnp.zeros(num))


def additive_throughout(
    source: ArraySource | StreamSource,
    model,
    structure: Structure,
    given: dict,
    trace: dict,
    batch: Batch,
) -> bool:
    """Whether what `is_additive` found on the first batch holds for all: a zero-inflated count is
    additive where y > 0 alone.

    Arrays are looked at as a whole, O(N log F). Of a stream's later batches the first one stands
    for all but the observations, which are drawn from the model and, discrete ones, put at 0, 1 and
    2; with a `numpyro.factor` nothing is known of them.
    """
    shapes = {k: tuple(trace[k]["fn"].shape()) for k in structure.outer}
    num = batch.weights.shape[0]
    if isinstance(source, StreamSource):
        joint = JointLogLikelihood(model, num, given, batch.args, batch.kwargs)
        observed = {k: s for k, s in trace.items() if is_observed(s)}
        if any(is_factor(s) for s in observed.values()):
            return False
        try:
            return all(
                is_additive(_OtherValues(joint, values), shapes) for values in _others(observed)
            )
        except NotImplementedError:  # a distribution that cannot be drawn from
            return False
    sweep = (as_batch(rows, batch.key) for rows in source.sweep(num))
    return source.whole or all(
        is_additive(JointLogLikelihood(model, num, {**given, **b.given}, b.args, b.kwargs), shapes)
        for b in sweep
    )


def _others(observed: dict):
    for i in range(_DRAWS):
        yield {
            k: s["fn"].sample(random.fold_in(random.key(i), j))
            for j, (k, s) in enumerate(observed.items())
        }
    discrete = {
        k: s
        for k, s in observed.items()
        if unwrap(s["fn"]).support.is_discrete and not s["fn"].event_shape
    }
    for count in _COUNTS if discrete else ():
        yield {k: _where_possible(s, count) for k, s in discrete.items()}


def _where_possible(site, count: int):
    value = jnp.asarray(site["value"])
    wanted = jnp.full_like(value, count)
    return jnp.where(unwrap(site["fn"]).support(wanted), wanted, value)
