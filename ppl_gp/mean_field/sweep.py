"""Coordinate ascent: each block in turn to the maximum of the bound (Bishop 2006, eq. 10.9),
from draws of the prior, labels near centres of the observed rows.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ppl_gp.errors import DataError
from ppl_gp.mean_field.choose import gaussian_of
from ppl_gp.mean_field.discrete import Discrete, discrete
from ppl_gp.mean_field.expected import Term, bound, expected
from ppl_gp.mean_field.family import Family, blend
from ppl_gp.mean_field.gaussian import Gaussian
from ppl_gp.mean_field.log_joint import LogJoint
from ppl_gp.mean_field.structure import Structure
from ppl_gp.reading.roles import is_observed


def updated(joint: LogJoint, terms, q: list[Family], j: int, rate=1.0) -> Family:
    """Block j at the maximum of the bound given the others, or a step `rate` of the way to it in
    natural parameters. One gradient of the terms that see it.
    """
    coordinates: list[Any] = [f.coordinates() for f in q]
    own = [t for t in terms if j in t.blocks]

    def energy(c):
        here = [*coordinates[:j], c, *coordinates[j + 1 :]]
        return sum((expected(joint, t, q, here) for t in own), jnp.zeros(()))

    target = q[j].natural(coordinates[j], jax.grad(energy)(coordinates[j]))
    return target if isinstance(rate, float) and rate == 1.0 else blend(q[j], target, rate)


def sweep(joint: LogJoint, terms: tuple[Term, ...], q: list[Family]) -> list[Family]:
    """Every block once, in order; the bound never falls."""
    for j in range(len(q)):
        q = [*q[:j], updated(joint, terms, q, j), *q[j + 1 :]]
    return q


class Progress(eqx.Module):
    """Where one start stands: q, the bound (nats), its last gain, sweeps made, the bounds so
    far.
    """

    q: list[Family]
    bound: Array
    gain: Array
    sweeps: Array


def begin(q: list[Family]) -> Progress:
    """Before the first sweep. Of the types that a sweep gives, or the second chunk of sweeps would
    compile anew.
    """
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


_SURE = 0.9  # of a label that a start gives


def start(
    structure: Structure, trace: dict, init: Mapping[str, Any], rng: np.random.Generator
) -> list[Family]:
    """A first q of every block: values of `init` where given, else from `trace`, a draw of the
    prior, and labels by k-means++.
    """
    return [_one(structure, i, trace, init, rng) for i in range(len(structure.blocks))]


def _one(structure: Structure, i: int, trace, init, rng) -> Family:
    family = structure.blocks[i]
    given = {k: init[k] for k in family.sites if k in init}
    if isinstance(family, Discrete):
        if given:
            return _labelled(family, given[family.sites[0]])
        return _labels(family, _rows(structure, i, trace), rng)
    if isinstance(family, Gaussian):
        values = {k: {**trace[k], "value": _value(k, given, trace)} for k in family.sites}
        return gaussian_of(list(family.sites), values, len(family.batch))
    if given:
        raise DataError(
            f"MeanField(init=...): site '{next(iter(given))}' is part of a "
            f"{type(family).__name__} factor; values to start from are for discrete and Gaussian "
            "sites."
        )
    return family


def _value(name: str, given: dict, trace: dict):
    value = given.get(name, trace[name]["value"])
    if np.shape(value) != tuple(trace[name]["fn"].shape()):
        raise DataError(
            f"MeanField(init=...): '{name}' has shape {np.shape(value)}, and the site "
            f"{tuple(trace[name]['fn'].shape())}."
        )
    return value


def _labelled(family: Discrete, labels) -> Family:
    """Given labels, or given probabilities, for the first update of the other blocks."""
    name, labels = family.sites[0], np.asarray(labels)
    K = len(family.categories)
    if labels.shape == (*family.batch, K) and np.issubdtype(labels.dtype, np.floating):
        probs = labels / labels.sum(-1, keepdims=True)
    elif labels.shape == family.batch and set(np.unique(labels)) <= set(family.categories):
        probs = (labels[..., None] == np.asarray(family.categories)).astype(float)
    else:
        raise DataError(
            f"MeanField(init={{'{name}': ...}}): give labels of shape {family.batch} among "
            f"{list(family.categories)}, or probabilities of shape {(*family.batch, K)}; got "
            f"shape {labels.shape}."
        )
    return _as_discrete(family, probs)


def _as_discrete(family: Discrete, probs) -> Family:
    tiny = np.finfo(float).tiny
    probs = jnp.asarray(np.maximum(probs, tiny))
    return discrete(family.sites, family.batch, family.categories, probs)


def _rows(structure: Structure, i: int, trace) -> np.ndarray | None:
    """(N, columns): what is observed behind a discrete site with one entry per row."""
    family, columns = structure.blocks[i], []
    if len(family.batch) != 1:
        return None
    for term in structure.terms:
        site = trace[term.site]
        if i in term.blocks and is_observed(site):
            value = np.asarray(site["value"], float)
            if value.shape[:1] == family.batch:
                columns.append(value.reshape(len(value), -1))
    return np.concatenate(columns, 1) if columns else None


def _labels(family: Discrete, rows: np.ndarray | None, rng) -> Family:
    K = len(family.categories)
    if rows is None or not np.all(np.isfinite(rows)) or len(rows) == 0:
        return _as_discrete(family, rng.dirichlet(np.ones(K), family.batch))
    centres = _plus_plus(_scaled(rows), K, rng)
    near = np.argmin(_distances(_scaled(rows), centres), 1)
    probs = np.full((len(rows), K), (1.0 - _SURE) / K)
    probs[np.arange(len(rows)), near] += _SURE
    return _as_discrete(family, probs)


def _scaled(rows: np.ndarray) -> np.ndarray:
    spread = rows.std(0)
    return rows / np.where(spread > 0, spread, 1.0)


def _distances(rows, centres):
    return np.sum((rows[:, None] - centres) ** 2, -1)


def _plus_plus(rows: np.ndarray, K: int, rng) -> np.ndarray:
    """K rows, each drawn in proportion to its squared distance from those before (Arthur &
    Vassilvitskii 2007).
    """
    found = [rows[rng.integers(len(rows))]]
    while len(found) < K:
        near = np.min(_distances(rows, np.asarray(found)), 1)
        total = near.sum()
        p = near / total if total > 0 else np.full(len(rows), 1.0 / len(rows))
        found.append(rows[rng.choice(len(rows), p=p)])
    return np.asarray(found)
