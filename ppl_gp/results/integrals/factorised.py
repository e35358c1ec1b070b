"""Log densities of new rows under mean field, integrated over its factors exactly: a mixture of
normals with normal-Wishart factors is a mixture of Student-t (Bishop 2006, eq. 10.81).

Where the density of a row is exp(sum_b c_b . t_b(z_b) + d), t_b the statistics of block b, q times
it is q' of the same families, of natural parameters eta_b + c_b, and by Bayes' rule

    log E_q[p(y | z)] = log p(y | z) + log q(z) - log q'(z)   at any z.

That the right-hand side is one number, at values of all sites that are far apart, is the proof for
each row; where it is not (two blocks meet in one density, a local bound stood in for one), rows are
averaged over draws of q. Labels of a row are summed.

Predictive means, variances and probabilities under mean field, integrated over its factors
exactly: E[y] = E_q[m(z)] and Var[y] = E_q[v(z) + (m(z) - E[y])^2], m and v of y given the sites z,
labels of a row summed with their probabilities.

Where m, and v + m^2, are proved affine in statistics of each block that have nodes
(`Family.moment_rules`), their means are sums over the product of the blocks' nodes. The proof
is one for all rows: of random combinations of all entries, each scaled to one. Where it fails (a
sigmoid, a latent of the row that is continuous, a GP, moments that do not exist), q is drawn.
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

from ppl_gp.draws import Moments
from ppl_gp.errors import warn
from ppl_gp.mean_field.family import Family, Rule, Values
from ppl_gp.quick import full_jit, quick_jit, zeros_of
from ppl_gp.reading.arguments import Leaves, argument_of
from ppl_gp.reading.dependence import sources
from ppl_gp.results.integrals.compiled import Outcome, outcome_given, outcome_moments
from ppl_gp.results.integrals.latents import all_labels, labelled, log_density_of_labels
from ppl_gp.results.query.layout import ObservedSite
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
    discrete = any(q.is_discrete for q in seen)
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
    return {k: x[0] for q in blocks for k, x in q.nodes(q.coordinates()).values.items()}


def anywhere(blocks, key) -> Values:
    """Values of all sites, far apart, anywhere in their supports."""
    keyed = zip(blocks, random.split(key, len(blocks)), strict=True)
    return {k: x for q, own in keyed for k, x in q.random_values(own).items()}


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


MAX_NODES = 10_000  # runs of the model at all rows, labels included
_COMBINATIONS = 4  # of all entries, that the proof is of


def integrated_moments(query: Query, blocks: tuple[Family, ...]):
    """As `compiled.predictive`, without draws and errors; `None` where it is not proved exact.

    A proof of some gradients for each block that y sees; the model at all rows at the product of
    the blocks' nodes and the labels, twice.
    """
    (seen, is_all), sites = blocks_of(query, blocks), query.layout.sites
    if not is_all or query.local or not sites or any(s.axis is None for s in sites):
        return None
    if (every := all_labels(query)) is None:
        return None
    labels = jnp.asarray(every)
    if query.layout.local_latents and not bool(_labels_apart(query, seen, labels)):
        return None
    rules = _proved_rules(query, seen, labels)
    nodes = [jax.eval_shape(r.nodes).weights.shape[0] for r in rules or ()]
    if rules is None or len(labels) * math.prod(nodes) > MAX_NODES:
        return None
    found = _integrated_moments(query, seen, rules, labels)
    y = {}
    for site in sites:
        given = [jnp.moveaxis(x[site.label], 0, _axis(site)) for x in found if site.label in x]
        if site.support is None:
            y[site.label] = Outcome(Moments(*given) if given else None)
        else:
            log_probs = jnp.log(given[0])
            y[site.label] = Outcome(outcome_moments(site.support, log_probs), log_probs)
    return {}, y


def warn_if_infinite(query: Query, blocks: tuple[Family, ...]) -> None:
    """Warn where draws of q are averaged, and a precision that y sees has no mean of its inverse:
    averages over draws are finite all the same.
    """
    seen = [q for q in blocks_of(query, blocks)[0] if q.lacks_variances()]
    if seen and (labels := all_labels(query)) is not None and not query.draws.kept:
        named = {k for q in _seen(query, tuple(seen), jnp.asarray(labels)) for k in q.sites}
        seen = [q for q in seen if not named.isdisjoint(q.sites)]
    if seen:
        warn(
            f"predict: under q the inverse of the precision in {[list(q.sites) for q in seen]} has "
            "no mean (a Student-t of at most two degrees of freedom). Where y depends on it, its "
            "variance is infinite, whatever the average over draws says: ask for quantiles=."
        )


def _axis(site: ObservedSite) -> int:
    """Of the rows, in moments of y, or in probabilities with the outcomes before them."""
    return site.axis + (site.support is not None)  # pyright: ignore[reportOptionalOperand]


def _given(query: Query, values: Values, z) -> tuple[dict, dict, Array]:
    """({label: E[y], or p of outcomes}, {label: Var[y]}, log p of the labels), the rows first."""
    trace, log_p = labelled(query, values, z)
    first, second = {}, {}
    for site in query.layout.sites:
        y = outcome_given(site, trace)
        if y.log_probs is not None:
            first[site.label] = jnp.moveaxis(jnp.exp(y.log_probs), _axis(site), 0)
        elif y.moments is not None:
            first[site.label], second[site.label] = (
                jnp.moveaxis(x, _axis(site), 0) for x in y.moments
            )
    return first, second, log_p


def _summed(query: Query, values: Values, labels, centre: dict | None) -> tuple[dict, dict]:
    """(E[first], E[v + (m - centre)^2]) over the labels of a row, given all sites in no row."""

    def one(z):
        first, second, log_p = _given(query, values, z)
        about = {k: v + (first[k] - (centre or {}).get(k, 0.0)) ** 2 for k, v in second.items()}
        weigh = lambda x: jnp.expand_dims(jnp.exp(log_p), tuple(range(1, x.ndim))) * x  # noqa: E731
        return jax.tree.map(weigh, (first, about))

    return _total(one, labels)


def _total(function, nodes) -> Any:
    """The sum of function(node) over the leading axis of a tree, one after another."""
    zero = zeros_of(function, jax.tree.map(lambda x: x[0], nodes))
    add = lambda total, node: (jax.tree.map(jnp.add, total, function(node)), None)  # noqa: E731
    return lax.scan(add, zero, nodes)[0]


@quick_jit
def _labels_apart(query: Query, blocks, labels):
    """Whether a row sees its own labels alone: other rows' random ones change nothing in it."""
    values, num = anywhere(blocks, random.key(5)), query.layout.num
    alone = lax.map(lambda z: _given(query, values, z), labels)
    which = random.randint(random.key(6), (num,), 0, len(labels))
    mixed = _given(query, values, labels[which].T)
    same = jax.tree.map(lambda x, every: _close(x, every[which, jnp.arange(num)]), mixed, alone)
    return jnp.all(jnp.stack(jax.tree.leaves(same)))


def _close(a, b):
    return jnp.all((a == b) | (jnp.abs(a - b) <= _TOLERANCE * (1.0 + jnp.abs(b))))


def _proved_rules(query: Query, blocks, labels) -> tuple[Rule, ...] | None:
    """A rule of each block that the moments of y are computed from."""
    found = []
    for q in _seen(query, blocks, labels):
        if q.is_discrete:
            return None
        proved = (r for r in q.moment_rules() if jnp.all(_is_affine(query, blocks, r, labels)))
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
    """Whether first and second moments are affine in a rule's statistics, other blocks anywhere."""
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

        return rule.q.is_affine(combined, rule.statistics, key)

    return lax.map(in_surroundings, random.split(random.key(9), _SURROUNDINGS))


def _entries(query: Query, values: Values, labels):
    parts = jax.tree.leaves(_summed(query, values, labels, None))
    return jnp.concatenate([jnp.ravel(x) for x in parts])


@full_jit
def _integrated_moments(query: Query, blocks, rules: tuple[Rule, ...], labels) -> tuple[dict, dict]:
    rest = centre_of(blocks)
    first, _ = _over_nodes(lambda v: _summed(query, v, labels, None), rules, rest)
    _, second = _over_nodes(lambda v: _summed(query, v, labels, first), rules, rest)
    return first, second


def _over_nodes(function, rules, values: Values) -> Any:
    """The weighted sum over the product of the rules' nodes."""
    if not rules:
        return function(values)
    nodes = rules[0].nodes()

    def one(node):
        own, weight = node
        inner = _over_nodes(function, rules[1:], {**values, **own})
        return jax.tree.map(lambda x: weight * x, inner)

    return _total(one, (nodes.values, nodes.weights))
