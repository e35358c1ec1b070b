"""Cov[v, f(X)] of unknowns among which each row sees one of U levels: V + 2 numbers per row, not
V + U.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_gp.numerics.arrow import split
from ppl_gp.numerics.loads import joined
from ppl_gp.sparse.root import Root


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

    def with_few(self, few: Float[Array, "V B"]) -> "LevelColumns":
        """Other entries of the few."""
        return LevelColumns(few, self.index, self.weight, self.num, self.start)

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
            return C.with_few(self.few.whiten(C.few))
        return self._of_few(self.few.whiten, C)

    def color(self, v):
        return self._of_few(self.few.color, v)

    def _of_few(self, apply, x):
        few, levels = split(x.T, self.start, self.num)
        return joined(levels.T, apply(few.T), self.start)

    @property
    def added(self):
        return self.few.added
