"""`log_density` of new observations, with the errors of its nodes and of its draws; where in
its predictive distribution an observation lies; latents of new data; and how far predictions and
observations differ.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from numpy import ndarray

from ppl_gp.deep.latents import encoder_of, latent_form
from ppl_gp.draws import mixture
from ppl_gp.errors import DataError, ModelError, warn
from ppl_gp.gp import bare_shape, mask_of
from ppl_gp.mean_field.family import Family
from ppl_gp.numerics.quadrature import TOLERANCE
from ppl_gp.quick import full_jit
from ppl_gp.reading.factors import is_concave
from ppl_gp.results.integrals import cubature, several
from ppl_gp.results.integrals.compiled import predictive
from ppl_gp.results.integrals.factorised import integrated_log_density
from ppl_gp.results.integrals.latents import Proposals, combinations, summed_log_density
from ppl_gp.results.integrals.quantiles import cdf_at
from ppl_gp.results.integrals.several import coupled_groups, log_density_per_datum
from ppl_gp.results.predict.prediction import (
    Prediction,
    by_rows,
    is_classification,
    many_separate_rows,
    outcome_probabilities,
    predict,
)
from ppl_gp.results.query.layout import (
    observed_names,
    observing,
    with_observations,
)
from ppl_gp.results.query.query import BY_DRAWS, Integration, Query, drawn_runs, query_at
from ppl_gp.results.record import Record
from ppl_gp.settings import as_key

NUM_BINS = 10
LEVELS = np.arange(0.05, 1.0, 0.05)  # nominal coverage of central intervals
UNKNOWN = 0.5  # nats, a standard error from which a log density is no more than a guess


def log_density(
    fit: Record,
    X_new,
    y_new=None,
    *args,
    num_draws: int | None = None,
    with_error: bool = False,
    **kwargs,
) -> Float[Array, "M"] | tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Score new observations by their log predictive density, `log p(y* | x*, data)`, per row.

    Compare models by their mean over the same test rows. Higher is better.

    Parameters
    ----------
    X_new : array or frame
        New inputs, as for `predict`.
    y_new : array
        The observations, (M,). Leave them out for a model that observes its inputs, such as a
        mixture: the score is then `log p(x* | data)`.
    *args, **kwargs
        The model's other arguments at the new inputs. Pass the observations of further observed
        sites by keyword; all sites are scored together.
    num_draws : int, default None
        The least number of draws if an integral needs them. None is 1000, or 4000 for latents.
    with_error : bool, default False
        Also return a standard error per row.

    Returns
    -------
    array or tuple
        (M,), in nats, or (log density, standard error). A row that a mask leaves out scores 0.
        `scale` handlers do not count.

    Raises
    ------
    DataError
        As `predict`. Also if `y_new` has NaN, another shape or values outside the support (if the
        support depends on latents, the density is zero there instead), or if `num_draws` is below
        1. Also if the model has an argument called `num_draws` or `with_error`.

    Warns
    -----
    UserWarning
        For rows that are NaN or +infinite because the model's log probability is so at some f. Also
        for errors above 0.5 nats, which mean that the number is not known.

    Notes
    -----
    The density is integrated over f, and draws of hyperparameters are combined by logsumexp.
    Functions that the likelihood does not couple are integrated separately, by quadrature. Coupled
    ones are integrated in closed form if log p(y | f) is proved quadratic, else two or three by
    cubature. Draws are used for more than three functions, latents of the new data and inner
    layers, or if a row of y depends on f at several rows. Discrete latents of models without a GP
    are summed. Such an average is unbiased for the density, but its logarithm is too low by about
    half its squared error.

    `MeanField()` sums over labels of new rows. If a row's density is the exponential of statistics
    of separate factors of q, the integral is exact, with error 0. For normal-Wishart factors it is
    a mixture of Student-t.

    The error combines draws made here, the posterior draws of a sampled fit (their variance over
    their effective number), and quadrature. The error of quadrature is 0 for likelihoods proved
    log-concave in f. For cubature it is mostly below 1e-3. It is infinite if no draw has a density.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> fit.log_density(np.array([0.25, 0.75]), np.array([1.0, -1.0])).shape
    (2,)
    """
    if num_draws is not None and num_draws < 1:
        raise DataError(f"log_density(num_draws={num_draws}): give at least 1.")
    fit.warn_of_others("log_density")
    X_new, y_new, args, kwargs = with_observations(fit, X_new, y_new, args, kwargs)
    scores = partial(_scores, fit, num_draws)
    if getattr(y_new, "ndim", 0) == 1 and many_separate_rows(fit, X_new, args, kwargs):
        if len(y_new) != (num := query_at(fit, X_new, args, kwargs).layout.num):
            raise DataError(f"log_density: y_new has {len(y_new)} entries, and X_new {num} rows.")
        log_p, nodes, draws = by_rows(scores, fit.model, X_new, args, kwargs, (y_new,))
    else:
        log_p, nodes, draws = scores(X_new, (y_new, *args), kwargs)
    if not with_error:
        _warn_of_errors(nodes, draws)
    if not_finite := np.flatnonzero(np.isnan(log_p) | np.isposinf(log_p)).tolist():
        warn(
            f"log_density: row(s) {not_finite[:5]} are NaN or infinite: the model's own log "
            "probability is so at some f. Look at what these rows give its distribution (an "
            "exposure of zero makes 0 log 0 = NaN), and leave such rows out."
        )
    return (log_p, jnp.sqrt(nodes**2 + draws**2)) if with_error else log_p


def _scores(fit: Record, num_draws: int | None, X, observed: tuple, kwargs: dict):
    """What `log_density_at` returns, at rows X; `observed`: y_new and the other arguments."""
    y_new, *args = observed
    query = observing(query_at(fit, X, tuple(args), kwargs), y_new)
    return log_density_at(query, fit.blocks, num_draws, fit.independent_draws)


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


def log_density_at(
    query: Query, blocks: tuple[Family, ...], num_draws: int | None, effective: float | None
) -> tuple[Array, Array, Array]:
    """(log p(y*_n | x*_n, data) of what the query observes, its estimated errors of nodes, and of
    draws: standard errors), (M,) each, nats; integrated over mean field's `blocks` where exact.

    `effective`: how many independent draws of the posterior the fit's are worth, if they are random
    ones; else (one setting, or weighted points) only what is drawn within each counts as an error.
    """
    query.model.reading.require_own_masks()
    has_latents = query.layout.local_latents and query.integration is Integration.layers
    labels = combinations(query) if has_latents else None
    if blocks:
        exact = integrated_log_density(query, blocks, labels)
        if exact is not None:
            return exact, jnp.zeros_like(exact), jnp.zeros_like(exact)
    groups = several.coupled_groups(query)
    num = num_draws or (cubature.LATENT_DRAWS if has_latents else cubature.MIN_DRAWS)
    every = None if labels is None else jnp.asarray(labels)
    log_p, nodes, within, between = _log_density(query, groups, every, num)
    return log_p, nodes, jnp.sqrt(within if effective is None else between / effective)


@full_jit
def _log_density(query: Query, groups, labels, num_draws: int):
    """(log p, error of nodes, squared errors within a posterior draw, and between draws)."""
    if labels is None and query.integration in BY_DRAWS:
        sums, each = _over_draws(query, groups, num_draws), cubature.repeats(query, num_draws)
        return sums[0], jnp.zeros_like(sums[0]), *_squared_errors(query, *sums, each)
    of_draw = partial(_integrated, query, groups, labels, num_draws)
    sums, log_nodes = query.mixture(of_draw, random.split(random.key(0), query.draws.num))
    return sums[0], jnp.exp(log_nodes), *_squared_errors(query, *sums, 1)


def _integrated(query: Query, groups, labels, num_draws: int, draw, key):
    """((log w, log w^2, log E[w]^2), log error of nodes) of the density w given a draw."""

    def log_lik(f):
        return log_density_per_datum(query.trace(draw, f))

    error, log_nodes = 0.0, -jnp.inf
    if labels is not None:
        log_p = summed_log_density(query, draw, labels)
    elif query.integration is Integration.quadrature:
        named = lambda f: {query.site: f}  # noqa: E731
        concave = is_concave(lambda f: query.trace(draw, named(f)), None, query.layout.num)
        f: Any = next(iter(query.marginals(draw).values()))
        how = f, cubature.num_nodes(query), concave
        log_p, log_nodes = cubature.log_expectation_and_error(lambda f: log_lik(named(f)), *how)
    else:
        f, effort = query.marginals(draw), cubature.effort_of(query, num_draws)
        log_p, error = several.log_expectation_over(log_lik, f, groups, effort, key)
    sums = log_p, 2.0 * log_p + jnp.log1p(error), 2.0 * log_p
    return sums, jnp.full_like(log_p, log_nodes)


def _squared_errors(query: Query, first, second, square, each: int):
    """Squared relative errors of E[w]: (within a posterior draw, by `each` draws; between draws).

    From log E[w], log E[w^2] and log of E[E[w | draw]^2], mixed over draws.
    """
    ratio, between = jnp.exp(second - 2.0 * first), jnp.exp(square - 2.0 * first)
    known = jnp.isfinite(first)
    within = jnp.maximum(ratio - between, 0.0) / (each * query.draws.effective)
    errors = within, jnp.maximum(between - 1.0, 0.0)
    return tuple(jnp.where(known, error, jnp.inf) for error in errors)


def _over_draws(query: Query, groups, num_draws: int):
    """(log E[w], log E[w^2], log E[E[w | draw]^2]) of densities w given what is drawn within a
    posterior draw: latents of new data (`latent_proposals`), layers below, or all of f.
    """
    log_lik, proposals = several.log_lik_above(query, groups), None
    is_layers = query.integration is Integration.layers
    if is_layers and query.layout.local_latents:
        proposals = Proposals.fitted(query, groups, {}, random.key(2))

    def weight_at(draw):
        if proposals is not None:
            weighed = proposals.weighed(draw)
            return lambda entry: weighed(entry)[1]
        run = drawn_runs(query, draw)
        if is_layers:
            return lambda entry: log_lik(*run(entry[0]), random.fold_in(entry[0], 2))
        return lambda entry: log_density_per_datum(run(entry[0])[0])

    def component(draw, entries):
        weight = weight_at(draw)
        twice = lambda log_w: (log_w, 2.0 * log_w)  # noqa: E731
        first, second = mixture(lambda entry: twice(weight(entry)), entries)
        return first, second, 2.0 * first

    keys = cubature.keys_of(query, num_draws)
    return query.mixture(component, (keys, jnp.arange(keys.size).reshape(keys.shape)))


class Pit(NamedTuple):
    """p(y* < y) and p(y* <= y) of each observation, in y's shape; equal where y is continuous.

    A uniform draw between the two is uniform on (0, 1) over y (Czado, Gneiting & Held 2009).
    """

    below: Float[ndarray, "..."]
    up_to: Float[ndarray, "..."]


def pit(fit: Record, X_new, y_new, *args, **kwargs) -> Pit | None:
    """Of observations y_new at X_new under the predictive distribution; `None` where an event is a
    vector or several sites are observed. Arguments, errors and cost as for `predict`.
    """
    X_new, y_new, args, kwargs = with_observations(fit, X_new, y_new, args, kwargs)
    query = query_at(fit, X_new, args, kwargs)
    if len(query.layout.sites) != 1:
        return None
    observing(query, y_new)  # which checks it
    (site,) = query.layout.sites
    if site.support is None:
        found = cdf_at(query, site, jnp.asarray(y_new))
        return None if found is None else Pit(*(np.asarray(x) for x in found))
    _, y = predictive(query, None)
    p = np.exp(np.asarray(y[site.label].log_probs))
    if p.shape[1:] != np.shape(y_new):
        raise DataError(f"y_new has shape {np.shape(y_new)}, and predictions of it {p.shape[1:]}.")
    outcomes = np.reshape(site.support, (-1,) + (1,) * np.ndim(y_new))
    below = np.sum(np.where(outcomes < np.asarray(y_new), p, 0.0), 0)
    return Pit(below, below + np.sum(np.where(outcomes == np.asarray(y_new), p, 0.0), 0))


class LatentDraws(NamedTuple):
    """Draws of the latents of new data, from `fit.infer_latents`.

    Attributes
    ----------
    draws : dict
        {latent site: (num_samples, ...)}, in the site's own shape at the new inputs.
    ess : array
        Effective number of proposals behind the draws of each datum, (M,). If it is small, draws
        repeat.
    """

    draws: dict[str, Array]
    ess: Float[Array, "M"]


def infer_latents(
    fit: Record,
    rng_key,
    X_new,
    y_new=None,
    *args,
    num_samples: int = 200,
    num_proposals: int = 1000,
    **kwargs,
) -> LatentDraws:
    """Draw the per-datum latents of new rows from their posterior given new observations.

    Parameters
    ----------
    rng_key : int or jax.Array
        A seed or a key.
    X_new, y_new : array
        New inputs and observations, as for `log_density`.
    *args, **kwargs
        The model's other arguments at the new inputs.
    num_samples : int, default 200
        The number of draws.
    num_proposals : int, default 1000
        Proposals per datum. The draws become exact as it grows.

    Returns
    -------
    LatentDraws
        `draws` {latent site: (num_samples, ...)} and `ess`, the effective number of proposals per
        datum, (M,).

    Raises
    ------
    ModelError
        If the fit has no q(h). Draws of `NUTS()` belong to the training data alone.
    DataError
        As `log_density`.

    Notes
    -----
    The target is `p(h) E_q(f)[p(y* | f([x*, h]))]`. Proposals come from `q(h | x*, y*)` if the fit
    has an encoder of y, else from a Gaussian fitted to each datum by Adam. Two of three come from
    the prior and the widened prior, which bounds the weights (a defensive mixture: Hesterberg
    1995). They are weighted by the model and resampled. Inner layers and hyperparameters with draws
    are drawn anew per proposal, and outer functions are integrated. O(num_proposals M N_u^2) for
    N_u inducing variables.

    Examples
    --------
    >>> def model(X, y=None):
    ...     with numpyro.plate("data", X.shape[0]):
    ...         h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(), jnp.concatenate([X, h], -1)))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> X = np.linspace(0.0, 1.0, 10)[:, None]
    >>> fit = pg.fit(model, pg.SVGP(num_inducing=4, max_steps=5), 0, X, y=np.sin(6.0 * X[:, 0]))
    >>> fit.infer_latents(1, X[:2], np.zeros(2)).draws["h"].shape
    (200, 2, 1)
    """
    if min(num_samples, num_proposals) < 1:
        raise DataError(
            f"infer_latents(num_samples={num_samples}, num_proposals={num_proposals}): give at "
            "least 1 each."
        )
    if not fit.local:
        raise ModelError(
            f"{type(fit.method).__name__} has no q(h) of per-datum latents; fit a model with "
            "latents by SVGP()."
        )
    X_new, y_new, args, kwargs = with_observations(fit, X_new, y_new, args, kwargs)
    query = query_at(fit, X_new, args, kwargs)
    query = observing(query, y_new)
    key = as_key(rng_key, "fit.infer_latents(0, X_new, y_new)")
    encoders = {k: q for k, q in fit.local.items() if encoder_of(q) is not None}
    groups = coupled_groups(query)
    # the model's prior is what h* has, not an encoder's guess
    query = dataclasses.replace(query, local={})
    return LatentDraws(*_infer(query, groups, encoders, key, num_samples, num_proposals))


@full_jit
def _infer(query: Query, groups, encoders, key, num_samples: int, num_proposals: int):
    key_fit, key_propose, key_choose = random.split(key, 3)
    proposals = Proposals.fitted(query, groups, encoders, key_fit)

    def component(entry):
        draw, keys, which = entry
        h, log_w = lax.map(proposals.weighed(draw), (keys, which))
        return h, log_w + draw.log_weights

    each = -(-num_proposals // query.draws.num)
    keys = random.split(key_propose, (query.draws.num, each))
    which = jnp.arange(keys.size).reshape(keys.shape)
    together = lambda x: jnp.reshape(x, (-1, *x.shape[2:]))  # noqa: E731
    h, log_w = jax.tree.map(together, lax.map(component, (query.draws, keys, which)))
    log_w = log_w - logsumexp(log_w, 0)
    chosen = random.categorical(key_choose, log_w, axis=0, shape=(num_samples, query.layout.num))
    sites = query.trace(query.draws.at(0), {})
    picked = {
        k: _choose(v, chosen, latent_form(sites[k], query.layout.num)[0]) for k, v in h.items()
    }
    return picked, jnp.exp(-logsumexp(2 * log_w, 0))


def _choose(values, chosen, axis: int):
    """(samples, ...): values (proposals, ..., M at `axis`, ...) at each datum's chosen ones."""
    moved = jnp.moveaxis(values, 1 + axis, 1)  # (proposals, M, ...)
    return jnp.moveaxis(moved[chosen, jnp.arange(moved.shape[1])], 1, 1 + axis)


class Score(NamedTuple):
    """A number and what it is."""

    value: float | None
    name: str


def trace_at(fit: Record, X, y, args: tuple, kwargs: dict) -> dict:
    """The model's at new inputs, with y observed there."""
    query = observing(query_at(fit, X, args, kwargs), y)
    return query.trace(query.draws.at(0), {})


def judged(fit: Record, X, y, args: tuple, kwargs: dict) -> tuple[Prediction, Any, Pit | None]:
    """What `error` and `calibration` want: the prediction, y, and where numbers of one site fall in
    it; of one site the entries alone that no mask leaves out, which have no shape then.
    """
    prediction, found = predict(fit, X, *args, **kwargs), None
    if not (is_classification(prediction) or isinstance(y, dict)):
        found = pit(fit, X, y, *args, **kwargs)
    trace = trace_at(fit, X, y, args, kwargs)
    predicts = fit.model.reading.predicts
    sites = [trace[k]["fn"] for k in observed_names(trace) if predicts(k)]
    if len(sites) != 1 or np.all(counts := np.asarray(mask_of(sites[0]))):
        return prediction, y, found
    counts = np.broadcast_to(counts, bare_shape(sites[0]))
    kept = lambda x: jax.tree.map(lambda x: np.asarray(x)[counts], x)  # noqa: E731
    own = {k: kept(getattr(prediction, k)) for k in ("mean", "variance", "probs")}
    return dataclasses.replace(prediction, **own), kept(y), kept(found)


def error(prediction: Prediction, y) -> Score:
    """Share of misclassified observations of classes 0, 1, ..., else root mean squared error."""
    if is_classification(prediction):
        guess = np.argmax(outcome_probabilities(prediction), -1)
        return Score(float(np.mean(guess != _observed(y, guess.shape))), "misclassified")
    if prediction.mean is None or isinstance(prediction.mean, dict):
        return Score(None, "RMSE")
    mean = np.asarray(prediction.mean)
    return Score(float(np.sqrt(np.mean((mean - _observed(y, mean.shape)) ** 2))), "RMSE")


def _observed(observed: Any, shape: tuple[int, ...]) -> ndarray:
    """y in the shape of its prediction; `DataError` for another, which NumPy would broadcast."""
    y = observed
    if isinstance(observed, dict) and len(observed) == 1:
        (y,) = observed.values()
    if np.shape(y) != shape:
        raise DataError(
            f"y_test has shape {np.shape(y)}, and predictions of it {shape}; give it as the model "
            "observes it."
        )
    return np.asarray(y)


def calibration(prediction: Prediction, y, pit: Pit | None = None) -> Score:
    """How far stated and observed frequencies differ: about 1 / sqrt(M) by chance over M rows.

    Classes: the expected calibration error over `NUM_BINS` bins of p(y = 1), or of the largest
    probability (Guo et al. 2017). Otherwise, where `pit` is known: the mean gap between nominal and
    observed coverage of the predictive distribution's central intervals.
    """
    if is_classification(prediction):
        stated, observed, rows = reliability(prediction, y)
        return Score(float(np.average(np.abs(stated - observed), weights=rows)), "ECE")
    if pit is None:
        return Score(None, "coverage gap")
    return Score(float(np.mean(np.abs(coverage(pit) - LEVELS))), "coverage gap")


def reliability(prediction: Prediction, y):
    """(mean probability, observed frequency, number of rows) of the bins that have rows."""
    probs = outcome_probabilities(prediction)
    y, probs = np.ravel(_observed(y, probs.shape[:-1])), np.reshape(probs, (-1, probs.shape[-1]))
    binary = probs.shape[1] == 2
    stated = probs[:, 1] if binary else probs.max(1)
    happened = (y == 1) if binary else (y == probs.argmax(1))
    which = np.minimum((stated * NUM_BINS).astype(int), NUM_BINS - 1)
    count = np.bincount(which, minlength=NUM_BINS)
    used = count > 0
    mean = lambda v: np.bincount(which, v, NUM_BINS)[used] / count[used]  # noqa: E731
    return mean(stated), mean(happened.astype(float)), count[used]


def coverage(pit: Pit) -> Float[ndarray, "L"]:
    """Share of the observations inside the predictive distribution's central interval at each of
    `LEVELS`. A count counts by the share of its probability that lies between the interval's two
    tails (the non-randomised PIT of Czado, Gneiting & Held 2009).
    """
    below, up_to = (np.ravel(x)[:, None] for x in pit)
    low, high = 0.5 - 0.5 * LEVELS, 0.5 + 0.5 * LEVELS
    width = up_to - below
    overlap = np.clip(np.minimum(up_to, high) - np.maximum(below, low), 0.0, None)
    inside = (low <= up_to) & (up_to <= high)
    return np.mean(np.where(width > 0, overlap / np.where(width > 0, width, 1.0), inside), 0)
