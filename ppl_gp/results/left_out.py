"""Log densities of the training data: at draws of f, and without each datum, by cavity or refit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.draws import Draws, JointMoments, Moments
from ppl_gp.errors import Result
from ppl_gp.gp import GP
from ppl_gp.kept import BehindSites, FromFunctions, FromInducing, FromPseudo
from ppl_gp.local.natural import MinusRankOne, condition, prediction_root
from ppl_gp.numerics import blocks as small
from ppl_gp.numerics.blocks import as_blocks
from ppl_gp.quick import full_jit, zeros_of
from ppl_gp.reading.factors import is_concave, read
from ppl_gp.reading.predictor.prior import covariance_of
from ppl_gp.reading.roles import is_observed, scored
from ppl_gp.reading.tracing import run
from ppl_gp.results.integrals.cubature import NODES, SEVERAL_NODES, Effort, log_expectation
from ppl_gp.results.integrals.several import log_density_per_datum, log_expectation_over
from ppl_gp.results.record import prior_at
from ppl_gp.sparse.expectation import Expectation, expected_log_lik

DRAWS = 1000  # of q(f), for the weights of an SVGP


@full_jit
def cavity_log_densities(
    model, site: str, draws: Draws, args, kwargs, scaled: bool, num: int, method=None, rows=()
):
    """(log p(y_n | y_-n), log p(y_n | y), log E[p(y_n | f_n)^w_n | y_-n]) at each draw of the
    hyperparameters, (S, N) each; w_n of `scale` handlers, all 1 unless `scaled`; and how far a
    sparse q is from its fixed point, (S,).

    q_{-n} of `rows` is `method`'s fit to the other rows, which starts from q's sites, where that
    converges; else, and of all other rows, it is the cavity.
    """
    several = draws.num > 1
    effort = Effort(SEVERAL_NODES[several], several, DRAWS)

    def one(draw):
        latent: Any = draw.kept[site]
        hyper, off, sparse = draw.known, jnp.zeros(()), isinstance(latent, FromInducing)
        factors: Any = None if sparse else read(model, *args, hyper=hyper, **kwargs)
        trace_at = lambda f: run(model, args, kwargs, hyper, {site: f})  # noqa: E731
        log_lik = lambda f, weighed: log_density_per_datum(trace_at(f), weighed)  # noqa: E731

        def score(moments: Moments | JointMoments, weighed=False):
            if isinstance(moments, JointMoments):  # by cubature, or weighted draws above 3
                log_p = lambda f: log_lik(f[site], weighed)  # noqa: E731
                together, key = (tuple(range(len(moments.mean))),), random.key(4)
                return log_expectation_over(log_p, {site: moments}, together, effort, key)[0]
            proper = jnp.isfinite(moments.variance)  # else one row's NaN is every row's
            at = Moments(*(jnp.where(proper, x, 1.0) for x in (moments.mean, moments.variance)))
            log_p, concave = lambda f: log_lik(f, weighed), is_concave(trace_at, None, num)
            found = log_expectation(log_p, at, NODES[several], concave)
            return jnp.where(proper, found, jnp.nan)

        if sparse:
            prior = prior_at(model, site, hyper, args, kwargs)
            within, without, off = cavity_of_inducing(prior, latent, lambda f: log_lik(f, True))
        elif isinstance(latent, FromFunctions):
            without, within = cavity_of_functions(factors.prior, latent)
        else:
            within, without = Moments(latent.mean, latent.variance), cavity(factors.prior, latent)
        if len(rows):
            without = _replaced(without, rows, *_refits(factors, latent, method, rows))
        left_out, kept = score(without), score(within)
        return left_out, kept, score(without, True) if scaled else left_out, off

    return lax.map(one, draws)


def _replaced(without, rows, mean, covariance, ended):
    """Moments with those of `rows` under a fit without them, where it `ended` well."""

    def put(old, new):
        well = jnp.reshape(ended, (-1,) + (1,) * (old.ndim - 1))
        return old.at[rows].set(jnp.where(well, new, old[rows]))

    if isinstance(without, Moments):
        return Moments(put(without.mean, mean[:, 0]), put(without.variance, covariance[:, 0, 0]))
    blocks = put(without.root @ jnp.swapaxes(without.root, 1, 2), covariance)
    return JointMoments.of(put(without.mean.T, mean).T, jnp.einsum("naa->an", blocks), blocks)


def _refits(factors, latent: BehindSites, method, rows):
    """(mean, covariance, whether it converged) of the functions of each of `rows` under the fit to
    the other rows, (n, R), (n, R, R), (n,), at the same hyperparameters: from the sites of q, else
    from none. A fit O(N^3) a step.
    """
    prior, log_lik = factors.prior, factors.log_lik
    K, mean, every = covariance_of(prior), jnp.ravel(prior.mean), jnp.arange(log_lik.num)
    first, form = latent.sites, method.form(factors)
    if MinusRankOne not in (type(first), form):  # a rescued softmax keeps its blocks
        first = form(first.nat1, first.nat2)

    def without(n):
        others = log_lik.of_rows(every != n)
        nat1 = jnp.where(every != n, jnp.reshape(first.nat1, (-1, log_lik.num)), 0.0)
        start = first.like(jnp.ravel(nat1), jnp.where(every != n, first.nat2, 0.0))
        blank = zeros_of(method.solve, K, mean, others, start)
        failed = blank._replace(code=jnp.full_like(blank.code, Result.nonfinite.code))

        def attempt(state):  # a loop, so that the second start compiles nothing
            tries = state[0]
            from_here = jax.tree.map(lambda x: jnp.where(tries == 0, x, 0.0), start)
            return tries + 1, method.solve(K, mean, others, from_here)

        unsolved = lambda s: (s[0] < 2) & (s[1].code != Result.converged.code)  # noqa: E731
        end = lax.while_loop(unsolved, attempt, (jnp.zeros((), jnp.int32), failed))[1]
        _, q = method.centred(K, mean, others, end.sites, condition(K, mean, end.sites))
        at = jnp.reshape(q.mean, (-1, log_lik.num))[:, n]
        block = jnp.reshape(q.variance[..., n], (len(at), len(at)))
        proper = jnp.all(jnp.isfinite(at)) & jnp.all(jnp.diagonal(block) >= 0)
        return at, block, (end.code == Result.converged.code) & proper

    return lax.map(without, rows)


def distinct(log_lik) -> np.ndarray:
    """Log densities (S, N), of a row moved by 1e-8 nats if its largest weights 1 / p are equal."""
    log_lik, num = np.asarray(log_lik), len(log_lik)
    tail = min(num // 5, int(3 * num**0.5))
    low = np.sort(log_lik, 0)[[0, tail - 1 - tail // 4, tail]]
    equal = np.min(np.diff(low, axis=0), 0) < 1e-9 * (1.0 + np.abs(low[0]))
    return log_lik + np.where(equal, np.linspace(-1e-8, 1e-8, num)[:, None], 0.0)


@full_jit
def draw_log_densities(model, hyper, f, args, kwargs):
    """log p(y_n | f, hyperparameters) of all sites of a datum, and that by `scale`; (S, N) each."""

    def one(draw):
        trace = run(model, args, kwargs, *draw)
        return log_density_per_datum(trace), log_density_per_datum(trace, weighed=True)

    return lax.map(one, (hyper, f))


@full_jit
def log_prior_over(blocks: list, model, draws: dict, args, kwargs):
    """log p(z) / q(z) at draws of mean field, {site: (S, ...)}, and terms of no datum."""

    def one(z):
        trace = run(model, args, kwargs, z)
        whole = lambda s: is_observed(s) and s["data_axis"] is None  # noqa: E731
        own = [s for k, s in trace.items() if k in z or whole(s)]
        return sum(jnp.sum(scored(s)) for s in own) - sum(q.log_prob(z) for q in blocks)

    return lax.map(one, draws)


def cavity_of_functions(prior: GP, latent: FromFunctions) -> tuple[JointMoments, JointMoments]:
    """(q_{-n}, q) of the functions of every datum; NaN where the former is not proper.

    covariance = (Sigma^-1 - T)^-1 of the blocks within a datum, mean = mu - covariance alpha.
    """
    sites, shape = latent.sites, latent.mean.shape
    q = condition(covariance_of(prior), jnp.ravel(prior.mean), sites)
    Sigma, T = (jnp.moveaxis(x, -1, 0) for x in (q.variance, as_blocks(sites.nat2)))
    # Sigma = L L^T: the cavity's is L (I - L^T T L)^-1 L^T
    L = small.lower_root(Sigma)
    left = jnp.eye(shape[0]) - jnp.swapaxes(L, -1, -2) @ T @ L
    half = small.lower_inverse(small.lower_root(left)) @ jnp.swapaxes(L, -1, -2)
    covariance = jnp.swapaxes(half, -1, -2) @ half
    covariance = jnp.where(small.is_definite(left)[:, None, None], covariance, jnp.nan)
    alpha = jnp.reshape(latent.alpha, shape)
    mean = latent.mean - jnp.einsum("nab,bn->an", covariance, alpha)
    without = JointMoments.of(mean, jnp.einsum("naa->an", covariance), covariance)
    return without, JointMoments.of(latent.mean, latent.variance, Sigma)


def cavity(prior: GP, latent: FromPseudo) -> Moments:
    """q_{-n}(f_n) of every datum, (N,): its marginal without its site; NaN where it is not proper.

    variance = v / (1 - nat2 v) = v nat2 / R_nn, R = (K + T^-1)^-1: each form where it does not
    cancel. mean = mu - variance alpha, as alpha_n = nat1_n - nat2_n mu_n.
    """
    v, sites = latent.variance, latent.sites
    root: Any = prediction_root(covariance_of(prior), sites)  # of one function
    R = root.sign * jnp.sum(root.W**2, 0) + root.diagonal
    share = sites.nat2 * v
    variance: jax.Array = jnp.where(share > 0.5, v * sites.nat2 / R, v / (1.0 - share))
    variance = jnp.where((variance >= 0) & jnp.isfinite(variance), variance, jnp.nan)
    return Moments(latent.mean - variance * latent.alpha, variance)


def cavity_of_inducing(prior: GP, kept: FromInducing, log_lik) -> tuple[Moments, Moments, Any]:
    """(q(f_n), q_{-n}(f_n), (N,) each; how far q is from the maximum of its bound).

    Var f_n = s + d, d what u leaves unexplained. E = E_q[log p(y_n | f_n)] has slopes g in the mean
    and -L / 2 in the variance of f_n. At the maximum q(v) = N(A g, (I + A L A^T)^-1), A =
    Cov[v, f]: without the site of n, s becomes s / (1 - s L), and the mean falls by that times g.
    The distance is the largest step to that fixed point, of means in sd, of variances in shares.
    """
    process: Any = kept.process(prior)
    mean, variance = process.marginals(prior)
    A = process.root.whiten(process.inducing.cross(prior, prior.X))
    rest = jnp.maximum(prior.variance - jnp.sum(A**2, 0), 0.0)

    def expected(m, v):
        at = {"f": m}, {"f": v}
        return jnp.sum(expected_log_lik(lambda f: log_lik(f["f"]), *at, Expectation(), None))

    slope, bend = jax.grad(expected, (0, 1))(mean, variance)
    s = jnp.maximum(variance - rest, 0.0)
    share = 1.0 + 2.0 * s * bend
    left: jax.Array = jnp.where(share > 0, s / share, jnp.nan)
    step = jnp.linalg.solve(jnp.eye(len(A)) - 2.0 * (A * bend) @ A.T, A)
    moved = jnp.abs((A @ slope - kept.mean) @ step) / jnp.sqrt(variance)
    off = jnp.maximum(moved, jnp.abs(jnp.sum(A * step, 0) - s) / variance)
    return Moments(mean, variance), Moments(mean - left * slope, left + rest), jnp.max(off)


def khats(log_w: np.ndarray) -> np.ndarray:
    """Pareto k-hats (N,) of weights (N, S): -inf of equal ones, which have no tail to fit."""
    from arviz_stats.base import array_stats  # here: it takes a second

    found, vary = np.full(len(log_w), -np.inf), np.ptp(log_w, 1) > 1e-6
    if vary.any():
        found[vary] = array_stats.psislw(log_w[vary])[1]
    return found
