"""The proofs of a local method: that its likelihood is pointwise, and that a row of a linear
predictor depends on its own row alone.
"""

import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import IN_ORDER, LISTED, NotPointwiseError
from ppl_gp.infer.probes.joint import probe_joint
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.factors import LogLikelihood
from ppl_gp.model.predictor_prior import PredictorGP
from ppl_gp.quick import quick_jit


def probe(log_lik: LogLikelihood) -> None:
    """Prove that the likelihood is pointwise, or raise `NotPointwiseError` naming the site."""
    functions = () if log_lik.functions == 1 else (log_lik.functions,)
    probe_joint(log_lik.joint, {log_lik.site: (*functions, log_lik.num)}, "a local method")


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
            f"sum, a mean over the data). {IN_ORDER} {LISTED}"
        )


@quick_jit
def _rows_of_predictor(kernel, X):
    return jnp.broadcast_to(kernel.model.rows_apart(kernel, X), (len(X),))
