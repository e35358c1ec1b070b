"""The parts of a linear predictor eta = offset + sum_k A_k z_k, of R functions a datum: what one
site adds at n rows.

- `Table`: a site that belongs to no datum (coefficients, groups, a GP at a table of places):
  F = A L, C = L L^T, a column an unknown; by `Columns`, or by `Levels` where each row is proved to
  see one of them;
- `Weighted`: a GP at the data's inputs: a number a_rn of each of its units, and its own kernel;
- `Own`: effects that stand one a datum: a covariance within the row.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_gp.gp import GP
from ppl_gp.numerics.blocks import diagonal_of


class Part(eqx.Module):
    """What one site adds to the R functions of the predictor at n rows: A c at its own mean c, and
    a covariance. Rows of matrices are (function, row), functions outermost.
    """

    mean: Float[Array, "R n"]

    @abstractmethod
    def cross(self, other: Any) -> Float[Array, "Rn Rm"]:
        """Covariances with the same part at other rows."""

    @abstractmethod
    def blocks(self) -> Float[Array, "R R n"]:
        """Covariances within a row, without `jitter`."""

    @abstractmethod
    def first_row(self) -> "Part":
        """Of the first row alone."""

    def diag(self) -> Float[Array, "Rn"]:
        """Variances, without `jitter`."""
        return diagonal_of(self.blocks())

    def jitter(self) -> Float[Array, "R R n"]:
        """Covariances that a row shares with no other row, not even one of the same arguments."""
        R, n = self.mean.shape
        return jnp.zeros((R, R, n), self.mean.dtype)


class Table(Part):
    """F w, w ~ N(0, I), of unknowns that belong to no datum."""

    @property
    @abstractmethod
    def flat(self) -> Float[Array, "Rn U"]:
        """F."""

    @property
    def num_unknowns(self) -> int:
        """U."""
        return self.flat.shape[1]

    def cross(self, other):
        return self.flat @ other.flat.T


class Columns(Table):
    """F by its columns."""

    columns: Float[Array, "R n U"]

    @property
    def flat(self):
        return jnp.reshape(self.columns, (-1, self.columns.shape[-1]))

    def blocks(self):
        return jnp.einsum("anu,bnu->abn", self.columns, self.columns)

    def first_row(self):
        return Columns(self.mean[:, :1], self.columns[:, :1])


class Levels(Table):
    """F with one entry per row: row n sees `weight[n]` times unknown `index[n]` of `num`. Of one
    function.
    """

    index: Int[Array, "n"]
    weight: Float[Array, "n"]
    num: int = eqx.field(static=True)

    @property
    def flat(self):
        return (self.index[:, None] == jnp.arange(self.num)) * self.weight[:, None]

    @property
    def num_unknowns(self):
        return self.num

    def cross(self, other):
        if not isinstance(other, Levels):
            return self.flat @ other.flat.T
        same = self.index[:, None] == other.index
        return jnp.where(same, self.weight[:, None] * other.weight, 0.0)

    def blocks(self):
        return (self.weight**2)[None, None]

    def first_row(self):
        return Levels(self.mean[:, :1], self.index[:1], self.weight[:1], self.num)


class Weighted(Part):
    """sum_p a_rpn f_p(x_n), f_p independent draws of one GP."""

    weights: Float[Array, "R P n"]
    prior: GP

    def cross(self, other):
        k = other.prior.kernel(self.prior.X, other.prior.X)
        if self.weights.shape[:2] == (1, 1):
            return self.weights[0, 0][:, None] * k * other.weights[0, 0]
        same = jnp.einsum("apn,bpm->anbm", self.weights, other.weights)
        rows, columns = (w.shape[0] * w.shape[2] for w in (self.weights, other.weights))
        return jnp.reshape(same * k[:, None, :], (rows, columns))

    def separate(self, other: "Weighted") -> Float[Array, "R n m"]:
        """Covariances of each function with itself, at these rows and at others."""
        k = self.prior.kernel(self.prior.X, other.prior.X)
        return jnp.einsum("rpn,rpm->rnm", self.weights, other.weights) * k

    def blocks(self):
        return self._same() * self.prior.kernel.diag(self.prior.X)

    def jitter(self):
        return self._same() * (self.prior.variance - self.prior.kernel.diag(self.prior.X))

    def _same(self):
        return jnp.einsum("apn,bpn->abn", self.weights, self.weights)

    def first_row(self):
        prior = GP(self.prior.kernel, self.prior.X[:1], self.prior.mean_function, self.prior.jitter)
        return Weighted(self.mean[:, :1], self.weights[..., :1], prior)


class Own(Part):
    """An effect of each datum."""

    covariance: Float[Array, "R R n"]

    def cross(self, other):
        return jnp.zeros((self.mean.size, other.mean.size), self.mean.dtype)

    def blocks(self):
        return jnp.zeros_like(self.covariance)

    def jitter(self):
        return self.covariance

    def first_row(self):
        return Own(self.mean[:, :1], self.covariance[..., :1])
