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
from ppl_gp.results.query.query import Case, drawn_trace

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
    def fitted(case: Case, observations: dict, log_lik, encoders: dict, key) -> "Proposals":
        """Gaussians for the latents that no encoder knows: the ELBO of each datum at the first draw
        of the hyperparameters.

        `log_lik(trace, moments of f, key)`: log p(y*_n | what was drawn below), (M,).
        """
        draw = case.draws.heaviest
        own = Proposals(encoders, {}, {**case.new_kwargs, **observations})
        sites = own._sites(case, draw, {})
        wide = own._widened(case, draw, sites)
        num = case.layout.num
        sizes = {
            k: latent_size(sites[k], num) for k in case.layout.local_latents if k not in encoders
        }
        if not sizes:
            return Proposals(encoders, wide, own.kwargs)
        conditionals, base = case.conditionals(draw), own.base(case, draw)
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
                h = now._from(now.guides, sites, case, key)
                trace, f = drawn_trace(
                    case, draw, conditionals, key, joint=False, latents=h, **observations
                )
                bound = (
                    log_lik(trace, f, key)
                    + now._log_base(case, draw, base, h)
                    - now._log_q(now.guides, sites, case, h)
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

    def base(self, case: Case, at: Draws) -> dict:
        """{latent site: q(h | x*)} where a prediction draws it from an encoder that sees x alone;
        the others have their prior.
        """
        sites = self._sites(case, at, {})
        return {
            k: q.at(sites[k], None, case.new_args, case.new_kwargs) for k, q in case.local.items()
        }

    def draw(self, case: Case, at: Draws, base: dict, key, which):
        """(h, log base(h) - log proposal(h) (M,)), from component `which` % 3."""
        drawn = self._sites(case, at, {}, key)
        known = {k: q.sample(random.fold_in(key, 100 + i)) for i, (k, q) in enumerate(base.items())}
        sites = self._sites(case, at, {})
        ours, wide = (self._from(g, sites, case, key) for g in (self.guides, self.wide))
        first = {k: known.get(k, drawn[k]["value"]) for k in ours}
        h = {
            k: jnp.where(which % 3 == 0, first[k], jnp.where(which % 3 == 1, wide[k], ours[k]))
            for k in ours
        }
        log_base = self._log_base(case, at, base, h)
        others = [self._log_q(g, sites, case, h) for g in (self.guides, self.wide)]
        return h, log_base - (logsumexp(jnp.stack([log_base, *others]), 0) - jnp.log(3.0))

    def _widened(self, case: Case, at: Draws, sites: dict) -> dict:
        """Gaussians about the prior's mean, `WIDER` times as wide, in unconstrained coordinates."""
        pilots = jax.vmap(
            lambda key: {
                k: v["value"] for k, v in self._sites(case, at, {}, key).items() if k in names
            }
        )
        names, wide = case.layout.local_latents, {}
        for k, h in pilots(random.split(random.key(3), PILOTS)).items():
            axis, _ = latent_form(sites[k], case.layout.num)
            free = jnp.moveaxis(biject_to(sites[k]["fn"].support).inv(h), 1 + axis, 1)
            free = jnp.reshape(free, (PILOTS, case.layout.num, -1))
            wide[k] = FreeGaussian(
                jnp.concatenate([jnp.mean(free, 0), jnp.log(WIDER * jnp.std(free, 0) + 1e-6)], 1)
            )
        return wide

    def _sites(self, case: Case, at: Draws, h: dict, key=None) -> dict:
        return run(case.model, case.new_args, self.kwargs, {**at.hyper, **h}, None, key)

    def _from(self, guides: dict, sites, case: Case, key) -> dict:
        """A draw of h, whatever the other latents are."""
        q = {k: g.at(sites[k], None, case.new_args, self.kwargs) for k, g in guides.items()}
        return {k: d.sample(random.fold_in(key, i)) for i, (k, d) in enumerate(sorted(q.items()))}

    def _log_q(self, guides: dict, sites, case: Case, h: dict):
        q = {k: g.at(sites[k], None, case.new_args, self.kwargs) for k, g in guides.items()}
        return _log_prob(case, sites, q, h)

    def _log_base(self, case: Case, at: Draws, base: dict, h: dict):
        """Of h under the model's prior, in which one latent may depend on another, or under what
        stands for it.
        """
        sites = self._sites(case, at, h)
        return _log_prob(case, sites, {k: base.get(k, sites[k]["fn"]) for k in h}, h)


def _log_prob(case: Case, sites, distributions: dict, h: dict):
    terms = [
        log_prob_per_datum({**sites[k], "fn": d, "value": h[k], "scale": None})
        for k, d in distributions.items()
    ]
    return sum(terms[1:], terms[0])
