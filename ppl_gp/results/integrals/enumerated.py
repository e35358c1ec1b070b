"""Discrete latents, one per datum, summed at the rows of a model without functions:

    log p(y_n) = log sum_k p(z_n = k) p(y_n | z_n = k).

All rows take the same labels in a run, one run for each combination of the sites' categories. Where
a row sees other rows' labels, or a latent is continuous, latents are drawn.
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp

from ppl_gp.draws import Draws
from ppl_gp.gp import unwrap
from ppl_gp.quick import full_jit
from ppl_gp.reading.roles import log_prob_per_datum, roles
from ppl_gp.reading.tracing import reading_of, run
from ppl_gp.results.integrals.likelihood import log_density_per_datum
from ppl_gp.results.query.layout import Layout
from ppl_gp.results.query.query import Query
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
    supports = [_support(trace[k], query.layout.num) for k in names]
    if any(s is None for s in supports) or np.prod([len(s) for s in supports]) > MAX_COMBINATIONS:  # pyright: ignore[reportArgumentType]
        return None
    found = list(itertools.product(*supports))  # pyright: ignore[reportArgumentType]
    return np.array(found, int).reshape(len(found), len(names))


def _support(site: dict, num: int) -> list[int] | None:
    """The categories of a site of one label a row."""
    fn: Any = unwrap(site["fn"])
    if not (fn.support.is_discrete and fn.has_enumerate_support and site["fn"].shape() == (num,)):
        return None
    return np.ravel(fn.enumerate_support(expand=False)).astype(int).tolist()


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
    return log_prior + log_density_per_datum(trace, query.layout)


def summed_log_density(query: Query, draw: Draws, labels):
    """log p(y_n) at one draw, (M,). K runs of the model."""
    return logsumexp(lax.map(lambda z: log_density_of_labels(query, draw.hyper, z), labels), 0)


def densities_without_labels(fit: Record, sites: dict, draws: dict, num: int):
    """(log p(y_n | theta) (S, N), draws without labels) of the training data at `draws`, {site:
    (S, ...)}, nats; `None` where a row has no labels, or they cannot be summed (a continuous
    latent, rows that see others'). S K runs of the model for K combinations of labels.

    Leaving a datum out leaves its label out as well: given labels that were drawn with the datum,
    no weights of the draws could.
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
