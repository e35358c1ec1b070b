"""`predict`, `log_density` and `sample`: the one way to ask any fit about new inputs.

What is averaged over draws at X_new has a fixed internal key and a standard error. Fits with draws
are mixtures over them; memory does not grow with their number.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_gp.errors import DataError, ModelError, warn
from ppl_gp.gp import unwrap
from ppl_gp.numerics.quadrature import TOLERANCE
from ppl_gp.observations import OrdinalProbit
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.reading import Declared
from ppl_gp.results.integrals.compiled import check_link_approximation, joint_draws, predictive
from ppl_gp.results.integrals.factorised import integrated_moments, warn_if_infinite
from ppl_gp.results.integrals.quantiles import quantiles_at
from ppl_gp.results.parts import function_rows
from ppl_gp.results.predict.log_density import log_density_at
from ppl_gp.results.query.by_names import (
    by_names,
    observing,
    require_no_such_argument,
    with_observations,
)
from ppl_gp.results.query.query import Integration, Query, query_at
from ppl_gp.results.record import Record
from ppl_gp.settings import as_key

UNKNOWN = 0.5  # nats, a standard error from which a log density is no more than a guess
# distributions over classes, with a parameter for each; a count has a number of trials instead
_CLASSES = ("CategoricalProbs", "CategoricalLogits", "OrderedLogistic", "OrderedProbit")


class Prediction(eqx.Module):
    """Predictions at M new inputs; of y an array for one observed site, {site: array} for several.

    - `f_mean`, `f_variance`: the latent function at X_new, (M,); (C, M) for several functions at a
      site, {site: array} for several GP sites, as samplers keep them. Where sites were integrated
      in one predictor (`Laplace`, `EP`, `VI`; effects under `SVGP`) these are the predictor's, (R,
      M) for R functions a datum, and `f_rows` says what each row is.
    - `f_rows`: ("f", "g - f"), say: what each row of `f_mean` (R, M) adds up, `fit.functions`; the
      order is not the declaration's. `None` where rows are the entries of a site.
    - `mean`, `variance`: of y, (M,), or the site's own shape with M for its data axis; for outcomes
      from a finite set, of their value as a number. `None` where NumPyro's distribution has no
      mean or variance, or those of a direction (VonMises); infinite or NaN where y has none.
    - `probs`: NumPyro's convention. p(y = 1), (M,), for Bernoulli sites; (M, K) over the K outcomes
      in order where the support is finite and the same in all rows (Categorical, ordinal, Binomial
      of one total: K = total + 1); `None` otherwise, as for Binomial totals that differ between the
      rows of X_new, whose outcomes are not the same, and for more than 1000 outcomes.
    - `mean_error`: standard error of `mean`, in its shape, where y was averaged over draws of f,
      latents or layers given the hyperparameters, or over q of `MeanField()`; else `None`. The
      error of the posterior's own draws (samplers, `Sample()`) is in no error here.
    - `f_quantiles`, `quantiles`: of f and of y, where `predict(quantiles=)` asked for them, in the
      shapes of `f_mean` and `mean` with the levels along a first axis: the smallest v with p(y <=
      v) of at least the level. `None` of sites whose events are vectors.
    - `quantiles_error`: of `quantiles` where y was averaged over draws, else `None`, also under
      `MeanField()` (at 1000 `num_draws` a few hundredths of the spread). `quantiles` -+ 2 errors
      holds the quantile with about 95 %: half the way to the farther end of the values whose p(y <=
      v) is within two standard errors of the level. Zero where they are one outcome; infinite where
      fewer than about ten draws are beyond it (`sample` has more).
    - `counts`: whether the outcomes of the one observed site are numbers of trials, not classes.
    """

    f_mean: Any
    f_variance: Any
    mean: Any
    variance: Any
    probs: Any
    mean_error: Any = None
    f_quantiles: Any = None
    quantiles: Any = None
    quantiles_error: Any = None
    counts: bool = eqx.field(default=False, static=True)
    f_rows: tuple[str, ...] | None = eqx.field(default=None, static=True)


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
    X_new, args, kwargs = by_names(fit, X_new, args, kwargs)
    if _many_separate_rows(fit, X_new, args, kwargs):
        options = {"link_approximation": link_approximation, "quantiles": levels or None}
        ask = lambda X, a, k: predict(fit, X, *a, **options, **k)  # noqa: E731
        return by_rows(ask, fit.model, X_new, args, kwargs)
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
    return Prediction(
        of_y("mean", f),
        of_y("variance", f),
        of_y("mean", moments),
        of_y("variance", moments),
        _one_or_all({k: probs.get(k) for k in y}),
        where_any("mean_error"),
        _one_or_all(f_quantiles),
        of_y("quantiles") if levels else None,
        where_any("quantiles_error"),
        len(y) == 1 and observes_counts(query),
        function_rows(fit),
    )


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


def _many_separate_rows(fit, X_new, args, kwargs) -> bool:
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


def log_density(
    fit: Record,
    X_new,
    y_new=None,
    *args,
    num_draws: int | None = None,
    with_error: bool = False,
    **kwargs,
) -> Float[Array, "M"] | tuple[Float[Array, "M"], Float[Array, "M"]]:
    """log p(y*_n | x*_n, data), (M,), nats, of observations passed to the model as `y`; of a model
    that observes its inputs (a mixture, a factor analysis), log p(x*_n | data), without `y_new`.

    Several observed sites are scored together: the others' observations are passed by keyword, and
    their log densities add up under the integral over f. A row that a mask leaves out scores 0;
    `scale` handlers do not count. The mixture over draws is a logsumexp.

    Under `MeanField()`, labels of new rows are summed, and where a row's density is proved the
    exponential of statistics of the factors of q, apart from each other, q is integrated exactly (a
    mixture of Student-t for normal-Wishart factors): its error is zero.

    Functions that the likelihood does not couple are integrated apart, by quadrature; those that it
    couples in closed form where log p(y | f) is proved quadratic, two or three of others by
    cubature. What is left is averaged over at least `num_draws` draws in all (1000, or 4000 of
    latents): more functions than three (weighted draws about the integrand's mode), latents of the
    new data (weighted draws; discrete ones of models without a GP are summed), inner layers, and f
    where rows of y depend on several of its rows. Such an average is unbiased for the density; its
    logarithm is not, and is too low by about half its squared error.

    `with_error=True` gives (log density, standard error), (M,) each, nats: of what is drawn here,
    of the posterior draws that a sampled fit has (the variance between them over their effective
    number), and of quadrature its estimated error: zero where the likelihood is proved log-concave
    in f; below 1e-3 as a rule where there is cubature; infinite where no draw has a density. An
    error above 0.5 says that the number is not known, and is warned of.

    Warns of rows that are NaN or +infinite, where the model's own log probability is so at some f.
    Raises `DataError` as `predict`, for y_new with NaN, of another shape, or outside the support,
    for num_draws < 1, and for a model that has an argument called `num_draws` or `with_error`.
    """
    require_no_such_argument(fit, "log_density", ("num_draws", "with_error"))
    if num_draws is not None and num_draws < 1:
        raise DataError(f"log_density(num_draws={num_draws}): give at least 1.")
    fit.warn_of_others("log_density")
    X_new, y_new, args, kwargs = with_observations(fit, X_new, y_new, args, kwargs)
    if getattr(y_new, "ndim", 0) == 1 and _many_separate_rows(fit, X_new, args, kwargs):
        options = {"num_draws": num_draws, "with_error": with_error}
        score = lambda X, a, k: log_density(fit, X, a[0], *a[1:], **options, **k)  # noqa: E731
        return by_rows(score, fit.model, X_new, args, kwargs, (y_new,))
    query = query_at(fit, X_new, args, kwargs)
    query = observing(query, y_new)
    log_p, nodes, draws = log_density_at(query, fit.blocks, num_draws, fit.independent_draws)
    if not with_error:
        _warn_of_errors(nodes, draws)
    if not_finite := np.flatnonzero(np.isnan(log_p) | np.isposinf(log_p)).tolist():
        warn(
            f"log_density: row(s) {not_finite[:5]} are NaN or infinite: the model's own log "
            "probability is so at some f. Look at what these rows give its distribution (an "
            "exposure of zero makes 0 log 0 = NaN), and leave such rows out."
        )
    return (log_p, jnp.sqrt(nodes**2 + draws**2)) if with_error else log_p


def _warn_of_errors(nodes, draws) -> None:
    if not (most := float(jnp.max(nodes))) <= TOLERANCE:
        warn(
            f"log_density: the integral of some row's likelihood is off by about {most:.1g} nats "
            "(many narrow modes, or edges); with_error=True gives it for each row."
        )
    if few := np.flatnonzero(np.asarray(draws) > UNKNOWN).tolist():
        warn(
            f"log_density: row(s) {few[:5]} rest on very few draws, to more than {UNKNOWN} nats; "
            "take more draws (num_samples= of the sampler, num_draws= here). with_error=True "
            "gives it for each row."
        )


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


def observes_counts(query: Query) -> bool:
    """Whether the outcomes of the one observed site are numbers, and not classes."""
    (site,) = query.layout.sites
    if site.support is None or site.boolean:
        return False
    fn = query.ask(site, unwrap)
    return not (isinstance(fn, OrdinalProbit) or type(fn).__name__ in _CLASSES)


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
