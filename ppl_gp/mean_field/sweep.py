"""E_q[log p] of every term of a model, by the nodes of the blocks that it sees, and coordinate
ascent: each block in turn to the maximum of the bound (Bishop 2006, eq. 10.9).

Means are exact where the terms are affine in each block's statistics, which `conjugacy` proves
first.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.local.bound import lam
from ppl_gp.mean_field.discrete import LEAST, Discrete
from ppl_gp.mean_field.family import Family, Values, blend
from ppl_gp.mean_field.log_joint import LogJoint

_AT_ONCE = 256  # nodes that one call of a term evaluates side by side
MAX_NODES = 10_000


class Term(NamedTuple):
    """A site, the blocks that its density sees, and its `forms.Form`, where it has one."""

    site: str
    blocks: tuple[int, ...]
    form: Any = None


def expected(joint: LogJoint, term: Term, q: list[Family], coordinates: list) -> Array:
    """E_q[log p(site | parents)], nats, or its local bound."""
    if term.form is not None:
        return _by_form(term, q, coordinates)
    rest = _any_values(q)
    seen = [(q[j], coordinates[j]) for j in term.blocks]
    if term.site in joint.bounded:
        return _bound(joint, term, seen, rest)
    labelled = any(isinstance(family, Discrete) for family, _ in seen)

    def log_p(values):
        found = joint.term(term.site, values)
        return jnp.maximum(found, LEAST) if labelled else found  # a label that cannot be

    return _over_nodes(log_p, seen, rest, jnp.sum)


def energy(
    joint: LogJoint, terms: Iterable[Term], q: list[Family], coordinates: list | None = None
) -> Array:
    """The sum of `expected` over terms; `coordinates` of the blocks, by default those of q."""
    at = [f.coordinates() for f in q] if coordinates is None else coordinates
    return sum((expected(joint, t, q, at) for t in terms), jnp.zeros(()))


def _by_form(term: Term, q: list[Family], coordinates: list) -> Array:
    labels = [j for j in term.blocks if isinstance(q[j], Discrete)]
    (other,) = set(term.blocks).difference(labels)
    probs = coordinates[labels[0]] if labels else 1.0
    return term.form.mean(probs, q[other].expectations(coordinates[other]))


def _any_values(q: list[Family]) -> Values:
    """Values that no term of interest sees."""
    found: Values = {}
    for family in q:
        nodes = family.nodes(lax.stop_gradient(family.coordinates()))
        found |= {k: x[0] for k, x in nodes.values.items()}
    return found


def _over_nodes(function, seen, values: Values, total: Callable, weights: tuple = ()) -> Array:
    """Sum of `total`(weighted terms) over the product of the blocks' nodes; largest loop inside."""
    if not seen:
        found = function(values)
        for w in weights:
            found = w * found  # a weight an element stands in the plates that the term has
        return total(found)
    (family, at), *rest = seen
    nodes = family.nodes(at)

    def one(node):
        own, weight = node
        return _over_nodes(function, rest, {**values, **own}, total, (*weights, weight))

    inner = math.prod(len(f.nodes(c).weights) for f, c in rest)
    each = lax.map if inner > _AT_ONCE else lambda f, x: jax.vmap(f)(x)
    return jnp.sum(each(one, (nodes.values, nodes.weights)), 0)


def require_few_nodes(terms: tuple[Term, ...], q: list[Family]) -> None:
    """Raise `ModelError` where a term's product of nodes is too large to sum."""
    sizes = [jax.eval_shape(f.own_nodes).weights.shape[0] for f in q]
    for term in terms:
        if (num := math.prod(sizes[j] for j in term.blocks)) > MAX_NODES:
            raise ModelError(
                f"site '{term.site}' sees the blocks {[q[j].sites for j in term.blocks]}, and its "
                f"mean would take {num} calls of the model (at most {MAX_NODES}). {LISTED}"
            )


def _bound(joint: LogJoint, term: Term, seen, rest: Values) -> Array:
    """The local bound of logistic terms (PRML 10.144) at its best xi, xi^2 = E[eta^2] (10.163)."""

    def moment(power):
        return lambda v: joint.logistic(term.site, v).eta ** power

    mean, second = (_over_nodes(moment(p), seen, rest, lambda x: x) for p in (1, 2))
    eta, y, total = joint.logistic(term.site, rest)
    xi = jnp.sqrt(lax.stop_gradient(second))
    bound = jax.nn.log_sigmoid(xi) - 0.5 * xi - lam(xi) * (second - xi**2)
    # what is no logistic term: binomial coefficients
    extra = joint.term(term.site, rest) - (y * eta - total * jax.nn.softplus(eta))
    return jnp.sum((y - 0.5 * total) * mean + total * bound + lax.stop_gradient(extra))


def bound(joint: LogJoint, terms: tuple[Term, ...], q: list[Family]) -> Array:
    """E_q[log p(y, z)] + H[q], nats: at most log p(y)."""
    total = energy(joint, terms, q) + sum((f.entropy() for f in q), jnp.zeros(()))
    return jnp.where(total < 1e-10 * LEAST, -jnp.inf, total)


def updated(joint: LogJoint, terms, q: list[Family], j: int, rate=1.0) -> Family:
    """Block j at the maximum of the bound given the others, or a step `rate` of the way to it in
    natural parameters. One gradient of the terms that see it.
    """
    at = [f.coordinates() for f in q]
    own = [t for t in terms if j in t.blocks]

    def of_own(c):
        return energy(joint, own, q, [*at[:j], c, *at[j + 1 :]])

    target = q[j].natural(at[j], jax.grad(of_own)(at[j]))
    return target if isinstance(rate, float) and rate == 1.0 else blend(q[j], target, rate)


def sweep(
    joint: LogJoint,
    terms: tuple[Term, ...],
    q: list[Family],
    which: Sequence[int] | None = None,
    rate=1.0,
) -> list[Family]:
    """Every block once, or `which`, in order, as `updated`; the bound never falls."""
    for j in range(len(q)) if which is None else which:
        q = [*q[:j], updated(joint, terms, q, j, rate), *q[j + 1 :]]
    return q


class Progress(eqx.Module):
    """Where one start is: q, the bound (nats), its last gain, and the sweeps made."""

    q: list[Family]
    bound: Array
    gain: Array
    sweeps: Array


def begin(q: list[Family]) -> Progress:
    """Before the first sweep, in the types that a sweep returns: others would compile it anew."""
    worst = jnp.full((), -jnp.inf, jnp.result_type(float))
    return Progress(q, worst, -worst, jnp.zeros((), int))


def is_open(state: Progress, tol: float) -> Array:
    """Whether the last sweep gained more than `tol`, and more than rounding."""
    rounding = 100.0 * jnp.finfo(state.bound.dtype).eps * jnp.abs(state.bound)
    still = state.gain > jnp.maximum(tol, jnp.where(jnp.isfinite(rounding), rounding, 0.0))
    return still & ~jnp.isnan(state.bound)


def climb(joint: LogJoint, terms, state: Progress, tol: float, num: int) -> tuple[Progress, Array]:
    """Up to `num` sweeps of one start, and their bounds, NaN behind the last."""

    def one(carry):
        now, bounds = carry
        q = sweep(joint, terms, now.q)
        value = bound(joint, terms, q)
        after = Progress(q, value, value - now.bound, now.sweeps + 1)
        return after, bounds.at[now.sweeps - state.sweeps].set(value)

    def going(carry):
        now, _ = carry
        return is_open(now, tol) & (now.sweeps - state.sweeps < num)

    return lax.while_loop(going, one, (state, jnp.full(num, jnp.nan)))


def caution_of(q: list[Family]) -> dict[str, str]:
    """Why a bound is not a number, if blocks whose moments are not numbers explain it."""
    moments = [jax.tree.leaves(f.coordinates()) for f in q]
    finite = [all(bool(jnp.all(jnp.isfinite(x))) for x in m) for m in moments]
    improper = [k for f, ok in zip(q, finite, strict=True) if not ok for k in f.sites]
    if not improper:
        return {}
    return {
        "caution": f"q of {improper} is no distribution, as where the data do not make up for an "
        "improper prior, or a mask takes both away; give these sites a proper one"
    }
