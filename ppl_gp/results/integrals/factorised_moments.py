"""Predictive means, variances and probabilities under mean field, integrated over its factors
exactly: E[y] = E_q[m(z)] and Var[y] = E_q[v(z) + (m(z) - E[y])^2], m and v of y given the sites z,
labels of a row summed with their probabilities.

Where m, and v + m^2, are proved affine in statistics of each block that have nodes
(`mean_field.moment_rules`), their means are sums over the product of the blocks' nodes. The proof
is one for all rows: of random combinations of all entries, each scaled to one. Where it fails (a
sigmoid, a latent of the row that is continuous, a GP, moments that do not exist), q is drawn.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array

from ppl_gp.errors import warn
from ppl_gp.gp import bare
from ppl_gp.mean_field.conjugacy import affine_in, quadratic_in
from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.family import Family, Values
from ppl_gp.mean_field.moment_rules import (
    Rule,
    Squares,
    lacks_variances,
    moment_rules,
)
from ppl_gp.quick import full_jit, quick_jit
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.roles import log_prob_per_datum
from ppl_gp.reading.tracing import run
from ppl_gp.results.integrals.compiled import outcome_moments
from ppl_gp.results.integrals.enumerated import all_labels
from ppl_gp.results.integrals.factorised import anywhere, centre_of
from ppl_gp.results.integrals.likelihood import moments_shape
from ppl_gp.results.query.mixture import Moments
from ppl_gp.results.query.query import Query

MAX_NODES = 10_000  # runs of the model at all rows, labels included
_SURROUNDINGS = 3
_COMBINATIONS = 4  # of all entries, that the proof is of
_TOLERANCE = 1e-9


def integrated_moments(query: Query, blocks: tuple[Family, ...]):
    """What `compiled.predictive` gives, without draws and errors: ({}, {label: Moments of y, or
    `None` where there are none}, {label: log p of its outcomes, (K, ...)}, {}); `None` where it is
    not proved exact.

    A proof of some gradients for each block that y sees; the model at all rows at the product of
    the blocks' nodes and the labels, twice.
    """
    seen = tuple(q for q in blocks if set(q.sites) <= set(query.draws.hyper))
    known = {k for q in seen for k in q.sites}
    sites = query.layout.sites
    if not sites or any(s.axis is None for s in sites):
        return None
    if query.draws.kept or query.local or known != set(query.draws.hyper):
        return None
    labels = all_labels(query)
    if labels is None:
        return None
    labels = jnp.asarray(labels)
    if query.layout.local_latents and not bool(_labels_apart(query, seen, labels)):
        return None
    rules = _proved_rules(query, seen, labels)
    nodes = [jax.eval_shape(r.nodes).weights.shape[0] for r in rules or ()]
    if rules is None or len(labels) * math.prod(nodes) > MAX_NODES:
        return None
    first, second = _integrated(query, seen, rules, labels)
    y: dict[str, Moments | None] = {}
    log_probs = {}
    for site in sites:
        if site.support is not None:
            log_probs[site.label] = jnp.log(first[site.label])
            y[site.label] = outcome_moments(site.support, log_probs[site.label])
        else:
            has = site.label in second
            y[site.label] = Moments(first[site.label], second[site.label]) if has else None
    return {}, y, log_probs, {}


def warn_if_infinite(query: Query, blocks: tuple[Family, ...]) -> None:
    """Warn where draws of q are averaged, and a precision that y sees has no mean of its inverse:
    averages over draws are finite, whatever they stand for.
    """
    seen = [q for q in blocks if set(q.sites) <= set(query.draws.hyper) and lacks_variances(q)]
    if seen and (labels := all_labels(query)) is not None and not query.draws.kept:
        named = {k for q in _seen(query, tuple(seen), jnp.asarray(labels)) for k in q.sites}
        seen = [q for q in seen if not named.isdisjoint(q.sites)]
    if seen:
        warn(
            f"predict: under q the inverse of the precision in {[list(q.sites) for q in seen]} has "
            "no mean (a Student-t of at most two degrees of freedom): variances of y are infinite "
            "where they see it, and the averages over draws given here, with their mean_error, "
            "stand for no number. Ask for quantiles=."
        )


def _given(query: Query, values: Values, z) -> tuple[dict, dict, Array]:
    """({label: E[y], or p of the outcomes with these first}, {label: Var[y]}, log p of the labels
    (M,)), given all sites.
    """
    names, num = query.layout.local_latents, query.layout.num
    own = {k: jnp.broadcast_to(x, (num,)) for k, x in zip(names, z, strict=True)}
    trace = run(query.model, query.new_args, query.new_kwargs, {**values, **own})
    log_p = sum((log_prob_per_datum({**trace[k], "scale": None}) for k in names), jnp.zeros(num))
    first, second = {}, {}
    for site in query.layout.sites:
        fn = bare(trace[site.name]["fn"])
        if site.support is not None:
            values_of = jnp.asarray(site.support).reshape((-1,) + (1,) * len(fn.batch_shape))
            full = jnp.broadcast_to(values_of, (len(site.support), *fn.batch_shape))
            first[site.label] = jnp.exp(fn.log_prob(full))
        elif moments_shape(lambda _, fn=fn: fn, jnp.zeros(())) is not None:
            first[site.label], second[site.label] = (
                jnp.broadcast_to(x, fn.shape()) for x in (fn.mean, fn.variance)
            )
    return first, second, log_p


def _summed(query: Query, values: Values, labels, centre: dict | None) -> tuple[dict, dict]:
    """(E[first], E[v + (m - centre)^2]) over the labels of a row, given all sites in no row."""

    def one(total, z):
        first, second, log_p = _given(query, values, z)
        about = {k: v + (first[k] - (centre or {}).get(k, 0.0)) ** 2 for k, v in second.items()}
        here = tuple(
            {k: _along_rows(query, k, jnp.exp(log_p), x) * x for k, x in part.items()}
            for part in (first, about)
        )
        return jax.tree.map(jnp.add, total, here), None

    first, second, _ = jax.eval_shape(lambda z: _given(query, values, z), labels[0])
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (first, second))
    return lax.scan(one, zero, labels)[0]


def _along_rows(query: Query, label: str, p, x):
    """p (M,) in the axes of a site's values, outcomes before them."""
    (site,) = (s for s in query.layout.sites if s.label == label)
    axis = site.axis + (site.support is not None)  # pyright: ignore[reportOptionalOperand]
    return p.reshape((1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1))


@quick_jit
def _labels_apart(query: Query, blocks, labels):
    """Whether a row sees its own labels alone: what it has under random labels of all rows is what
    it has where all rows have its own.
    """
    values, num = anywhere(blocks, random.key(5)), query.layout.num
    alone = lax.map(lambda z: _given(query, values, z), labels)
    which = random.randint(random.key(6), (num,), 0, len(labels))
    mixed = _given(query, values, labels[which].T)
    same = jnp.ones((), bool)
    for part, every in zip(mixed[:2], alone[:2], strict=True):
        for label, x in part.items():
            (site,) = (s for s in query.layout.sites if s.label == label)
            axis = site.axis + (site.support is not None)  # pyright: ignore[reportOptionalOperand]
            rows = jnp.moveaxis(every[label], axis + 1, 1)[which, jnp.arange(num)]
            same &= _close(jnp.moveaxis(x, axis, 0), rows)
    return same & _close(mixed[2], alone[2][which, jnp.arange(num)])


def _close(a, b):
    return jnp.all((a == b) | (jnp.abs(a - b) <= _TOLERANCE * (1.0 + jnp.abs(b))))


def _proved_rules(query: Query, blocks, labels) -> tuple[Rule, ...] | None:
    """A rule of each block that the moments of y are computed from."""
    found = []
    for q in _seen(query, blocks, labels):
        if isinstance(q, Discrete):
            return None
        proved = (r for r in moment_rules(q) if bool(jnp.all(_is_affine(query, blocks, r, labels))))
        if (rule := next(proved, None)) is None:
            return None
        found.append(rule)
    return tuple(found)


def _seen(query: Query, blocks, labels) -> list[Family]:
    """Blocks that what is integrated is computed from, by the jaxpr."""
    values = dict(query.draws.at(0).hyper)
    from_sites = sources(lambda v: _given(query, v, labels[0]), values)
    names = frozenset().union(*jax.tree.leaves(from_sites))
    return [q for q in blocks if not names.isdisjoint(q.sites)]


@quick_jit
def _is_affine(query: Query, blocks, rule: Rule, labels):
    """Whether the entries' first and second moments are affine in a rule's statistics, the other
    blocks anywhere.
    """
    at_centre = _entries(query, centre_of(blocks), labels)
    size = jnp.abs(at_centre)
    size = jnp.where(jnp.isfinite(size) & (size > 0), size, 1.0)
    # every weight is away from zero, or an entry would be left out
    signs = random.uniform(random.key(7), (_COMBINATIONS, len(size)), minval=0.5, maxval=1.5)
    signs *= jnp.where(random.bernoulli(random.key(8), shape=signs.shape), 1.0, -1.0)

    def in_surroundings(key):
        around = anywhere(blocks, random.fold_in(key, 1))

        def combined(own: Values):
            return signs @ (_entries(query, {**around, **own}, labels) / size)

        if isinstance(rule, Squares):
            return quadratic_in(lambda own: list(combined(own)), rule.q, key)
        return affine_in(combined, rule.q, rule.statistics, key)

    return lax.map(in_surroundings, random.split(random.key(9), _SURROUNDINGS))


def _entries(query: Query, values: Values, labels):
    parts = jax.tree.leaves(_summed(query, values, labels, None))
    return jnp.concatenate([jnp.ravel(x) for x in parts])


@full_jit
def _integrated(query: Query, blocks, rules: tuple[Rule, ...], labels) -> tuple[dict, dict]:
    rest = centre_of(blocks)
    first, _ = _over_nodes(lambda v: _summed(query, v, labels, None), rules, rest)
    _, second = _over_nodes(lambda v: _summed(query, v, labels, first), rules, rest)
    return first, second


def _over_nodes(function, rules, values: Values) -> Any:
    """The weighted sum over the product of the rules' nodes, one after another."""
    if not rules:
        return function(values)
    nodes = rules[0].nodes()

    def inner(own):
        return _over_nodes(function, rules[1:], {**values, **own})

    def add(total, node):
        own, weight = node
        return jax.tree.map(lambda t, x: t + weight * x, total, inner(own)), None

    shape = jax.eval_shape(inner, jax.tree.map(lambda x: x[0], nodes.values))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    return lax.scan(add, zero, (nodes.values, nodes.weights))[0]
