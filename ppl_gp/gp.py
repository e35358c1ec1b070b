"""The site: a Gaussian process as a NumPyro distribution, its whitening, and what conditioning
gives; and distributions behind masks, expansions and `to_event`, as the entries that they score.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Bool
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.infer.reparam import Reparam

from ppl_gp.errors import DataError, ModelError
from ppl_gp.frames.names import plain_numbers
from ppl_gp.kernels import as_kernel
from ppl_gp.kernels.base import floating, jitter_of
from ppl_gp.means import as_mean
from ppl_gp.numerics.linalg import (
    add_diagonal,
    half_log_det,
    robust_cholesky,
    robust_factors,
    solve_lower,
)

_WRAPPERS = (dist.MaskedDistribution, dist.ExpandedDistribution, dist.Independent)


def evened(fn: Any) -> Any:
    """A mixture with components of equal shapes, without which NumPyro has no mean and no draws."""
    if not isinstance(fn, dist.MixtureGeneral):
        return fn
    shape, parts = fn.batch_shape, fn.component_distributions
    if all(part.batch_shape == shape for part in parts):
        return fn
    parts = [part.expand(shape) for part in parts]
    return dist.MixtureGeneral(fn.mixing_distribution, parts, support=fn._support)


def unwrap(fn) -> Any:
    """The distribution beneath masks (of `Predictive`), expansions (of plates) and `to_event`."""
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


def bare(fn: dist.Distribution) -> dist.Distribution:
    """The distribution without masks and `to_event`, at its full batch shape."""
    return unwrap(fn).expand(bare_shape(fn))


def bare_shape(fn: dist.Distribution) -> tuple[int, ...]:
    """The batch shape of `bare(fn)`: axes that `to_event` took are batch axes again."""
    shape = fn.shape()
    return tuple(shape[: len(shape) - unwrap(fn).event_dim])


def hidden_axes(fn: dist.Distribution) -> int:
    """How many axes on the right of `bare_shape(fn)` are events of fn."""
    return len(bare_shape(fn)) - len(fn.batch_shape)


def mask_of(fn: dist.Distribution) -> Bool[Array, "..."]:
    """Which entries count, by every mask; broadcasts against the batch shape of `bare(fn)`."""
    mask = jnp.asarray(np.ones((), bool))  # no program, as `jnp.ones` would be
    while isinstance(fn, _WRAPPERS):
        if isinstance(fn, dist.MaskedDistribution):
            mask = mask & fn._mask
        if isinstance(fn, dist.Independent) and mask.ndim:
            mask = mask.reshape(mask.shape + (1,) * fn.reinterpreted_batch_ndims)
        fn = fn.base_dist
    return mask


class GP(dist.Distribution):
    """Gaussian-process prior of a function at the rows of X, for a NumPyro site.

    Write `f = numpyro.sample("f", pg.GP(kernel, X))` in a model. The event shape is (N,). Nothing
    is computed at construction.

    Parameters
    ----------
    kernel : Kernel or callable
        A kernel of `ppl_gp.kernels`, or any callable `k(X1, X2) -> (N1, N2)`, such as a tinygp
        kernel.
    X : array
        Inputs, (N, D), or (N,) for one input dimension.
    mean : number or callable, default None
        The prior mean. None is zero. A callable `m(X)` returns (N,), or (P, N) in a plate of P
        units.
    jitter : float, default None
        Variance added to the diagonal. None adds 1e-8 (float64) or 1e-5 (float32) of the kernel's
        mean variance. In float64, terms of finite rank (Linear, Polynomial, Constant) count with
        1e-12 only, because they cannot make the matrix singular.
    validate_args : bool, default None
        Whether NumPyro checks values.

    Raises
    ------
    DataError
        If X does not have one or two dimensions, or has no rows or no columns.

    Notes
    -----
    `f ~ N(m(X), k(X, X) + jitter I)`. If a factorisation still fails, the jitter is raised in steps
    and reported in `fit.stats`. `log_prob` and `sample` cost O(N^3 / 3) for one Cholesky factor.

    Examples
    --------
    >>> prior = pg.GP(pg.kernels.RBF(variance=2.0, lengthscale=0.5), np.array([0.0, 1.0, 3.0]))
    >>> prior.event_shape
    (3,)
    >>> float(prior.log_prob(jnp.zeros(3)).round(2))
    -3.79
    """

    support = constraints.real_vector
    reparametrized_params = []
    pytree_data_fields = ("kernel", "X", "mean_function", "jitter")
    has_rsample = True

    def __init__(self, kernel, X, mean=None, jitter=None, *, validate_args=None):
        shape = jnp.shape(X)
        if len(shape) not in (1, 2) or 0 in shape:
            raise DataError(f"GP(X=...) has shape {shape}; give (N, D) or (N,), N >= 1 and D >= 1.")
        self.kernel, self.X = as_kernel(kernel), jnp.asarray(X)
        # inputs of a table in float32, in 64-bit mode, would meet kernels in float64
        self.X = self.X.astype(jnp.result_type(float))
        self.mean_function, self.jitter = as_mean(mean), jitter
        super().__init__((), shape[:1], validate_args=validate_args)

    @classmethod
    def gather_pytree_data_fields(cls):
        """In one order: NumPyro's is that of a set of names, another one in each process, and a
        compilation cache on disk would not find what takes a GP.
        """
        return tuple(sorted(super().gather_pytree_data_fields()))

    @property
    def mean(self):
        """m(X), (N,)."""
        mean = floating(self.mean_function(self.X))
        return jnp.broadcast_to(mean, self.event_shape) if mean.shape in ((), (1,)) else mean

    @property
    def variance(self):
        """Marginal variances k(x_n, x_n) + jitter, (N,)."""
        variance = self.kernel.diag(self.X)
        return variance + self._jitter(variance)

    def _jitter(self, variance):
        if self.jitter is None:
            return jitter_of(self.kernel, self.X)
        return jnp.asarray(self.jitter, variance.dtype)

    @property
    def covariance_matrix(self):
        """k(X, X) + jitter I, (N, N)."""
        K = self.kernel(self.X, self.X)
        return add_diagonal(K, self._jitter(jnp.diagonal(K)))

    def factor(self):
        """(L, added): L L^T = covariance_matrix + added I, 0 unless the jitter was raised."""
        return robust_cholesky(self.covariance_matrix, jitter_of(self.kernel, self.X))

    def unwhiten(self, white):
        """f = m + L v for `white` v, (..., N). If v ~ N(0, I), f has this prior. O(N^3)."""
        return self.mean + white @ self.scale_tril.T

    @property
    def scale_tril(self):
        """Lower Cholesky factor of the covariance, (N, N)."""
        return self.factor()[0]

    def sample(self, key, sample_shape=()):
        """Draws m + L v, v ~ N(0, I), shape sample_shape + (N,)."""
        white = random.normal(key, sample_shape + self.event_shape, self.X.dtype)  # pyright: ignore[reportArgumentType]
        return self.unwhiten(white)

    @validate_sample
    def log_prob(self, value):
        """log N(value; m, K), nats; value (..., N)."""
        L = self.scale_tril
        white = solve_lower(L, jnp.reshape(value - self.mean, (-1, self.event_shape[0])).T)
        constant = half_log_det(L) + 0.5 * self.event_shape[0] * jnp.log(2 * jnp.pi)
        return jnp.reshape(-0.5 * jnp.sum(white**2, 0), jnp.shape(value)[:-1]) - constant


class Conditioned(eqx.Module):
    """A GP after conditioning, again a process. A subclass says what its moments at new inputs are.

    Called at new inputs it gives marginals as `Normal`, or with `joint=True` a
    `MultivariateNormal`. X_new are the GP site's own inputs (an array, or a frame of numbers, whose
    names are not looked at), or a `GP` at them (then its kernel and mean are taken). `beside`:
    other sites that were integrated with it, and are not independent of it given the data.
    """

    prior: GP
    beside: tuple[str, ...] = eqx.field(default=(), static=True, kw_only=True)

    @abstractmethod
    def marginals(self, new: GP) -> tuple[Array, Array]:
        """(mean, variance) at the inputs of `new`."""

    @abstractmethod
    def joint(self, new: GP) -> tuple[Array, Array]:
        """(mean, covariance) at the inputs of `new`."""

    def __call__(self, X_new, joint: Any = False) -> dist.Distribution:
        require_flag(joint)
        new = self.at(X_new)
        if joint:
            mean, covariance = self.joint(new)
            # differences of large prior variances may not be a covariance, by their rounding
            unit = jnp.finfo(covariance.dtype).eps * jnp.max(new.variance)
            return dist.MultivariateNormal(mean, scale_tril=robust_factors(covariance, unit))
        mean, variance = self.marginals(new)
        return dist.Normal(mean, jnp.sqrt(variance))

    def at(self, X_new) -> GP:
        """The prior at new inputs."""
        if isinstance(X_new, GP):
            return X_new
        prior, X = self.prior, plain_numbers("X_new", X_new)
        _require_any_rows(prior)
        return GP(prior.kernel, X, prior.mean_function, prior.jitter)


def _require_any_rows(prior: GP) -> None:
    """Raise `ModelError` where the mean or the jitter has one entry for each training row."""
    num = prior.event_shape[0] + 1
    rows = jax.ShapeDtypeStruct((num, *prior.X.shape[1:]), prior.X.dtype)
    tied = getattr(prior.jitter, "size", 1) > 1
    try:
        mean = jax.eval_shape(lambda X: GP(prior.kernel, X, prior.mean_function).mean, rows)
        tied |= mean.shape[-1] not in (1, num)
    except (TypeError, ValueError) as error:
        tied |= not isinstance(error, jax.errors.JAXTypeError)  # which looks at values
    if tied:
        raise ModelError(
            "posterior(X_new): the GP's mean or jitter has one entry for each training row. Give "
            "the GP at the new rows, posterior(pg.GP(kernel, X_new, mean=..., jitter=...)), or "
            "ask fit.predict(X_new, ...).f_mean, with the arguments of the new rows."
        )


def require_flag(joint) -> None:
    """Raise `DataError` for another argument of the model in the place of `joint`."""
    if not isinstance(joint, bool | np.bool_):
        raise DataError(
            f"posterior(X_new, joint={type(joint).__name__}): joint must be True or False. The "
            "posterior of f depends on the inputs of its GP alone: leave other arguments out."
        )


class Whiten(Reparam):
    """Reparameterisation of a GP site by independent normals, for NUTS and slice sampling.

    Pass it to NumPyro's `handlers.reparam`. The site `f` becomes deterministic, and the sampler
    moves `f_base` instead. An observed GP site is left unchanged.

    Notes
    -----
    `f = m + L v` with `v ~ N(0, I)` and L the Cholesky factor of the covariance. O(N^3).

    Examples
    --------
    >>> def model(X):
    ...     return numpyro.sample("f", pg.GP(pg.kernels.RBF(), X))
    >>> white = numpyro.handlers.reparam(model, config={"f": pg.Whiten()})
    >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(white, 0)).get_trace(np.arange(3.0))
    >>> trace["f_base"]["type"], trace["f"]["type"]
    ('sample', 'deterministic')
    """

    def __call__(self, name, fn, obs):
        if obs is not None:
            return fn, obs
        gp = unwrap(fn)
        if not isinstance(gp, GP):
            raise DataError(f"Whiten() is for GP sites; site '{name}' is a {type(gp).__name__}.")
        base = dist.Normal(jnp.zeros((), gp.X.dtype), 1.0).expand(fn.shape()).to_event(fn.event_dim)
        while isinstance(fn, _WRAPPERS):
            base = base.mask(fn._mask) if isinstance(fn, dist.MaskedDistribution) else base
            fn = fn.base_dist
        return None, gp.unwhiten(numpyro.sample(f"{name}_base", base))
