"""The blocks of mean field: who sees whom, which sites are taken together, and what each is proved
to be.

By default every latent site is a block of its own, but for a mean and the precision that scales
its prior, where both together are proved conjugate. Elements of a plate are apart in q where no
term couples them, and one joint Gaussian where one does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import LISTED, DataError, NotConjugateError
from ppl_gp.gp import unwrap
from ppl_gp.mean_field.choose import gaussian_of, paired, single
from ppl_gp.mean_field.conjugacy import (
    conjugate_nearby,
    conjugate_terms,
    coupled_rows,
    random_values,
)
from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.expected import Term, require_few_nodes
from ppl_gp.mean_field.family import Family
from ppl_gp.mean_field.gaussian import Gaussian
from ppl_gp.mean_field.log_joint import LogJoint, is_logistic, scored
from ppl_gp.reading.dependence import sources


class Structure(NamedTuple):
    """Blocks in the order of their updates, discrete ones last, and the terms that see them."""

    joint: LogJoint
    blocks: list[Family]
    terms: tuple[Term, ...]


def find_structure(
    joint: LogJoint, trace: dict, factors: Sequence[Sequence[str]] | None, bounds: bool
) -> Structure:
    """Find and prove the blocks. Abstract traces, and some hundred gradients a block.

    Raises `NotConjugateError`, `DataError` (`factors`), `ModelError` (no family).
    """
    return _Finder(joint, trace, bounds).find(factors)


class _Finder:
    """The search: the model, and which logistic terms take the local bound so far."""

    def __init__(self, joint: LogJoint, trace: dict, bounds: bool):
        self.joint, self.trace, self.bounds = joint, trace, bounds
        self.alone = {k: single(k, trace[k]) for k in joint.latents}
        self.seen = _seen(joint, trace)
        self.passed: dict[tuple, np.ndarray] = {}

    def find(self, factors) -> Structure:
        """Blocks as asked for, or as found, each proved; again where one took a local bound."""
        blocks = self._given(factors) if factors is not None else self._pairs()
        named = {k for f in blocks for k in f.sites}
        blocks += [self.alone[k] for k in self.joint.latents if k not in named]
        before = None
        while before != self.joint.bounded:  # a bound that a block needs is another term for all
            before = self.joint.bounded
            blocks = [self._proved(f) for f in blocks]
        order = {k: i for i, k in enumerate(self.joint.latents)}
        blocks.sort(key=lambda f: (isinstance(f, Discrete), min(order[k] for k in f.sites)))
        terms = tuple(self._term(name, blocks) for name in self.joint.terms)
        require_few_nodes(terms, blocks)
        return Structure(self.joint, blocks, terms)

    def _term(self, name: str, blocks: list[Family]) -> Term:
        sees = tuple(i for i, f in enumerate(blocks) if not self.seen[name].isdisjoint(f.sites))
        return Term(name, sees, name in self.joint.bounded)

    def _names(self, sites) -> tuple[str, ...]:
        return tuple(k for k in self.joint.terms if not self.seen[k].isdisjoint(sites))

    def _passes(self, family: Family) -> np.ndarray:
        """Each term's proof, which `_pairs` and `_proved` both ask for, once."""
        what = (type(family), family.sites, family.batch, self.joint.bounded)
        if what not in self.passed:
            names = self._names(family.sites)
            all_sites = list(self.alone.values())
            self.passed[what] = conjugate_terms(self.joint, names, family, all_sites)
        return self.passed[what]

    def _pairs(self) -> list[Family]:
        """A mean with the precision of its own prior."""
        found: list[Family] = []
        taken: set[str] = set()
        for mean, family in self.alone.items():
            if not isinstance(family, Gaussian):
                continue
            for precision in sorted(self.seen[mean] - {mean} - taken):
                both = paired(mean, precision, self.trace)
                if both is not None and np.all(self._passes(both)):
                    found.append(both)
                    taken |= {mean, precision}
                    break
        return found

    def _given(self, factors) -> list[Family]:
        named = [k for group in factors for k in group]
        if unknown := sorted(set(named) - set(self.joint.latents)):
            raise DataError(
                f"MeanField(factors=...): {unknown} are no latent sites of the model, which are "
                f"{list(self.joint.latents)}."
            )
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
        names, passed = self._names(family.sites), self._passes(family)
        failed = [k for k, ok in zip(names, passed, strict=True) if not ok]
        # where one overflows, no gradient is a number: the block's own prior comes last
        failed = sorted(failed, key=lambda k: k in family.sites)
        if failed and isinstance(family, Gaussian) and family.batch:
            fewer = gaussian_of(list(family.sites), self.trace, len(family.batch) - 1)
            return self._proved(fewer)
        if failed and self.bounds and isinstance(family, Gaussian):
            logistic = [k for k in failed if self._takes_bound(k)]
            if logistic and set(logistic) == set(failed):
                self.joint = self.joint._replace(bounded=(*self.joint.bounded, *logistic))
                # with elements apart: which ones the bound couples is another question
                own = family.sites
                return self._proved(self.alone[own[0]] if len(own) == 1 else family)
        if failed:
            self._require_finite(failed)
            raise self._error(family, failed[0])
        return family

    def _require_finite(self, names: list[str]) -> None:
        """A density that is not finite at some values cannot be looked at there."""
        for key in random.split(random.key(0), 4):
            values = random_values(list(self.alone.values()), key)
            for name, x in zip(names, self.joint.entries(tuple(names), values), strict=True):
                if not np.all(np.isfinite(x)):
                    raise NotConjugateError(
                        f"the log density of site '{name}' is not finite at some values of the "
                        "latents inside their supports (a label under which an observation is "
                        "impossible, or an overflow), and MeanField() needs it there. Make what is "
                        f"impossible unlikely, as in jnp.where(z == 1, rate, 1e-8). {LISTED}"
                    )

    def _takes_bound(self, name: str) -> bool:
        sees = [self.alone[k] for k in self.seen[name]]
        return (
            name not in self.joint.bounded
            and is_logistic(self.trace[name])
            and all(isinstance(f, Gaussian) for f in sees)
        )

    def _discrete(self, family: Discrete) -> Family:
        for name in self._names(family.sites):
            why = coupled_rows(self.joint, name, family, list(self.alone.values()))
            if why is not None:
                raise NotConjugateError(
                    f"MeanField() sums discrete site '{family.sites[0]}' element by element, and "
                    f"site '{name}' does not see it so: {why}; where an "
                    "index or two plates of labels stand between them (z[group], a block model), "
                    "such sums are not there, however conjugate the model is: use NUTS() with the "
                    "labels summed out (numpyro.distributions.MixtureSameFamily)."
                )
        return family

    def _error(self, family: Family, term: str) -> NotConjugateError:
        kind = type(unwrap(self.trace[term]["fn"])).__name__
        sites = " and ".join(f"'{k}'" for k in family.sites)
        what = "its own prior" if term in family.sites else f"'{term}'"
        hint = (
            "bounds=True takes the local bound of Bernoulli and binomial sites with logits= that "
            "are affine in Gaussian sites. "
            if isinstance(family, Gaussian) and ("Bernoulli" in kind or "Binomial" in kind)
            else ""
        )
        return NotConjugateError(
            f"site {sites} is not conjugate to {what} ({kind}): its log density is not affine in "
            f"the statistics of a {family.name} factor. {hint}{LISTED}"
        )


def require_conjugate_nearby(structure: Structure, q: list[Family]) -> None:
    """Raise `NotConjugateError` where a density is not affine about the fitted q: a bump there that
    no value of the proof met. Compiles nothing that the proof has not.
    """
    for j, family in enumerate(q):
        names = tuple(t.site for t in structure.terms if j in t.blocks)
        if isinstance(family, Discrete) or not names:
            continue
        passed = conjugate_nearby(structure.joint, names, family, q)
        if failed := [k for k, ok in zip(names, passed, strict=True) if not ok]:
            sites = " and ".join(f"'{k}'" for k in family.sites)
            raise NotConjugateError(
                f"site {sites} is not conjugate to '{failed[0]}': about the fitted q its log "
                f"density is not affine in the statistics of a {family.name} factor. "
                f"{LISTED}"
            )


def _seen(joint: LogJoint, trace: dict) -> dict[str, frozenset]:
    """{term: the latent sites that its density is computed from}: a proof, by the jaxpr."""
    values = {k: jnp.asarray(trace[k]["value"]) for k in joint.latents}

    def terms(values):
        again = joint.trace(values)
        return {k: scored(again[k]) for k in joint.terms}

    return {k: s & frozenset(joint.latents) for k, s in sources(terms, values).items()}
