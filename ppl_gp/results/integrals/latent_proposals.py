"""Proposals for the latents of new data, a third each: what they are drawn from without y, the
prior widened, and Gaussians that were fitted with y.

The mixture of all is the weights' denominator (a defensive mixture: Hesterberg 1995), so that
weights are bounded by three times the likelihood, and right however poor the Gaussians are. An
unusual datum has its latent in the prior's tail, often in several places, where one Gaussian is in
one of them: the widened prior is in all.
"""

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
from ppl_gp.results.query.query import Query, drawn_trace

STEPS, RATE, DRAWS = 300, 0.05, 4  # of Adam, for the Gaussians
# factor on the prior's standard deviations, and the draws from which those are taken
WIDER, PILOTS = 3.0, 64


class Proposals(eqx.Module):
    """`guides`: q(h | x*, y*) of each latent site; `wide`: the widened prior. `kwargs`: the model's
    keyword arguments with the observations.
    """

    guides: dict[str, LatentGuide]
    wide: dict[str, LatentGuide]
    kwargs: dict

    @staticmethod
    def fitted(query: Query, observations: dict, log_lik, encoders: dict, key) -> "Proposals":
        """Gaussians for the latents that no encoder knows: the ELBO of each datum at the first draw
        of the hyperparameters.

        `log_lik(trace, moments of f, key)`: log p(y*_n | what was drawn below), (M,).
        """
        draw = query.draws.heaviest
        own = Proposals(encoders, {}, {**query.new_kwargs, **observations})
        sites = own._sites(query, draw, {})
        wide = own._widened(query, draw, sites)
        num = query.layout.num
        sizes = {
            k: latent_size(sites[k], num) for k in query.layout.local_latents if k not in encoders
        }
        if not sizes:
            return Proposals(encoders, wide, own.kwargs)
        conditionals, base = query.conditionals(draw), own.base(query, draw)
        optimiser = optax.adam(RATE)
        start = {
            k: FreeGaussian(
                jnp.concatenate([jnp.zeros((num, n)), jnp.full((num, n), jnp.log(0.5))], 1)
            )
            for k, n in sizes.items()
        }

        def loss(guides, key):
            now = Proposals({**encoders, **guides}, wide, own.kwargs)

            def one(key):
                h = now._from(now.guides, sites, query, key)
                trace, f = drawn_trace(
                    query, draw, conditionals, key, joint=False, latents=h, **observations
                )
                bound = (
                    log_lik(trace, f, key)
                    + now._log_base(query, draw, base, h)
                    - now._log_q(now.guides, sites, query, h)
                )
                return -jnp.sum(bound)

            return jnp.mean(jax.vmap(one)(random.split(key, DRAWS)))

        def step(state, key):
            guides, memory = state
            updates, memory = optimiser.update(jax.grad(loss)(guides, key), memory)
            return (optax.apply_updates(guides, updates), memory), None

        (guides, _), _ = lax.scan(
            step, (start, optimiser.init(cast(Any, start))), random.split(key, STEPS)
        )
        return Proposals({**encoders, **cast(dict, guides)}, wide, own.kwargs)

    def base(self, query: Query, at: Draws) -> dict:
        """{latent site: q(h | x*)} where a prediction draws it from an encoder that sees x alone;
        the others have their prior.
        """
        sites = self._sites(query, at, {})
        return {
            k: q.at(sites[k], None, query.new_args, query.new_kwargs)
            for k, q in query.local.items()
        }

    def draw(self, query: Query, at: Draws, base: dict, key, which):
        """(h, log base(h) - log proposal(h) (M,)), from component `which` % 3."""
        drawn = self._sites(query, at, {}, key)
        known = {k: q.sample(random.fold_in(key, 100 + i)) for i, (k, q) in enumerate(base.items())}
        sites = self._sites(query, at, {})
        ours, wide = (self._from(g, sites, query, key) for g in (self.guides, self.wide))
        first = {k: known.get(k, drawn[k]["value"]) for k in ours}
        h = {
            k: jnp.where(which % 3 == 0, first[k], jnp.where(which % 3 == 1, wide[k], ours[k]))
            for k in ours
        }
        log_base = self._log_base(query, at, base, h)
        others = [self._log_q(g, sites, query, h) for g in (self.guides, self.wide)]
        return h, log_base - (logsumexp(jnp.stack([log_base, *others]), 0) - jnp.log(3.0))

    def _widened(self, query: Query, at: Draws, sites: dict) -> dict:
        """Gaussians about the prior's mean, `WIDER` times as wide, in unconstrained coordinates."""
        pilots = jax.vmap(
            lambda key: {
                k: v["value"] for k, v in self._sites(query, at, {}, key).items() if k in names
            }
        )
        names, wide = query.layout.local_latents, {}
        for k, h in pilots(random.split(random.key(3), PILOTS)).items():
            axis, _ = latent_form(sites[k], query.layout.num)
            free = jnp.moveaxis(biject_to(sites[k]["fn"].support).inv(h), 1 + axis, 1)
            free = jnp.reshape(free, (PILOTS, query.layout.num, -1))
            wide[k] = FreeGaussian(
                jnp.concatenate([jnp.mean(free, 0), jnp.log(WIDER * jnp.std(free, 0) + 1e-6)], 1)
            )
        return wide

    def _sites(self, query: Query, at: Draws, h: dict, key=None) -> dict:
        return run(query.model, query.new_args, self.kwargs, {**at.hyper, **h}, None, key)

    def _from(self, guides: dict, sites, query: Query, key) -> dict:
        """A draw of h, whatever the other latents are."""
        q = {k: g.at(sites[k], None, query.new_args, self.kwargs) for k, g in guides.items()}
        return {k: d.sample(random.fold_in(key, i)) for i, (k, d) in enumerate(sorted(q.items()))}

    def _log_q(self, guides: dict, sites, query: Query, h: dict):
        q = {k: g.at(sites[k], None, query.new_args, self.kwargs) for k, g in guides.items()}
        return _log_prob(query, sites, q, h)

    def _log_base(self, query: Query, at: Draws, base: dict, h: dict):
        """Of h under the model's prior, in which one latent may depend on another, or under what
        stands for it.
        """
        sites = self._sites(query, at, h)
        return _log_prob(query, sites, {k: base.get(k, sites[k]["fn"]) for k in h}, h)


def _log_prob(query: Query, sites, distributions: dict, h: dict):
    terms = [
        log_prob_per_datum({**sites[k], "fn": d, "value": h[k], "scale": None})
        for k, d in distributions.items()
    ]
    return sum(terms[1:], terms[0])
