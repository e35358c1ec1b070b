"""`predict` and `sample`: the one way to ask any fit about new inputs.

What is averaged over draws at X_new has a fixed internal key and a standard error. Fits with draws
are mixtures over them; memory does not grow with their number.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError, ModelError
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.reading import Declared
from ppl_gp.results.integrals.compiled import check_link_approximation, joint_draws, predictive
from ppl_gp.results.integrals.factorised import integrated_moments, warn_if_infinite
from ppl_gp.results.integrals.quantiles import quantiles_at
from ppl_gp.results.parts import function_rows
from ppl_gp.results.predict.prediction import Prediction, Question, asked, observes_counts
from ppl_gp.results.query.by_names import by_names, require_no_such_argument
from ppl_gp.results.query.query import Integration, query_at
from ppl_gp.results.record import Record
from ppl_gp.settings import as_key


class PredictiveDraws(NamedTuple):
    """Joint draws at X_new. `f` (num_samples, M), (num_samples, R, M) of a predictor of R functions
    in the order of `fit.functions`, or {GP site: ...} for several; `y` likewise, by observed site.
    """

    f: Any
    y: Any


def predict(
    fit: Record,
    X_new,
    *args,
    link_approximation: str | None = None,
    quantiles: Sequence[float] | None = None,
    **kwargs,
) -> Prediction:
    """Predict f and y at new inputs.

    **Arguments:**

    - `X_new`: (M, D) or (M,), as the training inputs, or a frame or DataArray with the columns of
      training in their order (`DataError` otherwise); `args`, `kwargs`: the model's other arguments
      at the new inputs. Arguments that are not arrays are remembered from training; arrays (an
      offset, say) are given again. Observations and masks are left out.
    - `link_approximation`: `None` integrates the model's own likelihood by quadrature, to about
      1e-9 (latent standard deviations up to 30). `"mackay"`, for `Bernoulli(logits=...)` with
      logits affine in f, is cheaper and off by up to 0.02 (MacKay 1992; PRML 4.153-4.154).
    - `quantiles`: levels in (0, 1), as (0.05, 0.95) for a central 90 % interval. p(y <= t) is
      integrated over f as probabilities are, and inverted to about 1e-8 of y's spread (in tails of
      several functions 1e-3); by draws, with an error, where y sees latents, layers or more than
      three functions, or has no distribution function. 10 to 25 times the cost of the rest.

    **Returns** `Prediction`. Sampled fits: f by moment matching, y and its probabilities as the
    mixture over draws. Of several observed sites each is predicted by itself: one that the model
    observes from an argument given here (x of a generative classifier p(x, y)) is not conditioned
    on, and p(y* | x*) is the ratio of two `log_density`. An entry of y that depends on more than
    three functions, on latents or on layers below is averaged over at least 1000 draws
    (`mean_error`), unless its mean is proved affine in the functions and its variance constant.

    **Raises** `DataError` for X_new with NaN, no rows or other columns than in training, and for
    missing arrays; `ModelError` for a model with nothing to predict, which observes its inputs
    themselves (a mixture), and for a link approximation that does not fit the model. More than
    10 007 rows are predicted in chunks, so that memory does not grow with them.
    Cost: O(M N^2 + 384 K M) for one setting of the hyperparameters, O(S (N^3 + M N^2 + 192 K M))
    for S draws, K outcomes.
    """
    if "y" in kwargs:
        raise DataError(
            "predict(y=...): y is what is predicted; log_density(X_new, y_new) scores observations."
        )
    require_no_such_argument(fit, "predict", ("quantiles",))
    levels = () if quantiles is None else _levels(quantiles)
    question = Question(fit, X_new, args, kwargs, partial(_again, link_approximation))
    X_new, args, kwargs = by_names(fit, X_new, args, kwargs)
    if many_separate_rows(fit, X_new, args, kwargs):
        options = {"link_approximation": link_approximation, "quantiles": levels or None}
        ask = lambda X, a, k: predict(fit, X, *a, **options, **k)  # noqa: E731
        return asked(question, by_rows(ask, fit.model, X_new, args, kwargs))
    query = query_at(fit, X_new, args, kwargs)
    check_link_approximation(query, link_approximation)
    exact = integrated_moments(query, fit.blocks) if fit.blocks else None
    if exact is not None:
        query.require_valid()
    elif fit.blocks:
        warn_if_infinite(query, fit.blocks)
    f, y = exact or predictive(query, link_approximation, judged=bool(fit.blocks))
    _require_any(fit, f, y, "predict")
    f_quantiles, y = quantiles_at(query, levels, y) if levels else ({}, y)
    finite = [s for s in query.layout.sites if y[s.label].log_probs is not None]
    probs = {s.label: _numpyro_convention(y[s.label].log_probs, s.boolean) for s in finite}

    def of_y(name, source=y):
        return _one_or_all({k: getattr(v, name, None) for k, v in source.items()})

    def where_any(name):
        return of_y(name) if any(getattr(v, name) is not None for v in y.values()) else None

    moments = {k: v.moments for k, v in y.items()}
    answer = Prediction(
        of_y("mean", f),
        of_y("variance", f),
        of_y("mean", moments),
        of_y("variance", moments),
        _one_or_all({k: probs.get(k) for k in y}),
        where_any("mean_error"),
        _one_or_all(f_quantiles),
        of_y("quantiles") if levels else None,
        where_any("quantiles_error"),
        len(y) == 1 and observes_counts(query, query.layout.sites[0]),
        function_rows(fit),
    )
    return asked(question, answer)


def _again(link_approximation, question: Question, levels: tuple[float, float]) -> Prediction:
    how = {"quantiles": levels, "link_approximation": link_approximation}
    return predict(question.fit, question.X_new, *question.args, **how, **question.kwargs)


def _levels(quantiles) -> tuple[float, ...]:
    try:
        levels = tuple(float(q) for q in np.ravel(np.asarray(quantiles, float)))
    except (TypeError, ValueError):
        levels = (float("nan"),)  # of what is no number
    if not levels or not all(0.0 < q < 1.0 for q in levels):
        raise DataError(
            f"predict(quantiles={quantiles}): give levels between 0 and 1, as (0.05, 0.95), or "
            "leave it out."
        )
    return levels


def many_separate_rows(fit, X_new, args, kwargs) -> bool:
    """Whether more than `ROWS` rows are asked for that do not depend on each other."""
    if not getattr(X_new, "ndim", 0) or X_new.shape[0] <= ROWS:
        return False
    query = query_at(fit, *rows_from(0, fit.model, X_new, args, kwargs))
    return query.integration is not Integration.joint_draws


@partial(jax.jit, static_argnames="boolean")
def _numpyro_convention(log_probs, boolean: bool):
    probs = jnp.exp(log_probs)
    return probs[1] if boolean else jnp.moveaxis(probs, 0, -1)


def _one_or_all(by_site: dict):
    """The value of a single site, {site: value} for several, `None` for none."""
    return next(iter(by_site.values())) if len(by_site) == 1 else by_site or None


def sample(fit: Record, rng_key, X_new, num_samples, *args, **kwargs) -> PredictiveDraws:
    """Draw f jointly over all rows of X_new (full covariance), and y given f.

    Sampled fits: the draws are spread evenly over the posterior draws. `rng_key`: a JAX key, or an
    integer seed.
    Cost: O(M^3 + M N^2) for each posterior draw used, and O(N^3) where the hyperparameters are
    sampled. Raises `DataError` as `predict`, and for num_samples < 1.
    """
    if not isinstance(num_samples, int | np.integer) or num_samples < 1:
        told = num_samples if np.ndim(num_samples) == 0 else f"array {np.shape(num_samples)}"
        raise DataError(
            f"sample(num_samples={told}): give a whole number of at least 1 after the inputs, and "
            "the model's other arguments after it: sample(rng_key, X_new, num_samples, ...)."
        )
    key = as_key(rng_key, "fit.sample(0, X_new, 100)")
    X_new, args, kwargs = by_names(fit, X_new, args, kwargs)
    f, y, _ = joint_draws(query_at(fit, X_new, args, kwargs), key, int(num_samples))
    _require_any(fit, f, y, "sample")
    return PredictiveDraws(_one_or_all(f), _one_or_all(y))


def _require_any(fit: Record, f, y, verb: str) -> None:
    if f or y:
        return
    reading = fit.model.reading
    if whole := [k for k in reading.observed if reading.axis(k) is None]:
        raise ModelError(
            f"{verb}: site(s) {whole} have no entry per row of the inputs, as one event of all "
            "rows has none, so that a row has no prediction of its own. The posterior is in "
            "fit.sites."
        )
    raise ModelError(
        f"{verb}: the model has no function, and observes the inputs themselves, so that there "
        "is nothing to predict at them; log_density(X_new) scores rows, fit.sites has the "
        "posterior."
    )


# A prime: no other axis of a result is likely to have this size.
ROWS = 10_007


def by_rows(
    function: Callable, model: Declared, X, args: tuple, kwargs: dict, observed: tuple = ()
):
    """function(X, observed + args, kwargs) on chunks of `ROWS` rows, put together.

    `observed`: y_new by position, one entry per row. The last chunk is filled with rows before it,
    which are dropped. For functions whose rows do not depend on each other.
    """
    num = jnp.shape(X)[0]
    starts = [*range(0, num - ROWS, ROWS), num - ROWS]
    parts = []
    for start in starts:
        first, others, named = rows_from(start, model, X, args, kwargs)
        own = (y[start : start + ROWS] for y in observed)
        parts.append(function(first, (*own, *others), named))

    def joined(*chunks):
        axis = chunks[0].shape.index(ROWS)
        *whole, last = (np.asarray(x) for x in chunks)
        own = np.arange(ROWS * len(starts) - num, ROWS)
        return jnp.asarray(np.concatenate([*whole, np.take(last, own, axis)], axis))

    return jax.tree.map(joined, *parts)


def rows_from(start: int, model: Declared, X, args: tuple, kwargs: dict) -> tuple:
    """(X, args, kwargs) at `ROWS` rows from `start` on."""
    leaves, axes = Leaves(model, (X, *args), kwargs), model.reading.row_axes
    rows = {
        p: x[(slice(None),) * axes[p] + (slice(start, start + ROWS),)]
        for p, x in leaves.arrays.items()
        if p in axes and x.shape
    }
    (first, *others), named = leaves.replaced(rows)
    return first, tuple(others), named
