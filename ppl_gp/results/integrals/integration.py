"""How y is integrated over f at new inputs, chosen from the model's structure; and the cheap class
probability of logistic models.
"""

from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import bare, unwrap
from ppl_gp.local.tilted import line
from ppl_gp.reading.affine import Dependence, dependence
from ppl_gp.reading.tracing import reading_of
from ppl_gp.results.query.mixture import Moments
from ppl_gp.results.query.query import Query


class Integration(Enum):
    """The ways."""

    given = "a draw decides y's distribution: the model has no function"
    quadrature = "one f_n decides y_n"
    functions = "several functions decide y_n, row by row, all of them Gaussian given a draw"
    layers = "as one of these, at inputs that are drawn: latents, or layers below"
    joint_draws = "rows of y depend on several rows of f"


def plan_integration(query: Query) -> Integration:
    """The cheapest way that is right for this model."""
    pointwise = all(site.axis is not None for site in query.layout.sites)
    if not query.draws.kept and pointwise:
        return Integration.layers if query.layout.local_latents else Integration.given
    reading: Any = reading_of(query.model)
    alone = not reading.coupled and query.draws.kept.keys().isdisjoint(reading.looked_up)
    if not (pointwise and (query.is_approximation or alone)):
        return Integration.joint_draws
    if query.layout.local_latents or query.layout.inner:
        return Integration.layers
    return Integration.functions if query.site is None else Integration.quadrature


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


def check_link_approximation(query: Query, integration: Integration, name: str | None) -> None:
    """Raise `DataError` for an unknown name, `ModelError` for a model that it does not fit."""
    if name is None:
        return
    if name != MACKAY:
        raise DataError(
            f"link_approximation={name!r}: give 'mackay', or None for quadrature of the model's "
            "likelihood."
        )
    if integration is not Integration.quadrature or not _logits_are_affine(query):
        raise ModelError(
            "link_approximation='mackay' needs one GP site and Bernoulli(logits=...) with logits "
            f"affine in f; the observed sites are {[s.label for s in query.layout.sites]}. Leave "
            "it out: quadrature fits every likelihood."
        )


def _logits_are_affine(query: Query) -> bool:
    """Whether every observed site is a Bernoulli whose logits are proved affine in f. Traces,
    computes nothing.
    """
    first = query.draws.at(0)
    zero = jnp.zeros(query.layout.num)
    return all(
        _has_line(lambda x, s=site: query.trace(first, {query.site: x})[s.name]["fn"], zero)
        for site in query.layout.sites
    )


def _has_line(fn_at, zero) -> bool:
    kinds = []

    def logits(x):
        fn = fn_at(x)
        kinds.append(type(unwrap(fn)))
        return _logits(bare(fn), x) if kinds[-1] is dist.BernoulliLogits else x

    proved = all(d <= Dependence.affine for d in dependence(logits, zero))
    return proved and kinds[-1] is dist.BernoulliLogits


def _logits(fn, f):
    return jnp.broadcast_to(unwrap(fn).logits, f.shape)
