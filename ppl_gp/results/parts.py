"""The posterior of each site behind an integrated predictor, and of what it adds at new rows.

With eta = offset + sum_k (A_k c_k + t_k) (`reading.predictor.parts`), alpha = K^-1 (E[eta] - m)
and R = (K + T^-1)^-1 of the pseudo-likelihood, anything that is jointly Gaussian with eta has
posterior mean c + Cov[., eta] alpha, and variance v - Cov[., eta] R Cov[eta, .] (Rasmussen &
Williams 2006, 3.21, 3.24). With inducing variables u of the parts, q(v) = N(m, I - P) of v = R^-1
u: mean c + a^T m and variance v - a^T P a, a = R^-1 Cov[u, .].
"""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from jaxtyping import Array

from ppl_gp.draws import Draws, Moments, mixed_normals
from ppl_gp.errors import ModelError
from ppl_gp.kept import FromFunctions, FromInducing, FromPseudo
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.posterior import Unknowns
from ppl_gp.quick import quick_jit
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.parts import Loadings, Weighted
from ppl_gp.reading.predictor.prior import PredictorGP, side_by_side, widest
from ppl_gp.results.query.layout import by_names
from ppl_gp.results.query.query import Query, query_at
from ppl_gp.results.record import Record, prior_at
from ppl_gp.sparse.parts import PartsVariables
from ppl_gp.sparse.process import explained

TOTAL, OFFSET = "total", "offset"
_ROWS = 1000  # of the training inputs, from which coefficients are read
_VARIES = "(..)"  # a factor that depends on the row or on hyperparameters


def components(record: Record, X_new, *args, **kwargs) -> dict[str, dist.Distribution]:
    """Predict what each term of the linear predictor adds at new rows.

    Parameters
    ----------
    X_new, *args, **kwargs
        As for `predict`.

    Returns
    -------
    dict
        {site: distribution} of each term, a `Normal` (M,), or (R, M) for R functions per row in the
        order of `fit.functions`. `"total"` is their sum with known terms, and `"offset"` is the
        known terms, a `Delta`, if they are not zero.

    Raises
    ------
    DataError
        As `predict`.
    ModelError
        If the method drew the functions, or gave each its own inducing variables. Also if a site is
        called "total" or "offset".

    Notes
    -----
    A site whose mean is another site, such as group effects about a level, counts as what it adds
    to that. Per-datum effects have their prior at new rows. For `Sample` and `Grid`, each term is a
    `MixtureSameFamily` over the S weighted draws, in O(S M) memory. Cost: as `predict`, and O(M
    N^2) per term and draw.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(level + f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=2.0 + np.sin(6.0 * x))
    >>> sorted(fit.components(x[:3]))
    ['f', 'level', 'total']
    """
    query = query_at(record, *by_names(record, X_new, args, kwargs))
    (kept,) = [*query.draws.kept.values()] if len(query.draws.kept) == 1 else [None]
    of_parts = isinstance(kept, FromInducing) and isinstance(kept.inducing, PartsVariables)
    if not (isinstance(kept, FromPseudo | FromFunctions) or of_parts):
        raise ModelError(
            "components() is for fits that integrate a predictor: by Laplace, EP, VI, LocalBound, "
            f"or SVGP with effects. {type(record.method).__name__} keeps the sites of this model "
            "themselves, in fit.hyper and fit.latent."
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
    """Of a model that is read as it stands, the predictor of its one GP, where the data see one."""
    if isinstance(record.model, Collapsed):
        return None
    known = record.draws.at(0).known
    found = collapse(record.model, record.args, record.kwargs, given=known, plain=True)
    one = isinstance(found, Collapsed) and found.plan.functions == 1
    return cast(Collapsed, found) if one else None


@quick_jit
def _components(query: Query, seen: Collapsed | None):
    """({part: Moments}, the offset) of each draw; `seen`: the predictor of a model of one GP."""
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

    return lax.map(one, query.draws)


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
    found, start, u = {}, 0, getattr(kept, "inducing", None)
    for k in sorted(there.parts):
        part: Any = there.parts[k]
        if isinstance(root, Unknowns):
            mean, variance = root.moments_of(part, start)
            start += part.num_unknowns
        else:
            sparse = isinstance(u, PartsVariables)
            C = u.cross_of({k: part}) if sparse else train.parts[k].cross(part)
            mean, variance = _given_data(kept, root, C, part.diag() + diagonal_of(part.jitter()))
        functions = part.mean.shape if len(part.mean) > 1 else part.mean.shape[1:]
        mean, variance = jnp.ravel(part.mean) + mean, jnp.maximum(variance, 0.0)
        found[k] = Moments(jnp.reshape(mean, functions), jnp.reshape(variance, functions))
    return found


def _given_data(kept, root, C, prior) -> tuple[Array, Array]:
    """(E[x] less its prior mean, its variance), `prior` its prior variance and C the covariances of
    x with what is kept: u, or the predictor at the data.
    """
    if isinstance(kept, FromInducing):
        mean, known = explained(root, C, kept.mean, kept.reduction)
        return mean, prior - known
    return C.T @ kept.alpha, prior - root.explained(C)


def effects(record: Record) -> dict[str, dist.Distribution]:
    """Posterior marginals of the integrated sites that are not GPs, {site: `Normal`}.

    `fit.sites` returns them, in the shape of each site. Per-datum noise is left out: `components`
    has it at the rows you ask for. For `Sample` and `Grid`, each is a `MixtureSameFamily` over the
    S weighted draws. O(N^3) per draw.
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
        prior: PredictorGP = prior_at(model, name, draw.known, args, kwargs)
        train, root = prior.kernel.at(prior.X), kept.root(prior)
        found, u = {}, getattr(kept, "inducing", None)
        for k, (mean, loads) in prior.behind.effects().items():
            if isinstance(root, Unknowns):
                centred, variance = root.moments(side_by_side(loads, widest(train.parts)))
            else:
                dense = (train.parts[j].cross(D) for j, D in loads.items())  # tables have columns
                C = u.cross_of_effects(loads) if isinstance(u, PartsVariables) else sum(dense)
                prior_variance = sum(D.diag() for D in loads.values())
                centred, variance = _given_data(kept, root, C, prior_variance)
            variance = jnp.reshape(jnp.maximum(variance, 0.0), mean.shape)
            found[k] = Moments(mean + jnp.reshape(centred, mean.shape), variance)
        return found

    return lax.map(one, draws)


def function_rows(record: Record) -> tuple[str, ...] | None:
    """What each row r of the predictor eta (R, N) adds up, as ("f", "g - f") or ("f[1] + offset",
    ...): `None` where the model's sites are not integrated in one predictor, or it is one function.

    Functions that add up the same sites, as for several units, have their place too, "f + u (2)".
    A GP has its factor, `f`, `-f`, or `(..) f` of others; of a GP in a plate `f[0]`, `f[1]`, ...;
    effects are named alone, and "offset" is what is added without a site. Read from at most 1000
    training rows, evenly spread, at the first draw; O(1000 R^2 U) for U unknowns.
    """
    model: Any = record.model
    if not isinstance(model, Collapsed) or model.plan.functions == 1:
        return None
    there = _loadings(model, record.draws.at(0), record.args, record.kwargs)
    terms = [_functions_of(k, part) for k, part in there.parts.items()]
    offset = np.any(np.abs(there.offset) > 1e-12, 1)
    told = [_told(r, terms, bool(offset[r])) for r in range(model.plan.functions)]
    return tuple(f"{k} ({r})" if told.count(k) > 1 else k for r, k in enumerate(told))


@quick_jit
def _loadings(model: Collapsed, draw, args, kwargs) -> Loadings:
    prior: Any = prior_at(model, model.plan.name, draw.known, args, kwargs)
    num = prior.X.shape[0]
    rows = np.unique(np.linspace(0, num - 1, min(num, _ROWS)).astype(int))
    return prior.kernel.at(prior.X[rows])


def _functions_of(site: str, part) -> tuple[list[str], np.ndarray]:
    """(names, factors (R, P, n)) of a GP's units; of another site itself, 1 where it is."""
    if isinstance(part, Weighted):
        units = part.weights.shape[1]
        names = [site] if units == 1 else [f"{site}[{p}]" for p in range(units)]
        return names, np.asarray(part.weights)
    return [site], np.asarray(jnp.reshape(part.diag(), part.mean.shape)[:, None] > 0, float)


def _told(r: int, terms: list, offset: bool) -> str:
    signed = []
    for names, weights in terms:
        for name, w in zip(names, weights[r], strict=True):
            if not np.any(np.abs(w) > 1e-12):
                continue
            plain = [k for k, one in (("+", 1.0), ("-", -1.0)) if np.all(np.abs(w - one) <= 1e-9)]
            signed.append((plain[0], name) if plain else ("+", f"{_VARIES} {name}"))
    signed.sort(key=lambda x: x[0] == "-")  # "g - f"
    signed += [("+", "offset")] * offset
    if not signed:
        return "0"
    (sign, first), *others = signed
    return "".join(["-" * (sign == "-"), first, *(f" {k} {name}" for k, name in others)])
