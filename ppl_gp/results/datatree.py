"""A fit as ArviZ's DataTree: every method's draws with the same groups and dimensions, so that
comparisons mix methods.

ArviZ 0.8 and 1.x. Dimensions are named after the model's plates.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.draws import Draws
from ppl_gp.errors import DataError
from ppl_gp.model.arguments import Leaves
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.roles import data_plates, is_factor, is_gp, is_observed
from ppl_gp.model.tracing import run
from ppl_gp.quick import full_jit
from ppl_gp.results.layer_draws import draw_layers
from ppl_gp.results.named_tree import own_coordinates, with_levels
from ppl_gp.results.part_draws import draw_parts, own_effects
from ppl_gp.results.query.layout import require_all_rows
from ppl_gp.results.query.mixture import Moments, mixture
from ppl_gp.results.query.new_inputs import num_rows
from ppl_gp.results.record import Record, feeds_another, prior_at
from ppl_gp.results.symmetry import symmetries
from ppl_gp.results.whole_tree import further_groups
from ppl_gp.storage.versions import package_versions
from ppl_gp.wrappers import bare, mask_of

if TYPE_CHECKING:
    import xarray as xr


def to_datatree(
    fit: Record,
    *,
    num_draws: int = 1000,
    rng_key=0,
    whole: bool = False,
    coords: Mapping[str, Sequence] | None = None,
) -> "xr.DataTree":
    """ArviZ's DataTree of a fit; every variable of `posterior` has the dimensions chain and draw.

    Groups: `posterior` (hyperparameters and f at the training inputs; where sites were integrated
    into a predictor, those sites and the predictor, drawn jointly), `log_likelihood` (each
    observed site and datum; 0 where masked; of factors those that see observations),
    `observed_data`, `constant_data` (inputs), `sample_stats` (of NUTS; and `inner_steps`,
    `inner_residual`, `inner_code` of the approximation at each draw for `hyper=Sample()`).
    Attributes: method, result, log_evidence, seconds; symmetries, where the posterior does not tell
    the entries of a plate apart (`results.symmetry`: label switching).

    `whole=True` adds what ArviZ's checks ask for: `prior` (every site, and deterministic ones),
    `prior_predictive`, `posterior_predictive` (y at the training inputs; a site that is computed
    from another's observations is drawn given these), `log_prior` (of hyperparameters, nats, for
    `psense`), and deterministic sites in `posterior`. `coords`: {dimension: labels}, such as
    {"data": names of the rows}. Where the fit has names (`fit.names`), columns and rows are
    coordinates of their dimensions, unless `coords` has others, and a variable of labels has them
    as the attribute `levels`.

    Where hyperparameters are one value (`MAP`, `Fixed`), f is drawn `num_draws` times from the
    approximation q(f), jointly, and the hyperparameters are repeated. With `Sample` f is drawn once
    from q(f) at each draw of theirs; draws that have weights are first resampled to `num_draws` of
    equal weight.
    `rng_key`: key or seed of these draws. A loaded fit has no observations: its tree lacks
    `log_likelihood` and `observed_data`.

    Cost: O(S N^3) for draws of f, S evaluations of the model; `whole` draws f from the prior as
    often. Raises `DataError` for num_draws < 1, and for coordinates of dimensions that the tree
    does not have, or of another length.
    """
    import arviz_base  # with xarray and pandas it takes a second, which a fit need not wait for

    if num_draws < 1:
        raise DataError(f"to_datatree(num_draws={num_draws}): give at least 1.")
    require_whole_data(fit, "to_datatree")
    key = random.key(rng_key) if isinstance(rng_key, int) else rng_key
    chains = 1 if fit.draws.is_weighted() else fit.num_chains
    hyper, f, parts = draws_with_parts(fit, key, num_draws)
    sites = training_sites(fit)
    groups = {
        "posterior": by_chain({**hyper, **parts, **f}, chains),
        "log_likelihood": by_chain(log_likelihood_of_draws(fit, hyper, f), chains),
        "observed_data": {
            label_of(k, sites): np.asarray(sites[k]["value"]) for k in observed_names(sites)
        },
        "constant_data": _inputs(fit),
        "sample_stats": {k: np.asarray(v) for k, v in fit.stats.get("sample_stats", {}).items()},
    }
    dims = dimensions(fit, sites)
    if whole:
        found = further_groups(fit, {**hyper, **parts, **f}, key, num_draws)
        groups["posterior"] |= by_chain(found.pop("deterministic"), chains)
        before = ("prior", "prior_predictive")  # draws that stand in no chain
        groups |= {k: by_chain(v, 1 if k in before else chains) for k, v in found.items()}
    groups = {k: v for k, v in groups.items() if v}
    sizes, given = _sizes(groups, dims), dict(coords or {})
    _require_known(given, sizes)
    named = own_coordinates(fit, sites, dims, sizes)
    tree = arviz_base.from_dict(
        groups, dims=dims, coords={**named, **given}, attrs={"/": _attributes(fit)}
    )
    return with_levels(fit, sites, tree)


def _sizes(groups: dict, dims: dict) -> dict[str, int]:
    """{dimension: its length}."""
    sizes = {}
    for group, values in groups.items():
        first = 0 if group in ("observed_data", "constant_data") else 2  # chain and draw
        for k, v in values.items():
            sizes |= dict(zip(dims.get(k, ()), np.shape(v)[first:], strict=False))
    return sizes


def _require_known(coords: dict, sizes: dict[str, int]) -> None:
    for name, labels in coords.items():
        if sizes.get(name) != len(labels):
            raise DataError(
                f"to_datatree(coords={{{name!r}: {len(labels)} labels}}): the tree's dimensions "
                f"are {sizes}."
            )


def draws_with_parts(fit: Record, key, num_draws: int) -> tuple[dict, dict, dict]:
    """As `posterior_draws`, and {integrated site: (S, ...)}, which add up to the predictor.

    Raises `DataError` where effects of each datum are drawn given its observation, which a loaded
    fit does not hold.
    """
    if not isinstance(fit.model, Collapsed):
        return *posterior_draws(fit, key, num_draws), {}
    if (own := own_effects(fit)) and not scored_names(training_sites(fit)):
        raise DataError(
            f"effects {own} stand one a datum, and have a posterior given the observations, which "
            "a saved fit of SVGP() does not hold; draw before saving."
        )
    draws, repeats = fit.draws.of_equal_weight(num_draws), 1 if fit.sampled else num_draws
    known = jax.tree.map(lambda x: jnp.repeat(x, repeats, 0), draws.known)
    parts, eta = draw_parts(fit.model, draws, fit.args, fit.kwargs, key, repeats)
    return known, {fit.model.plan.name: eta}, parts


def posterior_draws(fit: Record, key, num_draws: int) -> tuple[dict, dict]:
    """({site: (S, ...)}, {GP site: (S, ..., N)}): joint draws of the hyperparameters and f at the
    training inputs.

    S is `num_draws` where the hyperparameters are one value or their draws have different weights
    (which are then resampled), and the number of draws kept otherwise.
    """
    draws, repeats = fit.draws.of_equal_weight(num_draws), 1 if fit.sampled else num_draws
    if all(kept.is_draws for kept in draws.kept.values()):
        return draws.known, {k: v.mean for k, v in draws.kept.items()}
    known = jax.tree.map(lambda x: jnp.repeat(x, repeats, 0), draws.known)
    if fit.local or (len(fit.latent) > 1 and feeds_another(fit)):
        h, f = draw_layers(fit.model, draws, fit.local, fit.args, fit.kwargs, key, repeats)
        return {**known, **h}, f
    keys = [random.fold_in(key, i) if i else key for i in range(len(draws.kept))]
    f = {
        k: _draw(fit.model, k, draws, fit.args, fit.kwargs, own, repeats)
        for k, own in zip(draws.kept, keys, strict=True)
    }
    return known, f


@full_jit
def _draw(model, site: str, draws: Draws, args, kwargs, key, repeats: int):
    """(S repeats, *C, N) draws of q(f)."""

    def one(entry):
        draw, key = entry
        return draw.kept[site].sample(prior_at(model, site, draw.known, args, kwargs), key, repeats)

    f = lax.map(one, (draws, random.split(key, draws.num)))
    return jnp.reshape(f, (-1, *f.shape[2:]))


def training_moments(fit: Record) -> dict[str, Moments]:
    """{GP site: mean and variance of q(f) at the training inputs}, (*C, N), mixed over draws. O(S
    (M^3 + N M^2)) for `SVGP`.
    """
    if own_effects(fit):
        _, f, _ = draws_with_parts(fit, random.key(0), 1000)
        return {k: Moments(jnp.mean(x, 0), jnp.var(x, 0)) for k, x in f.items()}
    if fit.local or (len(fit.latent) > 1 and feeds_another(fit)):
        _, f = posterior_draws(fit, random.key(0), 1000)
        return {k: Moments(jnp.mean(x, 0), jnp.var(x, 0)) for k, x in f.items()}
    return {site: _moments(fit.model, site, fit.draws, fit.args, fit.kwargs) for site in fit.latent}


@full_jit
def _moments(model, site: str, draws: Draws, args, kwargs) -> Moments:
    def one(draw):
        return Moments(*draw.kept[site].moments(prior_at(model, site, draw.known, args, kwargs)))

    return mixture(one, draws, draws.log_weights)


def log_likelihood_of_draws(fit: Record, hyper: dict, f: dict) -> dict:
    """{observed site: (S, ...)}: log p(y | f, hyperparameters) of every observation, nats; 0 where
    masked, unscaled.
    """
    return _log_likelihood(fit.model, hyper, f, fit.args, fit.kwargs)


@full_jit
def _log_likelihood(model, hyper, f, args, kwargs):
    def one(entry):
        trace = run(model, args, kwargs, *entry)
        return {label_of(k, trace): log_prob_of(trace[k]) for k in scored_names(trace)}

    return lax.map(one, (hyper, f))


def log_prob_of(site):
    """log p of each entry of an observed site, in the batch shape without `to_event`; 0 where
    masked. Of a factor its value.
    """
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


def training_sites(fit: Record) -> dict:
    """The model's trace on the training arguments, at the first draw of everything.

    Raises `DataError` where the model itself subsamples, so that its trace is of some rows only.
    """
    first = fit.draws.at(0)
    trace = run(fit.model, fit.args, fit.kwargs, first.known, first.values)
    require_all_rows(trace)
    return trace


def observed_names(trace: dict) -> list[str]:
    """The sites of a trace that observe data."""
    return [k for k, site in trace.items() if is_observed(site) and not is_factor(site)]


def scored_names(trace: dict) -> list[str]:
    """The sites of a trace that score data: those that observe, and factors that see
    observations.
    """
    return [k for k, site in trace.items() if site["type"] == "sample" and site["is_scored"]]


def label_of(name: str, trace: dict) -> str:
    """A site's name for the user: without the "_observed" that obs_mask adds."""
    stem = name.removesuffix("_observed")
    return stem if f"{stem}_unobserved" in trace else name


def dimensions(fit: Record, trace: dict) -> dict[str, list[str]]:
    """{variable: names of its dimensions after chain and draw}: plates by name, else
    `<variable>_dim_<i>`.
    """
    kept = [
        k
        for k, s in trace.items()
        if s["type"] == "sample" and (k in (*fit.hyper, *fit.local) or is_gp(s) or is_observed(s))
    ]
    plate = data_plate(trace)
    named = {
        label_of(k, trace): _site_dimensions(label_of(k, trace), trace[k], plate) for k in kept
    }
    named |= _part_dimensions(fit)
    for path, array in _inputs(fit).items():
        own = [f"{path}_dim_{i}" for i in range(array.ndim)]
        axis = fit.model.reading.axis_of(path)
        named[path] = own if axis is None or not plate else [*own[:axis], plate, *own[axis + 1 :]]
    taken = set(named)
    return {k: [f"{d}_dim" if d in taken else d for d in dims] for k, dims in named.items()}


def _part_dimensions(fit: Record) -> dict[str, list[str]]:
    if not isinstance(fit.model, Collapsed):
        return {}
    trace = run(fit.model.source, fit.args, fit.kwargs, fit.draws.at(0).known)
    plate = data_plate(trace)
    return {k: _site_dimensions(k, trace[k], plate) for k in fit.model.plan.sites}


def num_data(fit: Record) -> int:
    """N, the rows of the training inputs."""
    return num_rows(fit, fit.args) or next(iter(fit.latent.values())).mean.shape[-1]


def data_plate(trace: dict) -> str | None:
    """The name of the data's plate, if there is one; of several the first."""
    plates = data_plates(trace)
    frames = [
        f.name for s in trace.values() if s["type"] == "sample" for f in s["cond_indep_stack"]
    ]
    return next((name for name in frames if name in plates), None)


def _site_dimensions(name, site, plate) -> list[str]:
    shape, batch = site["fn"].shape(), len(site["fn"].batch_shape)
    dims = [f"{name}_dim_{i}" for i in range(len(shape))]
    # also where `to_event`, or a GP, took the axis for an event
    if plate and site["data_axis"] is not None:
        dims[batch + site["data_axis"]] = plate
    for frame in site["cond_indep_stack"]:
        dims[batch + frame.dim] = frame.name
    return dims if not is_factor(site) else dims[:batch]


def by_chain(values: dict, chains: int) -> dict:
    """(S, ...) -> (chain, draw, ...)."""
    return {k: np.reshape(np.asarray(v), (chains, -1, *np.shape(v)[1:])) for k, v in values.items()}


def _inputs(fit) -> dict:
    arrays = Leaves(fit.model, fit.args, fit.kwargs).arrays
    return {
        p: np.asarray(v)
        for p, v in arrays.items()
        if p in fit.model.reading.shaping and np.ndim(v) > 0
    }


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
