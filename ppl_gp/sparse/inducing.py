"""Inducing variables: what u is. A kind of them says two things about a GP prior, and nothing
else changes.

u is a set of M linear functionals of f: values at points, projections on Fourier features or
eigenfunctions, derivatives. q(v) of the whitened v = R^-1 (u - E[u]) is trained, so the bound, the
posterior, training and prediction ask for Cov[u] and Cov[u, f(X)] only.

Choosing inducing points among the inputs: by conditional variance, k-means, or at random.
"""

from abc import abstractmethod
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ppl_gp.errors import DataError
from ppl_gp.gp import GP
from ppl_gp.kernels.base import jitter_of, of_finite_rank
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.sparse.families import DenseRoot, Root, dense_root


class InducingVariables(eqx.Module):
    """Base class of inducing variables: M linear functionals u of a GP.

    To add a kind, subclass it and write `num`, `root` and `cross`. Training moves the fields that
    are arrays.

    Notes
    -----
    Values of f are `Points`. Other kinds are in `ppl_gp.features`.

    Examples
    --------
    >>> issubclass(pg.features.FourierFeatures, pg.InducingVariables)
    True
    """

    @property
    @abstractmethod
    def num(self) -> int:
        """Number M of inducing variables."""

    @property
    def is_exact(self) -> bool:
        """Whether u are functionals of f under the prior's own kernel.

        If so, the bound is one on its evidence.
        """
        return True

    @property
    def functions(self) -> int:
        """R, if Cov[u, .] covers R functions of a row together, (M, R B); else 1."""
        return 1

    @abstractmethod
    def root(self, prior: GP) -> Root:
        """R with `R R^T = Cov[u]`, in the form that its structure allows."""

    @abstractmethod
    def cross(self, prior: GP, X) -> Float[Array, "M B"]:
        """Cov[u, f(X)], (M, B), for X in the inputs of the GP site."""


def as_floats(Z):
    """Lists, and whole numbers, as floats, which training can move."""
    Z = jnp.asarray(Z) if isinstance(Z, list | tuple) else Z
    is_whole = hasattr(Z, "dtype") and jnp.issubdtype(Z.dtype, jnp.integer)
    return jnp.asarray(Z, float) if is_whole else Z


class Points(InducingVariables):
    """Inducing points: the values u = f(Z).

    Pass an array Z as `inducing` instead, unless you combine kinds of inducing variables.

    Parameters
    ----------
    Z : array, (M, D) or (M,)
        The points, in the units of the inputs.

    Raises
    ------
    DataError
        For another shape.

    Notes
    -----
    The covariance of u is dense. A step costs O(M^3), and O(M^2 B) for B rows. Source: Titsias
    (2009).

    Examples
    --------
    >>> points = pg.Points(jnp.linspace(0.0, 10.0, 20))
    >>> points.num
    20
    """

    Z: Float[Array, "M *D"] = eqx.field(converter=as_floats)

    @property
    def num(self):
        return self.Z.shape[0]

    def root(self, prior) -> DenseRoot:
        variance = prior.kernel.diag(self.Z)
        unit = jitter_of(prior.kernel, self.Z)
        # the noise of single rows is no part of u, but of a table's values at those rows
        known = prior.jitter if self.Z is prior.X else any_rows(prior.jitter)
        jitter = unit if known is None else jnp.asarray(known, variance.dtype)
        return dense_root(add_diagonal(prior.kernel(self.Z, self.Z), jitter), unit)

    def cross(self, prior, X):
        return prior.kernel(self.Z, X)

    def __check_init__(self):
        require_places(self.Z, "Points")


def any_rows(jitter):
    """None of a jitter that has an entry for each row of the data."""
    return None if np.size(jitter) > 1 else jitter


def require_places(Z, name: str) -> None:
    """Raise `DataError` for an array that is not (M, D) or (M,)."""
    if hasattr(Z, "ndim") and (Z.ndim not in (1, 2) or 0 in Z.shape):
        raise DataError(f"{name}(Z=...) has shape {Z.shape}; give (M, D) or (M,) with M >= 1.")


MAX_CANDIDATES = 10_000  # rows that a choice looks at, a random subset of more
RULES = ("greedy", "kmeans", "subset", "farthest")


def select(
    rule: str, prior: GP, X, num: int, seed: int, tol: float = 1e-6, moves: bool = False
) -> np.ndarray:
    """At most `num` inducing points Z (M, *D) for the GP prior, from the rows of X.

    - "greedy": the next point is the one of largest variance given those before it (a pivoted
      Cholesky factorisation; Burt, Rasmussen & van der Wilk 2020, section 7). Stops early where no
      variance exceeds `tol` of the prior's, without terms of finite rank. O(N M^2). Where the
      hyperparameters are going to move (`moves`), other points will be needed than at these:
      exactly `num` all over the inputs, by "kmeans", with columns of whole numbers (such as the
      number of an output) rounded.
    - "kmeans": centres of clusters of X / (column standard deviation); not rows of X. O(N M) a
      pass.
    - "subset": rows at random.
    - "farthest": the row nearest to the mean, then rows the farthest from all before them.

    Duplicate rows are dropped first; where fewer than `num` remain, all are taken. Raises
    `DataError` for another rule.
    """
    if rule not in RULES:
        raise DataError(
            f"inducing={rule!r} is no rule for choosing points; give one of {RULES}, an array Z, "
            "or inducing variables."
        )
    rng = np.random.default_rng([seed, 17])
    X = np.asarray(X)
    if len(X) > MAX_CANDIDATES:
        X = X[np.sort(rng.choice(len(X), MAX_CANDIDATES, replace=False))]
    rows = np.unique(X, axis=0)
    if len(rows) <= num:
        return rows
    if rule == "kmeans":
        return _kmeans(rows, num, rng)
    if rule == "subset":
        return rows[np.sort(rng.choice(len(rows), num, replace=False))]
    if rule == "farthest":
        columns = _scaled(rows)[0]
        middle = np.argmin(np.sum((columns - columns.mean(0)) ** 2, 1))
        return _filled(rows[[middle]], rows, num)
    if moves:  # k-means may give fewer
        whole, Z = np.all(rows == np.round(rows), 0), _kmeans(rows, num, rng)
        return _filled(np.unique(np.where(whole, np.round(Z), Z), axis=0), rows, num)
    at = GP(prior.kernel, rows, prior.mean_function, any_rows(prior.jitter))
    chosen, variance = greedy(at, num)
    rest = at.variance - of_finite_rank(prior.kernel, rows)
    rounding = 1e3 * jnp.finfo(rest.dtype).eps * jnp.mean(at.variance)
    enough = np.asarray(variance) > float(tol * jnp.mean(rest) + rounding)
    return rows[np.asarray(chosen)[: max(1, int(np.sum(np.minimum.accumulate(enough))))]]


def _scaled(rows):
    """(rows in standard deviations of their columns, flat; those)."""
    scale = np.where(rows.std(0) > 0, rows.std(0), 1.0)
    return (rows / scale).reshape(len(rows), -1), scale


def _kmeans(rows, num, rng):
    columns, scale = _scaled(rows)
    from scipy.cluster.vq import kmeans2  # here: it takes a fifth of a second

    centres, _ = kmeans2(columns, num, minit="++", seed=rng)
    centres = np.unique(centres, axis=0)
    return (centres.reshape(-1, *rows.shape[1:]) * scale).astype(rows.dtype)


def _filled(Z, rows, num):
    """Z, and then rows, each the farthest from all points before it."""
    columns, scale = _scaled(rows)
    others = (Z / scale).reshape(len(Z), -1)
    left = np.min([np.sum((columns - z) ** 2, 1) for z in others], 0)
    chosen = []
    while len(Z) + len(chosen) < num:
        chosen.append(int(np.argmax(left)))
        left = np.minimum(left, np.sum((columns - columns[chosen[-1]]) ** 2, 1))
    return np.concatenate([Z, rows[np.array(chosen, int)]])


@partial(jax.jit, static_argnames="num")
def greedy(prior: GP, num: int) -> tuple[Int[Array, "M"], Float[Array, "M"]]:
    """(rows as chosen, each one's variance given those before it) of a pivoted Cholesky factor."""
    X, variance = prior.X, prior.variance

    def step(carry, i):
        columns, left = carry
        row = jnp.argmax(left)
        k = prior.kernel(X, lax.dynamic_slice_in_dim(X, row, 1))[:, 0]
        pivot = jnp.maximum(left[row], jnp.finfo(left.dtype).tiny)
        column = (k - columns.T @ columns[:, row]) / jnp.sqrt(pivot)
        left_after = jnp.maximum(left - column**2, 0.0).at[row].set(0.0)
        return (columns.at[i].set(column), left_after), (row, left[row])

    empty = jnp.zeros((num, X.shape[0]), variance.dtype)
    _, out = lax.scan(step, (empty, variance), jnp.arange(num))
    return out
