"""Leave-one-out predictive densities, as ArviZ's `ELPDData`.

- Local methods: the same method's fit to the other rows at the same hyperparameters, from q's sites
  in a few steps; else a cavity, q / site_n (Vehtari, Mononen, Tolvanen, Sivula & Winther 2016),
  exact for Gaussian likelihoods and off by up to .3 nats in a row of skewed ones.
- `hyper=Sample()`: 1 / E[1 / p(y_n | y_{-n}, theta)] over draws of theta, Pareto-smoothed.
- Draws of f, and of models without a GP: PSIS by ArviZ; labels of the rows are summed.
- `SVGP` of one function: cavities of q(u) where its bound is at its maximum (Khan & Lin 2017).
- `MeanField`, and `SVGP` of several functions: draws of q, whose weights also correct q for what it
  is not the posterior (Magnusson, Andersen, Jonasson & Vehtari 2019), if that density is known.
"""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError, warn
from ppl_gp.gp import bare_shape, mask_of
from ppl_gp.hyperparameters import Fixed
from ppl_gp.kept import FromInducing
from ppl_gp.numerics.blocks import times
from ppl_gp.quick import full_jit
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.roles import data_axis, roles
from ppl_gp.results.datatree import (
    by_chain,
    num_data,
    posterior_draws,
    require_whole_data,
    scored_names,
    training_sites,
)
from ppl_gp.results.integrals.enumerated import densities_without_labels
from ppl_gp.results.left_out import (
    DRAWS,
    cavity_log_densities,
    distinct,
    draw_log_densities,
    khats,
    log_prior_over,
)
from ppl_gp.results.part_draws import own_effects
from ppl_gp.results.record import Record, feeds_another, prior_at
from ppl_gp.results.tree_dimensions import data_plate, dots, dotted, row_names
from ppl_gp.sparse.process import SparseProcess, draws_with_inducing

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData

# ArviZ is imported where it is used: with xarray and pandas it takes a second, which a fit need not
# wait for.

SETTLED = 0.05  # sd of f, within which q is where its bound is highest
GOOD_KHAT = 0.7  # Vehtari et al. 2024
MOST_WORK = 1e9  # of refits, N^3 each: those of 170 rows, in seconds
NODES = 100  # likelihood values for each datum in a step
FEWEST_REFITS = 5
WORTH_TELLING = 0.5  # nats
_LABEL = "observations"
MAX_DATA = 20_000
FEWEST = 21  # draws, a fifth of which is the tail that is smoothed: at least five
MAX_ROWS = 2000  # f is drawn jointly over them


def loo(fit: Record) -> "ELPDData":
    """Expected log predictive density of the training data, each datum left out (`elpd`, `se`,
    pointwise `elpd_i`).

    `p` is the effective number of parameters, sum_n log p(y_n | data) - elpd_n. `pareto_k` judges
    the weights of draws: of samplers, and of `SVGP` of several functions, 1000 draws of q(f), or an
    autoguide's 100. A local method, and `SVGP` of one function, need no weights at one setting of
    the hyperparameters. There it judges q(f), by the weights from 1000 draws of q to the posterior
    without the datum: -inf if they are equal, `None` under `Grid()`, above 20 000 data, and of
    `SVGP` above 2000. A warning says how many nats rest on rows whose weights of draws fail.

    Local methods are fitted again without each row, at the same hyperparameters, up to about 170
    rows; else, or with draws of the hyperparameters, without those on which the fit depends most.
    Other rows, and `SVGP` of one function, are from cavities: exact for Gaussian noise, else off by
    a share of what leaving a row out changes. All observed sites of a datum are left out together;
    masked data do not count; a datum under a `scale` handler is scored unweighed. Coordinates are
    the rows' labels, or numbers. ArviZ's `compare` takes the result.

    In nats. NaN, and `warning`, where a cavity is not a proper Gaussian. Raises `DataError` for a
    loaded fit (no observations) and for fewer than 21 draws, `ModelError` where observed sites have
    no log density for each datum.
    """
    require_whole_data(fit, "loo")
    sites = training_sites(fit)
    if not scored_names(sites):
        raise DataError(
            "loo() needs observed sites with a density for each datum, and there are none: a "
            "saved fit does not hold its observations (call loo() before saving), and a "
            "numpyro.factor is of no datum."
        )
    fit.warn_of_others("loo")
    if own := own_effects(fit):
        raise ModelError(
            f"loo() under SVGP() is not for effects that stand one a datum, {own}: each follows "
            "its own datum. VI(), EP() and Laplace() leave data out by cavities; or score held-out "
            "data by log_density."
        )
    if not _has_cavities(fit):
        if num_data(fit) > MAX_DATA:
            raise DataError(
                f"loo() of {num_data(fit)} data weighs 1000 draws of each; score held-out data by "
                "log_density."
            )
        if can_be_corrected(fit, num_data(fit)):
            return _corrected(fit, sites)
        hyper, f = (
            _draws_of_blocks(fit) if fit.blocks else posterior_draws(fit, random.key(0), DRAWS)
        )
        found = densities_without_labels(fit, sites, hyper, num_data(fit))
        if found is not None and not _is_scaled(sites):
            densities, draws = found
            removed = densities
        else:
            densities, removed = draw_log_densities(
                fit.model, hyper, f, fit.args, fit.kwargs, num_data(fit)
            )
            draws = {**hyper, **f}
        if not fit.blocks:
            found = _psis(fit, sites, densities, removed, draws)
            lpd = logsumexp(densities, 0) - np.log(len(densities))
            return _told(fit, sites, found, lpd, own=_of_rows(sites, draws))
        blocks = [q for q in fit.blocks if set(q.sites) <= set(draws)]
        log_ratio = log_prior_over(blocks, fit.model, draws, fit.args, fit.kwargs)
        return _weighed(fit, sites, densities, removed, draws, jnp.sum(removed, 1) + log_ratio)
    (site,) = fit.latent
    left_out, kept, removed, off = _left_out(fit, site, _is_scaled(sites))
    log_w = fit.draws.log_weights[:, None]
    lpd = logsumexp(kept + log_w, 0)
    if fit.sampled and not fit.draws.is_weighted():
        return _told(fit, sites, _psis(fit, sites, left_out, removed, fit.hyper, lpd), lpd)
    without = -logsumexp(log_w - removed, 0)
    if _is_scaled(sites):  # else what is scored is what is taken out
        without = without + logsumexp(left_out - removed + log_w, 0)
    corrected = not fit.latent[site].has_sites and can_be_corrected(fit, num_data(fit))
    if float(jnp.max(off)) > SETTLED:
        _tell_of_unsettled(float(jnp.max(off)), corrected)
        if corrected:
            return _corrected(fit, sites)
    judged = corrected or (fit.latent[site].has_sites and num_data(fit) <= MAX_DATA)
    khat = _khat(fit, site) if judged and not fit.sampled else None
    return _elpd(fit, sites, np.asarray(without), np.asarray(lpd), khat)


def _left_out(fit: Record, site: str, scaled: bool):
    """As `cavity_log_densities`, with refits of as many rows as `MOST_WORK` allows: of all, or of
    those that the fit follows most.
    """
    num, data = num_data(fit), (fit.args, fit.kwargs, scaled, num_data(fit))
    ask = lambda *refits: cavity_log_densities(fit.model, site, fit.draws, *data, *refits)  # noqa: E731
    if not fit.latent[site].has_sites:
        return ask()
    method = dataclasses.replace(fit.method, hyper=Fixed())  # what compiled code is keyed by
    work = fit.draws.num * num * (NODES + num**2)
    many = min(num, max(FEWEST_REFITS, int(MOST_WORK / work)))
    if many == num:
        return ask(method, jnp.arange(num))
    found = ask()
    follows = jnp.mean(found[1] - found[0], 0)
    rows = jnp.argsort(-jnp.where(jnp.isnan(follows), jnp.inf, follows))[:many]
    moved = ask(method, rows)
    _tell_of_cavities(found[0], moved[0], follows, rows)
    return moved


def _tell_of_cavities(before, after, follows, rows) -> None:
    """What refits changed in a nat of `follows`, the others would change about as much."""
    move = np.asarray(jnp.mean(after - before, 0))[rows]
    share = np.nansum(np.abs(move)) / np.nansum(np.asarray(follows)[rows])
    left = share * float(jnp.nansum(jnp.delete(follows, rows)))
    if left > WORTH_TELLING:
        warn(
            f"loo(): {len(rows)} rows, on which the fit depends most, are from fits to the other "
            f"rows. The other {len(follows) - len(rows)} are from cavities, as refits would take "
            f"long: `elpd` may be off by about {left:.2g} nats. Where that matters, score held-out "
            "data by log_density."
        )


def _has_cavities(fit: Record) -> bool:
    """Whether a q is its prior times a site for each datum: behind a pseudo-likelihood, or at the
    maximum of its bound q(u) of one function with a full covariance.
    """
    every = list(fit.latent.values())
    if len(every) != 1 or fit.sampled or fit.local or not isinstance(every[0], FromInducing):
        return bool(every) and all(kept.has_sites for kept in every)
    kept = every[0]
    return not kept.coupled and kept.mean.ndim == 2 and getattr(kept.reduction, "ndim", 0) == 3


def _tell_of_unsettled(off: float, corrected: bool) -> None:
    instead = "weighted draws of q serve instead" if corrected else "`elpd_i` is off accordingly"
    warn(
        "loo(): q(u) is not at the maximum of its bound, where leave-one-out is from cavities: "
        f"some f_n would move by {off:.2g} sd in a step; {instead}. Raise max_steps."
    )


def _corrected(fit, sites):
    """PSIS-LOO of draws of q(f) with weights p(y, f) / (p(y_n | f_n) q(f))."""
    num, known = num_data(fit), fit.draws.at(0).known
    f, log_lik, log_ratio = corrected_draws(
        fit.model, fit.draws, num, fit.args, fit.kwargs, random.key(0), DRAWS
    )
    hyper = {k: jnp.broadcast_to(v, (DRAWS, *jnp.shape(v))) for k, v in known.items()}
    densities, removed = draw_log_densities(fit.model, hyper, f, fit.args, fit.kwargs, num)
    return _weighed(fit, sites, densities, removed, f, log_lik + log_ratio)


def _draws_of_blocks(fit: Record) -> tuple[dict, dict]:
    """As `posterior_draws`, of mean field's q: up to ten times `DRAWS`, as weights want many."""
    num = int(np.clip(MAX_DATA * MAX_ROWS // 10 // num_data(fit), DRAWS, 10 * DRAWS))
    keys = random.split(random.key(0), len(fit.blocks))
    z = {k: x for q, key in zip(fit.blocks, keys, strict=True) for k, x in q.draw(key, num).items()}
    return {k: z[k] for k in z if k not in fit.latent}, {k: z[k] for k in fit.latent}


def _weighed(fit, sites, densities, removed, draws, log_w):
    """Of draws of q that log weights (S,) make the posterior's."""
    import arviz_stats

    found: Any = _quiet(
        arviz_stats.loo_approximate_posterior,
        _tree(fit, sites, removed, draws),
        log_p=np.asarray(log_w),
        log_q=np.zeros(len(log_w)),
    )
    khat, own = float(np.median(found.pareto_k)), _of_rows(sites, draws)
    better = _scored(fit, sites, densities, removed - log_w[:, None], draws, found)
    if khat <= GOOD_KHAT:
        lpd = logsumexp(densities + log_w[:, None], 0) - logsumexp(log_w)
        return _told(fit, sites, better, lpd, weighed=True, own=own)
    plain = _psis(fit, sites, densities, removed, draws)
    usable = bool(fit.blocks) and khat < 1.0  # the weights of a narrow q have a mean
    told = (
        f"are roughly corrected: weights move `elpd` by {better.elpd - plain.elpd:.2g} nats, and a "
        "part of that may be lacking. Compare with NUTS()."
        if usable
        else "could not be corrected by weights: q is far from the posterior, or a datum decides "
        "much of it. This is leave-one-out by draws of q itself, which may be off by nats either "
        "way. Score held-out data by log_density."
    )
    told = f"{own}. Score held-out data by log_density." if own else told
    warn(
        f"loo(): draws of q of {type(fit.method).__name__} (median Pareto k {khat:.2f} of weights "
        f"over all {num_data(fit)} data) {told}"
    )
    return dataclasses.replace(better if usable else plain, warning=True)


def _of_rows(sites, draws) -> str:
    """What is to be said of draws that have latents of single rows."""
    own = [k for k in roles(sites).local_latents if k in draws]
    told = "follow each row by its own {}, which weights seldom take back: `elpd` may be nats off "
    return own and (told + "(4.3 and 7.5 too high over 25 rows where tried)").format(own) or ""


def _told(fit: Record, sites, found: Any, lpd, weighed=False, own=""):
    """`found`, after a warning of rows whose weights fail, of a q that is not the posterior, and of
    latents of rows (`own`). `lpd` (N,): log p(y_n | data).
    """
    bad, is_q = np.asarray(found.pareto_k) > found.good_k, fit.log_evidence is not None
    gain, causes = fit.stats.get("importance_gain"), []
    if is_q and not weighed and (bad.any() or not fit.latent):
        by = "" if gain is None else f", whose log evidence is {gain:.2g} nats below log p(y),"
        causes += [f"draws of {type(fit.method).__name__}'s q{by} are taken for the posterior's"]
    if bad.any():
        lowered = (np.asarray(lpd)[_counted(sites, len(lpd))] - np.asarray(found.elpd_i))[bad]
        causes += [
            f"{bad.sum()} of {bad.size} rows have a Pareto k-hat above {found.good_k:.2g}, the "
            f"worst {np.max(found.pareto_k):.2f}; none of the {np.sum(lowered):.2g} nats by which "
            "leaving them out lowers `elpd` is certain"
        ]
    causes += [f"draws {own}"] * bool(own)
    if causes:
        by_nuts = is_q and bad.size <= MAX_ROWS and not own
        compare = "Compare with NUTS(), or score" if by_nuts else "Score"
        warn(f"loo(): {'; '.join(causes)}. {compare} held-out data by log_density.")
    return found


def _is_scaled(sites) -> bool:
    """Whether a `scale` handler stands around what scores data."""
    scales = [sites[k]["scale"] for k in scored_names(sites)]
    return any(x is not None and not np.all(np.asarray(x) == 1) for x in scales)


def _psis(fit, sites, densities, removed, posterior, lpd=None):
    """ArviZ's PSIS-LOO of log densities (S, N) with `removed` (S, N) taken out of the posterior:
    the same, unless `scale` handlers weigh the data. `lpd` (N,) is log p(y_n | data) where the
    densities are not given f.
    """
    import arviz_stats

    if len(densities) < FEWEST:
        raise DataError(
            f"loo() weighs draws, and the fit has {len(densities)}; Pareto smoothing wants at "
            f"least {FEWEST}. Fit with more (num_draws=, num_samples=)."
        )
    keep = _counted(sites, densities.shape[-1])
    without: Any = _quiet(arviz_stats.loo, _tree(fit, sites, removed, posterior))
    elpd = _scored(fit, sites, densities, removed, posterior, without)
    if lpd is None:
        return elpd
    return dataclasses.replace(elpd, p=float(np.sum(np.asarray(lpd)[keep] - elpd.elpd_i.values)))


def _scored(fit, sites, densities, removed, posterior, without) -> Any:
    """`without`, the result of taking out what it scores; where `scale` handlers weigh the data,
    the log densities (S, N) with `removed` (S, N) taken out.
    """
    import arviz_stats

    if not _is_scaled(sites):
        return without
    draws = _tree(fit, sites, removed, posterior).log_likelihood[_LABEL]
    log_weights, k = draws.azstats.psislw(dim=["chain", "draw"])
    tree = _tree(fit, sites, densities, posterior)
    return _quiet(arviz_stats.loo, tree, log_weights=log_weights, pareto_k=k)


def _quiet(estimator, tree, **options):
    """ArviZ's estimate without its warning, which blames the model for any q: `_told` has ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter")
        return estimator(tree, pointwise=True, **options)


def _tree(fit, sites, densities, posterior):
    """What ArviZ's estimators take."""
    import arviz_base

    keep, dim = _counted(sites, densities.shape[-1]), _dimension(fit, sites)
    named = {_LABEL: np.reshape(distinct(densities)[:, keep], (fit.num_chains, -1, keep.size))}
    posterior = by_chain(dotted(posterior), fit.num_chains)
    groups = {"posterior": posterior, "log_likelihood": named}
    coords = {dim: _names(fit, keep, densities.shape[-1])}
    return arviz_base.from_dict(groups, dims={_LABEL: [dim]}, coords=coords)


def _khat(fit: Record, site: str) -> np.ndarray:
    """Pareto k-hat of each datum, (N,), from draws of q(f): of the weights that turn q into the
    posterior without the datum, prod_m p(y_m | f_m) / site_m(f_m) / p(y_n | f_n).
    """
    num, key, data = num_data(fit), random.key(0), (fit.args, fit.kwargs)
    hyper, f = posterior_draws(fit, key, DRAWS)
    if fit.latent[site].has_sites:
        pseudo, flat = fit.draws.at(0).kept[site].sites, jnp.reshape(f[site], (DRAWS, -1))
        squares = jnp.sum(flat.T * times(pseudo.nat2, flat.T), 0)
        log_sites = flat @ jnp.ravel(pseudo.nat1) - 0.5 * squares
    else:  # log q(u) - log p(u)
        f, _, log_ratio = corrected_draws(fit.model, fit.draws, num, *data, key, DRAWS)
        log_sites = -log_ratio
    _, log_p = draw_log_densities(fit.model, hyper, f, *data, num)
    log_w = jnp.sum(log_p, 1) - log_sites
    return khats(np.asarray(log_p - log_w[:, None]).T)


def _elpd(fit, sites, left_out, lpd, khat=None):
    """The result for one setting of the hyperparameters, from (N,) log densities."""
    import xarray as xr
    from arviz_stats import utils as arviz_utils

    keep, dim = _counted(sites, left_out.size), _dimension(fit, sites)
    elpd_i, names = left_out[keep], _names(fit, keep, left_out.size)
    named = {"dims": [dim], "coords": {dim: names}}
    figures = {
        "elpd": float(np.sum(elpd_i)),
        "se": float(np.sqrt(keep.size * np.var(elpd_i))),
        "p": float(np.sum(lpd[keep] - elpd_i)),
        "n_samples": 0,  # ArviZ prints it
        "n_data_points": keep.size,
        "scale": "log",
        "warning": bool(np.any(np.isnan(elpd_i))),
        "good_k": None if khat is None else GOOD_KHAT,
        "elpd_i": xr.DataArray(elpd_i, name=_LABEL, **named),
        "pareto_k": None if khat is None else xr.DataArray(khat[keep], name=_LABEL, **named),
    }
    # ArviZ 1.x has a class for each estimator, 0.8 one class with the estimator's name.
    if (estimator := getattr(arviz_utils, "ELPDDataLOO", None)) is not None:
        return estimator(**figures)
    return arviz_utils.ELPDData(kind="loo", **figures)


def _dimension(fit, sites) -> str:
    name = dots(data_plate(sites) or f"{_LABEL}_dim_0")
    return f"{name}_dim" if name == _LABEL else name


def _names(fit, keep, num: int) -> list:
    """Of the data that count."""
    rows = row_names(fit, num)
    return [rows[i] for i in keep]


def _counted(sites, num):
    """Indices of the data that some site scores: those that are not masked everywhere."""
    counted = np.zeros(num, bool)
    for name in scored_names(sites):
        shape = bare_shape(sites[name]["fn"])
        mask = np.broadcast_to(mask_of(sites[name]["fn"]), shape)
        axis = data_axis(sites[name], len(shape))
        if axis is not None:
            counted |= np.any(np.moveaxis(mask, axis, 0).reshape(num, -1), 1)
    return np.flatnonzero(counted)


def can_be_corrected(fit: Record, num_data: int) -> bool:
    """Whether p(f, y) / q(f) is known: one setting of the hyperparameters, one layer, and q(u) over
    inducing variables alone.
    """
    functions = max([kept.coupled for kept in fit.latent.values()], default=0)
    if (
        fit.sampled
        or fit.local
        or num_data * max(1, functions) > MAX_ROWS
        or (len(fit.latent) > 1 and feeds_another(fit))
    ):
        return False
    return all(isinstance(kept, FromInducing) for kept in fit.latent.values())


@full_jit
def corrected_draws(
    model, draws: Draws, num_data: int, args, kwargs, key, num: int
) -> tuple[dict, Float[Array, "S"], Float[Array, "S"]]:
    """({GP site: (S, *C, N)}, log p(y | f) (S,), log p(u) - log q(u) (S,)), S = `num`. O(N^3 + S
    N^2).
    """
    draw = draws.at(0)
    f, log_ratio = {}, jnp.zeros(num)
    for i, (site, kept) in enumerate(draw.kept.items()):
        prior = prior_at(model, site, draw.known, args, kwargs)
        f[site], ratio = draws_with_inducing(
            cast(SparseProcess, kept.process(prior)), prior, random.fold_in(key, i), num
        )
        log_ratio = log_ratio + ratio
    log_lik = JointLogLikelihood(model, num_data, draw.known, args, kwargs)
    return f, lax.map(lambda f: jnp.sum(log_lik(f)), f), log_ratio
