"""The bound of a model with layers and latents: doubly stochastic, importance-weighted for each
datum.

K copies h_n^k ~ q(h_n) of every datum's latents pass through the layers together:
  sum_n w_n E log (1/K) sum_k exp(E_q(f)[log p(y_n | f, h_n^k)]) p(h_n^k) / q(h_n^k)  -  sum over GP
  sites of KL[q(u) || p(u)]
(Salimbeni, Dutordoir, Hensman & Deisenroth 2019, eq. 16-17; Leibfried et al. 2022). The log is
taken for each datum, the global KL stands outside it, w_n = N / B outside the mean. K = 1 is the
ELBO (Salimbeni & Deisenroth 2017, eq. 16), with KL[q(h) || p(h)] in closed form where NumPyro has
it. Inner layers are drawn, jointly over a datum's copies; the last is integrated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from numpyro.distributions.kl import kl_divergence

from ppl_gp.deep.latents import latent_form
from ppl_gp.deep.layers import Moments, Passed, pass_through
from ppl_gp.deep.structure import Structure
from ppl_gp.gp import unwrap
from ppl_gp.model.declared import declare
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.tracing import log_prob_per_datum, plate_scale, run, sum_per_datum
from ppl_gp.sparse import bound as shallow
from ppl_gp.sparse.bound import Batch, Terms, Variational
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.process import SparseProcess

COPIES = "ppl_gp_copies"


class Sampling(NamedTuple):
    """How the bound is estimated. Static.

    `num_importance`: K. `num_paths`: independent passes through the layers that are averaged.
    `expected_last`: the outer layer enters by E_q(f)[log p(y | f)] inside the log, or else is drawn
    jointly at the copies. `doubly_reparameterised`: the gradient of q(h) of Tucker et al. (2019).
    `beta`: weight of every KL term, 1 for a bound; of a compiled step an array.
    """

    num_importance: int = 1
    num_paths: int = 1
    expected_last: bool = True
    doubly_reparameterised: bool = False
    beta: Any = 1.0


def terms(
    model: Callable,
    how: Expectation,
    sampling: Sampling,
    of: Structure,
    hyper: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict | None = None,
) -> Terms:
    """The bound's terms, nats. O(M^3 + M^2 B) a GP site, times num_paths K where its inputs differ;
    K^3 B a drawn layer.
    """
    model = declare(model, batch.args, batch.kwargs)
    if of.is_shallow:
        return shallow.terms(model, how, hyper, variational, batch, nudge, sampling.beta)
    given = {**hyper, **batch.given}
    first = run(model, batch.args, batch.kwargs, given)
    priors = {k: unwrap(first[k]["fn"]) for k in of.gps}
    processes, q, roots = shallow.processes(priors, variational, nudge)
    known = {k: Moments(*processes[k].marginals(priors[k])) for k in of.given}
    path = _Path(model, how, sampling, of, given, variational, batch, processes, known)
    per_datum = jnp.mean(
        lax.map(path.log_mean_weight, random.split(batch.key, sampling.num_paths)), 0
    )
    total = jnp.sum(
        jnp.where(batch.weights > 0, batch.weights * plate_scale(first) * per_datum, 0.0)
    )
    log_lik = JointLogLikelihood(model, batch.weights.shape[0], given, batch.args, batch.kwargs)
    weights = shallow.kl_weights(first, priors, sampling.beta)
    return Terms(total, shallow.weighted_kl(q, weights), log_lik.shared(), q, roots, weights)


class _Path(NamedTuple):
    """One pass of a batch's copies through the layers."""

    model: Callable
    how: Expectation
    sampling: Sampling
    of: Structure
    given: dict
    variational: Variational
    batch: Batch
    processes: dict[str, SparseProcess]
    known: dict[str, Moments]

    @property
    def drawn(self) -> tuple[str, ...]:
        """GP sites that are drawn."""
        return self.of.inner if self.sampling.expected_last else self.of.gps

    @property
    def axis(self) -> str | None:
        """The name of the copies' axis, where a GP site is drawn at copies of different inputs."""
        joint = self.sampling.num_importance > 1 and set(self.drawn) & set(self.of.varying)
        return COPIES if joint else None

    @property
    def num(self) -> int:
        """B."""
        return self.batch.weights.shape[0]

    def log_mean_weight(self, key) -> Float[Array, "B"]:
        """log (1/K) sum_k w_nk, (B,), nats."""
        K = self.sampling.num_importance
        key_f, *keys = random.split(key, 1 + K)
        if K == 1:
            return self._log_weight(key_f, keys[0], None)
        keys = jnp.stack(keys)

        def weights(share):
            if self.axis is None:  # one after the other, which is faster than one large problem
                return lax.map(lambda k: self._log_weight(key_f, *k), (keys, share))
            return jax.vmap(lambda k, s: self._log_weight(key_f, k, s), axis_name=COPIES)(
                keys, share
            )

        share = None
        if self.sampling.doubly_reparameterised:
            share = jax.nn.softmax(lax.stop_gradient(weights(None)), 0)
        return logsumexp(weights(share), 0) - jnp.log(K)

    def _log_weight(self, key_f, key_h, share) -> Float[Array, "B"]:
        """log of p(y_n | h_n) p(h_n) / q(h_n) of one copy."""
        q = self._latent_posteriors(stop=False)
        h = {k: one.sample(random.fold_in(key_h, i)) for i, (k, one) in enumerate(q.items())}
        if share is not None:
            q = self._latent_posteriors(stop=True)
            h = {k: scale_gradient(v, self._along_data(k, v, share)) for k, v in h.items()}
        given = {**self.given, **h}
        batch = self.batch
        passed = pass_through(
            self.model,
            batch.args,
            batch.kwargs,
            given,
            self.processes,
            self.of,
            key_f,
            self.axis,
            self.drawn,
            self.known,
        )
        ratio = sum(
            [self._log_ratio(passed.trace, k, q[k]) for k in self.of.latents], jnp.zeros(self.num)
        )
        return (
            self._log_lik(passed, given, key_f) / plate_scale(passed.trace)
            + self.sampling.beta * ratio
        )

    def _latent_posteriors(self, stop: bool):
        batch, guides = self.batch, self.variational.latents
        guides = lax.stop_gradient(guides) if stop else guides
        sites = run(self.model, batch.args, batch.kwargs, self.given)
        return {
            k: guides[k].at(sites[k], batch.rows, batch.args, batch.kwargs) for k in self.of.latents
        }

    def _along_data(self, name, value, share):
        site = run(self.model, self.batch.args, self.batch.kwargs, self.given)[name]
        return jnp.expand_dims(
            share, [i for i in range(value.ndim) if i != latent_form(site, self.num)[0]]
        )

    def _log_lik(self, passed: Passed, given, key):
        """E_q(f)[log p(y_n | f)], (B,), or log p(y_n | f) where every layer was drawn."""
        batch = self.batch
        fixed = {**given, **passed.values(self.drawn)}
        log_lik = JointLogLikelihood(self.model, self.num, fixed, batch.args, batch.kwargs)
        if not passed.moments:
            return log_lik(passed.values(self.of.outer))
        mean, variance = (
            {k: getattr(m, part) for k, m in passed.moments.items()}
            for part in ("mean", "variance")
        )
        return expected_log_lik(log_lik, mean, variance, self.how, key)

    def _log_ratio(self, trace: dict, name: str, q) -> Float[Array, "B"]:
        """log p(h_n) - log q(h_n), or minus its expectation KL[q || p] where that is known and K =
        1; times the site's `scale`.
        """
        site = {**trace[name], "scale": own_scale(trace, name)}
        if self.sampling.num_importance == 1:
            try:
                return -sum_per_datum(site, site["scale"] * kl_divergence(q, site["fn"]), self.num)
            except NotImplementedError:
                pass
        return log_prob_per_datum(site, self.num) - log_prob_per_datum({**site, "fn": q}, self.num)


def own_scale(trace: dict, name: str):
    """What `numpyro.handlers.scale` multiplies a site's log-density by: its scale without the N / B
    of plates that subsample.
    """
    site = trace[name]
    if site["scale"] is None:
        return 1.0
    around = {frame.name for frame in site["cond_indep_stack"]}
    return site["scale"] / plate_scale({k: s for k, s in trace.items() if k in around})


@jax.custom_vjp
def scale_gradient(x, factor):
    """x, whose cotangent is multiplied by `factor` on its way back."""
    return x


scale_gradient.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (factor * g, jnp.zeros_like(factor))
)
