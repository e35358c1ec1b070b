"""Proposals for the latents of new data, a third each: what they are drawn from without y, the
prior widened, and Gaussians that were fitted with y.

The mixture of all is the weights' denominator (a defensive mixture: Hesterberg 1995), so that
weights are bounded by three times the likelihood, and right however poor the Gaussians are. An
unusual datum has its latent in the prior's tail, often in several places, where one Gaussian is in
one of them: the widened prior is in all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax, random
from jax.scipy.special import logsumexp
from numpyro.distributions.transforms import biject_to

from ppl_gp.deep.latents import FreeGaussian, LatentGuide, latent_form, latent_size
from ppl_gp.draws import Draws
from ppl_gp.reading.roles import log_prob_per_datum
from ppl_gp.reading.tracing import run
from ppl_gp.results.integrals.several import log_lik_above, quick_log_lik
from ppl_gp.results.query.query import Query, drawn_runs

STEPS, RATE, DRAWS = 300, 0.05, 4  # of Adam, for the Gaussians
# factor on the prior's standard deviations, and the draws from which those are taken
WIDER, PILOTS = 3.0, 64


class Proposals(eqx.Module):
    """`guides`: q(h | x*, y*) of each latent site; `wide`: the widened prior."""

    query: Query
    groups: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    guides: dict[str, LatentGuide]
    wide: dict[str, LatentGuide]

    @staticmethod
    def fitted(query: Query, groups, encoders: dict, key) -> "Proposals":
        """Gaussians for the latents that no encoder knows: the ELBO of each datum at the first draw
        of the hyperparameters. `groups`: `several.coupled_groups`.
        """
        draw, num = query.draws.heaviest, query.layout.num
        own = Proposals(query, groups, encoders, {})
        sites = own._sites(draw, {})
        own = dataclasses.replace(own, wide=own._widened(draw, sites))
        unknown = [k for k in query.layout.local_latents if k not in encoders]
        sizes = {k: latent_size(sites[k], num) for k in unknown}
        if not sizes:
            return own
        run_at, base = drawn_runs(query, draw, False), query.encoded(draw)
        log_lik, optimiser = quick_log_lik(query, groups), optax.adam(RATE)
        start = {
            k: FreeGaussian(
                jnp.concatenate([jnp.zeros((num, n)), jnp.full((num, n), jnp.log(0.5))], 1)
            )
            for k, n in sizes.items()
        }

        def loss(guides, key):
            def one(key):
                q = own._at({**encoders, **guides}, sites)
                h = _sampled(q, key)
                trace, f = run_at(key, h)
                log_p = log_lik(trace, f, key) + own._log_base(draw, base, h)
                return -jnp.sum(log_p - _log_prob(sites, q, h))

            return jnp.mean(jax.vmap(one)(random.split(key, DRAWS)))

        def step(state, key):
            guides, memory = state
            updates, memory = optimiser.update(jax.grad(loss)(guides, key), memory)
            return (optax.apply_updates(guides, updates), memory), None

        state = start, optimiser.init(cast(Any, start))
        (guides, _), _ = lax.scan(step, state, random.split(key, STEPS))
        return dataclasses.replace(own, guides={**encoders, **cast(dict, guides)})

    def weighed(self, draw: Draws) -> Callable:
        """(key, which) -> (h from component `which` % 3, its log weight (M,)), layers below drawn
        anew for each: weights that are right on average are right (Andrieu & Roberts 2009).
        """
        run_at, base = drawn_runs(self.query, draw, False), self.query.encoded(draw)
        log_lik = log_lik_above(self.query, self.groups)

        def one(entry):
            key, which = entry
            h, log_ratio = self._draw(draw, base, key, which)
            trace, f = run_at(key, h)
            return h, log_lik(trace, f, key) + log_ratio

        return one

    def _draw(self, at: Draws, base: dict, key, which):
        """(h, log base(h) - log proposal(h) (M,))."""
        drawn, sites = self._sites(at, {}, key), self._sites(at, {})
        known = {k: q.sample(random.fold_in(key, 100 + i)) for i, (k, q) in enumerate(base.items())}
        others = [self._at(guides, sites) for guides in (self.guides, self.wide)]
        ours, wide = (_sampled(q, key) for q in others)
        first = {k: known.get(k, drawn[k]["value"]) for k in ours}
        h = {
            k: jnp.where(which % 3 == 0, first[k], jnp.where(which % 3 == 1, wide[k], ours[k]))
            for k in ours
        }
        log_base = self._log_base(at, base, h)
        log_q = [log_base, *(_log_prob(sites, q, h) for q in others)]
        return h, log_base - (logsumexp(jnp.stack(log_q), 0) - jnp.log(3.0))

    def _widened(self, at: Draws, sites: dict) -> dict:
        """Gaussians about the prior's mean, `WIDER` times as wide, in unconstrained coordinates."""
        names, num = self.query.layout.local_latents, self.query.layout.num

        def pilot(key):
            drawn = self._sites(at, {}, key)
            return {k: drawn[k]["value"] for k in names if k in drawn}

        wide = {}
        for k, h in jax.vmap(pilot)(random.split(random.key(3), PILOTS)).items():
            axis, _ = latent_form(sites[k], num)
            free = jnp.moveaxis(biject_to(sites[k]["fn"].support).inv(h), 1 + axis, 1)
            free = jnp.reshape(free, (PILOTS, num, -1))
            wide[k] = FreeGaussian(
                jnp.concatenate([jnp.mean(free, 0), jnp.log(WIDER * jnp.std(free, 0) + 1e-6)], 1)
            )
        return wide

    def _sites(self, at: Draws, h: dict, key=None) -> dict:
        query = self.query
        return run(query.model, query.new_args, query.new_kwargs, {**at.hyper, **h}, None, key)

    def _at(self, guides: dict, sites: dict) -> dict:
        """{latent site: its distribution}, whatever the other latents are."""
        new = self.query.new_args, self.query.new_kwargs
        return {k: g.at(sites[k], None, *new) for k, g in guides.items()}

    def _log_base(self, at: Draws, base: dict, h: dict):
        """Of h under the prior, where latents may depend on others, or an encoder."""
        sites = self._sites(at, h)
        return _log_prob(sites, {k: base.get(k, sites[k]["fn"]) for k in h}, h)


def _sampled(q: dict, key) -> dict:
    return {k: d.sample(random.fold_in(key, i)) for i, (k, d) in enumerate(sorted(q.items()))}


def _log_prob(sites: dict, distributions: dict, h: dict):
    terms = [
        log_prob_per_datum({**sites[k], "fn": d, "value": h[k], "scale": None})
        for k, d in distributions.items()
    ]
    return sum(terms[1:], terms[0])
