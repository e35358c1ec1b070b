"""`hyper=Sample()`: NUTS over the hyperparameters of a model whose f a local approximation
integrates out.
"""

from functools import lru_cache

import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from ppl_gp.errors import ModelError, Result
from ppl_gp.hyperparameters import Sample
from ppl_gp.infer.chains import Kernel, diagnose, flatten, run_chains, sampled_fit
from ppl_gp.infer.hyper.choice import LocalProblem, infer_hyper
from ppl_gp.infer.hyper.point import without_values
from ppl_gp.infer.hyper.space import require_draws
from ppl_gp.infer.hyper.width import tell_of_width, widest
from ppl_gp.infer.marginal import marginal
from ppl_gp.infer.mcmc.sampled_model import missing_parts, require_samplable, self_contained
from ppl_gp.kept import FromFunctions, FromPseudo, from_sites
from ppl_gp.local.method import centred, has_digits
from ppl_gp.local.natural import of_arrays
from ppl_gp.model.factors import read
from ppl_gp.model.predictor_prior import covariance_of
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.quick import quick_jit
from ppl_gp.results.fit import Fit


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
    stats |= tell_of_width(method, ratios)
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
