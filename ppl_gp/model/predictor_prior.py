"""The prior of a linear predictor eta = offset + sum_k A_k z_k, of R functions a datum, as a GP
over rows of a model's arguments.

eta_n is computed from z by the arguments of row n alone, so that cov(eta(r), eta(r')) is a function
of two rows: the sum over the sites of a(r) C a(r')^T. What a site adds is one of three parts:

- `Table`: a site that belongs to no datum (coefficients, groups, a GP at a table of places):
  F = A L, C = L L^T, a column an unknown; by `Columns`, or by `Levels` where each row is proved to
  see one of them;
- `Weighted`: a GP at the data's inputs: a number a_rn of each of its units, and its own kernel;
- `Own`: effects that stand one a datum: a covariance within the row.

A is never formed: columns of L are pushed through the model's own operations.
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float, Int

from ppl_gp.gp import GP
from ppl_gp.kernels.base import Kernel
from ppl_gp.model.gaussian_sites import root_of
from ppl_gp.numerics.blocks import diagonal_of, matrix_of
from ppl_gp.numerics.independent import Independent
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.numerics.loads import Dense, Loads, OneAndOthers
from ppl_gp.numerics.low_rank import Covariance, LowRank
from ppl_gp.proofs.one_each import OneEach
from ppl_gp.wrappers import unwrap

FEW_LEVELS = 16  # unknowns of a site below which its columns are as fast as what each row sees


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
    """F with one entry a row: row n sees `weight[n]` times unknown `index[n]` of `num`. Of one
    function.
    """

    index: Int[Array, "n"]
    weight: Float[Array, "n"]
    num: int = eqx.field(static=True)

    @property
    def flat(self):
        return (self.index[:, None] == jnp.arange(self.num)) * self.weight[:, None]

    def cross(self, other):
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

    def separate(self) -> Float[Array, "R n n"]:
        """Covariances of each function with itself."""
        k = self.prior.kernel(self.prior.X, self.prior.X)
        return jnp.einsum("rpn,rpm->rnm", self.weights, self.weights) * k

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


class Loadings(eqx.Module):
    """A predictor at n rows, by what it is made of."""

    offset: Float[Array, "R n"]
    parts: dict[str, Part]

    def first_row(self) -> "Loadings":
        """Of the first row alone."""
        return Loadings(self.offset[:, :1], {k: p.first_row() for k, p in self.parts.items()})

    @property
    def mean(self) -> Float[Array, "R n"]:
        return sum([p.mean for p in self.parts.values()], self.offset)

    def jitter(self) -> Float[Array, "R R n"]:
        return _added([p.jitter() for p in self.parts.values()])

    def diag(self) -> Float[Array, "Rn"]:
        return _added([p.diag() for p in self.parts.values()])

    def blocks(self) -> Float[Array, "R R n"]:
        """Covariances within a row, `jitter` included."""
        return _added([p.blocks() + p.jitter() for p in self.parts.values()])

    def cross(self, other: "Loadings") -> Float[Array, "Rn Rm"]:
        return _added([p.cross(other.parts[k]) for k, p in self.parts.items()])


def _added(terms: list[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def loadings(
    eta: Callable, fns: dict, centres: dict, axes: dict[str, int], one_each: Callable
) -> Loadings:
    """Of a predictor `eta({site: innovation}) -> (R, n)`, affine.

    `fns`: {site: distribution at these rows}. `centres`: the sites' own means, where the other
    sites are zero. `axes`: {site with one entry a datum: the axis of the data in its value, from
    the right}. `one_each(site)`: what each row sees of it, where that is one entry, else `None`.
    """
    zero = {k: jnp.zeros(fn.shape()) for k, fn in fns.items()}

    def pushed(site):
        """A e of one site's innovations e."""
        return lambda e: jax.jvp(lambda x: eta({**zero, site: x}), (zero[site],), (e,))[1]

    def part(site, fn):
        seen = one_each(site) if site not in axes and _has_scales(fn) else None
        return _part(fn, pushed(site), centres[site], axes.get(site), seen)

    parts = {k: part(k, fn) for k, fn in fns.items()}
    return Loadings(eta(zero) - sum(p.mean for p in parts.values()), parts)


def _has_scales(fn) -> bool:
    """Whether a Gaussian site's entries are independent, and enough that it matters."""
    return isinstance(unwrap(fn), dist.Normal) and math.prod(fn.shape()) >= FEW_LEVELS


def _part(fn, pushed: Callable, centre, axis: int | None, seen: OneEach | None) -> Part:
    centre = jnp.asarray(centre, jnp.result_type(float))  # Normal(0, 1) has integers
    mean, root = pushed(jnp.broadcast_to(centre, fn.shape())), root_of(fn)
    if seen is not None:
        scale = jnp.ravel(jnp.broadcast_to(unwrap(fn).scale, fn.shape()))
        return Levels(mean, seen.index, seen.weight * scale[seen.index], scale.size)
    if axis is None:
        return Columns(mean, jnp.moveaxis(columns(fn, pushed), 0, -1))
    if isinstance(unwrap(fn), GP):
        return Weighted(mean, of_units(fn.shape(), axis, pushed), unwrap(fn))
    own = of_units(fn.shape(), axis, lambda e: pushed(root(e)))
    return Own(mean, jnp.einsum("apn,bpn->abn", own, own))


def of_units(shape, axis: int, pushed: Callable) -> Float[Array, "R P n"]:
    """What each unit of a site with one entry a datum gives, taken alone and alike in all rows."""
    units = list(shape)
    num = units.pop(axis)

    def alike(unit):
        rows = jnp.broadcast_to(unit[..., None], (*unit.shape, num))
        return jnp.moveaxis(rows, -1, axis)

    return jnp.moveaxis(jax.vmap(lambda b: pushed(alike(b)))(_basis(units)), 0, 1)


def rows_apart(eta: Callable, shapes: dict[str, tuple], axes: dict[str, int], key) -> Array:
    """Whether row n of the predictor sees row n alone of the sites with one entry a datum, (n,).

    A = diag(a) for a unit and a function if and only if A v = a v for a random v, with probability
    one.
    """
    zero = {k: jnp.zeros(shape) for k, shape in shapes.items()}
    found = []
    for i, (site, axis) in enumerate(axes.items()):
        v = random.normal(random.fold_in(key, i), shapes[site])
        pushed = lambda e, k=site: jax.jvp(lambda x: eta({**zero, k: x}), (zero[k],), (e,))[1]  # noqa: E731
        rows = jnp.reshape(jnp.moveaxis(v, axis, -1), (-1, v.shape[axis]))
        terms = of_units(v.shape, axis, pushed) * rows
        size = 1.0 + jnp.sum(jnp.abs(terms), 1)
        found.append(
            jnp.abs(pushed(v) - jnp.sum(terms, 1)) <= 1e3 * jnp.finfo(size.dtype).eps * size
        )
    return jnp.all(jnp.stack(found), (0, 1)) if found else jnp.ones((), bool)


def columns(fn, pushed: Callable):
    """(U, ...): `pushed` at the innovations L e_1, ..., L e_U of a site."""
    root = root_of(fn)
    return jax.vmap(lambda b: pushed(root(b)))(_basis(fn.shape()))


def _basis(shape):
    """One unit after another, (U, *shape)."""
    return jnp.reshape(jnp.eye(math.prod(shape)), (-1, *shape))


class RowsKernel(Kernel):
    """cov(eta(r), eta(r')) of rows r, r' of a model's arguments, as columns of numbers (N, D)."""

    model: Any = eqx.field(static=True)  # a `Collapsed`
    tables: dict[str, Any]  # arguments that belong to no datum
    hyper: dict[str, Any]

    @property
    def functions(self) -> int:
        """R."""
        return self.model.plan.functions

    def at(self, X) -> Loadings:
        """The predictor at rows."""
        return self.model.loadings(X, self.tables, self.hyper)

    def __call__(self, X1, X2):
        return _cross(self, X1, None if X2 is X1 else X2)

    def diag(self, X):
        return _diag(self, X)

    def separate(self, X) -> Float[Array, "R N N"]:
        """k(X, X) of functions that are independent a priori, jitter included."""
        return _separate(self, X)


class PredictorGP(GP):
    """The prior of eta at rows of a model's arguments, (N,), or (R, N) where a datum sees R
    functions. What a row shares with no other (a GP's jitter, effects that stand one a datum) is on
    the diagonal of the covariance, as jitter is.

    The R functions stand where those of any GP site do, in the batch shape, and are correlated:
    moments are of all (R N,) values, functions outermost, and there is no density of one function.
    """

    def __init__(self, kernel: RowsKernel, X):
        super().__init__(kernel, X)
        R = kernel.functions
        self._batch_shape = () if R == 1 else (R,)

    @property
    def mean(self):
        """The predictor at the sites' means, (N,) or (R, N)."""
        mean = _mean(self.kernel, self.X)
        return mean[0] if self.kernel.functions == 1 else mean

    @property
    def variance(self):
        """Variances, (R N,)."""
        return diagonal_of(_blocks(self.kernel, self.X))

    @property
    def covariance_matrix(self):
        """(R N, R N)."""
        return self.kernel(self.X, self.X) + matrix_of(_jitter(self.kernel, self.X))

    def sample(self, key, sample_shape=()):
        """Draws of all functions, sample_shape + (N,) or (R, N)."""
        white = random.normal(key, (*sample_shape, self.mean.size), self.X.dtype)
        return self.mean + jnp.reshape(white @ self.scale_tril.T, sample_shape + self.shape())

    def log_prob(self, value):
        """log N(value; m, K), nats, of one function; several have no density each."""
        if self.kernel.functions > 1:
            raise NotImplementedError("the functions of a predictor are correlated.")
        return super().log_prob(value)


# What is asked for in tens of places: compiled as functions of their own, the model is traced once.
@eqx.filter_jit
def _cross(kernel: RowsKernel, X1, X2):
    first = kernel.at(X1)
    return first.cross(first if X2 is None else kernel.at(X2))


@eqx.filter_jit
def _separate(kernel: RowsKernel, X):
    whole = kernel.at(X)
    K = _added([p.separate() for p in whole.parts.values() if isinstance(p, Weighted)])
    return jax.vmap(add_diagonal)(K, jnp.einsum("rrn->rn", whole.jitter()))


@eqx.filter_jit
def _diag(kernel: RowsKernel, X):
    return kernel.at(X).diag()


@eqx.filter_jit
def _blocks(kernel: RowsKernel, X):
    return kernel.at(X).blocks()


@eqx.filter_jit
def _jitter(kernel: RowsKernel, X):
    return kernel.at(X).jitter()


@eqx.filter_jit
def _mean(kernel: RowsKernel, X):
    return kernel.model.mean(X, kernel.tables, kernel.hyper)


@eqx.filter_jit
def _loads(kernel: RowsKernel, X) -> Loads:
    parts = kernel.at(X).parts
    tables: list[Any] = [parts[k] for k in sorted(parts) if isinstance(parts[k], Table)]
    most = max(tables, key=lambda p: p.num if isinstance(p, Levels) else 0)
    if not isinstance(most, Levels):
        return Dense(jnp.concatenate([part.flat for part in tables], 1))
    at = tables.index(most)
    flat = [part.flat for part in tables if part is not most]
    start = sum(part.shape[1] for part in flat[:at])
    others = jnp.concatenate([jnp.zeros((len(X), 0)), *flat], 1)
    return OneAndOthers(most.index, most.weight, others, most.num, start)


def loads_of(prior: Any) -> Loads:
    """F at the rows of a predictor's prior, the sites in alphabetical order."""
    return _loads(prior.kernel, prior.X)


def blocks_of(prior: Any) -> Float[Array, "R R n"]:
    """Covariances of the functions within a row."""
    return _blocks(prior.kernel, prior.X)


def covariance_of(prior: GP) -> Covariance:
    """Cov[f] at a prior's inputs in the form that fits: columns of unknowns where a predictor sees
    fewer of them than there are data, and nothing that has one entry a datum; a matrix a function
    where several are independent.
    """
    if isinstance(prior, PredictorGP) and not prior.kernel.model.plan.axes:
        F = loads_of(prior)
        if F.shape[1] < F.shape[0]:
            return LowRank(F)
    if isinstance(prior, PredictorGP) and prior.kernel.model.plan.independent:
        if prior.kernel.functions > 1:
            return Independent(prior.kernel.separate(prior.X))
    return prior.covariance_matrix
