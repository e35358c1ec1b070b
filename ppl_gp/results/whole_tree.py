"""Further groups of a tree: what the model draws before and after it has seen the data, its prior
densities, and deterministic sites.
"""

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro import handlers

from ppl_gp.model.arguments import is_array
from ppl_gp.model.roles import is_factor, is_missing_part, is_observed, roles
from ppl_gp.model.tracing import run
from ppl_gp.proofs.dependence import sources
from ppl_gp.quick import full_jit
from ppl_gp.results.record import Record
from ppl_gp.results.tree_dimensions import label_of
from ppl_gp.wrappers import bare

_PRIOR = 1  # folded into the key: other draws than those of the posterior


def deterministic_sites(fit: Record, values: dict) -> tuple[dict, dict]:
    """({site: (S, ...)} of deterministic sites that are computed from anything that has draws,
    {site: value} of the others) at `values`, draws of every site.
    """
    model, first = fit.source, {k: v[0] for k, v in values.items()}
    at = lambda values: _deterministic(run(model, fit.args, fit.kwargs, values, values))  # noqa: E731
    seen = {k: frozenset().union(*jax.tree.leaves(v)) for k, v in sources(at, first).items()}
    still = {k: v for k, v in at(first).items() if seen[k] <= fit.points} if seen else {}
    moving = tuple(k for k in seen if k not in still)
    return _each(model, values, moving, fit.args, fit.kwargs) if moving else {}, still


def _deterministic(trace: dict) -> dict:
    """Without what NumPyro's `obs_mask` puts together of observations and draws."""
    return {
        k: s["value"]
        for k, s in trace.items()
        if s["type"] == "deterministic" and is_array(s["value"]) and f"{k}_unobserved" not in trace
    }


@full_jit
def _each(model, values: dict, names: tuple[str, ...], args, kwargs) -> dict:
    def one(values):
        found = _deterministic(run(model, args, kwargs, values, values))
        return {k: found[k] for k in names}

    return lax.map(one, values)


def further_groups(fit: Record, values: dict, key, num_draws: int) -> dict[str, dict]:
    """{group: {variable: (S, ...)}}: `posterior_predictive` and `log_prior` at `values`, draws of
    every site; `prior` and `prior_predictive` of `num_draws` draws.

    `log_prior`: nats, of each hyperparameter that has draws, in its batch shape (GP and integrated
    sites are left out). A prior that cannot be drawn (an improper one) has no such groups. O(S N^3)
    for the prior.
    """
    model = fit.source
    found = _after(model, values, fit.args, fit.kwargs, key)
    found["log_prior"] = {k: v for k, v in found["log_prior"].items() if k not in fit.points}
    try:
        prior = _before(model, fit.args, fit.kwargs, random.fold_in(key, _PRIOR), num_draws)
    except NotImplementedError:
        prior = {}
    return {**found, **prior}


def _replicated(trace: dict, key) -> dict:
    """A draw of each observed site given all else, without its observations."""
    data = [k for k, s in trace.items() if is_observed(s) and not is_factor(s)]
    return {
        label_of(k, trace): bare(trace[k]["fn"]).sample(random.fold_in(key, i))
        for i, k in enumerate(data)
    }


@full_jit
def _after(model, values: dict, args, kwargs, key) -> dict:
    def one(entry):
        values, key = entry
        trace = run(model, args, kwargs, values, values)
        names = roles(trace).hyper
        return {
            "posterior_predictive": _replicated(trace, key),
            "log_prior": {k: trace[k]["fn"].log_prob(trace[k]["value"]) for k in names},
        }

    num = next(iter(values.values())).shape[0]
    return lax.map(one, (values, random.split(key, num)))


@full_jit
def _before(model, args, kwargs, key, num_draws: int) -> dict:
    def one(key):
        with handlers.block():
            drawn = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        free = {
            k: jnp.asarray(s["value"])
            for k, s in drawn.items()
            if s["type"] in ("sample", "deterministic")
            and not is_observed(s)
            and not is_missing_part(k, drawn)
            and f"{k}_unobserved" not in drawn  # observations, and draws where these are missing
        }
        return {"prior": free, "prior_predictive": _replicated(drawn, random.fold_in(key, 1))}

    return lax.map(one, random.split(key, num_draws))
