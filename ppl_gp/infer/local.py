"""Fitting by a local approximation, with the hyperparameters fixed, maximised or sampled."""

import copy
import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.draws import Draws
from ppl_gp.errors import ModelError, Result
from ppl_gp.hyperparameters import MAP, Fixed, Sample
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.hyper.fixed import fixed_values, holding
from ppl_gp.infer.hyper.map import Optimum, maximise
from ppl_gp.infer.hyper.sample import sample_marginal
from ppl_gp.infer.hyper.space import require_draws, space
from ppl_gp.infer.probes import first_trace, perhaps_unbounded, probe, require_bounded
from ppl_gp.kept import FromPseudo
from ppl_gp.local.condition import condition
from ppl_gp.local.method import LocalMethod, Solution, form_of, log_evidence
from ppl_gp.local.natural import Positive, Sites, as_general, flat
from ppl_gp.model.factors import read
from ppl_gp.model.tracing import require_no_subsampling, roles
from ppl_gp.numerics.quadrature import TOLERANCE
from ppl_gp.quick import FEW_DATA, quick_jit
from ppl_gp.results.fit import Fit


def local_methods() -> dict[str, LocalMethod]:
    """{class name: with its defaults} of every local method of this package, by name."""
    found, front = [], [LocalMethod]
    while front:
        new = front.pop(0).__subclasses__()
        found += [cls for cls in new if cls.__module__.startswith("ppl_gp.")]
        front += new
    return {cls.__name__: cls() for cls in sorted(found, key=lambda cls: cls.__name__)}


@run_method.register
def _fit_local(method: LocalMethod, model, rng_key, args, kwargs, progress) -> Fit:
    trace = first_trace(holding(model, method.hyper), args, kwargs)
    require_no_subsampling(trace, type(method).__name__)
    found = roles(trace)
    if isinstance(method.hyper, MAP):
        require_bounded(trace, model.reading, f"{type(method).__name__}(hyper=MAP())")
    log_lik = read(
        model, *args, hyper={k: trace[k]["value"] for k in found.hyper}, **kwargs
    ).log_lik
    probe(log_lik)
    if (why := method.refuses(log_lik)) is not None:
        raise ModelError(why)
    if isinstance(method.hyper, Sample):
        for name in found.hyper:
            require_draws(trace[name], "hyper=MAP(init={...})")
        return sample_marginal(method, model, rng_key, args, kwargs, progress)
    hyper, ended, stats, value, solution = _choose_hyper(
        method, model, trace, rng_key, args, kwargs, progress
    )
    kept, code, figures = _kept(model, hyper, args, kwargs, solution)
    inner = Result.from_code(code)
    if ended is not Result.converged and (caution := perhaps_unbounded(trace, model.reading)):
        stats = {**stats, "caution": caution}
    stats = {**stats, **_quadrature_error(solution, code, method)}
    return Fit(
        model=model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.one(hyper, {found.gps[0]: kept}),
        log_evidence=float(value),
        result=_worst(ended, inner, float(value)),
        stats={
            **stats,
            "steps": int(solution.steps),
            "residual": float(solution.residual),
            **_jitter(figures),
        },
    )


def _choose_hyper(method, model, trace, rng_key, args, kwargs, progress) -> Optimum:
    found = roles(trace)
    names = (*found.hyper, *found.params)
    if isinstance(method.hyper, MAP) and names:
        sp = space(trace, model, args, kwargs)
        return maximise(
            model,
            _without_values(method),
            method.hyper,
            sp,
            rng_key,
            args,
            kwargs,
            progress=progress,
        )
    hyper = (
        fixed_values(method.hyper, names, model, args, kwargs)
        if isinstance(method.hyper, Fixed)
        else {}
    )
    num = trace[found.gps[0]]["fn"].shape()[-1]
    return Optimum(
        hyper,
        Result.converged,
        {},
        *_solved(model, _without_values(method), hyper, args, kwargs, num=num),
    )


def _without_values(method: LocalMethod) -> LocalMethod:
    """What compiled code is keyed by: other values of hyperparameters and other settings of `MAP`
    find it again.
    """
    bare = copy.copy(method)
    object.__setattr__(bare, "hyper", Fixed())
    return bare


def _solved(*problem, num: int) -> tuple[Float[Array, ""], Solution]:
    """As `_solve`; what a log-concave likelihood should not need is compiled where the solution
    failed without it.
    """
    solve = _solve if num <= FEW_DATA else _solve.full
    value, solution = solve(*problem, general=False)
    if isinstance(solution.sites, Positive) and solution.code != Result.converged.code:
        value, solution = solve(*problem, general=True)
    return value, solution


@quick_jit
def _solve(model, method, hyper, args, kwargs, general: bool) -> tuple[Float[Array, ""], Solution]:
    factors = read(model, *args, hyper=hyper, **kwargs)
    init = flat(factors.prior.mean, Sites if general else form_of(factors.log_lik))
    return log_evidence(method, factors, init)


@quick_jit
def _kept(model, hyper, args, kwargs, solution: Solution):
    """(what the fit keeps of f, the solution's status, the jitter's figures)."""
    prior = read(model, *args, hyper=hyper, **kwargs).prior
    q = condition(prior.covariance_matrix, prior.mean, solution.sites)
    kept = jax.tree.map(
        lambda x: x[None], FromPseudo(q.mean, q.variance, q.alpha, as_general(solution.sites))
    )
    L, raised = prior.factor()
    # A kernel that is not positive definite can still leave K + T^-1 with a factor: its answers are
    # none.
    proper = jnp.isfinite(L[-1, -1]) & jnp.all(q.variance > 0)
    code = jnp.where(
        proper | (solution.code != Result.converged.code), solution.code, Result.nonfinite.code
    )
    return kept, code, (prior.variance - prior.kernel.diag(prior.X), raised)


def _quadrature_error(solution, code, method) -> dict:
    """The estimated error of the worst datum's integral, nats, where there are integrals; a warning
    where it is large.
    """
    if solution.quadrature_error is None:
        return {}
    error = float(solution.quadrature_error)
    if code == Result.converged.code and not error <= TOLERANCE:
        warnings.warn(
            f"{type(method).__name__}(num_nodes={method.num_nodes}): the integral of some datum's "
            f"likelihood is off by about {error:.1g} nats (several modes, or edges); raise "
            "num_nodes, or use NUTS().",
            stacklevel=2,
        )
    return {"quadrature_error": error}


def _jitter(figures):
    jitter, raised = figures
    return {"jitter": float(jnp.max(jitter)), "jitter_raised": float(raised)}


def _worst(outer: Result, inner: Result, value: float) -> Result:
    """An inner status that names a cause comes first; where values are not finite, it is no cause
    that steps ran out.
    """
    if inner not in (Result.converged, Result.max_steps):
        return inner
    if outer is Result.nonfinite or not jnp.isfinite(value):
        return Result.nonfinite
    return inner if inner is not Result.converged else outer
