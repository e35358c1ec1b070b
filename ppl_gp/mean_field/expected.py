"""E_q[log p] of every term of a model, by the nodes of the blocks that it sees.

Exact where the terms are affine in each block's statistics, which `conjugacy` proves first.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.local.bound import lam
from ppl_gp.mean_field.discrete import LEAST, Discrete
from ppl_gp.mean_field.family import Family, Values
from ppl_gp.mean_field.log_joint import LogJoint

_AT_ONCE = 256  # nodes that one call of a term evaluates side by side
MAX_NODES = 10_000


class Term(NamedTuple):
    """A site and the blocks that its density sees; whether the local bound stands for it; its form
    by coefficients (`forms`), where it has one.
    """

    site: str
    blocks: tuple[int, ...]
    bounded: bool = False
    form: Any = None


def expected(joint: LogJoint, term: Term, q: list[Family], coordinates: list) -> Array:
    """E_q[log p(site | parents)], nats, or its local bound."""
    if term.form is not None:
        return _by_form(term, q, coordinates)
    rest = _any_values(q)
    seen = [(q[j], coordinates[j]) for j in term.blocks]
    if term.bounded:
        return _bound(joint, term, seen, rest)
    labelled = any(isinstance(family, Discrete) for family, _ in seen)

    def log_p(values):
        found = joint.term(term.site, values)
        return jnp.maximum(found, LEAST) if labelled else found  # a label that cannot be

    return _over_nodes(log_p, seen, rest, ())


def _by_form(term: Term, q: list[Family], coordinates: list) -> Array:
    if len(term.blocks) == 1:
        (j,) = term.blocks
        return term.form.mean(q[j].expectations(coordinates[j]))
    a, b = term.blocks
    labels, other = (a, b) if isinstance(q[a], Discrete) else (b, a)
    return term.form.mean(coordinates[labels], q[other].expectations(coordinates[other]))


def _any_values(q: list[Family]) -> Values:
    """Values that no term of interest sees."""
    found: Values = {}
    for family in q:
        nodes = family.nodes(lax.stop_gradient(family.coordinates()))
        found |= {k: x[0] for k, x in nodes.values.items()}
    return found


def _over_nodes(function, seen, values: Values, weights: tuple) -> Array:
    """Sum over the product of the blocks' nodes of the weighted terms; the largest loop inside."""
    if not seen:
        found = function(values)
        for w in weights:
            found = w * found  # a weight an element stands in the plates that the term has
        return jnp.sum(found)
    (family, at), *rest = seen
    nodes = family.nodes(at)

    def one(node):
        own, weight = node
        return _over_nodes(function, rest, {**values, **own}, (*weights, weight))

    inner = math.prod(len(f.nodes(c).weights) for f, c in rest)
    if inner > _AT_ONCE:
        return jnp.sum(lax.map(one, (nodes.values, nodes.weights)))
    return jnp.sum(jax.vmap(one)((nodes.values, nodes.weights)))


def require_few_nodes(terms: tuple[Term, ...], q: list[Family]) -> None:
    """Raise `ModelError` where a term's product of nodes is too large to sum."""
    nodes = [jax.eval_shape(lambda f=f: f.nodes(f.coordinates())) for f in q]
    sizes = [x.weights.shape[0] for x in nodes]
    for term in terms:
        if (num := math.prod(sizes[j] for j in term.blocks)) > MAX_NODES:
            raise ModelError(
                f"site '{term.site}' sees the blocks {[q[j].sites for j in term.blocks]}, and its "
                f"mean would take {num} calls of the model (at most {MAX_NODES}). {LISTED}"
            )


def _bound(joint: LogJoint, term: Term, seen, rest: Values) -> Array:
    """The local bound of logistic terms at its best xi (PRML 10.144, 10.163): E[eta], E[eta^2] by
    nodes, xi^2 = E[eta^2].
    """

    def moment(power):
        return lambda v: joint.logistic(term.site, v).eta ** power

    mean, second = (_elementwise(moment(p), seen, rest) for p in (1, 2))
    form = joint.logistic(term.site, rest)
    xi = jnp.sqrt(lax.stop_gradient(second))
    rate = lam(xi)
    bound = jax.nn.log_sigmoid(xi) - 0.5 * xi - rate * (second - xi**2)
    extra = joint.term(term.site, rest) - (
        form.weight * (form.y * form.eta - form.total * jax.nn.softplus(form.eta))
    )  # what is no logistic term: binomial coefficients
    logistic_part = form.weight * ((form.y - 0.5 * form.total) * mean + form.total * bound)
    return jnp.sum(logistic_part + lax.stop_gradient(extra))


def _elementwise(function, seen, values: Values) -> Array:
    """The weighted sum over nodes, of the function's own shape; blocks with equal weights."""
    if not seen:
        return function(values)
    (family, at), *rest = seen
    nodes = family.nodes(at)

    def one(own, weight):
        return weight * _elementwise(function, rest, {**values, **own})

    return jnp.sum(jax.vmap(one)(nodes.values, nodes.weights), 0)


def bound(joint: LogJoint, terms: tuple[Term, ...], q: list[Family]) -> Array:
    """E_q[log p(y, z)] + H[q], nats: at most log p(y)."""
    coordinates: list[Any] = [f.coordinates() for f in q]
    energy = [expected(joint, t, q, coordinates) for t in terms]
    total = jnp.sum(jnp.stack(energy)) + jnp.sum(jnp.stack([f.entropy() for f in q]))
    return jnp.where(total < 1e-10 * LEAST, -jnp.inf, total)
