"""The bound over all data at the end of a run, its error, and whether the run got anywhere."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array, Float
from scipy.special import stdtrit

from ppl_gp.errors import Result, warn
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.hyper.space import log_prior
from ppl_gp.infer.sources import Rows
from ppl_gp.infer.stream_source import MOST_LOOKED, StreamSource
from ppl_gp.infer.svgp.problem import Problem, hyper_at, terms_at
from ppl_gp.infer.svgp.start import Begun
from ppl_gp.infer.svgp.step import Reached, State
from ppl_gp.quick import quick_jit
from ppl_gp.sparse.bound import Batch, at_batch, inducing_gap, quadrature_gap

_QUICKLY = 20_000  # rows below which a bound is summed sooner than it is compiled well
# sums that an estimate averages: up to ten, of about so many rows in all
_REPEATS, _REPEATED_ROWS = 10, 30_000
_WORTH_TELLING = 1e-3  # nats a datum that nodes may be off before it is said
_WINDOW = 20  # steps at either end of a run that are compared


_folded = quick_jit(random.fold_in)


def total_bound(begun: Begun, state: State, key) -> float | None:
    """The objective over all data, nats; of a stream that cannot be read again, `None`. O(N M^2).
    With an autoguide each batch has one draw of the hyperparameters.
    """
    return float(np.sum(_of_batches(begun, state, key))) if begun.subject.source.restarts else None


def _of_batches(begun: Begun, state: State, key, sweep=None) -> np.ndarray:
    """What each batch (of `sweep`) adds to `total_bound`, from draws of its own."""
    source, expected, rests = begun.subject.source, [], []
    size = source.batch_size or 1  # whole batches, so that they split over devices as the run's do
    sweep = source.sweep(size * max(1, MOST_LOOKED // size)) if sweep is None else sweep
    for i, rows in enumerate(sweep):
        batch = begun.spread.batch(as_batch(rows, _folded(key, np.asarray(i))))
        parts = _parts if source.num_data <= _QUICKLY else _parts.full
        one, rest = parts(begun.problem, state, batch)
        expected, rests = [*expected, float(one)], [*rests, float(rest)]
    return np.add(expected, np.divide(rests, len(rests)))


@quick_jit
def _parts(
    problem: Problem, state: State, batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(weighted expectation, the bound's other terms) of a batch, nats, for sums over all data."""
    hyper, log_p = hyper_at(problem, state.free, batch)
    t = terms_at(problem, hyper, state.variational, batch)
    return t.expected, t.shared - t.kl + _without_points(problem, hyper, log_p, batch)


def _without_points(problem: Problem, hyper: dict, log_p, batch: Batch):
    """Of a distribution its KL counts; a point is judged at its value, without the prior."""
    if problem.guide is None or not problem.guide.draws:
        return 0.0
    values, points = {**hyper, **batch.given}, problem.guide.held
    return log_p - log_prior(problem.model, batch.args, batch.kwargs, values, points)


def repeats(num_data: int) -> int:
    """Sums over so many data that an estimate averages."""
    return int(np.clip(_REPEATED_ROWS // num_data, 2, _REPEATS))


def mean_and_error(sums: np.ndarray | list[np.ndarray]) -> tuple[float, float | None]:
    """Mean of sums over batches, (S, B), each batch with draws of its own, and its standard error:
    by batch, as two sums alone do not tell how far they spread, and for few of them by Student's t,
    so that twice it holds 95 %. None for one sum, which is exact.
    """
    mean = float(np.mean(np.sum(sums, 1)))
    if len(sums) == 1:
        return mean, None
    wider = stdtrit((len(sums) - 1) * len(sums[0]), 0.975) / 1.96
    return mean, float(wider * np.sqrt(np.sum(np.var(sums, 0, ddof=1)) / len(sums)))


def over_passes(
    source: StreamSource, drawn: bool, sum_of: Callable[[Iterator[Rows]], np.ndarray]
) -> tuple[float | None, float | None]:
    """As `mean_and_error`, of passes over a stream, whose rows each pass may draw anew. Exact where
    two passes agree, for a list, and where many rows end with the pass. `None` of an iterator with
    less than two passes left, which need not be all data.
    """
    once = not source.restarts
    few = source.num_data <= _REPEATED_ROWS and not isinstance(source.stream.batches, Sequence)
    sums: list[np.ndarray] = []
    whole = 0
    for sweep in islice(source.passes(drawn or few), repeats(source.num_data)):
        parts = sum_of(sweep)
        rows = min(source.swept, source.num_data)
        if once and rows < source.num_data:
            break
        whole = whole or rows
        sums += [parts] if rows == whole else []  # no end of a stream
        apart = abs(np.sum(parts) - np.sum(sums[0]))
        rounding = jnp.finfo(jnp.result_type(float)).eps ** 0.5 * np.sum(np.abs(parts))
        if len(sums) == 2 and apart <= rounding and not drawn:
            return mean_and_error(sums[:1])
    if once and len(sums) < 2:
        return None, None
    # a pass that ends may have the same rows in other batches
    by_batch = (source.goes_on or not drawn) and len({len(x) for x in sums}) == 1
    return mean_and_error(sums if by_batch else [np.sum(x, keepdims=True) for x in sums])


@quick_jit
def _split(key, num: int) -> list[Array]:
    return [*random.split(key, num)]


def judged(begun: Begun, state: State, key) -> tuple[float | None, float | None]:
    """(the ELBO over all data, its standard error), nats, with a KL weight of 1 for any `beta`. The
    error is that of 2 to 10 sums with draws, or rows of a stream, of their own; else `None`. Raises
    `DataError` for a level, of rows that no step took, that the model lacks.
    """
    source, drawn = begun.subject.source, begun.problem.drawn
    plain = eqx.tree_at(lambda p: p.beta, begun.problem, replace_fn=jnp.ones_like)
    begun = begun._replace(problem=plain)
    keys = _split(key, repeats(source.num_data) if drawn else 1)
    if not isinstance(source, StreamSource):
        return mean_and_error([_of_batches(begun, state, k) for k in keys])
    each, known = cycle(keys), begun.subject.levels or (lambda rows: None)  # one: nothing is drawn
    told = lambda sweep: (known(rows) or rows for rows in sweep)  # noqa: E731
    return over_passes(source, drawn, lambda x: _of_batches(begun, state, next(each), told(x)))


def errors_of(begun: Begun, state: State, key, told: bool = True) -> dict:
    """What `stats` say of the bound's own errors, nats; nothing where expectations are drawn.
    `expectation_error`: by how much it is too high at most, as nodes of the likelihood's
    expectations miss something, with a warning where that matters. `inducing_gap`: see there.
    Estimates from up to `MOST_LOOKED` rows at even distances, or in the first batches of a stream.
    """
    if begun.problem.drawn:
        return {}
    source = begun.subject.source
    rows = source.some(MOST_LOOKED)
    share = source.num_data / int(np.sum(rows.weights > 0))
    found = _errors(begun.problem, state, as_batch(rows, key), jnp.asarray(share))
    *nodes, short = map(float, found)
    gap, size = (share * x for x in nodes)
    if told and size > _WORTH_TELLING * source.num_data:
        warn(
            f"Expectation(num_nodes={begun.problem.expectation.num_nodes}): nodes of the "
            f"likelihood's expectations are off by {size:.2g} nats in all, and the bound may be "
            f"{gap:.2g} nats too high; raise num_nodes."
        )
    return {"expectation_error": gap, "inducing_gap": None if np.isnan(short) else short}


@quick_jit
def _errors(problem: Problem, state: State, batch: Batch, share) -> tuple[Array, Array, Array]:
    """(by how much one batch's nodes are off, nats: sum, of absolute values; `inducing_gap`)."""
    hyper, _ = hyper_at(problem, state.free, batch)
    at, expectation = at_batch(problem.model, hyper, state.variational, batch), problem.expectation
    return *quadrature_gap(at, expectation), inducing_gap(at, expectation, share)


def result_of(begun: Begun, ended: Reached, bound: float | None, key) -> Result:
    """`nonfinite` where the bound is not finite, `diverged` where it is far below that of the
    start, else as the run ended. If the last steps are below one of the first, the objective over
    all data has to be a nat and a hundredth lower too.
    """
    result, bounds = ended.result, ended.bounds
    assert result is not None  # it has ended
    if bound is not None and not np.isfinite(bound):
        return Result.nonfinite
    if result not in (Result.completed, Result.converged) or len(bounds) < 2:
        return result
    window = min(_WINDOW, len(bounds) // 2)
    first, last = bounds[:window], np.median(bounds[-window:])
    if not last < np.nanmax(first):
        return result
    before, after = (total_bound(begun, state, key) for state in (begun.state, ended.state))
    if before is None or after is None:  # of a stream that is used up the steps are all there is
        before, after = np.nanmin(first) - np.ptp(first[np.isfinite(first)]), last
    return Result.diverged if after < before - 1.0 - 0.01 * abs(before) else result
