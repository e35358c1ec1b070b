"""The blocks of mean field: who sees whom, which sites are taken together, what each is proved to
be, and where it starts.

By default every latent site is a block of its own, but for a mean and the precision that scales
its prior, where both together are proved conjugate. Elements of a plate are apart in q where no
term couples them, and one joint Gaussian where one does.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import random
from scipy.spatial.distance import cdist

from ppl_gp.errors import LISTED, DataError, NotConjugateError
from ppl_gp.gp import unwrap
from ppl_gp.mean_field.choose import gaussian_of, paired, single
from ppl_gp.mean_field.conjugacy import coupled_rows, not_affine, random_values
from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.gaussian import Gaussian
from ppl_gp.mean_field.log_joint import LogJoint, is_logistic
from ppl_gp.mean_field.sweep import Term, require_few_nodes
from ppl_gp.reading.roles import is_observed
from ppl_gp.reading.tracing import bare_trace


class Structure(NamedTuple):
    """Blocks in the order of their updates, discrete ones last, and the terms that see them;
    `local`: (block, axis of the rows in its batch) of what is per datum, for batches.
    """

    joint: LogJoint
    blocks: list[Family]
    terms: tuple[Term, ...]
    local: tuple[tuple[int, int], ...] = ()

    def shared(self) -> list[int]:
        """The other blocks."""
        return sorted(set(range(len(self.blocks))) - {j for j, _ in self.local})

    def to_prove(self) -> list[tuple[int, tuple[str, ...]]]:
        """(Block, the terms that see it) of all but the discrete ones, which are summed."""
        seen = [tuple(t.site for t in self.terms if j in t.blocks) for j in range(len(self.blocks))]
        pairs = enumerate(zip(self.blocks, seen, strict=True))
        return [(j, names) for j, (q, names) in pairs if names and not isinstance(q, Discrete)]


def find_structure(
    joint: LogJoint, trace: dict, factors: Sequence[Sequence[str]] | None, bounds: bool
) -> Structure:
    """Find and prove the blocks. Abstract traces, and some hundred gradients a block. Raises
    `NotConjugateError`, `DataError` (`factors`), `ModelError` (no family).
    """
    return _Finder(joint, trace, bounds).find(factors)


class _Finder:
    """The search: the model, and which logistic terms take the local bound so far."""

    def __init__(self, joint: LogJoint, trace: dict, bounds: bool):
        self.joint, self.trace, self.bounds = joint, trace, bounds
        self.alone = {k: single(k, trace[k]) for k in joint.latents}
        self.all_sites, self.seen = list(self.alone.values()), joint.seen(trace)
        self.failed: dict[tuple, list[str]] = {}

    def find(self, factors) -> Structure:
        """Blocks as asked for, or as found, each proved; again where one took a local bound."""
        blocks = self._given(factors) if factors is not None else self._pairs()
        named = {k for f in blocks for k in f.sites}
        blocks += [self.alone[k] for k in self.joint.latents if k not in named]
        before = None
        while before != self.joint.bounded:  # a bound that a block needs is another term for all
            before = self.joint.bounded
            blocks = [self._proved(f) for f in blocks]
        order = self.joint.latents.index
        blocks.sort(key=lambda f: (isinstance(f, Discrete), min(map(order, f.sites))))
        terms = tuple(
            Term(name, tuple(i for i, f in enumerate(blocks) if self._meet(name, f.sites)))
            for name in self.joint.terms
        )
        require_few_nodes(terms, blocks)
        return Structure(self.joint, blocks, terms)

    def _meet(self, name: str, sites) -> bool:
        """Whether a term sees one of these sites."""
        return not self.seen[name].isdisjoint(sites)

    def _names(self, sites) -> tuple[str, ...]:
        return tuple(k for k in self.joint.terms if self._meet(k, sites))

    def _fails(self, family: Family) -> list[str]:
        """Terms without a proof, which `_pairs` and `_proved` both ask for, once."""
        what = (type(family), family.sites, family.batch, self.joint.bounded)
        if what not in self.failed:
            names = self._names(family.sites)
            self.failed[what] = not_affine(self.joint, names, family, self.all_sites)
        return self.failed[what]

    def _pairs(self) -> list[Family]:
        """A mean with the precision of its own prior."""
        found: list[Family] = []
        taken: set[str] = set()
        for mean, family in self.alone.items():
            if not isinstance(family, Gaussian):
                continue
            for precision in sorted(self.seen[mean] - {mean} - taken):
                both = paired(mean, precision, self.trace)
                if both is not None and not self._fails(both):
                    found.append(both)
                    taken |= {mean, precision}
                    break
        return found

    def _given(self, factors) -> list[Family]:
        named = [k for group in factors for k in group]
        _require_latents("factors", named, self.joint)
        if len(named) != len(set(named)):
            raise DataError(f"MeanField(factors={factors!r}): a site stands in two blocks.")
        return [self._group(list(group)) for group in factors if group]

    def _group(self, group: list[str]) -> Family:
        if len(group) == 1:
            return self.alone[group[0]]
        if all(isinstance(self.alone[k], Gaussian) for k in group):
            return gaussian_of(group, self.trace, 0)
        if len(group) == 2:
            for mean, precision in (group, group[::-1]):
                if isinstance(self.alone[mean], Gaussian) and (
                    both := paired(mean, precision, self.trace)
                ):
                    return both
        raise DataError(
            f"MeanField(factors=...): {group} have no joint family here; several Gaussian sites "
            "do, and a mean with its precision (gamma or Wishart) of the same plates."
        )

    def _proved(self, family: Family) -> Family:
        """The block with the independence that its terms have; or `NotConjugateError`."""
        if isinstance(family, Discrete):
            return self._discrete(family)
        # where one overflows, no gradient is a number: the block's own prior comes last
        if not (failed := sorted(self._fails(family), key=lambda k: k in family.sites)):
            return family
        if isinstance(family, Gaussian) and family.batch:
            return self._proved(gaussian_of(list(family.sites), self.trace, len(family.batch) - 1))
        if self.bounds and isinstance(family, Gaussian) and all(map(self._takes_bound, failed)):
            self.joint = self.joint._replace(bounded=(*self.joint.bounded, *failed))
            # with elements apart: which ones the bound couples is another question
            own = family.sites
            return self._proved(self.alone[own[0]] if len(own) == 1 else family)
        self._require_finite(failed)
        raise self._error(family, failed[0])

    def _require_finite(self, names: list[str]) -> None:
        """A density that is not finite at some values cannot be looked at there."""
        for key in random.split(random.key(0), 4):
            values = random_values(self.all_sites, key)
            for name, x in zip(names, self.joint.entries(tuple(names), values), strict=True):
                if not np.all(np.isfinite(x)):
                    raise NotConjugateError(
                        f"the log density of site '{name}' is not finite at some values of the "
                        "latents inside their supports (a label under which an observation is "
                        "impossible, or an overflow), and MeanField() needs it there. Make what is "
                        f"impossible unlikely, as in jnp.where(z == 1, rate, 1e-8). {LISTED}"
                    )

    def _takes_bound(self, name: str) -> bool:
        free = name not in self.joint.bounded and is_logistic(self.trace[name])
        return free and all(isinstance(self.alone[k], Gaussian) for k in self.seen[name])

    def _discrete(self, family: Discrete) -> Family:
        for name in self._names(family.sites):
            if (why := coupled_rows(self.joint, name, family, self.all_sites)) is not None:
                raise NotConjugateError(
                    f"MeanField() sums discrete site '{family.sites[0]}' element by element, and "
                    f"site '{name}' does not depend on it so: {why}. With an index or two plates "
                    "of labels between them (z[group], a block model) no model has such sums: use "
                    "NUTS() with labels summed out (numpyro.distributions.MixtureSameFamily)."
                )
        return family

    def _error(self, family: Family, term: str) -> NotConjugateError:
        kind = type(unwrap(self.trace[term]["fn"])).__name__
        what = "its own prior" if term in family.sites else f"'{term}'"
        hint = (
            "bounds=True takes the local bound of Bernoulli and binomial sites with logits= that "
            "are affine in Gaussian sites. "
            if isinstance(family, Gaussian) and ("Bernoulli" in kind or "Binomial" in kind)
            else ""
        )
        return not_conjugate(family, f"{what} ({kind}): its log density is", hint)


def not_conjugate(family: Family, what: str, hint: str = "") -> NotConjugateError:
    """The error that names the sites and says `what` is not affine."""
    sites = " and ".join(f"'{k}'" for k in family.sites)
    return NotConjugateError(
        f"site {sites} is not conjugate to {what} not affine in the statistics of a {family.name} "
        f"factor. {hint}{LISTED}"
    )


def require_conjugate_nearby(structure: Structure, q: list[Family]) -> None:
    """Raise `NotConjugateError` where a density is not affine about the fitted q: a bump there that
    no value of the proof met. Compiles nothing that the proof has not.
    """
    for j, names in structure.to_prove():
        if failed := not_affine(structure.joint, names, q[j], q, near=True):
            raise not_conjugate(q[j], f"'{failed[0]}': about the fitted q its log density is")


_SURE = 0.9  # of a label that a start gives


def start_of(
    init: Mapping[str, Any] | None, structure: Structure, trace: dict, key
) -> list[Family]:
    """A first q of every block: from `init`, else draws of the prior, and labels by k-means++."""
    joint, rng = structure.joint, np.random.default_rng(number_of(key))
    _require_latents("init", init or {}, joint)
    drawn = bare_trace(joint.model, joint.args, joint.kwargs, key=key)
    prior = {k: {**trace[k], "value": drawn[k]["value"]} for k in joint.latents}
    known = {k: s for k, s in trace.items() if k in drawn} | prior
    return [_one(structure, i, known, init or {}, rng) for i in range(len(structure.blocks))]


def _require_latents(option: str, names: Iterable[str], joint: LogJoint) -> None:
    if unknown := sorted(set(names) - set(joint.latents)):
        raise DataError(
            f"MeanField({option}=...): {unknown} are not latent sites; give {list(joint.latents)}."
        )


def number_of(key) -> int:
    """A seed for what the host draws."""
    return int(np.asarray(random.key_data(key)).ravel()[-1])


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
            f"MeanField(init=...): the factor of site '{next(iter(given))}' is "
            f"{type(family).__name__}; give values of discrete and Gaussian sites."
        )
    return family


def _value(name: str, given: dict, trace: dict):
    value, shape = given.get(name, trace[name]["value"]), tuple(trace[name]["fn"].shape())
    if np.shape(value) != shape:
        raise DataError(
            f"MeanField(init=...): '{name}' has shape {np.shape(value)}; its site has {shape}."
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
    return _with_probs(family, probs)


def _with_probs(family: Discrete, probs) -> Family:
    return family.at_eta(jnp.log(np.maximum(probs, np.finfo(float).tiny)))


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
        return _with_probs(family, rng.dirichlet(np.ones(K), family.batch))
    spread = rows.std(0)
    rows = rows / np.where(spread > 0, spread, 1.0)
    near = np.argmin(cdist(rows, _plus_plus(rows, K, rng), "sqeuclidean"), 1)
    probs = np.full((len(rows), K), (1.0 - _SURE) / K)
    probs[np.arange(len(rows)), near] += _SURE
    return _with_probs(family, probs)


def _plus_plus(rows: np.ndarray, K: int, rng) -> np.ndarray:
    """k-means++ (Arthur & Vassilvitskii 2007): K rows, drawn by squared distance from others."""
    found = [rows[rng.integers(len(rows))]]
    while len(found) < K:
        near = np.min(cdist(rows, found, "sqeuclidean"), 1)
        total = near.sum()
        p = near / total if total > 0 else np.full(len(rows), 1.0 / len(rows))
        found.append(rows[rng.choice(len(rows), p=p)])
    return np.asarray(found)
