"""Fitting by a local approximation, with the hyperparameters fixed, maximised or sampled."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp

from ppl_gp.errors import Result
from ppl_gp.factors import read
from ppl_gp.hyperparameters import Fixed, Sample
from ppl_gp.infer.boundary import first_trace, probe
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.initial import fixed_values
from ppl_gp.infer.marginal_nuts import sample_marginal
from ppl_gp.infer.optimise import Optimum, maximise
from ppl_gp.local.method import LocalMethod, log_evidence
from ppl_gp.local.pseudo import condition
from ppl_gp.numerics.quadrature import TOLERANCE
from ppl_gp.posterior import Latent
from ppl_gp.results.fit import Fit
from ppl_gp.tracing import roles


@run_method.register
def _fit_local(method: LocalMethod, model, rng_key, args, kwargs, progress) -> Fit:
    trace = first_trace(model, args, kwargs)
    found = roles(trace)
    probe(read(model, *args, hyper={k: trace[k]["value"] for k in found.hyper}, **kwargs).log_lik)
    if isinstance(method.hyper, Sample):
        return sample_marginal(method, model, rng_key, args, kwargs, progress)
    hyper, ended, stats, sites = _choose_hyper(method, model, trace, rng_key, args, kwargs, progress)
    value, solution, latent, figures = _solve(model, method, hyper, args, kwargs, sites)
    inner = Result.from_code(solution.code)
    stats = {**stats, **_quadrature_error(solution, method)}
    return Fit(
        model,
        method,
        args,
        kwargs,
        hyper,
        {found.gps[0]: latent},
        float(value),
        _worst(ended, inner, float(value)),
        {**stats, "steps": int(solution.steps), "residual": float(solution.residual), **_jitter(figures)},
    )


def _choose_hyper(method, model, trace, rng_key, args, kwargs, progress) -> Optimum:
    found = roles(trace)
    names = (*found.hyper, *found.params)
    if isinstance(method.hyper, Fixed):
        return Optimum(fixed_values(method.hyper.values, names, trace), Result.converged, {}, None)
    if not names:
        return Optimum({}, Result.converged, {}, None)
    return maximise(model, method, method.hyper, rng_key, args, kwargs, progress=progress)


@eqx.filter_jit
def _solve(model, method, hyper, args, kwargs, sites):
    factors = read(model, *args, hyper=hyper, **kwargs)
    prior, log_lik = factors.prior, factors.log_lik
    K = prior.covariance_matrix
    value, solution = log_evidence(method, K, prior.mean, log_lik, sites)
    q = condition(K, prior.mean, solution.sites)
    latent = Latent(*(x[None] for x in (q.mean, q.variance, q.alpha)), jax.tree.map(lambda x: x[None], solution.sites))
    L, raised = prior.factor()
    # A kernel that is not positive definite can still leave K + T^-1 with a factor: its answers are none.
    proper = jnp.isfinite(L[-1, -1]) & jnp.all(q.variance > 0)
    code = jnp.where(proper | (solution.code != Result.converged.code), solution.code, Result.nonfinite.code)
    solution = solution._replace(code=code)
    return value + log_lik.shared(), solution, latent, (prior.variance - prior.kernel.diag(prior.X), raised)


def _quadrature_error(solution, method) -> dict:
    """The estimated error of the worst datum's integral, nats, where there are integrals; a warning where it is large."""
    if solution.quadrature_error is None:
        return {}
    error = float(solution.quadrature_error)
    if solution.code == Result.converged.code and not error <= TOLERANCE:
        warnings.warn(
            f"{type(method).__name__}(num_nodes={method.num_nodes}): the integral of some datum's likelihood is off by about "
            f"{error:.1g} nats (several modes, or edges); raise num_nodes, or use NUTS().",
            stacklevel=2,
        )
    return {"quadrature_error": error}


def _jitter(figures):
    jitter, raised = figures
    return {"jitter": float(jnp.max(jitter)), "jitter_raised": float(raised)}


def _worst(outer: Result, inner: Result, value: float) -> Result:
    if inner is not Result.converged:
        return inner
    return outer if jnp.isfinite(value) else Result.nonfinite
