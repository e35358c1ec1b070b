"""The cheap class probability of logistic models: the logistic function's Gaussian integral by a
probit.
"""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.local.tilted import line
from ppl_gp.proofs.affine import Dependence, dependence
from ppl_gp.results.integrals.integration import Integration
from ppl_gp.results.query.mixture import Moments
from ppl_gp.results.query.query import Case
from ppl_gp.wrappers import bare

MACKAY = "mackay"


def mackay_log_probs(fn_at, f: Moments):
    """log p(y = 0), log p(y = 1), (2, M): sigma(kappa m), kappa = (1 + pi v / 8)^(-1/2) (PRML
    4.153-4.154).

    m and v are those of the logits, a + b f. MacKay (1992), "The evidence framework applied to
    classification networks".
    """
    form = line(lambda x: _logits(fn_at(x), x), f.mean.shape[0], f.mean.dtype)
    mean, variance = form.intercept + form.slope * f.mean, form.slope**2 * f.variance
    eta = mean / jnp.sqrt(1.0 + jnp.pi * variance / 8.0)
    return jax.nn.log_sigmoid(jnp.stack([-eta, eta]))


def check_link_approximation(case: Case, integration: Integration, name: str | None) -> None:
    """Raise `DataError` for an unknown name, `ModelError` for a model that it does not fit."""
    if name is None:
        return
    if name != MACKAY:
        raise DataError(
            f"link_approximation={name!r}: give 'mackay', or None for quadrature of the model's "
            "likelihood."
        )
    if integration is not Integration.quadrature or not _logits_are_affine(case):
        raise ModelError(
            "link_approximation='mackay' needs one GP site and Bernoulli(logits=...) with logits "
            f"affine in f; the observed sites are {[s.label for s in case.layout.sites]}. Leave "
            "it out: quadrature fits every likelihood."
        )


def _logits_are_affine(case: Case) -> bool:
    """Whether every observed site is a Bernoulli whose logits are proved affine in f. Traces,
    computes nothing.
    """
    first = case.draws.at(0)
    zero = jnp.zeros(case.layout.num)
    return all(
        _has_line(lambda x, s=site: case.trace(first, {case.site: x})[s.name]["fn"], zero)
        for site in case.layout.sites
    )


def _has_line(fn_at, zero) -> bool:
    kinds = []

    def logits(x):
        fn = fn_at(x)
        kinds.append(type(unwrap(fn)))
        return _logits(bare(fn), x) if issubclass(kinds[-1], dist.BernoulliLogits) else x

    proved = all(d <= Dependence.affine for d in dependence(logits, zero))
    return proved and issubclass(kinds[-1], dist.BernoulliLogits)


def _logits(fn, f):
    return jnp.broadcast_to(unwrap(fn).logits, f.shape)
