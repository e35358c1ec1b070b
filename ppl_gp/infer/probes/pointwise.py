"""The proof that the likelihood of one function is pointwise, and that a row of a linear predictor
sees its own row alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import LISTED, NotPointwiseError
from ppl_gp.infer.probes.joint import ONE_NUMBER, probe_joint
from ppl_gp.infer.probes.moves import ROUNDINGS, require_finite, unmoved
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.factors import LogLikelihood
from ppl_gp.model.per_datum import log_prob_per_datum
from ppl_gp.model.predictor_prior import PredictorGP
from ppl_gp.model.roles import is_observed
from ppl_gp.quick import quick_jit


def probe(log_lik: LogLikelihood) -> None:
    """Prove that the likelihood is pointwise, or raise `NotPointwiseError` naming the site.

    For a diagonal Jacobian J and any v, J v = (J 1) * v. One continuous random v finds any
    off-diagonal entry with probability one (random signs would miss a single coupled pair half of
    the time). Moves of half of the rows find steps, which have no slope. Two jvps and a few
    evaluations, O(N).
    """
    if log_lik.functions > 1:
        shape = (log_lik.functions, log_lik.num)
        return probe_joint(log_lik.joint, {log_lik.site: shape}, "a local method")
    finite, pointwise, free = _probe(log_lik, random.key(7))
    require_finite(finite)
    bad = np.flatnonzero(~np.asarray(pointwise))[:3].tolist()
    if bad or not bool(free):
        raise NotPointwiseError(
            f"the likelihood of site {_coupled_sites(log_lik)} couples values of "
            f"f{f' (data {bad}, ...)' if bad else ' into one number'}; Laplace, EP, VI and "
            f"LocalBound need log p(y|f) = sum_n log p(y_n|f_n). {LISTED}"
            f"{'' if bad else ONE_NUMBER}"
        )


@quick_jit
def _probe(log_lik: LogLikelihood, key):
    f, v = random.normal(key, (2, log_lik.num))
    g, along = jax.jvp(log_lik, (f,), (v,))
    rows = jax.jvp(log_lik, (f,), (jnp.ones_like(f),))[1]
    scale = jnp.abs(along) + jnp.abs(rows * v)
    tolerance = ROUNDINGS * jnp.finfo(f.dtype).eps * (1.0 + scale)
    constant, shared = jax.value_and_grad(log_lik.shared)(f)
    pointwise = (jnp.abs(along - rows * v) <= tolerance) & unmoved(log_lik, f, key)
    finite = jnp.isfinite(g + constant) & ~jnp.isnan(along)
    return finite, pointwise, jnp.all(shared == 0)


def _coupled_sites(log_lik):
    zero = jnp.zeros((log_lik.num,))
    f, v = random.normal(random.key(8), (2, log_lik.num))

    def part(name):
        return lambda f: log_prob_per_datum(log_lik.trace(f)[name], log_lik.num)

    def coupled(name):
        along, rows = (jax.jvp(part(name), (f,), (d,))[1] for d in (v, jnp.ones_like(f)))
        return bool(along != 0) if jnp.ndim(along) == 0 else not bool(jnp.allclose(along, rows * v))

    return [k for k, s in log_lik.trace(zero).items() if is_observed(s) and coupled(k)]


def probe_predictor(model: Collapsed, prior: PredictorGP) -> None:
    """Prove that row n of the predictor sees row n alone of what stands one a datum, or raise
    `NotPointwiseError`. Two jvps a site, O(N).
    """
    # One row is traced as two: what sees its double has another evidence there.
    rows = prior.X if len(prior.X) > 1 else jnp.concatenate([prior.X, prior.X])
    apart = np.asarray(_rows_of_predictor(prior.kernel, rows))[: len(prior.X)]
    if not apart.all():
        raise NotPointwiseError(
            f"the linear predictor of data {np.flatnonzero(~apart)[:3].tolist()}, ... sees other "
            f"rows of {[k for k, _ in model.plan.axes]} than its own (a permutation, a cumulative "
            "sum, a mean over the data). Give the GP its inputs in the data's order, GP(kernel, "
            f"X[order]). {LISTED}"
        )


@quick_jit
def _rows_of_predictor(kernel, X):
    return jnp.broadcast_to(kernel.model.rows_apart(kernel, X), (len(X),))
