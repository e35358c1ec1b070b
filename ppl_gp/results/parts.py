"""Answers by part: the posterior of each site behind an integrated predictor, and of what it adds
at new rows.

With eta = offset + sum_k (A_k c_k + t_k) (`reading.predictor.parts`), alpha = K^-1 (E[eta] - m)
and R = (K + T^-1)^-1 of the pseudo-likelihood, anything that is jointly Gaussian with eta has
posterior mean c + Cov[., eta] alpha, and variance v - Cov[., eta] R Cov[eta, .] (Rasmussen &
Williams 2006, 3.21, 3.24). With inducing variables u of the parts, q(v) = N(m, I - P) of v = R^-1
u: mean c + a^T m and variance v - a^T P a, a = R^-1 Cov[u, .].
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_gp.draws import Draws, mixed_normals
from ppl_gp.errors import ModelError
from ppl_gp.kept import FromFunctions, FromInducing, FromPseudo
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.posterior import Unknowns
from ppl_gp.quick import quick_jit
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.parts import Loadings
from ppl_gp.reading.predictor.prior import side_by_side, widest
from ppl_gp.results.query.by_names import by_names
from ppl_gp.results.query.mixture import Moments, over_draws
from ppl_gp.results.query.query import Query, query_at
from ppl_gp.results.record import Record, prior_at
from ppl_gp.sparse.parts import PartsVariables
from ppl_gp.sparse.projection import explained

TOTAL, OFFSET = "total", "offset"


def components(record: Record, X_new, *args, **kwargs) -> dict[str, dist.Distribution]:
    """{site: what it adds to the linear predictor at new rows, `Normal` (M,), or (R, M) where a
    datum sees R functions, in the order of `fit.functions`}, and `"total"`, their sum with what is
    known (`"offset"`, a `Delta`, where it is not zero).

    A site whose mean is another site (group effects about a level) counts as what it adds to that.
    Effects that stand one a datum are new at new rows: their prior. Where the hyperparameters were
    integrated, by `Sample` or `Grid`, each is the `MixtureSameFamily` over the S weighted draws,
    O(S M) memory. Arguments, errors and cost as `predict`, and O(M N^2) a part and a draw.

    Raises `ModelError` for a fit whose functions were drawn, or have inducing variables each, and
    for sites that are called as its own two entries.
    """
    query = query_at(record, *by_names(record, X_new, args, kwargs))
    (kept,) = [*query.draws.kept.values()] if len(query.draws.kept) == 1 else [None]
    of_parts = isinstance(kept, FromInducing) and isinstance(kept.inducing, PartsVariables)
    if not (isinstance(kept, FromPseudo | FromFunctions) or of_parts):
        raise ModelError(
            "components() is of fits that integrate a predictor's sites together: by Laplace, EP, "
            "VI, LocalBound, and by SVGP where effects stand beside a GP. "
            f"{type(record.method).__name__} keeps the sites of this model themselves, in "
            "fit.hyper and fit.latent."
        )
    found, offset = _components(query, _predictor_of_one(record))
    known = {OFFSET: _known(record, offset)} if bool(jnp.any(offset != 0)) else {}
    return {**known, **{k: _distribution(record, m) for k, m in found.items()}}


def _distribution(record: Record, draws: Moments) -> dist.Distribution:
    """Of moments of each draw, with a leading axis S."""
    if record.sampled:
        return mixed_normals(record.draws.log_weights, draws.mean, draws.variance)
    # a term that is not in every function has a variance of zero in the others
    return dist.Normal(draws.mean[0], jnp.sqrt(draws.variance[0]), validate_args=False)


def _known(record: Record, offset: Array) -> dist.Distribution:
    """What is known given the hyperparameters, (S, ...), which it may depend on."""
    if bool(jnp.all(offset == offset[0])):
        return dist.Delta(offset[0])
    weights = dist.CategoricalLogits(record.draws.log_weights)
    return dist.MixtureSameFamily(weights, dist.Delta(jnp.moveaxis(offset, 0, -1)))


def _predictor_of_one(record: Record) -> Collapsed | None:
    """Of a model that is read as it stands: the predictor that its one GP enters, where the data
    see one.
    """
    if isinstance(record.model, Collapsed):
        return None
    known = record.draws.at(0).known
    found = collapse(record.model, record.args, record.kwargs, given=known, plain=True)
    one = isinstance(found, Collapsed) and found.plan.functions == 1
    return cast(Collapsed, found) if one else None


@quick_jit
def _components(query: Query, seen: Collapsed | None):
    """({part: Moments}, the offset), each with a leading axis of the draws; `seen`: the predictor
    of a model of one GP.
    """
    (site,) = query.draws.kept

    def one(draw: Draws):
        kept: Any = draw.kept[site]
        prior = prior_at(query.model, site, draw.known, query.args, query.kwargs)
        new = prior_at(query.model, site, draw.known, query.new_args, query.new_kwargs)
        root = kept.root(prior) if query.root is None else query.root
        total = Moments(*kept.process(prior, root).marginals(new))
        if seen is not None:
            new = prior_at(seen, seen.plan.name, draw.known, query.new_args, query.new_kwargs)
            there = new.kernel.at(new.X)
            return _of_one(site, total, there.parts[site].weights[0, 0], there.offset[0])
        if not isinstance(query.model, Collapsed):
            return _and_total({site: total}, total), jnp.zeros_like(total.mean)
        there = new.kernel.at(new.X)
        parts = _part_moments(prior.kernel.at(prior.X), there, root, kept)
        return _and_total(parts, total), jnp.reshape(there.offset, total.mean.shape)

    return over_draws(one, query.draws)


def _and_total(parts: dict[str, Moments], total: Moments) -> dict[str, Moments]:
    if taken := sorted(parts.keys() & {TOTAL, OFFSET}):
        raise ModelError(
            f"components() has the predictor's own 'total' and 'offset', and the model has site(s) "
            f"{taken}, which would be hidden by them: give these another name."
        )
    return {**parts, TOTAL: total}


def _of_one(site: str, f: Moments, weight, offset):
    """({part: Moments}, the offset) of weight_n f_n + offset_n."""
    part = Moments(weight * f.mean, weight**2 * f.variance)
    return _and_total({site: part}, Moments(part.mean + offset, part.variance)), offset


def _part_moments(train: Loadings, there: Loadings, root, kept: Any) -> dict[str, Moments]:
    found, start = {}, 0
    for k in sorted(there.parts):
        part: Any = there.parts[k]
        if isinstance(root, Unknowns):
            mean, variance = root.moments_of(part, start)
            start += part.num_unknowns
        else:
            prior = part.diag() + diagonal_of(part.jitter())
            sparse = isinstance(kept, FromInducing)
            variables: Any = kept.inducing_variables
            C = variables.cross_of_part(k, part) if sparse else train.parts[k].cross(part)
            mean, known = _explained(kept, root, C)
            variance = prior - known
        functions = part.mean.shape if len(part.mean) > 1 else part.mean.shape[1:]
        whole = Moments(jnp.ravel(part.mean) + mean, jnp.maximum(variance, 0.0))
        found[k] = jax.tree.map(lambda x, shape=functions: jnp.reshape(x, shape), whole)
    return found


def _explained(kept, root, C) -> tuple[Array, Array]:
    """(E[x] less its prior mean, what the data explain of its variance), C the covariances of x
    with what is kept: u, or the predictor at the data.
    """
    if isinstance(kept, FromInducing):
        return explained(root, C, kept.mean, kept.reduction)
    return C.T @ kept.alpha, root.explained(C)


def effects(record: Record) -> dict[str, dist.Distribution]:
    """{integrated site that is no GP: its posterior marginals, `Normal` in the site's shape}, but
    for noise that stands one a datum, which `components` has at the rows it is asked for.

    Where the hyperparameters were integrated, by `Sample` or `Grid`: the `MixtureSameFamily` of
    these normals over the S weighted draws. O(N^3) a draw.
    """
    if not isinstance(record.model, Collapsed):
        return {}
    found = _effects(record.model, record.draws, record.args, record.kwargs)
    return {k: _distribution(record, m) for k, m in found.items()}


@quick_jit
def _effects(model: Collapsed, draws: Draws, args, kwargs):
    name = model.plan.name

    def one(draw: Draws):
        kept: Any = draw.kept[name]
        prior = prior_at(model, name, draw.known, args, kwargs)
        train, root = prior.kernel.at(prior.X), kept.root(prior)
        found = {}
        for k, (mean, loads) in model.effects(prior.kernel, prior.X).items():
            if isinstance(root, Unknowns):
                centred, variance = root.moments(side_by_side(loads, widest(train.parts)))
            else:
                variables: Any = kept.inducing_variables
                C: Any = (
                    variables.cross_of_effects(loads)
                    if isinstance(kept, FromInducing)
                    # Cov[eta, site]; tables have columns
                    else sum(train.parts[j].cross(D) for j, D in loads.items())
                )
                centred, known = _explained(kept, root, C)
                variance = sum(D.diag() for D in loads.values()) - known
            moments = Moments(centred, jnp.maximum(variance, 0.0))
            shaped = jax.tree.map(lambda x, m=mean: jnp.reshape(x, m.shape), moments)
            found[k] = Moments(mean + shaped.mean, shaped.variance)
        return found

    return over_draws(one, draws)
