"""Joint draws of the sites behind an integrated predictor, and of the predictor itself.

Three routes, by what is kept: the unknowns w themselves, where there are few; inducing variables
and what they leave unexplained, and effects of each datum given the rest and its observation; else
a draw of eta from q(eta), and the sites given it by Matheron's rule, e = e_0 + Cov[e, eta] K^-1
(eta - eta_0) with (e_0, eta_0) from the prior (Wilson et al. 2021, eq. 8).
"""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.linalg import cho_solve
from numpyro import handlers

from ppl_gp.draws import Draws
from ppl_gp.gp import GP, unwrap
from ppl_gp.kept import MAX_JOINT, FromInducing
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky
from ppl_gp.numerics.low_rank import Independent
from ppl_gp.posterior import Unknowns
from ppl_gp.quick import full_jit
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.predictor import root_of
from ppl_gp.reading.predictor.prior import Behind, covariance_of
from ppl_gp.reading.tracing import run, set_gps
from ppl_gp.results.record import Record, prior_at
from ppl_gp.sparse.expectation import averaged, split_effects
from ppl_gp.sparse.process import SparseProcess, draw_given_inducing, factor_of_v


@full_jit
def draw_parts(model: Collapsed, draws: Draws, args, kwargs, key, repeats: int):
    """({site: (S repeats, ...)}, the predictor (S repeats, N) or (S repeats, R, N)). O(S (N^3 +
    repeats N^2)), of U < N unknowns O(S (N U^2 + repeats N U)).
    """
    name = model.plan.name

    def one(entry):
        draw, (key, own) = entry[0], random.split(entry[1])
        prior: Any = prior_at(model, name, draw.known, args, kwargs)
        kept, here = draw.kept[name], prior.behind
        e = _innovations(kept, prior, here, key, repeats)
        if any(k not in e for k in here.fns):
            joint = JointLogLikelihood(model, len(prior.X), draw.known, args, kwargs)
            e |= _given_functions(averaged(joint, split_effects({name: prior})[1]), here, e, own)
        eta = jax.vmap(lambda e: jnp.reshape(here.eta(e), prior.mean.shape))(e)
        return jax.vmap(here.values)(e), eta

    found = lax.map(one, (draws, random.split(key, draws.num)))
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), found)


def _innovations(kept, prior, here: Behind, key, num: int) -> dict:
    if isinstance(kept, FromInducing):
        return _given_inducing(kept, prior, here, key, num)
    root = kept.root(prior)
    if isinstance(root, Unknowns):
        return _of_unknowns(root.mean + kept.unknowns(root, prior, key, num), here)
    return _given_predictor(kept, prior, here, key, num)


def _of_unknowns(w, here: Behind) -> dict:
    """(num, U) unknowns, the sites in alphabetical order."""
    found, start = {}, 0
    for k in sorted(here.fns):
        shape = here.fns[k].shape()
        white = jnp.reshape(w[:, start : start + math.prod(shape)], (-1, *shape))
        found[k] = jax.vmap(root_of(here.fns[k]))(white)
        start += math.prod(shape)
    return found


def _given_predictor(kept, prior, here: Behind, key, num: int) -> dict:
    solve, centre = _solver(prior), here.eta({})

    def given(e, eta):
        alpha = jnp.reshape(solve(jnp.ravel(eta - here.eta(e))), centre.shape)
        return _moved(here, e, alpha)

    key_eta, key_e = random.split(key)
    eta = jnp.reshape(kept.sample(prior, key_eta, num), (num, *centre.shape))
    keys = random.split(key_e, len(here.fns))
    e = {
        k: jax.vmap(root_of(fn))(random.normal(own, (num, *fn.shape())))
        for own, (k, fn) in zip(keys, here.fns.items(), strict=True)
    }
    return jax.vmap(given)(e, eta)


def _moved(here: Behind, e: dict, alpha) -> dict:
    """e + Cov[e, eta] alpha, of these sites."""
    (slopes,) = jax.vjp(here.eta, here.zero)[1](alpha)
    found = {}
    for k, x in e.items():
        root = root_of(here.fns[k])
        (white,) = jax.linear_transpose(root, x)(slopes[k])
        found[k] = x + root(white)
    return found


def _solver(prior):
    """r -> K^-1 r, (R N,): of functions that are independent a priori each by its own factor."""
    K = covariance_of(prior)
    if not isinstance(K, Independent):
        L = prior.scale_tril
        return lambda r: cho_solve((L, True), r)
    unit = default_jitter(prior.variance)
    factors = lax.map(lambda part: robust_cholesky(part, unit)[0], K.parts)
    solve = jax.vmap(lambda L, r: cho_solve((L, True), r))
    return lambda r: jnp.ravel(solve(factors, jnp.reshape(r, factors.shape[:2])))


def _given_inducing(kept: FromInducing, prior, here: Behind, key, num: int) -> dict:
    variables: Any = kept.inducing
    process = kept.process(prior)
    key_v, key_f = random.split(key)
    white = random.normal(key_v, (num, *kept.mean.shape), kept.mean.dtype)
    v = kept.mean + factor_of_v(process).colour(white)
    found = {}
    for i, (k, fn) in enumerate(here.fns.items()):
        if k not in variables.names:
            continue  # one per datum: `_given_functions`
        block = v[:, variables.start(k) : variables.start(k) + variables.size(k)]
        if k in variables.tables:
            found[k] = jax.vmap(root_of(fn))(jnp.reshape(block, (num, *fn.shape())))
        else:
            block = jnp.reshape(block, (num, variables.units[k], -1))
            own = random.fold_in(key_f, i)
            f = _of_inducing(variables.gps[k], unwrap(fn), block, own)
            found[k] = jnp.reshape(f, (num, *fn.shape()))
    return found


def _given_functions(likelihood: Any, here: Behind, e: dict, key) -> dict:
    """Effects per datum that `e` lacks: their sum from p(. | f_n, y_n), each by Matheron's rule."""
    own, S = {k: here.fns[k] for k in here.fns if k not in e}, likelihood.variance

    def one(entry):
        e, key = entry
        key_sum, *keys = random.split(key, 1 + len(own))
        total = likelihood.draw(here.eta(e)[0], key_sum)
        before = {
            k: root_of(fn)(random.normal(k_own, fn.shape()))
            for k_own, (k, fn) in zip(keys, own.items(), strict=True)
        }
        alpha = (total - (here.eta(before) - here.eta({}))[0]) / jnp.where(S > 0, S, 1.0)
        return _moved(here, before, alpha[None])

    num = len(next(iter(e.values())))
    return lax.map(one, (e, random.split(key, num)))


def own_effects(record: Record) -> list[str]:
    """Per-datum sites that are integrated in the likelihood (`sparse.expectation`)."""
    kept: Any = next(iter(record.latent.values()), None)
    if not isinstance(record.model, Collapsed) or not isinstance(kept, FromInducing):
        return []
    return sorted({*record.model.plan.sites} - {*cast(Any, kept.inducing).names})


def _of_inducing(variables, prior: GP, v, key):
    """f - m at the training inputs given whitened v (num, units, M): jointly up to `MAX_JOINT` rows
    and row by row above, as `FromInducing.sample`.
    """
    A = variables.root(prior).whiten(variables.cross(prior, prior.X))
    white = random.normal(key, (*v.shape[:-1], A.shape[1]), v.dtype)
    if len(prior.X) > MAX_JOINT or not variables.is_exact:
        return v @ A + jnp.sqrt(jnp.maximum(prior.variance - jnp.sum(A**2, 0), 0.0)) * white
    unit = default_jitter(prior.variance)
    R, _ = robust_cholesky(prior.covariance_matrix - A.T @ A, unit)
    return v @ A + white @ R.T


@full_jit
def draw_layers(
    model, draws: Draws, local: dict, args, kwargs, key, repeats: int
) -> tuple[dict, dict]:
    """({latent site: (S repeats, ...)}, {GP site: (S repeats, *F, N)}).

    u is drawn jointly, f given u row by row: every marginal is exact, and so is what a pointwise
    likelihood sees. O(N M) a draw.
    """

    def one(entry):
        draw, keys = entry
        return lax.map(lambda key: _draw(model, draw, local, args, kwargs, key), keys)

    keys = jnp.reshape(random.split(key, draws.num * repeats), (draws.num, repeats))
    found = lax.map(one, (draws, keys))
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), found)


def _draw(model, draw: Draws, local, args, kwargs, key):
    sites = run(model, args, kwargs, draw.known)
    q = {k: guide.at(sites[k], None, args, kwargs) for k, guide in local.items()}
    h = {k: q[k].sample(random.fold_in(key, i)) for i, k in enumerate(q)}
    names = list(draw.kept)

    def value(name, prior):
        process = cast(SparseProcess, draw.kept[name].process(prior))
        own = random.fold_in(key, len(h) + names.index(name))
        return draw_given_inducing(process, prior, own, 1)[0]

    with handlers.block():
        seeded = handlers.substitute(handlers.seed(model, random.key(0)), data={**draw.known, **h})
        trace = handlers.trace(set_gps(seeded, value)).get_trace(*args, **kwargs)
    return h, {k: trace[k]["value"] for k in names}
