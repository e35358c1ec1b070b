"""`hyper=Sample()`: NUTS over hyperparameters, f integrated out by a method; `marginal`."""

from collections.abc import Callable
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax
from jaxtyping import Array, Bool, Float

from ppl_gp.errors import ModelError, Result
from ppl_gp.infer.chains import Kernel, run_chains, sampled_fit
from ppl_gp.infer.hyper.point import LocalProblem, Setting, infer_hyper, warn_if_wide, widest
from ppl_gp.infer.hyper.space import require_draws
from ppl_gp.infer.maximised import integrated
from ppl_gp.infer.mcmc.nuts import missing_parts, require_samplable, self_contained
from ppl_gp.kept import FromFunctions, FromPseudo, from_sites
from ppl_gp.local.method import LocalMethod, centred, has_digits, log_evidence
from ppl_gp.local.natural import of_arrays
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.quick import quick_jit
from ppl_gp.reading.factors import read
from ppl_gp.reading.predictor.prior import covariance_of
from ppl_gp.reading.reading import declare
from ppl_gp.reading.tracing import sample_hyper
from ppl_gp.results.fit import Fit
from ppl_gp.settings import Sample


def marginal(model: Callable, approximation: LocalMethod) -> Callable:
    """Integrate f out of a model by a local method, which leaves a model of the hyperparameters.

    Use it with any sampler of NumPyro. `hyper=Sample()` samples this model.

    Parameters
    ----------
    model : callable
        A NumPyro model that the method accepts.
    approximation : LocalMethod
        `Laplace()`, `EP()`, `VI()` or `LocalBound()`.

    Returns
    -------
    callable
        A NumPyro model with the same arguments. Its sites are the hyperparameters as declared,
        `<f>_log_evidence` (a factor, nats), and the inner state at each draw: `<f>_mean`,
        `<f>_nat1` and `<f>_nat2`, (N,), `<f>_steps`, `<f>_residual` and `<f>_code`.

    Raises
    ------
    ModelError
        When the model runs, as `read`.

    Notes
    -----
    If the inner iteration does not converge, the density is NaN, which NUTS counts as a divergence.
    Each evaluation costs that of the method.

    Examples
    --------
    >>> def model(X, y=None):
    ...     scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, scale), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> seeded = numpyro.handlers.seed(pg.marginal(model, pg.Laplace()), 0)
    >>> data = jnp.arange(4.0), jnp.array([0, 2, 1, 0])
    >>> sorted(numpyro.handlers.trace(seeded).get_trace(*data))
    ['f_code', 'f_log_evidence', 'f_mean', 'f_nat1', 'f_nat2', 'f_residual', 'f_steps', 'scale']
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
        for figure in ("nat1", "nat2"):
            numpyro.deterministic(f"{name}_{figure}", getattr(solution.sites, figure))
        for figure in ("steps", "residual", "code"):
            numpyro.deterministic(f"{name}_{figure}", getattr(solution, figure))

    return marginalised


@lru_cache(maxsize=64)
def _kernel(model, method, config: Sample, missing: tuple[str, ...]):
    """One kernel a model and configuration, so that compiled code is found again."""
    whole = marginal(self_contained(model, missing), method)
    return Kernel(whole, target_accept_prob=config.target_accept_prob)


@infer_hyper.register
def _fit_sample(config: Sample, problem: LocalProblem) -> Fit:
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
    name, values = found.gps[0], draws.flat
    hyper = {k: values[k] for k in found.hyper}
    sites = of_arrays(values[f"{name}_nat1"], values[f"{name}_nat2"])
    kept, ratios, sound = kept_of_draws(problem.setting, hyper, sites)
    fit = sampled_fit(draws, found.hyper, method, model, args, kwargs, hyper, {name: kept})
    codes = np.asarray(values[f"{name}_code"])
    inner = {f"inner_{k}": draws.values[f"{name}_{k}"] for k in ("steps", "residual", "code")}
    fit.stats |= {
        "residual": float(np.max(values[f"{name}_residual"])),
        "inner_codes": codes,
        "sample_stats": fit.stats["sample_stats"] | inner,
        **warn_if_wide(method, ratios),
    }
    if not np.all(sound):
        fit.result = Result.nonfinite
    elif fit.result is Result.converged and codes.any():
        fit.result = Result.from_code(codes.max())
    return fit


@quick_jit
def kept_of_draws(
    setting: Setting, hyper: dict, sites
) -> tuple[FromPseudo | FromFunctions, Float[Array, "S"], Bool[Array, "S"]]:
    """(what is kept of f, its width in the prior's, whether its mean has digits). O(S N^3)."""

    def one(entry):
        factors = setting.factors(entry[0])
        sites, q = centred(setting.method, factors, entry[1])
        sound = has_digits(covariance_of(factors.prior), q, sites, 0.0)
        return from_sites(q, sites), widest(factors.prior, diagonal_of(q.variance)), sound

    return lax.map(one, (hyper, sites))
