"""`marginal`: model -> model with the GP site integrated out by a local approximation."""

from collections.abc import Callable

import jax.numpy as jnp
import numpyro

from ppl_gp.errors import Result
from ppl_gp.infer.integrated import integrated
from ppl_gp.local.method import LocalMethod, log_evidence
from ppl_gp.model.declared import declare
from ppl_gp.model.factors import read
from ppl_gp.model.tracing import sample_hyper


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
