"""Log densities of new rows under mean field, integrated over its factors exactly: a mixture of
normals with normal-Wishart factors is a mixture of Student-t (Bishop 2006, eq. 10.81).

Where the density of a row is exp(sum_b c_b . t_b(z_b) + d), t_b the statistics of block b, q times
it is q' of the same families, of natural parameters eta_b + c_b, and by Bayes' rule

    log E_q[p(y | z)] = log p(y | z) + log q(z) - log q'(z)   at any z.

That the right-hand side is one number, at values of all sites that are far apart, is the proof for
each row; where it is not (two blocks meet in one density, a local bound stood in for one), rows are
averaged over draws of q. Labels of a row are summed.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.family import Family, Values
from ppl_gp.quick import full_jit
from ppl_gp.reading.arguments import Leaves, argument_of
from ppl_gp.reading.dependence import sources
from ppl_gp.results.integrals.enumerated import labelled, log_density_of_labels
from ppl_gp.results.query.query import Query

_SURROUNDINGS = 3
_TOLERANCE = 1e-9  # of the terms' sizes
_NUMBERS = 10**7  # that rows worked on side by side may hold


def integrated_log_density(
    query: Query, blocks: tuple[Family, ...], labels: np.ndarray | None
) -> Float[Array, "M"] | None:
    """log p(y*_n | x*_n, data), (M,), nats, `labels` (L, sites) of the rows' discrete latents
    summed; `None` where it is not proved exact.

    For each row and labels a gradient of the row's density at the nodes of each block.
    """
    seen, is_all = blocks_of(query, blocks)
    discrete = any(isinstance(q, Discrete) for q in seen)
    if not is_all or discrete or not query.model.reading.grows:
        return None
    if labels is None and query.layout.local_latents:
        return None
    every = jnp.zeros((1, 0), int) if labels is None else jnp.asarray(labels)
    if not (_has_rows(query) and _stand_apart(query, seen, every[0])):
        return None
    found, proved = _integrated(query, seen, every)
    return found if bool(jnp.all(proved)) else None


def blocks_of(query: Query, blocks: tuple[Family, ...]) -> tuple[tuple[Family, ...], bool]:
    """(the blocks of what stands in no row, whether they are all that a prediction sees)."""
    hyper = set(query.draws.hyper)
    seen = tuple(q for q in blocks if set(q.sites) <= hyper)
    return seen, not query.draws.kept and hyper == {k for q in seen for k in q.sites}


def _has_rows(query: Query) -> bool:
    """Whether some argument, and every observation, has a known axis of the rows."""
    axes = query.model.reading.row_axes
    paths = Leaves(query.model, query.new_args, query.new_kwargs).arrays
    observed = {p for p in paths if argument_of(p) in query.observed}
    return not axes.keys().isdisjoint(paths) and observed <= axes.keys()


def _stand_apart(query: Query, blocks, labels) -> bool:
    """Whether no density of a row is computed from two blocks, read off the jaxpr."""

    def densities(hyper):
        trace, _ = labelled(query, hyper, labels)
        sites = {k: s for k, s in trace.items() if s["type"] == "sample"}
        local = query.layout.local_latents
        own = {k: s for k, s in sites.items() if s["is_scored"] or k in local}
        return {k: s["fn"].log_prob(s["value"]) for k, s in own.items()}

    seen = sources(densities, dict(query.draws.at(0).hyper))
    return all(sum(not s.isdisjoint(q.sites) for q in blocks) <= 1 for s in seen.values())


@full_jit
def _integrated(query: Query, blocks: tuple[Family, ...], labels):
    around = [centre_of(blocks)]
    around += [anywhere(blocks, key) for key in random.split(random.key(0), _SURROUNDINGS)]

    def of_row(row):
        one = _one_row(query, row)

        def log_p(values: Values, z):
            return log_density_of_labels(one, values, z)[0]

        of_labels = lambda z: _by_bayes(lambda values: log_p(values, z), blocks, around)  # noqa: E731
        values, proved = lax.map(of_labels, labels)
        return logsumexp(values), jnp.all(proved)

    return lax.map(of_row, _rows(query), batch_size=_side_by_side(blocks))


def _by_bayes(log_p, blocks, around: list[Values]):
    """(log E_q[exp log_p], whether it is the same from all values)."""
    after = [_updated(log_p, q, around[0]) for q in blocks]
    g = jnp.stack([log_p(v) for v in around])
    before = jnp.stack([jnp.stack([q.log_prob(v) for q in blocks]) for v in around])
    behind = jnp.stack([jnp.stack([q.log_prob(v) for q in after]) for v in around])
    found = g + jnp.sum(before - behind, 1)
    size = 1.0 + jnp.abs(g) + jnp.sum(jnp.abs(before) + jnp.abs(behind), 1)
    impossible = jnp.all(jnp.isneginf(g))
    same = jnp.all(jnp.abs(found - found[0]) <= _TOLERANCE * (size + size[0]))
    return jnp.where(impossible, -jnp.inf, found[0]), impossible | same


def _updated(log_p, q: Family, values: Values) -> Family:
    """q with the message of exp log_p in its natural parameters, other blocks at `values`.

    Its own are known, and what is added is a difference of two of the same rounding: elements that
    log_p does not see stay as they are.
    """
    at = q.coordinates()

    def message(function):
        def energy(coordinates):
            nodes = q.nodes(coordinates)
            terms = jax.vmap(lambda z: function({**values, **z}))(nodes.values)
            return jnp.sum(nodes.weights * terms)

        return jax.grad(energy)(at)

    own = message(q.log_prob)
    both = jax.tree.map(jnp.add, own, message(log_p))
    first, second = q.natural(at, own), q.natural(at, both)
    return jax.tree.map(lambda x, a, b: x + (b - a), q, first, second)


def centre_of(blocks) -> Values:
    """Values of all sites in the middle of q: the first node of each block."""
    found: Values = {}
    for q in blocks:
        found |= {k: x[0] for k, x in q.nodes(q.coordinates()).values.items()}
    return found


def anywhere(blocks, key) -> Values:
    """Values of all sites, far apart, anywhere in their supports."""
    found: Values = {}
    for q, k in zip(blocks, random.split(key, len(blocks)), strict=True):
        found |= q.random_values(k)
    return found


def _rows(query: Query) -> dict[str, Array]:
    """{path: (M, ...)} of the arguments, observations among them, with one entry per row."""
    axes = query.model.reading.row_axes
    arrays = Leaves(query.model, query.new_args, query.new_kwargs).arrays
    return {p: jnp.moveaxis(x, axes[p], 0) for p, x in arrays.items() if p in axes}


def _one_row(query: Query, arguments: dict[str, Array]) -> Query:
    """The query at one row."""
    axes = query.model.reading.row_axes
    own = {p: jnp.expand_dims(x, axes[p]) for p, x in arguments.items()}
    args, kwargs = Leaves(query.model, query.new_args, query.new_kwargs).replaced(own)
    plan = dataclasses.replace(query.layout, num=1)
    return dataclasses.replace(query, layout=plan, new_args=args, new_kwargs=kwargs)


def _side_by_side(blocks) -> int:
    """Rows at once: what the nodes of a block hold is held for each."""

    def held(q: Family) -> int:
        shapes: Any = jax.eval_shape(lambda: q.nodes(q.coordinates()).values)
        return sum(math.prod(x.shape) for x in shapes.values())

    return max(1, _NUMBERS // max([1, *(held(q) for q in blocks)]))
