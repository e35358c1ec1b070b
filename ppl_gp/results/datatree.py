"""A fit as ArviZ's DataTree: draws of all methods have the same groups and dimensions.

ArviZ 0.8 and 1.x. Dimensions are named after the model's plates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.draws import Draws, Moments, mixture
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import bare, mask_of
from ppl_gp.quick import full_jit
from ppl_gp.reading.arguments import as_arrays, named_arrays, require_no_such_argument
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.reading import declare, own_function
from ppl_gp.reading.refusals import of_the_model, with_outputs
from ppl_gp.reading.roles import is_factor, is_gp, is_observed
from ppl_gp.reading.tracing import run
from ppl_gp.results import tree_groups
from ppl_gp.results.integrals.latents import densities_without_labels
from ppl_gp.results.part_draws import draw_layers, draw_parts, own_effects
from ppl_gp.results.parts import function_rows
from ppl_gp.results.query.layout import label_of, observed_names, require_all_rows
from ppl_gp.results.query.new_inputs import num_rows
from ppl_gp.results.record import Record, first_trace, has_layers, prior_at, unfolded
from ppl_gp.results.store.archive import package_versions
from ppl_gp.results.symmetry import symmetries
from ppl_gp.results.tree_groups import (
    Part,
    data_plate,
    deterministic_dimensions,
    dots,
    dotted,
    inputs_of,
    rows_that_count,
    scored_names,
    site_dimensions,
)
from ppl_gp.settings import as_key

if TYPE_CHECKING:
    import xarray as xr

_BEFORE = ("prior", "prior_predictive")  # draws that stand in no chain


def to_datatree(
    fit: Record,
    *,
    num_draws: int = 1000,
    rng_key=0,
    whole: bool = False,
    coords: Mapping[str, Sequence] | None = None,
    predictions: Any = None,
    pred_coords: Mapping[str, Sequence] | None = None,
) -> "xr.DataTree":
    """Convert a fit to ArviZ's `DataTree`, with the same groups for every method.

    Parameters
    ----------
    num_draws : int, default 1000
        Draws of f from q(f) if the hyperparameters have one value (`MAP`, `Fixed`). Weighted draws
        are resampled to this number of equal weight. Fits with draws of equal weight (`Sample`,
        samplers, `MeanField`, `SVI`) keep their own draws, with one f per draw.
    rng_key : int or jax.Array, default 0
        Seed or key of these draws.
    whole : bool, default False
        Add the groups that ArviZ's checks need: `prior` (every site), `prior_predictive`,
        `posterior_predictive` and `log_prior`, which contains the log prior of drawn
        hyperparameters in nats, for `psense`.
    coords : mapping, default None
        {dimension: labels}. By default the labels of your frames.
    predictions : array, frame or dict, default None
        New inputs, as for `predict`. For a model with further arguments, {argument: value}. Adds
        `predictions` and `predictions_constant_data`.
    pred_coords : mapping, default None
        As `coords`, for these two groups. By default the row labels of the new inputs.

    Returns
    -------
    xarray.DataTree
        Groups as below. A loaded fit, which has no observations, lacks `log_likelihood` and
        `observed_data`.

    Raises
    ------
    DataError
        For `num_draws` below 1, coordinates of unknown dimensions or of another length, and new
        inputs as in `predict`.

    Notes
    -----
    - `posterior`: hyperparameters, f at the training inputs and deterministic sites, with
      dimensions chain and draw. If sites were integrated into a predictor, those sites and the
      predictor, drawn jointly.
    - `point_estimates`: hyperparameters with one value, and deterministic sites that depend on
      nothing else. They have no chain and draw.
    - `log_likelihood`: per observed site and datum, without rows that are masked in all sites. An
      entry that is masked in some only is 0. Factors are included if they depend on observations.
    - `observed_data`, `constant_data` (inputs), and `sample_stats`: for NUTS, and for
      `hyper=Sample()` `inner_steps`, `inner_residual` and `inner_code` of the approximation per
      draw.
    - `posterior_predictive`: y at the training inputs. A site that is computed from the
      observations of another is drawn given these.
    - `predictions`: y, f and deterministic sites, jointly over the rows, with f drawn anew given
      each draw of the hyperparameters. If sites were integrated into a predictor: y and the
      predictor.
    - Attributes: method, result, log_evidence, seconds, and symmetries (label switching).

    A variable of labels has them as the attribute `levels`. Columns of a table are variables of
    `constant_data`, for `plot_lm(tree, x="age")`, unless another argument or dimension has their
    name. A slash in a site's name becomes a dot. The rows of a predictor of several functions are
    named as in `fit.functions`.

    Cost: O(S N^3) for draws of f and S evaluations of the model. `whole` draws f from the prior as
    often. `predictions` of M rows add O(S (M^3 + M N^2)).

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> tree = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x)).to_datatree(num_draws=50)
    >>> tree["posterior"]["f"].shape
    (1, 50, 10)
    """
    if num_draws < 1:
        raise DataError(f"to_datatree(num_draws={num_draws}): give at least 1.")
    if pred_coords and predictions is None:
        raise DataError("to_datatree(pred_coords=...) names the rows of predictions=; give both.")
    require_whole_data(fit, "to_datatree")
    key = as_key(rng_key, "fit.to_datatree(rng_key=0)")
    (key, key_further, key_new), sites = random.split(key, 3), training_sites(fit)
    drawn = draws_with_parts(fit, key, num_draws)
    values = {k: v for group in drawn for k, v in group.items()}
    groups, dims = _groups_of_training(fit, sites, *drawn)
    if whole:
        further = tree_groups.further_groups(fit, values, key_further, num_draws)
        groups |= {k: by_chain(v, 1 if k in _BEFORE else _chains(fit)) for k, v in further.items()}
    observed, plate = tree_groups.names_of_observed(fit, sites), data_plate(sites)
    inputs = inputs_of(fit.model, fit.args, fit.kwargs, plate)
    part = Part(groups, dims, observed)
    training = tree_groups.parts_of(part, "constant_data", *inputs, fit.names, {})
    each = function_rows(fit)  # what each function of a predictor is
    functions = {} if each is None else {training[0].dims[fit.model.plan.name][0]: list(each)}
    given = dotted(coords or {})
    found = tree_groups.datasets(training, "coords", functions, given)
    if predictions is not None:
        num, still = len(jax.tree.leaves(values)[0]), groups["point_estimates"]
        new = tree_groups.predicted_groups(fit, predictions, key_new, num, observed, still)
        new[0].groups["predictions"] = by_chain(new[0].groups["predictions"], _chains(fit))
        shared = functions | {d: x for d, x in given.items() if d != dots(plate or "")}
        found |= tree_groups.datasets(new, "pred_coords", shared, dotted(pred_coords or {}))
    import xarray as xr  # with pandas it takes a second, which a fit need not wait for

    if (densities := found.get("log_likelihood")) is not None:
        scored = dotted({label_of(k, sites): sites[k] for k in scored_names(sites)})
        found["log_likelihood"] = tree_groups.without_masked_rows(densities, scored)
    tree = xr.DataTree.from_dict(found)
    tree.attrs = _attributes(fit)
    return tree


@of_the_model
def sample_prior(
    model: Callable, rng_key, *args, num_samples: int = 1000, **kwargs
) -> "xr.DataTree":
    """Draw parameters and observations from the model before it is fitted.

    A prior is well chosen if its draws look like data that would not surprise you.

    Parameters
    ----------
    model : callable
        As for `fit`: the first argument contains the inputs, `y` the observations.
    rng_key : int or jax.Array
        A seed or a key.
    *args, **kwargs
        The arguments of the model. Observations may be left out.
    num_samples : int, default 1000
        The number of draws.

    Returns
    -------
    xarray.DataTree
        `prior` (each site, and deterministic ones), `prior_predictive` (y) and `constant_data` (the
        inputs). Chain and draw are the first dimensions, and frames give their names as in
        `to_datatree`. Observations that are left out are in `prior_predictive` if no other site
        sees them; what sees observations that are given is drawn given these.

    Raises
    ------
    DataError
        For `num_samples` below 1.
    ModelError
        If the prior cannot be drawn from (improper priors).

    Notes
    -----
    O(num_samples N^3): f is drawn jointly over the rows.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> tree = pg.sample_prior(model, 0, np.linspace(0.0, 1.0, 10), num_samples=20)
    >>> tree["prior_predictive"]["y"].shape
    (1, 20, 10)
    """
    if not isinstance(num_samples, int | np.integer) or num_samples < 1:
        raise DataError(f"sample_prior(num_samples={num_samples}): give a whole number above 0.")
    key, model = as_key(rng_key, "sample_prior(model, 0, X)"), own_function(model)
    require_no_such_argument(model, "sample_prior", ("num_samples",))
    args, kwargs, names = named_arrays(model, args, kwargs)
    args, kwargs = as_arrays(args, kwargs)
    first = declare(model, args, kwargs)
    given = with_outputs(first, args, kwargs, run(first, args, kwargs))
    declared = declare(model, *given)
    trace = run(declared, *given)  # with observations, which tell what is along the data
    outputs = tuple(label_of(k, trace) for k in observed_names(trace))
    try:
        drawn = tree_groups.prior_draws(declared, args, kwargs, key, int(num_samples), outputs)
    except NotImplementedError as error:
        raise ModelError(
            "sample_prior: a prior of the model has no draws (an improper prior, or a distribution "
            "without `sample`). Give it a proper one."
        ) from error
    plate = data_plate(trace)
    dims = {k: site_dimensions(k, s, plate) for k, s in trace.items() if s["type"] == "sample"}
    dims = {label_of(k, trace): own for k, own in dims.items()}
    whole = Part({k: by_chain(v, 1) for k, v in drawn.items()}, dims, {})
    inputs = inputs_of(declared, args, kwargs, plate)
    parts = tree_groups.parts_of(whole, "constant_data", *inputs, names, {})
    import xarray as xr

    return xr.DataTree.from_dict(tree_groups.datasets(parts, "coords", {}, {}))


def _chains(fit: Record) -> int:
    """Draws that were resampled by their weights stand in no order."""
    return 1 if fit.draws.is_weighted() else fit.num_chains


def _groups_of_training(
    fit: Record, sites: dict, hyper: dict, f: dict, parts: dict
) -> tuple[dict[str, dict], dict[str, list[str]]]:
    """({group: {variable: array}}, {variable: dimensions after chain and draw})."""
    values, chains = {**hyper, **parts, **f}, _chains(fit)
    further, still = tree_groups.deterministic_sites(fit, values)
    shapes = {k: np.shape(v)[1:] for k, v in further.items()}
    shapes |= {k: np.shape(v) for k, v in still.items()}
    drawn = {k: v for k, v in values.items() if k not in fit.points}
    fixed = jax.tree.map(lambda x: x[0], {k: hyper[k] for k in hyper if k in fit.points})
    groups = {
        "posterior": by_chain(drawn | further, chains),
        "point_estimates": {k: np.asarray(v) for k, v in unfolded(fixed | still).items()},
        "log_likelihood": by_chain(_pointwise(fit, sites, hyper, f), chains),
        "observed_data": {
            label_of(k, sites): np.asarray(sites[k]["value"]) for k in observed_names(sites)
        },
        "sample_stats": {k: np.asarray(v) for k, v in fit.stats.get("sample_stats", {}).items()},
    }
    plate = data_plate(sites)
    return groups, dimensions(fit, sites) | deterministic_dimensions(fit, shapes, plate)


def _pointwise(fit: Record, sites: dict, hyper: dict, f: dict) -> dict:
    """Of one observed site whose rows have labels, the density without them: given labels that were
    drawn with a row, nothing tells what it would be without.
    """
    scored = scored_names(sites)
    if len(scored) == 1 and not is_factor(sites[scored[0]]) and sites[scored[0]]["scale"] is None:
        found = densities_without_labels(fit, sites, hyper, num_data(fit))
        if found is not None:
            return {label_of(scored[0], sites): found[0]}
    return _log_likelihood(fit.model, hyper, f, fit.args, fit.kwargs)


def draws_with_parts(fit: Record, key, num_draws: int) -> tuple[dict, dict, dict]:
    """As `posterior_draws`, and {integrated site: (S, ...)}, which add up to the predictor.

    Raises `DataError` for effects per datum of a loaded fit, which does not hold observations.
    """
    if not isinstance(fit.model, Collapsed):
        return *posterior_draws(fit, key, num_draws), {}
    if (own := own_effects(fit)) and not scored_names(training_sites(fit)):
        raise DataError(
            f"effects {own} are per datum, and have a posterior given the observations, which "
            "a saved fit of SVGP() does not hold; draw before saving."
        )
    draws, repeats, known = _even(fit, num_draws)
    parts, eta = draw_parts(fit.model, draws, fit.args, fit.kwargs, key, repeats)
    return known, {fit.model.plan.name: eta}, parts


def _even(fit: Record, num_draws: int) -> tuple[Draws, int, dict]:
    """(draws of equal weight, how often each is used, {site: (S, ...)} of all of these)."""
    draws, repeats = fit.draws.of_equal_weight(num_draws), 1 if fit.sampled else num_draws
    return draws, repeats, jax.tree.map(lambda x: jnp.repeat(x, repeats, 0), draws.known)


def posterior_draws(fit: Record, key, num_draws: int) -> tuple[dict, dict]:
    """({site: (S, ...)}, {GP site: (S, ..., N)}): joint draws of the hyperparameters and f at the
    training inputs; S as `to_datatree` says.
    """
    draws, repeats, known = _even(fit, num_draws)
    if all(kept.is_draws for kept in draws.kept.values()):
        return draws.known, {k: v.mean for k, v in draws.kept.items()}
    if has_layers(fit):
        h, f = draw_layers(fit.model, draws, fit.local, fit.args, fit.kwargs, key, repeats)
        return {**known, **h}, f
    f = {}
    for k, own in zip(draws.kept, random.split(key, len(draws.kept)), strict=True):
        f[k] = _draw(fit.model, k, draws, fit.args, fit.kwargs, own, repeats)
    return known, f


@full_jit
def _draw(model, site: str, draws: Draws, args, kwargs, key, repeats: int):

    def one(entry):
        draw, key = entry
        return draw.kept[site].sample(prior_at(model, site, draw.known, args, kwargs), key, repeats)

    f = lax.map(one, (draws, random.split(key, draws.num)))
    return jnp.reshape(f, (-1, *f.shape[2:]))


def training_moments(fit: Record) -> dict[str, Moments]:
    """{GP site: moments of q(f) at the training inputs, (*C, N)}. O(S (M^3 + N M^2)) for `SVGP`."""
    if own_effects(fit):
        _, f, _ = draws_with_parts(fit, random.key(0), 1000)
    elif has_layers(fit):
        _, f = posterior_draws(fit, random.key(0), 1000)
    else:
        of = lambda site: _moments(fit.model, site, fit.draws, fit.args, fit.kwargs)  # noqa: E731
        return {site: of(site) for site in fit.latent}
    return {k: moments_of(x) for k, x in f.items()}


def moments_of(draws) -> Moments:
    """Of equally likely draws (S, ...)."""
    return Moments(jnp.mean(draws, 0), jnp.var(draws, 0))


@full_jit
def _moments(model, site: str, draws: Draws, args, kwargs) -> Moments:
    def one(draw):
        return Moments(*draw.kept[site].moments(prior_at(model, site, draw.known, args, kwargs)))

    return mixture(one, draws, draws.log_weights)


@full_jit
def _log_likelihood(model, hyper, f, args, kwargs):
    """{observed site: (S, ...)}: log p(y | f, hyperparameters), nats, unscaled; 0 where masked."""

    def one(entry):
        trace = run(model, args, kwargs, *entry)
        return {label_of(k, trace): log_prob_of(trace[k]) for k in scored_names(trace)}

    return lax.map(one, (hyper, f))


def log_prob_of(site):
    """log p of each entry without `to_event`, 0 where masked; of a factor its value."""
    if is_factor(site):
        return site["fn"].log_prob(site["value"])
    return jnp.where(mask_of(site["fn"]), bare(site["fn"]).log_prob(site["value"]), 0.0)


def require_whole_data(fit: Record, verb: str) -> None:
    """Raise `DataError` where a fit keeps the first batch of a stream only."""
    if fit.stats.get("first_batch_only"):
        raise DataError(
            f"{verb}() is about the training data, of which a fit of a Stream keeps the first "
            "batch alone; score held-out data by log_density, or predict at rows of your choice."
        )


def require_same_stream(verb: str, named: Mapping[str, Record]) -> None:
    """Raise `DataError` where some fits are of streams, and not all of the same `Stream`."""
    if len({fit.stats.get("stream") for fit in named.values()}) > 1:
        raise DataError(
            f"{verb}(): of {list(named)} some are of a Stream, and not all of the same one. A fit "
            "keeps the first batch of a stream alone, so that the data cannot be compared. Fit all "
            "of them to one Stream object that can be read again, or all to arrays."
        )


def training_sites(fit: Record) -> dict:
    """`first_trace`; `DataError` where the model subsamples, so that it is of some rows only."""
    trace, name = first_trace(fit), type(fit.method).__name__
    require_all_rows(trace, f"fit with None, and {name}(batch_size={{}}) draws the batches")
    return trace


def dimensions(fit: Record, trace: dict) -> dict[str, list[str]]:
    """{variable that has draws or is observed: its dimensions after chain and draw}."""
    drawn = {*fit.hyper, *fit.local}
    kept = {
        label_of(k, trace): s
        for k, s in trace.items()
        if s["type"] == "sample" and (k in drawn or is_gp(s) or is_observed(s))
    }
    named = {k: site_dimensions(k, s, data_plate(trace)) for k, s in kept.items()}
    if isinstance(fit.model, Collapsed):
        whole = run(fit.source, fit.args, fit.kwargs, fit.draws.at(0).known)
        plate = data_plate(whole)
        named |= {k: site_dimensions(k, whole[k], plate) for k in fit.model.plan.sites}
    return named


def num_data(fit: Record) -> int:
    """N, the rows of the training inputs; of a model of keywords alone, of what it observes."""
    if (num := num_rows(fit, fit.args, fit.kwargs)) or fit.latent:
        return num or next(iter(fit.latent.values())).mean.shape[-1]
    sites = training_sites(fit)
    for name in scored_names(sites):
        if (rows := rows_that_count(sites[name])) is not None:
            return len(rows[1])
    raise DataError("the model observes no rows, and nothing is left out or scored by row.")


def by_chain(values: dict, chains: int) -> dict:
    """(S, ...) -> (chain, draw, ...)."""
    return {k: np.reshape(np.asarray(v), (chains, -1, *np.shape(v)[1:])) for k, v in values.items()}


def _attributes(fit) -> dict:
    known = {
        "inference_library": "ppl_gp",
        "inference_library_version": package_versions()["ppl-gp"],
        "method": repr(fit.method),
        "result": str(fit.result),
        "log_evidence": fit.log_evidence,
        "seconds": fit.stats.get("seconds"),
        "symmetries": "; ".join(str(s) for s in symmetries(fit)) or None,
    }
    return {k: v for k, v in known.items() if v is not None}
