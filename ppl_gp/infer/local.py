"""Fitting by a local approximation: what is checked whatever is chosen for `hyper`."""

from functools import partial

from ppl_gp.errors import DataError, ModelError, Result
from ppl_gp.infer.fit import run_method

# each registers its choice
from ppl_gp.infer.hyper import grid, map, point, sample  # noqa: F401
from ppl_gp.infer.hyper.point import LocalProblem, infer_hyper, wide_column
from ppl_gp.infer.hyper.space import given, held, holding
from ppl_gp.infer.joint_mode import fit_joint
from ppl_gp.infer.maximised import integrated, require_no_maximised_effects
from ppl_gp.infer.probes import observed_trace, probe, require_numbers
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.method import LocalMethod
from ppl_gp.reading.factors import factors_of, read
from ppl_gp.reading.predictor.collapsed import Collapsed, require_levels
from ppl_gp.reading.refusals import require_observations
from ppl_gp.reading.roles import require_no_subsampling, roles
from ppl_gp.reading.tracing import run_at_once
from ppl_gp.results.fit import Fit
from ppl_gp.settings import GAUSSIAN, MAP


@run_method.register
def _fit_local(method: LocalMethod, model, rng_key, args, kwargs, progress) -> Fit:
    at = holding(model, method.hyper) if given(method.hyper)[1] else model
    trace = observed_trace(at, args, kwargs)
    require_observations(model, args, kwargs, trace)
    require_no_subsampling(trace, type(method).__name__)
    whole, numbers = model, partial(require_numbers, model, args, kwargs, trace)
    model = integrated(model, method, args, kwargs, held(method.hyper, trace))
    if model is not whole or not roles(trace).gps:
        numbers()  # of others `probe` sees all that f is computed from
    if isinstance(method, Laplace) and not isinstance(model, Collapsed) and not roles(trace).gps:
        return fit_joint(LocalProblem(method, model, trace, rng_key, args, kwargs, progress))
    if isinstance(method.hyper, MAP) and method.integrate == GAUSSIAN:
        label = f"{type(method).__name__}(hyper=MAP())"
        require_no_maximised_effects(model, args, kwargs, label, method.hyper.maximise)
    if isinstance(model, Collapsed):
        names = {*roles(trace).hyper, *roles(trace).params} - {*model.plan.sites}
        trace = run_at_once(model, args, kwargs, {k: trace[k]["value"] for k in names})
    problem = LocalProblem(method, model, trace, rng_key, args, kwargs, progress)
    hyper = {k: trace[k]["value"] for k in problem.found.hyper}
    factors = factors_of(model, args, kwargs, trace, hyper)
    log_lik = factors.log_lik
    if isinstance(model, Collapsed):
        require_levels(model, args, kwargs, factors.log_lik.joint.hyper)
    try:
        probe(log_lik)
    except DataError:
        numbers()  # which names the values
        raise
    if (why := method.refuses(log_lik)) is not None:
        raise ModelError(why)
    fit = infer_hyper(method.hyper, problem)
    if fit.result is Result.nonfinite and "caution" not in fit.stats:
        there = read(model, *args, hyper=fit.draws.at(0).known, **kwargs).prior
        fit.stats |= {k: x for k, x in {"caution": wide_column(there)}.items() if x}
    return fit
