"""`SparseNUTS`: NUTS over whitened inducing variables and hyperparameters together."""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float
from numpyro import handlers

from ppl_gp.deep.structure import Structure
from ppl_gp.gp import GP, unwrap
from ppl_gp.infer.chains import Kernel, run_chains, sampled_fit
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.mcmc import nuts
from ppl_gp.infer.probes import first_trace
from ppl_gp.infer.svgp.look import look_at, site_inputs
from ppl_gp.infer.svgp.start import inducing_variables, priors_of, require_known_sites
from ppl_gp.kept import FromInducing
from ppl_gp.reading.factors import JointLogLikelihood
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import scored
from ppl_gp.reading.tracing import run, sample_hyper, set_gps
from ppl_gp.results.fit import Fit
from ppl_gp.settings import require_settings
from ppl_gp.sparse.bound import Variational, processes
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.families import Family, Values
from ppl_gp.sparse.process import SparseProcess
from ppl_gp.sparse.svgp import SVGP


class SparseNUTS(eqx.Module):
    """NUTS over inducing variables and hyperparameters together.

    The sparsity is its only approximation: u need not be Gaussian, and its draws belong to the
    hyperparameters of the same draw. Use it to check `SVGP()`.

    Parameters
    ----------
    num_inducing, inducing : default 50, "greedy"
        Number and choice of the inducing variables. See `SVGP`. Or give those of a fit,
        `svgp_fit.inducing`. They are fixed.
    num_warmup, num_samples, num_chains : int, default 300, 500, 2
        As in `NUTS`.
    target_accept_prob, max_tree_depth : default 0.8, 10
        As in `NUTS`.
    num_nodes : int, default None
        Quadrature nodes per direction. See `Expectation`.

    Raises
    ------
    DataError
        For numbers out of range.
    ModelError
        In `fit`, for a scaled prior of f, and as in `NUTS`.

    Notes
    -----
    Samples the whitened u, v, and the hyperparameters from `p(v) p(hyper) exp(sum_n E_{p(f_n |
    u)}[log p(y_n | f_n)])`. Effects and latents per row are sampled too. In inner layers f given u
    is independent from row to row, as in `SVGP`, and its noise is sampled. `fit.result` and `stats`
    are those of `NUTS`. A leapfrog step costs O(M^3 + N M^2), with all data in every step. Source:
    Hensman, Matthews, Filippone & Ghahramani (2015), eq. 9.

    Examples
    --------
    >>> pg.SparseNUTS(num_inducing=30).num_warmup
    300
    """

    num_inducing: int = eqx.field(default=50, static=True)
    inducing: Any = "greedy"
    num_warmup: int = eqx.field(default=300, static=True)
    num_samples: int = eqx.field(default=500, static=True)
    num_chains: int = eqx.field(default=2, static=True)
    target_accept_prob: float = eqx.field(default=0.8, static=True)
    max_tree_depth: int = eqx.field(default=10, static=True)
    num_nodes: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        require_settings(self, "num_inducing", "max_tree_depth")


def sparse_model(undeclared: Callable, expectation: Expectation, structure: Structure) -> Callable:
    """A NumPyro model over hyperparameters, latents and whitened inducing variables: `<site>_base`,
    in inner layers `<site>_noise` too, and the data as a factor. Called as `sparse_model(...)(
    variables, *args, **kwargs)`, `variables` = {GP site: InducingVariables}.
    """

    def over_inducing(variables, *args, **kwargs):
        model = declare(undeclared, args, kwargs)
        trace = run(model, args, kwargs)
        shapes = {k: trace[k]["fn"].shape() for k in structure.gps}
        given = sample_hyper(model, args, kwargs)
        base = {k: _white(f"{k}_base", (*shapes[k][:-1], variables[k].num)) for k in structure.gps}
        q: dict[str, Family] = {k: Values(v) for k, v in base.items()}
        noise = {k: _white(f"{k}_noise", shapes[k]) for k in structure.inner}
        at = run(model, args, kwargs, given)
        priors = {k: unwrap(at[k]["fn"]) for k in structure.gps}
        posterior, _ = processes(priors, Variational(variables, q))
        log_lik, there = log_lik_given_noise(
            model, expectation, given, posterior, noise, args, kwargs
        )
        numpyro.factor("expected_log_lik", log_lik)
        # `sample_hyper` has priors of latents at the prior means of what they see
        latents = structure.latents if structure.inner else ()
        moved = [jnp.sum(scored(there[k])) - jnp.sum(scored(at[k])) for k in latents]
        numpyro.factor("latents_given_f", sum(moved, jnp.zeros(())))

    return over_inducing


def _white(name: str, shape):
    normal = dist.Normal(jnp.zeros(shape), 1.0).to_event(len(shape))
    return cast(Array, numpyro.sample(name, normal))


@lru_cache(maxsize=64)
def _kernel(model, expectation: Expectation, structure: Structure, missing, num_warmup, **options):
    """One kernel a model, configuration and length of warm-up: compiled code is found again."""
    whole = nuts.self_contained(model, missing)
    return Kernel(sparse_model(whole, expectation, structure), **options)


@run_method.register
def _fit_sparse_nuts(method: SparseNUTS, model, rng_key, args, kwargs, progress) -> Fit:
    key_start, key_run = random.split(rng_key)
    seed = int(random.randint(key_start, (), 0, 2**31 - 1))
    nuts.require_samplable(model, first_trace(model, args, kwargs), args, kwargs, "SparseNUTS()")
    whole = SVGP(num_inducing=method.num_inducing, batch_size=sys.maxsize)  # all rows
    subject = look_at(whole, model, args, kwargs, seed, declared=True)
    nuts.require_plain_priors(subject.trace, subject.gps, "SparseNUTS()")
    hyper = {k: subject.trace[k]["value"] for k in subject.names}
    priors, _ = priors_of(subject.trace, subject.gps)
    inputs = site_inputs(subject, hyper, seed)
    variables = {
        k: inducing_variables(method, k, p, inputs[k], seed, bool(hyper)) for k, p in priors.items()
    }
    require_known_sites(method.inducing, variables)
    expectation = Expectation(method.num_nodes, additive=subject.additive)
    missing = nuts.missing_parts(subject.trace)
    options = {k: getattr(method, k) for k in ("target_accept_prob", "max_tree_depth")}
    kernel = _kernel(model, expectation, subject.structure, missing, method.num_warmup, **options)
    names = tuple(k for k in subject.names if subject.trace[k]["type"] == "sample")
    given = (variables, *args)
    label, latents = "SparseNUTS", subject.structure.latents
    draws = run_chains(kernel, method, key_run, given, kwargs, progress=progress, label=label)
    values, judged = draws.flat, (*names, *latents, *(f"{k}_base" for k in variables))
    kept = {k: _kept(v, values[f"{k}_base"]) for k, v in variables.items()}
    hyper = {k: values[k] for k in (*names, *latents)}
    fit = sampled_fit(draws, judged, method, model, args, kwargs, hyper, kept)
    fit.stats["num_inducing"] = max(v.num for v in variables.values())
    return fit


def _kept(variables, draws) -> FromInducing:
    """Draws of v: nothing is left of the prior's variance of u, P = I."""
    repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (draws.shape[0], *x.shape)), variables)
    return FromInducing(inducing=repeated, mean=draws, reduction=jnp.ones_like(draws))


def log_lik_given_noise(
    model: Callable,
    expectation: Expectation,
    given: dict,
    processes: dict[str, SparseProcess],
    noise: dict,
    args,
    kwargs,
) -> tuple[Float[Array, ""], dict]:
    """(sum_n E[log p(y_n | f_n)] over f of the outer layers, inner ones at f_n = m_n + s_n noise_n,
    nats; the trace there). O(M^2 N) a GP site. `given`: hyperparameters and latents; `noise`:
    {inner GP site: (*F, N)}.
    """
    mean, variance, inner = {}, {}, {}

    def value(name, new: GP):
        m, v = processes[name].marginals(new)
        if name in noise:
            inner[name] = m + jnp.sqrt(v) * noise[name]
            return inner[name]
        mean[name], variance[name] = m, v
        return m

    seeded = handlers.substitute(handlers.seed(model, random.key(0)), data=given)
    with handlers.block():
        trace = handlers.trace(set_gps(seeded, value)).get_trace(*args, **kwargs)
    num = next(iter({**mean, **inner}.values())).shape[-1]
    log_lik = JointLogLikelihood(model, num, {**given, **inner}, args, kwargs)
    if mean:
        expected = expected_log_lik(log_lik, mean, variance, expectation, random.key(0))
    else:
        expected = log_lik({})
    return jnp.sum(expected) + log_lik.shared(), trace
