"""The proof that a term's log density is affine in a block's statistics (`affinity`).

What is looked at is a random combination of a term's entries, each scaled to a size of one: rows of
small noise would hide the others. The other sites are at random values, and labels in turn at every
combination of theirs, where these are few: each may choose another density. A density that decides
by its values (a comparison, a clip: `reading.dependence`) is held to it at many values, as few far
apart say nothing about those between; any other one at as many as are cheap.
"""

import math
from itertools import product, zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.mean_field.affinity import SCALES, SPREADS, TOLERANCE, affine_in, evened, quadratic_in
from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.family import Family, Values
from ppl_gp.mean_field.gaussian import Gaussian
from ppl_gp.mean_field.log_joint import LogJoint
from ppl_gp.quick import quick_jit
from ppl_gp.reading.dependence import decides, num_entries
from ppl_gp.reading.label_rules import is_entry_by_entry

_SURROUNDINGS = 3, 4  # at least: anywhere, about a fitted q
_MOST = 300  # combinations of labels' values that are all tried, or values of each
# values where a density decides, and the evaluations of entries that they may take
_MANY, _FEWEST, _WORK = 2000, 100, 10**8


def not_affine(
    joint: LogJoint, names: tuple[str, ...], family: Family, all_sites: list, near: bool = False
) -> list[str]:
    """Terms among `names` that are not affine in the statistics of `family`, the other sites
    anywhere in the supports of `all_sites`; `near`: about a fitted q, where an error would count,
    with what is compiled already.

    Some twenty gradients of the terms, and values of those that decide, about that for each further
    value of a label beyond three; O(d T^2) an element for T statistics of d values. A term that is
    not affine at one of more than `_MOST` values of a label can be missed.
    """
    if not names:  # an improper prior that nothing is seen through
        return []
    many = num_values(joint, names, family, all_sites)
    turns = _turns(all_sites)
    keys = random.split(random.key(int(near)), max(_SURROUNDINGS[near], len(turns)))
    ways = zip_longest(keys, turns, fillvalue=())
    found = [looked_at(joint, names, family, all_sites, k, near, many, by) for k, by in ways]
    return failing(names, found)


def _turns(all_sites: list[Family]) -> list[tuple[int, ...]]:
    """How far each label moves on in every surrounding: through all combinations; where those are
    too many, all together; through too many values not at all, but to random ones.
    """
    sizes = [len(q.categories) for q in all_sites if isinstance(q, Discrete)]
    if math.prod(sizes) <= _MOST:
        return list(product(*map(range, sizes)))
    return [(i,) * len(sizes) for i in range(max(sizes))] if max(sizes) <= _MOST else []


def _turned(all_sites: list[Family], by: tuple[int, ...]) -> Values:
    """Labels that many values on from random ones, which are the same at every call."""
    labels, found = [q for q in all_sites if isinstance(q, Discrete)], {}
    for q, key, i in zip(labels, random.split(random.key(0), len(labels)), by, strict=False):
        found |= q.at((q.free(key, 1.0) + i) % len(q.categories))
    return found


def failing(names: tuple[str, ...], found: list) -> list[str]:
    """The terms that were not affine in every surrounding, (terms,) each."""
    return [k for k, ok in zip(names, np.all(jax.device_get(found), 0), strict=True) if not ok]


def looked_at(joint: LogJoint, names, family: Family, all_sites, key, near: bool, many: int, by=()):
    """(terms,): whether they are affine in one surrounding; `many`: `num_values`; `by`: a turn."""
    spreads = (SCALES if isinstance(family, Gaussian) else SPREADS)[near]
    how = jnp.asarray(spreads), jnp.asarray(TOLERANCE[near]), many
    around = random_values(all_sites, key) | _turned(all_sites, by)
    return _is_conjugate(joint, names, family, around, key, *how)


@quick_jit
def _is_conjugate(
    joint: LogJoint, names, family: Family, around: Values, key, spreads, tolerance, many
):
    def entries(own: Values):
        return joint.entries(names, {**around, **own})

    if isinstance(family, Gaussian):
        return quadratic_in(entries, family, key, spreads, tolerance, many)
    keys = random.split(random.fold_in(key, 2), len(spreads))
    points = [family.at(family.free(k, s)) for k, s in zip(keys, spreads, strict=True)]
    log_p = evened(entries, points, key)
    return affine_in(log_p, family, family.statistics, key, spreads, tolerance, many)


def num_values(joint: LogJoint, names, family: Family, all_sites: list[Family]) -> int:
    """At how many values terms are looked at besides: where no step of theirs decides, as many as
    are cheap (a narrow bump is analytic, and lies between few values all the same).
    """
    values = jax.eval_shape(lambda: random_values(all_sites, random.key(0)))
    work = _WORK * _SURROUNDINGS[0] // max(_SURROUNDINGS[0], len(_turns(all_sites)))
    own = {k: values[k] for k in family.sites}

    def entries(own: Values, around: Values):
        return joint.entries(names, {**around, **own})

    if not decides(entries, own, values):
        return min(work // num_entries(entries, own, values), _MANY)
    size = sum(math.prod(x.shape) for x in jax.eval_shape(entries, own, values))
    return int(np.clip(work // max(size, 1), _FEWEST, _MANY))


@quick_jit
def random_values(families: list[Family], key) -> Values:
    """Values of every site, far apart."""
    found: Values = {}
    for family, k in zip(families, random.split(key, len(families)), strict=True):
        found |= family.random_values(k)
    return found


def coupled_rows(
    joint: LogJoint, name: str, family: Discrete, all_sites: list[Family]
) -> str | None:
    """Why a term is not proved to see the elements of a discrete site one by one, or `None`."""
    around, site = random_values(all_sites, random.key(0)), family.sites[0]
    shape = jax.eval_shape(lambda v: joint.term(name, v), around).shape
    if not _holds(shape, family.batch):
        if len(shape) >= len(family.batch) and _holds(shape, family.batch, within=True):
            return (
                "it stands in plates to the right of its plate. Give that plate dim=-1, and the "
                "others dimensions to the left of it"
            )
        return "it stands outside its plate. Declare both in one plate"
    if not is_entry_by_entry(lambda z: joint.term(name, {**around, site: z}), around[site]):
        return "one of its entries sees several elements. Declare both in one plate"
    return None


def _holds(shape, batch, within: bool = False) -> bool:
    """Whether a shape ends in this batch, `within` as what its single entries broadcast to."""
    tail = shape[len(shape) - len(batch) :] if batch else ()
    return len(tail) == len(batch) and all(
        n == m or (within and m == 1) for n, m in zip(tail, batch, strict=True)
    )
