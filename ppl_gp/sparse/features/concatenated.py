"""Several kinds of inducing variables of one process side by side: values with derivatives,
features with points; and partial derivatives of f as inducing variables.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_gp.errors import DataError, ModelError
from ppl_gp.kernels.base import safe_sqrt
from ppl_gp.kernels.derivative import WithDerivatives, as_dim, require_differentiable
from ppl_gp.numerics.linalg import add_diagonal, default_jitter, product
from ppl_gp.sparse.families import DenseRoot, Root, dense_root
from ppl_gp.sparse.inducing import InducingVariables, Points, any_rows, as_floats, require_places


class Derivatives(InducingVariables):
    """Partial derivatives of f along one input column, as inducing variables.

    Use them together with points, for a function whose slope matters: `Concatenated([Points(Z),
    Derivatives(Z, 0), Derivatives(Z, 1)])`.

    Parameters
    ----------
    Z : array, (M, D) or (M,)
        Where the derivative is taken.
    dim : int, default 0
        The input column, counted from 0.

    Raises
    ------
    DataError
        For another shape of Z, or a column that it does not have.
    ModelError
        In `fit`, for a kernel without derivatives (`Matern12`, `White`), and for a site with kernel
        `WithDerivatives`. There use `Points(derivative_inputs(Z, dim))`.

    Notes
    -----
    `Cov[u, f(x)] = d k(z, x) / d z_dim` and `Cov[u] = d^2 k(z, z') / d z_dim d z'_dim` (Rasmussen &
    Williams 2006, eq. 9.1). E[u] is the derivative of the mean. Cov[u, f] costs two evaluations of
    the kernel for any D. Cov[u] is dense, with the default jitter of its own diagonal. The `jitter`
    of the GP is noise on f, and is not added.

    Examples
    --------
    >>> slopes = pg.features.Derivatives(jnp.linspace(0.0, 1.0, 5))
    >>> pg.features.Concatenated([pg.Points(slopes.Z), slopes]).num
    10
    """

    Z: Float[Array, "M *D"] = eqx.field(converter=as_floats)
    dim: int = eqx.field(default=0, static=True)

    @property
    def num(self):
        return self.Z.shape[0]

    def root(self, prior) -> DenseRoot:
        K = self.of(lambda Z: self.cross(prior, Z))
        unit = default_jitter(jnp.diagonal(K))
        return dense_root(add_diagonal(K, unit), unit)

    def cross(self, prior, X):
        """Cov[u, f(X)]: the slopes of the kernel at the points."""
        if isinstance(prior.kernel, WithDerivatives):
            raise ModelError(
                f"Derivatives at a site with kernel {prior.kernel!r}: use "
                "Points(derivative_inputs(Z, dim))."
            )
        require_differentiable(prior.kernel, "Derivatives")
        return self.of(lambda Z: prior.kernel(Z, X))

    def of(self, function):
        """The derivative at Z of a function X -> array, along the rows of X."""
        D = 1 if self.Z.ndim == 1 else self.Z.shape[1]
        along = jnp.zeros_like(self.Z) + jnp.asarray(jnp.arange(D) == self.dim, self.Z.dtype)
        return jax.jvp(function, (self.Z,), (along,))[1]

    def __check_init__(self):
        require_places(self.Z, "Derivatives")
        if hasattr(self.Z, "ndim"):
            as_dim(self.dim, 1 if self.Z.ndim == 1 else self.Z.shape[1], "Derivatives")


class Concatenated(InducingVariables):
    """Several kinds of inducing variables of the same f together.

    For example points with derivatives, or Fourier features for a trend with points where it is
    rough.

    Parameters
    ----------
    parts : list of InducingVariables
        Any number of `Points` and `Derivatives`, and at most one part of another kind.

    Raises
    ------
    DataError
        For an empty list, two parts of other kinds, or a part whose `is_exact` is False
        (`LaplacianFeatures`).

    Notes
    -----
    Cov[u] is dense: O(M^3) for M variables in all. Jitter is relative to the variance of each
    variable, because values, slopes and features differ in units. Parts that measure the same thing
    twice make Cov[u] singular, and its jitter is raised.

    Examples
    --------
    >>> points = pg.Points(jnp.array([4.0, 5.0, 6.0]))
    >>> waves = pg.features.FourierFeatures(10, 0.0, 10.0)
    >>> pg.features.Concatenated([points, waves]).num
    24
    """

    parts: tuple[InducingVariables, ...]

    def __init__(self, parts):
        self.parts = tuple(parts)
        other = [part for part in self.parts if not isinstance(part, Points | Derivatives)]
        exact = all(getattr(part, "is_exact", True) for part in other)
        if not self.parts or len(other) > 1 or not exact:
            names = [type(part).__name__ for part in self.parts]
            raise DataError(
                f"Concatenated({names}) has parts of unknown covariance with each other: give "
                "Points and Derivatives, and at most one other kind, whose `is_exact` is True."
            )

    @property
    def num(self):
        return sum(part.num for part in self.parts)

    def root(self, prior) -> "ScaledRoot":
        """A root of Cov[u] of all parts, scaled to unit variances first."""
        K = jnp.block([[_covariance(prior, i, j) for j in self.parts] for i in self.parts])
        scale = safe_sqrt(jnp.diagonal(K))
        unit = default_jitter(jnp.ones_like(scale))
        jitter = jnp.concatenate([_jitter(prior, part, unit) for part in self.parts])
        raised = add_diagonal(K / scale[:, None] / scale, jnp.maximum(unit, jitter / scale**2))
        return ScaledRoot(scale, dense_root(raised, unit))

    def cross(self, prior, X):
        return jnp.concatenate([part.cross(prior, X) for part in self.parts])


class ScaledRoot(Root):
    """R = diag(scale) R', for a K_uu whose rows differ in units."""

    scale: Float[Array, "M"]
    inner: Root

    def whiten(self, C):
        return self.inner.whiten(C / self.scale[:, None])

    def color(self, v):
        return self.scale[:, None] * self.inner.color(v)

    @property
    def added(self):
        return self.inner.added * jnp.mean(self.scale**2)


def _covariance(prior, first, second):
    """Cov[u_first, u_second]."""
    if isinstance(second, Points):
        return first.cross(prior, second.Z)
    if isinstance(second, Derivatives):
        return second.of(partial(first.cross, prior))
    if first is second:
        R = first.root(prior).color(jnp.eye(first.num, dtype=prior.X.dtype))
        return product(R, R.T)
    return _covariance(prior, second, first).T


def _jitter(prior, part, unit):
    """What the GP's own `jitter` asks for: it is noise on f, so on values of f alone."""
    known = any_rows(prior.jitter) if isinstance(part, Points) else None
    return jnp.full(part.num, 0.0 if known is None else known, unit.dtype)
