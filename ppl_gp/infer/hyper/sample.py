"""`hyper=Sample()`: NUTS over the hyperparameters of a model whose f a local approximation
integrates out; and that model, `marginal`.
"""

from collections.abc import Callable
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from jaxtyping import Array, Bool, Float

from ppl_gp.errors import ModelError, Result
from ppl_gp.hyperparameters import Sample
from ppl_gp.infer.chains import Kernel, diagnose, flatten, run_chains, sampled_fit
from ppl_gp.infer.hyper.choice import LocalProblem, infer_hyper
from ppl_gp.infer.hyper.point import without_values
from ppl_gp.infer.hyper.space import require_draws
from ppl_gp.infer.hyper.width import warn_if_wide, widest
from ppl_gp.infer.integrated import integrated
from ppl_gp.infer.mcmc.sampled_model import missing_parts, require_samplable, self_contained
from ppl_gp.kept import FromFunctions, FromPseudo, from_sites
from ppl_gp.local.method import LocalMethod, centred, has_digits, log_evidence
from ppl_gp.local.natural import of_arrays
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.quick import quick_jit
from ppl_gp.reading.declared import declare
from ppl_gp.reading.factors import read
from ppl_gp.reading.predictor.prior import covariance_of
from ppl_gp.reading.tracing import sample_hyper
from ppl_gp.results.fit import Fit


def marginal(model: Callable, approximation: LocalMethod) -> Callable:
    """A NumPyro model over the hyperparameters alone: f is integrated out, its log evidence is a
    factor.

    Sites: the model's hyperparameters as declared; `<f>_log_evidence` (factor, nats); and for each
    draw the approximation's inner state: `<f>_mean` (N,), `<f>_nat1`, `<f>_nat2` (N,), `<f>_steps`,
    `<f>_residual`, `<f>_code`. Where the inner iteration does not converge the density is NaN,
    which NUTS counts as a divergence; it is never silently biased. Errors as `read`. Cost: the
    approximation's, at every evaluation.
    """

    def marginalised(*args, **kwargs):
        declared = integrated(declare(model, args, kwargs), approximation, args, kwargs)
        # Pass 1: only the hyperparameters talk to the outer handlers.
        hyper = sample_hyper(declared, args, kwargs)
        # Pass 2, inside `read`: nothing leaks, or the sites would not have unique names.
        factors = read(declared, *args, hyper=hyper, **kwargs)
        value, solution = log_evidence(approximation, factors)
        name = factors.log_lik.site
        solved = solution.code == Result.converged.code
        numpyro.factor(f"{name}_log_evidence", jnp.where(solved, value, jnp.nan))
        numpyro.deterministic(f"{name}_mean", solution.marginals.mean)
        numpyro.deterministic(f"{name}_nat1", solution.sites.nat1)
        numpyro.deterministic(f"{name}_nat2", solution.sites.nat2)
        numpyro.deterministic(f"{name}_steps", solution.steps)
        numpyro.deterministic(f"{name}_residual", solution.residual)
        numpyro.deterministic(f"{name}_code", solution.code)

    return marginalised


@lru_cache(maxsize=64)
def _kernel(model, method, config: Sample, missing: tuple[str, ...]):
    """One kernel a model and configuration, so that compiled code is found again."""
    return Kernel(
        marginal(self_contained(model, missing), method),
        target_accept_prob=config.target_accept_prob,
    )


@infer_hyper.register
def _fit_sample(config: Sample, problem: LocalProblem) -> Fit:
    """NUTS over the hyperparameters with f integrated out; every draw keeps its pseudo-likelihood
    and inner status.
    """
    method, model, trace, rng_key, args, kwargs, progress = problem
    found = problem.found
    for site in found.hyper:
        require_draws(trace[site], "hyper=MAP(init={...})")
    require_samplable(model, trace, args, kwargs, "hyper=Sample()")
    if not found.hyper:
        raise ModelError(
            "Sample() found no hyperparameter declared by numpyro.sample; use Fixed({}) or MAP()."
        )
    kernel = _kernel(model, method, config, missing_parts(trace))
    label = f"{type(method).__name__} marginal NUTS"
    draws = run_chains(kernel, config, rng_key, args, kwargs, progress=progress, label=label)
    name, values = found.gps[0], flatten(draws.values)
    result, stats = diagnose(draws, found.hyper)
    codes = np.asarray(values[f"{name}_code"])
    stats |= {"residual": float(np.max(values[f"{name}_residual"])), "inner_codes": codes}
    inner = {
        f"inner_{figure}": draws.values[f"{name}_{figure}"]
        for figure in ("steps", "residual", "code")
    }
    stats["sample_stats"] = {**stats["sample_stats"], **inner}
    if result is Result.converged and codes.any():
        result = Result.from_code(codes.max())
    hyper = {k: values[k] for k in found.hyper}
    sites = of_arrays(values[f"{name}_nat1"], values[f"{name}_nat2"])
    kept, ratios, sound = kept_of_draws(model, without_values(method), hyper, sites, args, kwargs)
    stats |= warn_if_wide(method, ratios)
    result = result if np.all(sound) else Result.nonfinite
    return sampled_fit(config, method, model, args, kwargs, hyper, {name: kept}, (result, stats))


@quick_jit
def kept_of_draws(
    model, method, hyper, sites, args, kwargs
) -> tuple[FromPseudo | FromFunctions, Float[Array, "S"], Bool[Array, "S"]]:
    """What is kept of f at draws of the hyperparameters with their pseudo-likelihoods, how much
    wider than the prior q(f) is, and whether its mean has digits. O(S N^3).
    """

    def one(entry):
        factors = read(model, *args, hyper=entry[0], **kwargs)
        sites, q = centred(method, factors, entry[1])
        sound = has_digits(covariance_of(factors.prior), q, sites)
        return from_sites(q, sites), widest(factors.prior, diagonal_of(q.variance)), sound

    return lax.map(one, (hyper, sites))
