"""Leave-one-out predictive densities, as ArviZ's `ELPDData`.

- Local methods: the same method's fit to the other rows at the same hyperparameters, from q's sites
  in a few steps; else a cavity, q / site_n (Vehtari, Mononen, Tolvanen, Sivula & Winther 2016),
  off by up to .3 nats in a row of skewed likelihoods.
- `hyper=Sample()`: 1 / E[1 / p(y_n | y_{-n}, theta)] over draws of theta, Pareto-smoothed.
- Draws of f, and of models without a GP: PSIS by ArviZ; labels of the rows are summed.
- `SVGP` of one function: cavities of q(u) where its bound is at its maximum (Khan & Lin 2017).
- `MeanField`, and `SVGP` of several functions: draws of q, with weights that also correct q
  (Magnusson, Andersen, Jonasson & Vehtari 2019), if its density is known.
"""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError, warn
from ppl_gp.kept import BehindSites, FromInducing
from ppl_gp.numerics.blocks import times
from ppl_gp.quick import full_jit
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.roles import roles
from ppl_gp.results.datatree import (
    by_chain,
    num_data,
    posterior_draws,
    require_whole_data,
    training_sites,
)
from ppl_gp.results.integrals.latents import densities_without_labels
from ppl_gp.results.left_out import (
    DRAWS,
    cavity_log_densities,
    distinct,
    draw_log_densities,
    khats,
    log_prior_over,
)
from ppl_gp.results.part_draws import own_effects
from ppl_gp.results.record import Record, has_layers, prior_at
from ppl_gp.results.tree_groups import (
    counted_rows,
    data_plate,
    dots,
    dotted,
    row_names,
    scored_names,
)
from ppl_gp.settings import Fixed
from ppl_gp.sparse.process import SparseProcess, draws_with_inducing

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData

# ArviZ is imported where it is used: it takes a second, which a fit need not wait for.

SETTLED = 0.05  # sd of f, within which q is where its bound is highest
GOOD_KHAT = 0.7  # Vehtari et al. 2024
MOST_WORK = 1e9  # of refits, N^3 each: those of 170 rows, in seconds
NODES = 100  # likelihood values for each datum in a step
FEWEST_REFITS = 5
WORTH_TELLING = 0.5  # nats
_LABEL = "observations"
MAX_DATA = 20_000
FEWEST = 21  # draws, a fifth of which is the tail that is smoothed: at least five
_EXACT = 1e-6  # nats that q lacks, below which it is the posterior but for rounding
MAX_ROWS = 2000  # f is drawn jointly over them


def loo(fit: Record) -> "ELPDData":
    """Leave-one-out log densities of the training rows: how well the others predict each.

    Use it without test data, to compare models or to find rows that a model cannot explain.

    Returns
    -------
    ELPDData
        `elpd` (the sum over rows, in nats) with standard error `se`, one score per row in `elpd_i`,
        and `pareto_k` per row. `p` is the effective number of parameters, `sum_n log p(y_n | data)
        - elpd`. Coordinates are the labels or numbers of the rows. ArviZ's `compare` accepts the
        result.

    Raises
    ------
    DataError
        For a loaded fit, which has no observations, for fewer than 21 draws, for a guide of points,
        and if the model has no log density per datum.

    Notes
    -----
    - Local methods are fitted again without each row, at the same hyperparameters, up to about 170
      rows. With more rows, or with draws of the hyperparameters, only those on which the fit
      depends most are.
    - The scores of other rows, and of `SVGP` with one function, come from cavities. They are exact
      for Gaussian noise, else off by a share of what leaving a row out changes. NaN, and `warning`,
      if a cavity is not a proper Gaussian.
    - Samplers, `SVGP` with several functions (1000 draws of q(f)) and autoguides (100 draws) weight
      draws. `pareto_k` judges these weights: above 0.7, they fail. A warning says how many nats
      depend on such rows.
    - Local methods and `SVGP` with one function need no weights at one setting of the
      hyperparameters. There `pareto_k` judges q(f), by the weights from 1000 draws of q to the
      posterior without the datum. It is -inf if they are equal. It is None under `Grid()`, above 20
      000 data, and for `SVGP` above 2000.
    - All observed sites of a datum are left out together. Masked data do not count. A datum under a
      `scale` handler is scored without its weight.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> fit.loo().elpd_i.shape
    (10,)
    """
    require_whole_data(fit, "loo")
    sites = training_sites(fit)
    if not scored_names(sites):
        raise DataError(
            "loo() needs observed sites with a density for each datum. A saved fit does not hold "
            "its observations (call loo() before saving); a numpyro.factor belongs to no datum."
        )
    fit.require_spread("loo")
    fit.warn_of_others("loo")
    if own := own_effects(fit):
        raise ModelError(
            f"loo() under SVGP() is not for per-datum effects, {own}, and follow it: "
            "use VI(), EP() or Laplace(), or score held-out data by log_density."
        )
    data = _scored_data(fit, sites)
    if _has_cavities(fit):
        return _by_cavities(fit, data)
    if data.num > MAX_DATA:
        raise DataError(
            f"loo() weighs 1000 draws of {data.num} data; score held-out data by log_density."
        )
    return _corrected(fit, data) if can_be_corrected(fit, data.num) else _by_draws(fit, sites, data)


class _Data(NamedTuple):
    """What is scored: `num` data, of which those at `keep` count, as not all of their entries are
    masked. `dim` and `labels`: what the tree calls them. `scaled`: whether a `scale` handler stands
    around what scores them; `local`: latents of single rows.
    """

    num: int
    keep: np.ndarray
    dim: str
    labels: list
    scaled: bool
    local: tuple[str, ...]


def _scored_data(fit: Record, sites: dict) -> _Data:
    num, scored = num_data(fit), [sites[k] for k in scored_names(sites)]
    keep = counted_rows(sites)
    dim, labels = dots(data_plate(sites) or f"{_LABEL}_dim_0"), row_names(fit, num)
    scales = [np.asarray(s["scale"]) for s in scored if s["scale"] is not None]
    return _Data(
        num,
        keep,
        f"{dim}_dim" if dim == _LABEL else dim,
        [labels[i] for i in keep],
        any(np.any(x != 1) for x in scales),
        tuple(roles(sites).local_latents),
    )


def _by_draws(fit: Record, sites: dict, data: _Data):
    """PSIS-LOO by draws of f and of the hyperparameters, or of mean field's q."""
    given = fit.args, fit.kwargs
    hyper, f = _draws_of_blocks(fit) if fit.blocks else posterior_draws(fit, random.key(0), DRAWS)
    found = None if data.scaled else densities_without_labels(fit, sites, hyper, data.num)
    if found is None:
        densities, removed = draw_log_densities(fit.model, hyper, f, *given)
        draws = {**hyper, **f}
    else:
        densities, draws = found
        removed = densities
    if fit.blocks:
        blocks = [q for q in fit.blocks if set(q.sites) <= set(draws)]
        log_ratio = log_prior_over(blocks, fit.model, draws, *given)
        return _weighed(fit, data, densities, removed, draws, jnp.sum(removed, 1) + log_ratio)
    lpd = logsumexp(densities, 0) - np.log(len(densities))
    return _told(fit, data, _psis(fit, data, densities, removed, draws), lpd, draws)


def _by_cavities(fit: Record, data: _Data):
    (site,) = fit.latent
    left_out, kept, removed, off = _left_out(fit, site, data)
    log_w = fit.draws.log_weights[:, None]
    lpd = logsumexp(kept + log_w, 0)
    if fit.sampled and not fit.draws.is_weighted():
        return _told(fit, data, _psis(fit, data, left_out, removed, fit.hyper, lpd), lpd, {})
    without = -logsumexp(log_w - removed, 0)
    if data.scaled:  # else what is scored is what is taken out
        without = without + logsumexp(left_out - removed + log_w, 0)
    has_sites = fit.latent[site].has_sites
    corrected = not has_sites and can_be_corrected(fit, data.num)
    if (most := float(jnp.max(off))) > SETTLED:
        instead = "`elpd_i` is off accordingly"
        if corrected:
            instead = "weighted draws of q serve instead"
        warn(
            "loo(): q(u) is not at the maximum of its bound, where leave-one-out is from cavities: "
            f"some f_n would move by {most:.2g} sd in a step; {instead}. Raise max_steps."
        )
        if corrected:
            return _corrected(fit, data)
    judged = corrected or (has_sites and data.num <= MAX_DATA)
    khat = _khat(fit, site, data.num) if judged and not fit.sampled else None
    return _elpd(data, np.asarray(without), np.asarray(lpd), khat)


def _left_out(fit: Record, site: str, data: _Data):
    """`cavity_log_densities`, with refits of the rows that the fit follows most, by `MOST_WORK`."""
    num, given = data.num, (fit.args, fit.kwargs, data.scaled, data.num)
    ask = lambda *refits: cavity_log_densities(fit.model, site, fit.draws, *given, *refits)  # noqa: E731
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
            f"rows, and {len(follows) - len(rows)} from cavities, as refits take long: `elpd` may "
            f"be off by about {left:.2g} nats. To be sure, score held-out data by log_density."
        )


def _has_cavities(fit: Record) -> bool:
    """Whether a q is its prior times a site for each datum: behind a pseudo-likelihood, or at the
    maximum of its bound q(u) of one function with a full covariance.
    """
    if len(fit.latent) != 1:
        return False
    (kept,) = fit.latent.values()
    if fit.sampled or fit.local or not isinstance(kept, FromInducing):
        return kept.has_sites
    return not kept.coupled and kept.mean.ndim == 2 and getattr(kept.reduction, "ndim", 0) == 3


def _corrected(fit: Record, data: _Data):
    """PSIS-LOO of draws of q(f) with weights p(y, f) / (p(y_n | f_n) q(f))."""
    given, known = (fit.args, fit.kwargs), fit.draws.at(0).known
    f, log_lik, log_ratio = corrected_draws(fit.model, fit.draws, data.num, *given)
    hyper = jax.tree.map(lambda v: jnp.broadcast_to(v, (DRAWS, *jnp.shape(v))), known)
    densities, removed = draw_log_densities(fit.model, hyper, f, *given)
    return _weighed(fit, data, densities, removed, f, log_lik + log_ratio)


def _draws_of_blocks(fit: Record) -> tuple[dict, dict]:
    """As `posterior_draws`, of mean field's q: up to ten times `DRAWS`, as weights want many."""
    num = int(np.clip(MAX_DATA * MAX_ROWS // 10 // num_data(fit), DRAWS, 10 * DRAWS))
    keys = random.split(random.key(0), len(fit.blocks))
    z = {k: x for q, key in zip(fit.blocks, keys, strict=True) for k, x in q.draw(key, num).items()}
    return {k: z[k] for k in z if k not in fit.latent}, {k: z[k] for k in fit.latent}


def _weighed(fit: Record, data: _Data, densities, removed, draws, log_w):
    """Of draws of q that log weights (S,) make the posterior's."""
    import arviz_stats

    tree, log_p = _tree(fit, data, removed, draws), np.asarray(log_w)
    estimator, log_q = arviz_stats.loo_approximate_posterior, np.zeros(len(log_w))
    found: Any = _quiet(estimator, tree, log_p=log_p, log_q=log_q)
    khat, own, better = float(np.median(found.pareto_k)), _of_rows(data, draws), found
    if data.scaled:
        better = _psis(fit, data, densities, removed - log_w[:, None], draws)
    if khat <= GOOD_KHAT:
        lpd = logsumexp(densities + log_w[:, None], 0) - logsumexp(log_w)
        return _told(fit, data, better, lpd, draws, weighed=True)
    plain = _psis(fit, data, densities, removed, draws)
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
        f"over all {data.num} data) {told}"
    )
    return dataclasses.replace(better if usable else plain, warning=True)


def _of_rows(data: _Data, draws) -> str:
    """What is to be said of draws that have latents of single rows."""
    if not (own := [k for k in data.local if k in draws]):
        return ""
    told = f"follow each row by its own {own}, which weights seldom take back: `elpd` may be nats "
    return told + "off (4.3 and 7.5 too high over 25 rows where tried)"


def _told(fit: Record, data: _Data, found: Any, lpd, draws, weighed=False):
    """`found`, after a warning of rows whose weights fail, of a q that is not the posterior, and of
    latents of rows among `draws`. `lpd` (N,): log p(y_n | data).
    """
    own = _of_rows(data, draws)
    bad, is_q = np.asarray(found.pareto_k) > found.good_k, not fit.by_chains
    gain, causes = fit.stats.get("importance_gain"), []
    exact = not bad.any() and gain is not None and abs(gain) < _EXACT
    if is_q and not weighed and not exact and (bad.any() or not fit.latent):
        by = "" if gain is None else f", whose log evidence is {gain:.2g} nats below log p(y),"
        causes += [f"draws of {type(fit.method).__name__}'s q{by} are taken for the posterior's"]
    if bad.any():
        lowered = (np.asarray(lpd)[data.keep] - np.asarray(found.elpd_i))[bad]
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


def _psis(fit: Record, data: _Data, densities, removed, posterior, lpd=None) -> Any:
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
    tree, weights = _tree(fit, data, removed, posterior), {}
    if data.scaled:
        log_weights, k = tree.log_likelihood[_LABEL].azstats.psislw(dim=["chain", "draw"])
        weights = {"log_weights": log_weights, "pareto_k": k}
        tree = _tree(fit, data, densities, posterior)
    elpd: Any = _quiet(arviz_stats.loo, tree, **weights)
    if lpd is None:
        return elpd
    p = np.sum(np.asarray(lpd)[data.keep] - elpd.elpd_i.values)
    return dataclasses.replace(elpd, p=float(p))


def _quiet(estimator, tree, **options):
    """ArviZ's estimate without its warning, which blames the model for any q: `_told` has ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter")
        return estimator(tree, pointwise=True, **options)


def _tree(fit: Record, data: _Data, densities, posterior):
    import arviz_base

    scored, chains = {_LABEL: distinct(densities)[:, data.keep]}, fit.num_chains
    groups = {"posterior": dotted(posterior), "log_likelihood": scored}
    groups = {k: by_chain(values, chains) for k, values in groups.items()}
    coords = {data.dim: data.labels}
    return arviz_base.from_dict(groups, dims={_LABEL: [data.dim]}, coords=coords)


def _khat(fit: Record, site: str, num: int) -> np.ndarray:
    """Pareto k-hat of each datum, (N,), from draws of q(f): of the weights that turn q into the
    posterior without the datum, prod_m p(y_m | f_m) / site_m(f_m) / p(y_n | f_n).
    """
    given = fit.args, fit.kwargs
    hyper, f = posterior_draws(fit, random.key(0), DRAWS)
    if isinstance(kept := fit.draws.at(0).kept[site], BehindSites):
        pseudo, flat = kept.sites, jnp.reshape(f[site], (DRAWS, -1))
        squares = jnp.sum(flat.T * times(pseudo.nat2, flat.T), 0)
        log_sites = flat @ jnp.ravel(pseudo.nat1) - 0.5 * squares
    else:  # log q(u) - log p(u)
        f, _, log_ratio = corrected_draws(fit.model, fit.draws, num, *given)
        log_sites = -log_ratio
    _, log_p = draw_log_densities(fit.model, hyper, f, *given)
    log_w = jnp.sum(log_p, 1) - log_sites
    return khats(np.asarray(log_p - log_w[:, None]).T)


def _elpd(data: _Data, left_out, lpd, khat=None):
    """The result for one setting of the hyperparameters, from (N,) log densities."""
    import xarray as xr
    from arviz_stats import utils as arviz_utils

    keep, named = data.keep, {"dims": [data.dim], "coords": {data.dim: data.labels}}
    elpd_i = left_out[keep]
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


def can_be_corrected(fit: Record, num_data: int) -> bool:
    """Whether p(f, y) / q(f) is known: one setting, one layer, q(u) of inducing variables alone."""
    functions = max([1, *(kept.coupled for kept in fit.latent.values())])
    if fit.sampled or num_data * functions > MAX_ROWS or has_layers(fit):
        return False
    return all(isinstance(kept, FromInducing) for kept in fit.latent.values())


@full_jit
def corrected_draws(
    model, draws: Draws, num_data: int, args, kwargs
) -> tuple[dict, Float[Array, "S"], Float[Array, "S"]]:
    """({GP site: (S, *C, N)}, log p(y | f), log p(u) - log q(u), (S,) each). O(N^3 + S N^2)."""
    draw = draws.at(0)
    f, log_ratio = {}, jnp.zeros(DRAWS)
    for i, (site, kept) in enumerate(draw.kept.items()):
        prior = prior_at(model, site, draw.known, args, kwargs)
        process, key = cast(SparseProcess, kept.process(prior)), random.fold_in(random.key(0), i)
        f[site], ratio = draws_with_inducing(process, prior, key, DRAWS)
        log_ratio = log_ratio + ratio
    log_lik = JointLogLikelihood(model, num_data, draw.known, args, kwargs)
    return f, lax.map(lambda f: jnp.sum(log_lik(f)), f), log_ratio
