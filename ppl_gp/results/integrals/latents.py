"""Discrete latents, one per datum, summed at the rows of a model without functions:

    log p(y_n) = log sum_k p(z_n = k) p(y_n | z_n = k).

All rows take the same labels in a run, one run for each combination of the sites' categories. Where
a row sees other rows' labels, or a latent is continuous, latents are drawn.

Other latents of new data have proposals, a third each: what they are drawn from without y, the
prior widened, and Gaussians that were fitted with y. Their mixture is the weights' denominator (a
defensive mixture: Hesterberg 1995), so that weights are bounded by three times the likelihood, and
right however poor the Gaussians are. An unusual datum has its latent in the prior's tail, often in
several places, where one Gaussian is in one of them: the widened prior is in all.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.scipy.special import logsumexp
from numpyro.distributions.transforms import biject_to

from ppl_gp.deep.latents import FreeGaussian, LatentGuide, latent_form, latent_size
from ppl_gp.draws import Draws
from ppl_gp.quick import full_jit
from ppl_gp.reading.roles import log_prob_per_datum, roles
from ppl_gp.reading.tracing import reading_of, run
from ppl_gp.results.integrals import several
from ppl_gp.results.query.layout import Layout, outcomes
from ppl_gp.results.query.query import Query, drawn_runs
from ppl_gp.results.record import Record

MAX_COMBINATIONS = 512


def combinations(query: Query) -> np.ndarray | None:
    """(K, sites) labels of `query.layout.local_latents`, in order, where they can be summed."""
    if query.draws.kept or query.local or not query.layout.local_latents:
        return None
    reading = reading_of(query.model)
    mixed = {k for k, *_ in reading.mixing}
    is_apart = not reading.coupled and mixed.isdisjoint(query.layout.local_latents)
    return all_labels(query) if is_apart else None


def all_labels(query: Query) -> np.ndarray | None:
    """(K, sites) labels of the rows' latents; `None` where one has no short list of categories."""
    names, hyper = query.layout.local_latents, query.draws.at(0).hyper
    trace = run(query.model, query.new_args, query.new_kwargs, hyper) if names else {}
    fns = [trace[k]["fn"] for k in names]
    supports = [outcomes(fn) or () for fn in fns if fn.shape() == (query.layout.num,)]
    num = math.prod(map(len, supports))
    if len(supports) < len(names) or not 0 < num <= MAX_COMBINATIONS:
        return None
    return np.array(list(itertools.product(*supports)), int).reshape(num, len(names))


def labelled(query: Query, hyper: dict, labels) -> tuple[dict, Any]:
    """(trace at new rows, log p(z_n = labels) of every row (M,)), `labels` (sites,) the same in all
    rows or (sites, M); `hyper`: {site: value} of what stands in no row.
    """
    names, num = query.layout.local_latents, query.layout.num
    z = {k: jnp.broadcast_to(x, (num,)) for k, x in zip(names, labels, strict=True)}
    trace = run(query.model, query.new_args, query.new_kwargs, {**hyper, **z})
    terms = (log_prob_per_datum({**trace[k], "scale": None}) for k in names)
    return trace, sum(terms, jnp.zeros(num))


def log_density_of_labels(query: Query, hyper: dict, labels):
    """log p(y_n, z_n = labels) of every row, (M,), as `labelled`."""
    trace, log_prior = labelled(query, hyper, labels)
    return log_prior + several.log_density_per_datum(trace)


def summed_log_density(query: Query, draw: Draws, labels):
    """log p(y_n) at one draw, (M,). K runs of the model."""
    return logsumexp(lax.map(lambda z: log_density_of_labels(query, draw.hyper, z), labels), 0)


def densities_without_labels(fit: Record, sites: dict, draws: dict, num: int):
    """(log p(y_n | theta) (S, N), draws without labels) of the training data at `draws`, {site:
    (S, ...)}, nats; `None` where a row has no labels, or they cannot be summed (a continuous
    latent, rows that see others'). S K runs of the model for K combinations of labels.

    Leaving a datum out takes out its label, which no weights of draws with labels can do.
    """
    labels = tuple(k for k in roles(sites).local_latents if k in draws)
    if not labels or fit.latent:
        return None
    theta = {k: x for k, x in draws.items() if k not in labels}
    inputs = fit.args, fit.kwargs
    drawn = Draws.equal(theta, {}, len(draws[labels[0]]))
    query = Query(fit.model, Layout((), labels, num), drawn, None, *inputs, *inputs, {})
    every = combinations(query)
    return None if every is None else (_summed(query, jnp.asarray(every)), theta)


@full_jit
def _summed(query: Query, labels):
    return lax.map(lambda draw: summed_log_density(query, draw, labels), query.draws)


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
        of the largest weight. `groups`: `several.coupled_groups`.
        """
        draw, num = query.draws.at(jnp.argmax(query.draws.log_weights)), query.layout.num
        own = Proposals(query, groups, encoders, {})
        sites = own._sites(draw)
        run_at, base = drawn_runs(query, draw, False), query.encoded(draw)
        own = dataclasses.replace(own, wide=own._widened(run_at, sites))
        unknown = [k for k in query.layout.local_latents if k not in encoders]
        sizes = {k: latent_size(sites[k], num) for k in unknown}
        if not sizes:
            return own
        log_lik, optimiser = several.quick_log_lik(query, groups), optax.adam(RATE)
        start = {
            k: _gaussian(jnp.zeros((num, n)), jnp.full((num, n), 0.5)) for k, n in sizes.items()
        }

        def loss(guides, key):
            def one(key):
                q = own._at({**encoders, **guides}, sites)
                key_h, key_run, key_p = random.split(key, 3)
                h = _sampled(q, key_h)
                trace, f = run_at(key_run, h)
                log_p = log_lik(trace, f, key_p) + _log_base(trace, base, h)
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
        log_lik = several.log_lik_above(self.query, self.groups)
        sites = self._sites(draw)
        others = [self._at(guides, sites) for guides in (self.guides, self.wide)]

        def one(entry):
            key, which = entry
            key_h, key_run, key_p = random.split(key, 3)
            # with the same key f is the same function in both runs, which priors of h may see
            h = _chosen(run_at(key_run)[0], others, key_h, which)
            trace, f = run_at(key_run, h)
            log_base = _log_base(trace, base, h)
            log_q = [log_base, *(_log_prob(sites, q, h) for q in others)]
            log_ratio = log_base - (logsumexp(jnp.stack(log_q), 0) - jnp.log(3.0))
            return h, log_lik(trace, f, key_p) + log_ratio

        return one

    def _widened(self, run_at: Callable, sites: dict) -> dict:
        """Gaussians about the prior's mean, `WIDER` times as wide, in unconstrained coordinates."""
        names, num = self.query.layout.local_latents, self.query.layout.num

        def pilot(key):
            drawn, _ = run_at(key, {})
            return {k: drawn[k]["value"] for k in names if k in drawn}

        wide = {}
        for k, h in jax.vmap(pilot)(random.split(random.key(3), PILOTS)).items():
            axis, _ = latent_form(sites[k], num)
            free = jnp.moveaxis(biject_to(sites[k]["fn"].support).inv(h), 1 + axis, 1)
            free = jnp.reshape(free, (PILOTS, num, -1))
            wide[k] = _gaussian(jnp.mean(free, 0), WIDER * jnp.std(free, 0) + 1e-6)
        return wide

    def _sites(self, at: Draws) -> dict:
        return run(self.query.model, self.query.new_args, self.query.new_kwargs, at.hyper)

    def _at(self, guides: dict, sites: dict) -> dict:
        """{latent site: its distribution}, whatever the other latents are."""
        new = self.query.new_args, self.query.new_kwargs
        return {k: g.at(sites[k], None, *new) for k, g in guides.items()}


def _chosen(drawn: dict, others: list[dict], key, which) -> dict:
    """h from the prior, or an encoder, the widened prior, or our Gaussians."""
    ours, wide = (_sampled(q, key) for q in others)
    first = {k: drawn[k]["value"] for k in ours}
    chosen = lambda a, b, c: jnp.where(which % 3 == 0, a, jnp.where(which % 3 == 1, b, c))  # noqa: E731
    return {k: chosen(first[k], wide[k], ours[k]) for k in ours}


def _log_base(trace: dict, base: dict, h: dict):
    """Of h under its prior in a run with h, where it may depend on others, or an encoder."""
    return _log_prob(trace, {k: base.get(k, trace[k]["fn"]) for k in h}, h)


def _gaussian(mean, sd) -> FreeGaussian:
    return FreeGaussian(jnp.concatenate([mean, jnp.log(sd)], 1))


def _sampled(q: dict, key) -> dict:
    return {k: d.sample(random.fold_in(key, i)) for i, (k, d) in enumerate(sorted(q.items()))}


def _log_prob(sites: dict, distributions: dict, h: dict):
    terms = [
        log_prob_per_datum({**sites[k], "fn": d, "value": h[k], "scale": None})
        for k, d in distributions.items()
    ]
    return sum(terms[1:], terms[0])
