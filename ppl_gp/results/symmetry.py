"""Plates whose entries no posterior tells apart: components of a mixture, which can change places
where their weights and the labels of the data do.

Every posterior is then the same under all K! orders of the entries. Draws of one entry are of
whichever order each draw has (label switching), averages over them are of no entry, and a q that
tells the entries apart sits at one of equal maxima.

What changes places together is found by trying, and proved as conjugacy is: two permutations that
generate all others leave each site's log density as it was, at values that are far apart.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.distributions import biject_to, constraints

from ppl_gp.gp import unwrap
from ppl_gp.quick import quick_jit
from ppl_gp.reading.roles import data_plates, is_missing_part, is_observed, scored, subsampling
from ppl_gp.reading.tracing import bare_trace
from ppl_gp.results.query.layout import outcomes
from ppl_gp.results.record import Record, first_trace

_SPREADS = (0.3, 1.0, 2.0)  # of values, in NumPyro's unconstrained coordinates
_TOLERANCE = 1e-10  # of the sum of a site's terms, each without its sign; more in float32
_MOST = 6  # further plates, simplices and discrete sites that may take part: 2^6 subsets are tried


class Symmetry(NamedTuple):
    """All orders of a plate's entries have one log joint.

    `size`: K entries. `sites`: those that change places along the plate, or, of a simplex, along
    its K probabilities. `labels`: discrete sites whose K values are renumbered.
    """

    plate: str
    size: int
    sites: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def log_count(self) -> float:
        """log K!, nats: `compare_models(log_symmetry=)` adds it to a bound at one of K! modes."""
        return math.lgamma(self.size + 1.0)

    def __str__(self) -> str:
        labels = f" and the labels {', '.join(self.labels)}" if self.labels else ""
        return f"plate '{self.plate}': {self.size}! orders of {', '.join(self.sites)}{labels}"


class _Part(NamedTuple):
    """What moves as one: axes of sites, (site, axis from the right), or the labels of a site."""

    axes: tuple[tuple[str, int], ...] = ()
    label: str | None = None


def symmetries(fit: Record) -> tuple[Symmetry, ...]:
    """The plates without data whose orders are proved to leave the log joint as it is, each with
    the fewest other sites that must move with it; of models without a GP.

    Costs, if there are such plates, one compiled run of the model and a few hundred calls of it at
    most. Not found: plates that hold observations, symmetries of more than seven parts, and those
    of other axes than plates (factors of a factor analysis).
    """
    if fit.latent:
        return ()
    known, trace = fit.draws.at(0).known, first_trace(fit)
    plates = _plates(trace)
    if not plates:
        return ()
    sampled = (k for k, site in trace.items() if site["type"] == "sample")
    terms = tuple(k for k in sampled if not is_missing_part(k, trace))
    latents = tuple(k for k in terms if not is_observed(trace[k]))
    declared = fit.model, fit.args, fit.kwargs
    params = {k: v for k, v in known.items() if k not in latents}
    values = [{**params, **_values(trace, latents, i)} for i in range(len(_SPREADS))]
    before = [_terms(declared, terms, v) for v in values]

    def invariant(parts: tuple[_Part, ...], size: int) -> bool:
        turns = {tuple(np.roll(np.arange(size), 1)), (1, 0, *range(2, size))}  # generate all orders
        for order in turns:
            for v, (sums, sizes) in zip(values, before, strict=True):
                after, _ = _terms(declared, terms, _moved(v, parts, np.asarray(order)))
                tolerance = max(_TOLERANCE, 100.0 * float(jnp.finfo(sums.dtype).eps))
                if not bool(jnp.all(jnp.abs(after - sums) <= tolerance * (1.0 + sizes))):
                    return False  # of infinite terms too, which show nothing
        return True

    found = (_symmetry(invariant, trace, latents, name, plates) for name in plates)
    return tuple(s for s in found if s is not None)


def _plates(trace: dict) -> dict[str, int]:
    """{name: size} of whole plates of two entries or more in which latents stand, and no data."""
    latent, others = {}, data_plates(trace) | subsampling(trace).keys()
    for site in trace.values():
        if site["type"] == "sample":
            frames = {f.name: f.size for f in site["cond_indep_stack"]}
            (others if is_observed(site) else latent).update(frames)
    return {k: n for k, n in latent.items() if n > 1 and k not in others}


def _symmetry(invariant, trace, latents, name: str, plates) -> Symmetry | None:
    size, own = plates[name], _along(trace, latents, name)
    others = list(_others(trace, latents, name, plates))
    if len(others) > _MOST:
        return None
    for num in range(len(others) + 1):
        for more in itertools.combinations(others, num):
            parts = (own, *more)
            if invariant(parts, size):
                sites = dict.fromkeys(k for p in parts for k, _ in p.axes)
                labels = tuple(p.label for p in parts if p.label is not None)
                return Symmetry(name, size, tuple(sites), labels)
    return None


def _along(trace: dict, latents, name: str) -> _Part:
    axes = []
    for k in latents:
        fn = trace[k]["fn"]
        own = [f.dim for f in trace[k]["cond_indep_stack"] if f.name == name]
        axes += [(k, dim - len(fn.event_shape)) for dim in own]
    return _Part(tuple(axes))


def _others(trace: dict, latents, name: str, plates) -> Iterator[_Part]:
    """Other plates, simplices and discrete sites of as many entries."""
    size = plates[name]
    for other, num in plates.items():
        if num == size and other != name:
            yield _along(trace, latents, other)
    for k in latents:
        fn: Any = unwrap(trace[k]["fn"])
        if fn.support is constraints.simplex and trace[k]["fn"].event_shape == (size,):
            yield _Part(((k, -1),))
        elif outcomes(fn) == tuple(range(size)):
            yield _Part(label=k)


def _values(trace: dict, latents, i: int) -> dict:
    """{site: a value far from the others', of its own support}; what has no such is as drawn."""
    found, rng = {}, np.random.default_rng(i)
    for k, key in zip(latents, random.split(random.key(i), len(latents)), strict=True):
        site, fn = trace[k], unwrap(trace[k]["fn"])
        shape = tuple(site["fn"].shape())
        if (categories := outcomes(fn)) is not None:
            found[k] = jnp.asarray(rng.choice(categories, shape))
        elif fn.support.is_discrete:
            found[k] = site["value"]
        else:
            bijection = biject_to(site["fn"].support)
            free = random.normal(key, bijection.inverse_shape(shape))
            found[k] = bijection(_SPREADS[i] * free)
    return found


def _moved(values: dict, parts, order: np.ndarray) -> dict:
    moved = dict(values)
    for part in parts:
        for k, axis in part.axes:
            moved[k] = jnp.take(moved[k], order, axis=axis)
        if part.label is not None:
            moved[part.label] = jnp.asarray(np.argsort(order))[moved[part.label]]
    return moved


@quick_jit
def _terms(declared: tuple, terms: tuple[str, ...], values: dict):
    """(terms,) each site's log density, and the sum of its entries' sizes."""
    trace = bare_trace(*declared, values, values)
    found = [scored(trace[k]) for k in terms]
    return (jnp.stack([jnp.sum(x) for x in found]), jnp.stack([jnp.sum(jnp.abs(x)) for x in found]))
