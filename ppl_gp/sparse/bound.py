"""The sparse variational bound of a declared model on a minibatch, and the natural-gradient target
at the same price.

ELBO = sum_n w_n E_q[log p(y_n | f_n)] - sum over GP sites of KL[q(u) || p(u)] + shared terms + log
p(hyperparameters), w_n = N / B (Hensman, Fusi & Lawrence 2013; Hensman, Matthews & Ghahramani 2015,
eq. 19).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.gp import GP, unwrap
from ppl_gp.model.declared import declare
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.tracing import roles, run
from ppl_gp.proofs.degree import degree
from ppl_gp.sparse.expectation import (
    NODES,
    Expectation,
    expectation_error,
    expected_log_lik,
    flatten,
)
from ppl_gp.sparse.families import Family, Sites, Whitened
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.process import SparseProcess
from ppl_gp.sparse.root import Root


class Batch(NamedTuple):
    """A minibatch: the model's arguments at its rows, each row's weight (N / B; 0 where padded), a
    key for draws.

    `given`: further sites of the trace that are given values, such as the indices of the model's
    own subsampling plate. `rows`: where the rows stand in the data, (B,), for what is kept by row;
    `None` where that is nothing.
    """

    args: tuple
    kwargs: dict
    weights: Float[Array, "B"]
    key: Any
    given: dict = {}
    rows: Any = None


class Variational(NamedTuple):
    """The variational part of the parameters: {GP site: ...}, and {latent site: q(h)}."""

    variables: dict[str, InducingVariables]
    q: dict[str, Family]
    latents: dict[str, Any] = {}


class Terms(eqx.Module):
    """What a bound is made of, nats, and q(v) of every site in the coordinates of this
    evaluation.
    """

    expected: Float[Array, ""]
    kl: Float[Array, ""]
    shared: Float[Array, ""]
    q: dict[str, Whitened]
    roots: dict[str, Root]
    kl_weights: dict[str, Array]  # of each site's KL in `kl`, () or (*F,)

    @property
    def bound(self) -> Float[Array, ""]:
        """The ELBO at these hyperparameters, nats (without their prior)."""
        return self.expected - self.kl + self.shared


class Nudge(NamedTuple):
    """Zeros added to q(v)'s mean and P before the expectation: the derivative in them is the
    natural gradient.
    """

    mean: Float[Array, "*F M"]
    reduction: Float[Array, "..."]


def priors_at(model: Callable, batch: Batch, hyper: dict) -> dict[str, GP]:
    """The GP priors that the model declares at a minibatch. O(B)."""
    trace = run(
        declare(model, batch.args, batch.kwargs), batch.args, batch.kwargs, {**hyper, **batch.given}
    )
    return {k: unwrap(trace[k]["fn"]) for k in roles(trace).gps}


def terms(
    model: Callable,
    how: Expectation,
    hyper: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
    beta: Any = 1.0,
) -> Terms:
    """The bound's terms. O(M^3 + M^2 B) a GP site (see `projection.explained`) and the quadrature
    of the likelihood.

    `beta`: weight of every KL, besides the site's own `numpyro.handlers.scale`.
    """
    trace = run(
        declare(model, batch.args, batch.kwargs), batch.args, batch.kwargs, {**hyper, **batch.given}
    )
    priors = {k: unwrap(trace[k]["fn"]) for k in roles(trace).gps}
    posterior, q, roots = processes(priors, variational, nudge)
    moments = {k: posterior[k].marginals(prior) for k, prior in priors.items()}
    mean, variance = ({k: m[i] for k, m in moments.items()} for i in (0, 1))
    log_lik = JointLogLikelihood(
        model, batch.weights.shape[0], {**hyper, **batch.given}, batch.args, batch.kwargs
    )
    expected = expected_log_lik(log_lik, mean, variance, how, batch.key)
    # A padded row repeats another one; `where` keeps what a mask leaves out from turning 0 x inf
    # into NaN.
    total = jnp.sum(jnp.where(batch.weights > 0, batch.weights * expected, 0.0))
    weights = kl_weights(trace, priors, beta)
    return Terms(total, weighted_kl(q, weights), log_lik.shared(), q, roots, weights)


def quadrature_gap(
    model: Callable, how: Expectation, hyper: dict, variational: Variational, batch: Batch
):
    """(sum_n w_n (E_q[log p(y_n | f_n)] by the bound's nodes - by finer ones), the same of absolute
    values), nats.

    Zero, and no finer nodes, where log p(y_n | f_n) is proved a polynomial that Gauss-Hermite nodes
    integrate exactly.
    """
    trace = run(
        declare(model, batch.args, batch.kwargs), batch.args, batch.kwargs, {**hyper, **batch.given}
    )
    priors = {k: unwrap(trace[k]["fn"]) for k in roles(trace).gps}
    posterior, _, _ = processes(priors, variational)
    moments = {k: posterior[k].marginals(prior) for k, prior in priors.items()}
    mean, variance = ({k: m[i] for k, m in moments.items()} for i in (0, 1))
    log_lik = JointLogLikelihood(
        model, batch.weights.shape[0], {**hyper, **batch.given}, batch.args, batch.kwargs
    )
    f, rebuild = flatten(mean)
    # n nodes are exact up to degree 2 n - 1
    if degree(lambda f: log_lik(rebuild(f)), f) < 2 * min(NODES.values()):
        return jnp.zeros(()), jnp.zeros(())
    gap = jnp.where(
        batch.weights > 0,
        batch.weights * expectation_error(log_lik, mean, variance, how, batch.key),
        0.0,
    )
    return jnp.sum(gap), jnp.sum(jnp.abs(gap))


def kl_weights(trace: dict, sites: Iterable[str], beta) -> dict[str, Array]:
    """What multiplies each GP site's KL: `beta`, and the `numpyro.handlers.scale` that the site
    stands in.
    """
    scales = {k: trace[k]["scale"] for k in sites}
    return {k: jnp.asarray(beta if s is None else beta * s) for k, s in scales.items()}


def weighted_kl(q: dict[str, Whitened], weights: dict[str, Array]) -> Float[Array, ""]:
    """The sum of all KL terms, nats."""
    return sum([jnp.sum(weights[k] * w.kl) for k, w in q.items()], jnp.zeros(()))


def processes(
    priors: dict[str, GP], variational: Variational, nudge: dict[str, Nudge] | None = None
) -> tuple[dict[str, SparseProcess], dict[str, Whitened], dict[str, Root]]:
    """The posterior process, q(v) and the root of every GP site. O(M^3) each."""
    posterior, q, roots = {}, {}, {}
    for name, prior in priors.items():
        variables = variational.variables[name]
        roots[name] = variables.root(prior)
        q[name] = variational.q[name].whitened(roots[name], variables, prior)
        m, P = q[name].mean, q[name].reduction
        if nudge is not None and name in nudge:
            m, P = m + nudge[name].mean, P + nudge[name].reduction
        posterior[name] = SparseProcess(prior, variables, roots[name], m, P, q[name].basis)
    return posterior, q, roots


def nudges(variational: Variational) -> dict[str, Nudge]:
    """Zero nudges for the sites that natural gradients train."""
    sites = {k: q for k, q in variational.q.items() if isinstance(q, Sites)}
    return {k: Nudge(jnp.zeros_like(q.nat1), jnp.zeros_like(q.nat2)) for k, q in sites.items()}


def natural_target(q: Whitened, gradient: Nudge, weight) -> Sites:
    """The sites that maximise the bound's linearisation: nat1 = (dE/dm + 2 (dE/dP) m) / weight,
    nat2 = 2 dE/dP / weight.

    P = I - S; `weight` of the KL, whose natural gradient is weight x (the sites). A step of size 1
    lands there; for a Gaussian likelihood that is the optimum (Hensman et al. 2013; Khan & Lin
    2017).
    """
    share = (1.0 / jnp.asarray(weight)).astype(gradient.mean.dtype)
    P_bar = (
        share[..., None, None]
        * 0.5
        * (gradient.reduction + jnp.swapaxes(gradient.reduction, -1, -2))
    )
    nat1 = share[..., None] * gradient.mean + 2.0 * jnp.einsum("...ij,...j->...i", P_bar, q.mean)
    return Sites(nat1, 2.0 * P_bar)


def blend(old: Sites, target: Sites, rate) -> Sites:
    """A natural-gradient step of size `rate` in (0, 1]."""
    nat1, nat2 = (
        (1.0 - rate) * a + rate * b for a, b in ((old.nat1, target.nat1), (old.nat2, target.nat2))
    )
    return Sites(nat1, nat2, old.base)
