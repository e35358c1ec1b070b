"""Which terms are taken by coefficients that are solved for once, in place of nodes.

Where row n has a label k and its density sees one other block, log p(x_n | z_n = k) is affine in
the block's statistics t, and for observations of an exponential family in few functions v of the
row's arguments as well (of normal ones in the products of pairs of its entries):

    log p(x_n | k, z) = v(x_n)' C_k (1, t_k(z)),   t_k of the elements that stand at k, or of all.

C is solved for once, from the term itself at random values of the block and at some of the rows,
and is taken where it gives back the term of every row and label at other values. The mean under q
is then two products of matrices, N V K multiplications, whatever the nodes; a mixture of normals of
D columns has V = (D + 1) (D + 2) / 2.

A term with an entry for each element of one block (the prior of a plate, as a rule) is the same
with one row, v = 1, whose entries are the labels: log p_k(z) = C_k (1, t_k(z)), all of them summed.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.log_joint import LogJoint
from ppl_gp.mean_field.structure import Structure
from ppl_gp.mean_field.sweep import Term
from ppl_gp.quick import quick_jit
from ppl_gp.reading.arguments import Leaves

_FEW, _MANY = 500, 10**5  # evaluations of a term at nodes from which a form is looked for
MOST = 600  # functions of a row, or statistics, that are solved for
MORE = 8  # random values beyond the unknowns
SPREAD = 0.5
RESIDUAL = 1e-9  # of the largest entry of a row's terms


def with_forms(structure: Structure, trace: dict) -> Structure:
    """The structure, its terms with the forms that they have, where nodes would take long."""
    joint, blocks = structure.joint, structure.blocks
    local = {k for k in joint.latents if trace[k]["data_axis"] is not None}
    alone: dict[str, Form] = {}
    for j, q in enumerate(blocks):
        if not local.isdisjoint(q.sites):
            continue
        own = [t for t in structure.terms if t.blocks == (j,) and t.site not in joint.bounded]
        names = tuple(t.site for t in own if entries_of(joint, t.site) == q.batch != ())
        if names and _num_nodes(q) * math.prod(q.batch) >= _FEW:
            alone |= elementwise(joint, names, q)

    def one(term: Term) -> Term:
        if term.site in alone:
            return term._replace(form=alone[term.site])
        pair = _pair([blocks[j] for j in term.blocks], local)
        axis = trace[term.site]["data_axis"]
        if axis is None or axis >= 0 or term.site in joint.bounded or not pair or not worth(*pair):
            return term
        return term._replace(form=sufficient(joint, term.site, axis, *pair))

    return structure._replace(terms=tuple(one(t) for t in structure.terms))


def _pair(seen: list[Family], local: set[str]) -> tuple[Discrete, Family] | None:
    """Labels, the only latents of the rows, and the one block beside them."""
    labels = [q for q in seen if isinstance(q, Discrete) and len(q.batch) == 1]
    others = [q for q in seen if not isinstance(q, Discrete)]
    if len(seen) != 2 or len(labels) != 1 or len(others) != 1 or local != set(labels[0].sites):
        return None
    return labels[0], others[0]


def worth(labels: Discrete, q: Family) -> bool:
    """Whether nodes would take more than it costs to look for a form."""
    return math.prod(labels.batch) * len(labels.categories) * _num_nodes(q) >= _MANY


def _num_nodes(q: Family) -> int:
    return jax.eval_shape(q.own_nodes).weights.shape[0]


def _moments(q: Family) -> Any:
    """The shape of E[t] of each element, (E, T); `None` where there is no closed form."""
    return jax.eval_shape(lambda: q.expectations(q.coordinates()))


class Form(eqx.Module):
    """E_q[sum_n log p(x_n | z_n)] of one term: `rows` v, `table` C. `by_label`: whether label k
    sees the elements at k of the block alone.
    """

    by_label: bool = eqx.field(static=True)
    rows: Float[Array, "N V"]
    table: Float[Array, "K V T"]

    def mean(self, probs: Float[Array, "N K"] | float, statistics: Float[Array, "E S"]) -> Array:
        """Given E[t] of each element, nats; `probs` 1 of a term without labels."""
        t = _with_one(self.by_label, len(self.table), statistics)
        return jnp.sum(probs * (self.rows @ jnp.einsum("kvt,kt->vk", self.table, t)))


def _with_one(by_label: bool, K: int, statistics):
    """(K, T): one, and the statistics of the elements that a label sees."""
    own = statistics.reshape(K if by_label else 1, -1)
    own = jnp.broadcast_to(own, (K, own.shape[1]))
    return jnp.concatenate([jnp.ones((K, 1), own.dtype), own], 1)


def elementwise(joint: LogJoint, names: tuple[str, ...], q: Family) -> dict[str, Form]:
    """{term: its form} of terms that see one block and have an entry for each of its elements."""
    if (statistics := _moments(q)) is None or statistics.shape[1] >= MOST:
        return {}
    num, one = statistics.shape[1] + 1 + MORE, np.ones((1, 1))
    values, t = jax.device_get(_of_elements(joint, names, q, num + 2))
    tables = {k: _table(values[k], t, one, num) for k in names}
    forms = {k: (jnp.asarray(one), jnp.asarray(C)) for k, C in tables.items() if C is not None}
    return {k: Form(True, *form) for k, form in forms.items()}


def sufficient(joint: LogJoint, name: str, axis: int, labels: Discrete, q: Family) -> Form | None:
    """The form, if any, of a term of one label per row and `q`; `axis`: of the rows, negative."""
    reading, K = getattr(joint.model, "reading", None), len(labels.categories)
    statistics = _moments(q)
    if reading is None or not reading.grows or statistics is None:
        return None
    features = _features(joint, reading, labels.batch[0])
    for by_label in (True, False):
        if by_label and not (q.batch and q.batch[0] == K):
            continue
        if (size := statistics.size // (K if by_label else 1)) < MOST:
            found = _solved(joint, reading, (name, axis, labels, q, by_label), size, features)
            if found is not None:
                return found
    return None


def _features(joint: LogJoint, reading, num: int) -> list[np.ndarray]:
    """Functions of a row's arguments, (N, V), few first: one, its entries, their squares, their
    products; each scaled to a standard deviation of one.
    """
    arrays = Leaves(joint.model, joint.args, joint.kwargs).arrays
    axes = {p: a for p, a in reading.row_axes.items() if p in arrays}
    columns = [
        np.moveaxis(np.asarray(arrays[p], float), a, 0).reshape(num, -1) for p, a in axes.items()
    ]
    one, x = np.ones((num, 1)), np.concatenate([np.zeros((num, 0)), *columns], 1)
    spread = x.std(0)
    moving = spread > 1e-12 * (1.0 + np.abs(x).max(0, initial=0.0))
    x = (x[:, moving] - x[:, moving].mean(0)) / spread[moving]
    found, d = [one], x.shape[1]
    if 0 < d < MOST // 2:
        found += [np.hstack([one, x]), np.hstack([one, x, x**2])]
        if (d + 1) * (d + 2) // 2 <= MOST:
            i, j = np.tril_indices(d)
            found += [np.hstack([one, x, x[:, i] * x[:, j]])]
    return found


def _solved(
    joint: LogJoint, reading, what: tuple, size: int, features: list[np.ndarray]
) -> Form | None:
    """By the fewest functions of a row that explain some rows, if they then explain all."""
    num, most = features[-1].shape
    rows = np.sort(np.random.default_rng(0).choice(num, min(num, 2 * most + MORE), replace=False))
    points = size + 1 + MORE
    values, t = jax.device_get(_of_labels(_at(joint, reading, rows), *what, points, 1))
    tables = ((v, _table(values, t, v[rows], points)) for v in features)
    v, table = next(((v, C) for v, C in tables if C is not None), (None, None))
    if v is None or table is None:
        return None
    values, t = jax.device_get(_of_labels(joint, *what, 2, 2))
    given = np.einsum("nv,kvt,pkt->pkn", v, table, t, optimize=True)
    scale = np.max(np.abs(values), (0, 1), keepdims=True)
    if not np.all(np.abs(given - values) <= RESIDUAL * (1.0 + scale)):
        return None
    return Form(what[-1], jnp.asarray(v), jnp.asarray(table))


def _table(values, t, v, num: int) -> np.ndarray | None:
    """C (K, V, T) of values (points, K, rows), t (points, K, T), v (rows, V) by least squares at
    the first `num` points, where it is right at all of them.
    """
    if not np.all(np.isfinite(values)):
        return None
    found = []
    for k in range(values.shape[1]):
        S, y = t[:, k], values[:, k]
        scale = np.max(np.abs(S), 0)
        scale = np.where(scale > 0, scale, 1.0)
        own = np.linalg.lstsq(S[:num] / scale, y[:num], rcond=None)[0] / scale[:, None]  # (T, rows)
        C = np.linalg.lstsq(v, own.T, rcond=None)[0]
        if not np.all(np.abs(S @ (v @ C).T - y) <= RESIDUAL * (1.0 + np.abs(y).max())):
            return None
        found.append(C)
    return np.stack(found)


def _at(joint: LogJoint, reading, rows: np.ndarray) -> LogJoint:
    """The log joint of some rows."""
    leaves = Leaves(joint.model, joint.args, joint.kwargs)
    axes = reading.row_axes
    own = {p: jnp.take(x, rows, axes[p]) for p, x in leaves.arrays.items() if p in axes}
    args, kwargs = leaves.replaced(own)
    return joint._replace(args=args, kwargs=kwargs)


def _random(q: Family, by_label: bool, K: int, num: int, seed: int) -> tuple[Array, Array]:
    """(`num` random values, (1, t) there, (num, K, T))."""
    free = jax.vmap(lambda key: q.free(key, SPREAD))(random.split(random.key(seed), num))
    t = jax.vmap(jax.vmap(q.statistics))(free)  # (num, E, S)
    return free, jax.vmap(lambda s: _with_one(by_label, K, s))(t)


@quick_jit
def _of_labels(joint: LogJoint, name, axis: int, labels: Discrete, q: Family, by_label, num, seed):
    """(log p of every row at each label and random value, (num, K, rows); (1, t))."""
    site, K = labels.sites[0], len(labels.categories)
    free, t = _random(q, by_label, K, num, seed)

    def term(entry):
        row, k = entry
        label = jnp.full((entries_of(joint, name)[axis],), k)
        x = joint.term(name, {site: label, **q.at(row)})
        return jnp.sum(jnp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]), 0)

    every = (jnp.repeat(free, K, 0), jnp.tile(jnp.asarray(labels.categories), num))
    return lax.map(term, every).reshape(num, K, -1), t


@quick_jit
def _of_elements(joint: LogJoint, names: tuple[str, ...], q: Family, num: int):
    """({term: (num, E, 1)}, (1, t)) at random values."""
    free, t = _random(q, True, math.prod(q.batch), num, 3)
    return lax.map(lambda row: {k: joint.term(k, q.at(row)).reshape(-1, 1) for k in names}, free), t


def entries_of(joint: LogJoint, name: str) -> tuple[int, ...]:
    """The shape of a term."""
    return jax.eval_shape(lambda: joint.term(name, {})).shape
