"""Which terms are taken by coefficients that are solved for once, in place of nodes."""

import math
from typing import Any

import jax

from ppl_gp.conjugate.discrete import Discrete
from ppl_gp.conjugate.elementwise import Elementwise, elementwise, entries_of
from ppl_gp.conjugate.expected import Term
from ppl_gp.conjugate.family import Family
from ppl_gp.conjugate.structure import Structure
from ppl_gp.conjugate.sufficient import sufficient

_FEW, _MANY = 500, 10**5  # evaluations of a term at nodes from which a form is looked for


def with_forms(structure: Structure, trace: dict) -> Structure:
    """The structure, its terms with the forms that they have, where nodes would take long."""
    joint, blocks = structure.joint, structure.blocks
    local = {k for k in joint.latents if trace[k]["data_axis"] is not None}
    alone: dict[str, Elementwise] = {}
    for j, q in enumerate(blocks):
        if not local.isdisjoint(q.sites):
            continue
        own = [t for t in structure.terms if t.blocks == (j,) and not t.bounded]
        names = tuple(t.site for t in own if entries_of(joint, t.site) == q.batch != ())
        if names and _num_nodes(q) * math.prod(q.batch) >= _FEW:
            alone |= elementwise(joint, names, q)

    def one(term: Term) -> Term:
        if term.site in alone:
            return term._replace(form=alone[term.site])
        pair = _pair([blocks[j] for j in term.blocks], local)
        axis = trace[term.site]["data_axis"]
        if pair is None or term.bounded or axis is None or axis >= 0 or not worth(*pair):
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
    nodes: Any = jax.eval_shape(lambda: q.nodes(q.coordinates()).weights)
    return nodes.shape[0]
