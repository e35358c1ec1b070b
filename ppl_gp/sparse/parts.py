"""Inducing variables of a linear predictor eta = offset + sum_k A_k z_k, of R functions per datum:
those of each GP, and the effects themselves.

u = (inducing variables of every unit of every GP site; w of every other site, z = c + L w, w ~ N(0,
I)), sites in alphabetical order. The terms are independent a priori, so Cov[u] is block diagonal.
q(u) is one Gaussian for all of them: a GP and the effects of other sites are correlated in the
posterior. Covariances with the predictor at n rows are (M, R n), functions outermost.

`ArrowVariables` are for a grouping factor of U levels, if each row is proved to depend on one
(`predictor.parts.Levels`). Everything else (the GPs' inducing variables, coefficients, smaller
factors, and further large ones) are the V few. Cov[v, f(X)] takes V + 2 numbers per row, not V + U:
those of the few, and an index and a weight (`LevelColumns`).
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_gp.errors import ModelError
from ppl_gp.numerics.arrow import Arrow, ArrowGram, joined, split
from ppl_gp.numerics.linalg import product
from ppl_gp.reading.digest import at_once
from ppl_gp.reading.predictor.parts import Levels, Table, Weighted
from ppl_gp.reading.predictor.prior import PredictorGP, widest
from ppl_gp.sparse.families import DiagonalRoot, NaturalGaussian, Root, Whitened
from ppl_gp.sparse.features.structure import BlockRoot
from ppl_gp.sparse.inducing import InducingVariables


class PartsVariables(InducingVariables):
    """M = the sum of the GPs' (for each unit) and of the other sites' unknowns; O(M^3 + M^2 B).

    `gps`: {GP site: its inducing variables}. `units`: {GP site: number of its functions}. `tables`:
    {other site: number of its unknowns}.
    """

    gps: dict[str, InducingVariables]
    units: dict[str, int] = eqx.field(static=True)
    tables: dict[str, int] = eqx.field(static=True)

    @property
    def names(self) -> list[str]:
        """The sites, in the order of u."""
        return sorted({*self.gps, *self.tables})

    def size(self, site: str) -> int:
        """Unknowns of a site."""
        return self.tables[site] if site in self.tables else self.units[site] * self.gps[site].num

    def start(self, site: str) -> int:
        """Where they begin in u."""
        return sum(self.size(k) for k in self.names[: self.names.index(site)])

    @property
    def num(self):
        return sum(self.size(k) for k in self.names)

    @property
    def is_exact(self):
        return all(v.is_exact for v in self.gps.values())

    def root(self, prior) -> Root:
        return self._blocks(prior, self.names)

    def _blocks(self, prior, sites: list[str]) -> BlockRoot:
        parts, roots, sizes = prior.kernel.at(prior.X[:2]).parts, [], []
        for k in sites:
            if k in self.tables:
                roots += [DiagonalRoot(jnp.ones(self.tables[k]))]
                sizes += [self.tables[k]]
            else:
                roots += [self.gps[k].root(parts[k].prior)] * self.units[k]
                sizes += [self.gps[k].num] * self.units[k]
        return BlockRoot(tuple(roots), tuple(sizes))

    def cross(self, prior, X):
        parts = prior.kernel.at(X).parts
        return self.cross_of({k: parts[k] for k in self.names})

    def cross_of(self, parts: dict[str, Any]) -> Any:
        """Cov[u, what some sites add to the predictor at n rows], (M, R n); zero for effects with
        one value per datum, which u is not about.
        """
        return self._stacked(self.names, parts)

    def cross_of_effects(self, loads: dict[str, Table]) -> Any:
        """Cov[u, sum_j D_j w_j], (M, n), of `{site j: D_j}`, w_j the unknowns of its columns."""
        return self.cross_of(loads)

    def _stacked(self, sites: list[str], parts: dict[str, Any]) -> Float[Array, "V Rn"]:
        """Of the unknowns of `sites`: zero of those that `parts` lacks."""
        n = next(iter(parts.values())).mean.size
        none = lambda k: jnp.zeros((self.size(k), n))  # noqa: E731
        return jnp.concatenate([self._cross(k, parts[k]) if k in parts else none(k) for k in sites])

    def _cross(self, site: str, part: Any):
        if isinstance(part, Table):
            return part.flat.T
        C = self.gps[site].cross(part.prior, part.prior.X)
        weighted = jnp.einsum("rpn,mn->pmrn", part.weights, C)
        return jnp.reshape(weighted, (part.weights.shape[1] * len(C), -1))


class SeveralParts(PartsVariables):
    """As `PartsVariables`, of a predictor of several functions a datum: one q(u) for all of them,
    which are correlated given the data. O(M^3 + M^2 R B).
    """

    num_functions: int = eqx.field(static=True)

    @property
    def functions(self):
        return self.num_functions


class LevelColumns(eqx.Module):
    """A (M, B): column n is `few[:, n]`, and `weight[n]` at level `index[n]`. The `num` levels
    stand at `start` among all M.
    """

    few: Float[Array, "V B"]
    index: Int[Array, "B"]
    weight: Float[Array, "B"]
    num: int = eqx.field(static=True)
    start: int = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, B)."""
        return len(self.few) + self.num, len(self.weight)

    def __rmatmul__(self, v: Float[Array, "... M"]) -> Float[Array, "... B"]:
        """v A."""
        few, levels = split(v, self.start, self.num)
        return few @ self.few + levels[..., self.index] * self.weight

    def array(self) -> Float[Array, "M B"]:
        """A written out."""
        levels = (self.index == jnp.arange(self.num)[:, None]) * self.weight
        return joined(levels, self.few, self.start)


class LevelRoot(Root):
    """K_uu of the few by its own root, and I of the levels."""

    few: Root
    num: int = eqx.field(static=True)
    start: int = eqx.field(static=True)

    def whiten(self, C: Any) -> Any:
        if isinstance(C, LevelColumns):
            return eqx.tree_at(lambda C: C.few, C, self.few.whiten(C.few))
        return self._of_few(self.few.whiten, C)

    def color(self, v):
        return self._of_few(self.few.color, v)

    def _of_few(self, apply, x):
        few, levels = split(x.T, self.start, self.num)
        return joined(levels.T, apply(few.T), self.start)

    @property
    def added(self):
        return self.few.added


MIN_LEVELS = 200  # below, one dense Gaussian is as fast


class ArrowVariables(PartsVariables):
    """As `PartsVariables`, `levels` the site whose unknowns are kept apart. O(V^3 + V^2 B) of V
    others, nothing of size (levels x B).
    """

    levels: str = eqx.field(static=True)

    @property
    def few(self) -> list[str]:
        """The other sites, in the order of u."""
        return [k for k in self.names if k != self.levels]

    def root(self, prior):
        blocks = self._blocks(prior, self.few)
        return LevelRoot(blocks, self.tables[self.levels], self.start(self.levels))

    def cross_of_effects(self, loads):
        seen = isinstance(loads.get(self.levels), Levels | None)
        return self.cross_of(loads) if seen else super().cross_of(loads)

    def cross_of(self, parts):
        """For the few, and for the level of each row."""
        num, start = self.tables[self.levels], self.start(self.levels)
        levels, few = parts.get(self.levels), self._stacked(self.few, parts)
        if levels is None:
            n = few.shape[1]
            return LevelColumns(few, jnp.zeros(n, int), jnp.zeros(n), num, start)
        if not isinstance(levels, Levels):
            raise ModelError(
                f"rows of the data see one level of site '{self.levels}' each, and those here are "
                "not seen to: q(u) of a fit by SVGP() has a form for the former alone. Compute the "
                "linear predictor in the same way for any number of rows."
            )
        return LevelColumns(few, levels.index, levels.weight, num, start)


def parts_variables(
    prior: PredictorGP, gps: dict[str, InducingVariables], arrow: bool
) -> PartsVariables:
    """Of a predictor's prior, with the inducing variables of its GPs at the data's inputs.

    `arrow`: whether q(u) may have a precision of that form: then the largest site of `MIN_LEVELS`
    or more unknowns of which each row is proved to see one is kept apart.
    """
    units, tables, levels = at_once(_sizes, prior)
    if prior.kernel.functions > 1:
        return SeveralParts(gps, units, tables, prior.kernel.functions)
    if arrow and levels is not None and tables[levels] >= MIN_LEVELS:
        return ArrowVariables(gps, units, tables, levels)
    return PartsVariables(gps, units, tables)


def _sizes(prior: PredictorGP) -> tuple[dict[str, int], dict[str, int], str | None]:
    """Units of GPs, unknowns of tables, the widest site of which a row sees one."""
    parts = prior.kernel.at(prior.X[:2]).parts
    units = {k: p.weights.shape[1] for k, p in parts.items() if isinstance(p, Weighted)}
    tables = {k: p.flat.shape[1] for k, p in parts.items() if isinstance(p, Table)}
    return units, tables, widest(parts)


def natural_prior(variables: InducingVariables, shape, dtype) -> NaturalGaussian:
    """q(v) = p(v), in the form that the variables have; `shape` (*F, M)."""
    nat1 = jnp.asarray(np.zeros(shape, dtype))  # on the host: no program
    if not isinstance(variables, ArrowVariables):
        return NaturalGaussian(nat1, jnp.asarray(np.zeros((*shape, shape[-1]), dtype)))
    num, start = variables.tables[variables.levels], variables.start(variables.levels)
    return ArrowGaussian(nat1, Arrow.zeros(shape[-1] - num, num, start, dtype))


class ArrowGaussian(NaturalGaussian):
    """As `NaturalGaussian`, with an arrow nat2, of one function, in whitened coordinates."""

    nat2: Arrow

    def whitened(self):
        gram = self._precision()
        m, S = gram.solve(self.nat1), gram.inverse
        trace = jnp.trace(S.block) + jnp.sum(S.own)
        kl = 0.5 * (trace + jnp.sum(m**2) - m.size) + gram.half_log_det()
        return Whitened(m, S.times(-1.0).plus_diagonal(1.0), kl)

    def _precision(self) -> ArrowGram:
        return self.nat2.symmetric().plus_diagonal(1.0).factored()

    def narrowed(self, scale):
        nat2 = self.nat2.plus_diagonal(1.0).times(1.0 / scale**2).plus_diagonal(-1.0)
        return ArrowGaussian(self.nat1 / scale**2, nat2)

    def target(self, q, gradient, weight):
        """As there. `across` stands for two entries, and its derivative is twice the matrix's."""
        share = (1.0 / jnp.asarray(weight)).astype(gradient.mean.dtype)
        bar = gradient.reduction.symmetric()
        nat2 = Arrow(2.0 * bar.block, bar.across, 2.0 * bar.own, bar.start).times(share)
        return ArrowGaussian(share * gradient.mean + nat2 @ q.mean, nat2)

    def expected_gain(self, q, target, weight):
        """As there, O(U V^2): S = E + W B W^T with E = diag(1 / d) at the levels, W = (I; C) and B
        the few's block, so that tr((S D)^2) = tr((E D)^2) + 2 tr(B Y^T E Y) + tr((B W^T D W)^2), Y
        = D W at the levels.
        """
        gram, D = self._precision(), target.nat2 + self.nat2.times(-1.0)
        r = target.nat1 - self.nat1 - D @ q.mean
        C, d, B = -gram.cross / gram.d[:, None], gram.d, gram.inverse.block
        Y = D.across + D.own[:, None] * C
        inside = D.block + product(D.across.T, C) + product(C.T, Y)
        own = jnp.sum((D.own / d) ** 2) + 2.0 * jnp.sum(B * product(Y.T, Y / d[:, None]))
        BD = product(B, inside)
        return weight * (0.5 * r @ gram.solve(r) + 0.25 * (own + jnp.sum(BD * BD.T)))

    def is_proper(self):
        return jnp.isfinite(self._precision().half_log_det())
