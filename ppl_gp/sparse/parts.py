"""Inducing variables of a linear predictor eta = offset + sum_k A_k z_k, of R functions a datum:
those of each GP, and the effects themselves.

u = (inducing variables of every unit of every GP site; w of every other site, z = c + L w, w ~ N(0,
I)), sites in alphabetical order. The terms are independent a priori, so that Cov[u] is block
diagonal, and q(u) is one Gaussian for all of them: a GP and the effects beside it are correlated in
the posterior. Covariances with the predictor at n rows are (M, R n), functions outermost.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from ppl_gp.model.loadings import Loadings
from ppl_gp.model.predictor_parts import Table
from ppl_gp.sparse.features.composed import BlockRoot
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.root import DiagonalRoot, Root


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
        parts = _at(prior, prior.X[:2]).parts
        roots = [r for k in sites for r in self._roots(k, parts[k])]
        return BlockRoot(tuple(roots), tuple(s for k in sites for s in self._sizes(k)))

    def _sizes(self, site: str) -> list[int]:
        if site in self.tables:
            return [self.tables[site]]
        return [self.gps[site].num] * self.units[site]

    def _roots(self, site: str, part: Any) -> list[Root]:
        if site in self.tables:
            return [DiagonalRoot(jnp.ones(self.tables[site]))]
        return [self.gps[site].root(part.prior)] * self.units[site]

    def cross(self, prior, X):
        parts = _at(prior, X).parts
        return jnp.concatenate([self._cross(k, parts[k]) for k in self.names])

    def cross_of_part(self, site: str, part: Any) -> Any:
        """Cov[u, what one site adds to the predictor at n rows], (M, R n); zero of an effect that
        stands one a datum, which u is not about.
        """
        if site not in self.names:
            return jnp.zeros((self.num, part.mean.size), part.mean.dtype)
        return self._stacked({site: self._cross(site, part)})

    def cross_of_effects(self, loads: dict[str, Table]) -> Any:
        """Cov[u, sum_j D_j w_j], (M, n), of `{site j: D_j}`, w_j what stands behind its columns."""
        return self._stacked({k: part.flat.T for k, part in loads.items()})

    def _stacked(self, rows: dict[str, Array]):
        n = next(iter(rows.values())).shape[1]
        blocks = [rows[k] if k in rows else jnp.zeros((self.size(k), n)) for k in self.names]
        return jnp.concatenate(blocks)

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


def _at(prior: Any, X) -> Loadings:
    return prior.kernel.at(X)
