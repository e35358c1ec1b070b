"""Proposals for the latents of new data: what they are drawn from without y, and Gaussians that were fitted with it, half each.

The mixture of both is the weights' denominator (a defensive mixture: Hesterberg 1995), so that weights are bounded by twice the
likelihood, and right however poor the Gaussians are.
"""

from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax, random

from ppl_gp.deep.latents import FreeGaussian, LatentGuide, latent_size
from ppl_gp.results.case import Case, drawn_trace
from ppl_gp.tracing import log_prob_per_datum, run

STEPS, RATE, DRAWS = 300, 0.05, 4  # of Adam, for the Gaussians


class Proposals(eqx.Module):
    """`guides`: q(h | x*, y*) of each latent site. `kwargs`: the model's keyword arguments with the observations."""

    guides: dict[str, LatentGuide]
    kwargs: dict

    @staticmethod
    def fitted(case: Case, observations: dict, log_lik, encoders: dict, key) -> "Proposals":
        """Gaussians for the latents that no encoder knows: the ELBO of each datum at the first draw of the hyperparameters.

        `log_lik(trace, moments of f, key)`: log p(y*_n | what was drawn below), (M,).
        """
        hyper, latents = jax.tree.map(lambda x: x[0], case.draws)
        own = Proposals(encoders, {**case.new_kwargs, **observations})
        sites = own._sites(case, hyper, {})
        num = case.layout.num
        sizes = {k: latent_size(sites[k], num) for k in case.layout.local_latents if k not in encoders}
        if not sizes:
            return own
        conditionals, base = case.conditionals(hyper, latents), own.base(case, hyper)
        optimiser = optax.adam(RATE)
        start = {
            k: FreeGaussian(jnp.concatenate([jnp.zeros((num, n)), jnp.full((num, n), jnp.log(0.5))], 1))
            for k, n in sizes.items()
        }

        def loss(guides, key):
            now = Proposals({**encoders, **guides}, own.kwargs)

            def one(key):
                h = now._from_guides(sites, case, key)
                trace, f = drawn_trace(case, hyper, conditionals, key, joint=False, latents=h, **observations)
                bound = log_lik(trace, f, key) + now._log_base(case, hyper, base, h) - now._log_q(sites, case, h)
                return -jnp.sum(bound)

            return jnp.mean(jax.vmap(one)(random.split(key, DRAWS)))

        def step(state, key):
            guides, memory = state
            updates, memory = optimiser.update(jax.grad(loss)(guides, key), memory)
            return (optax.apply_updates(guides, updates), memory), None

        (guides, _), _ = lax.scan(step, (start, optimiser.init(start)), random.split(key, STEPS))
        return Proposals({**encoders, **cast(dict, guides)}, own.kwargs)

    def base(self, case: Case, hyper: dict) -> dict:
        """{latent site: q(h | x*)} where a prediction draws it from an encoder that sees x alone; the others have their prior."""
        sites = self._sites(case, hyper, {})
        return {k: q.at(sites[k], None, case.new_args, case.new_kwargs) for k, q in case.local.items()}

    def draw(self, case: Case, hyper: dict, base: dict, key, from_base):
        """(h, log base(h) - log proposal(h) (M,))."""
        drawn = self._sites(case, hyper, {}, key)
        known = {k: q.sample(random.fold_in(key, 100 + i)) for i, (k, q) in enumerate(base.items())}
        sites = self._sites(case, hyper, {})
        ours = self._from_guides(sites, case, key)
        h = {k: jnp.where(from_base, known.get(k, drawn[k]["value"]), ours[k]) for k in ours}
        log_base = self._log_base(case, hyper, base, h)
        return h, log_base - (jnp.logaddexp(self._log_q(sites, case, h), log_base) - jnp.log(2.0))

    def _sites(self, case: Case, hyper: dict, h: dict, key=None) -> dict:
        return run(case.model, case.new_args, self.kwargs, {**case.new_hyper(hyper), **h}, None, key)

    def _from_guides(self, sites, case: Case, key) -> dict:
        """A draw of h, whatever the other latents are."""
        q = {k: g.at(sites[k], None, case.new_args, self.kwargs) for k, g in self.guides.items()}
        return {k: d.sample(random.fold_in(key, i)) for i, (k, d) in enumerate(sorted(q.items()))}

    def _log_q(self, sites, case: Case, h: dict):
        q = {k: g.at(sites[k], None, case.new_args, self.kwargs) for k, g in self.guides.items()}
        return _log_prob(case, sites, q, h)

    def _log_base(self, case: Case, hyper: dict, base: dict, h: dict):
        """Of h under the model's prior, in which one latent may depend on another, or under what stands for it."""
        sites = self._sites(case, hyper, h)
        return _log_prob(case, sites, {k: base.get(k, sites[k]["fn"]) for k in h}, h)


def _log_prob(case: Case, sites, distributions: dict, h: dict):
    terms = [
        log_prob_per_datum({**sites[k], "fn": d, "value": h[k], "scale": None}, case.layout.num)
        for k, d in distributions.items()
    ]
    return sum(terms[1:], terms[0])
