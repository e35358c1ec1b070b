"""What calls and configurations are given: keys of random numbers, whole and positive numbers, the
numbers of every sampler's chains, and what every method's `hyper=` takes.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, random

from ppl_gp.errors import DataError
from ppl_gp.reading.fingerprint import digest


def as_key(rng_key, call: str):
    """A key of JAX's default kind from an integer seed, one `jax.random.key` of any kind or a raw
    `jax.random.PRNGKey`, whose axis code that splits keys would count as one of keys.

    Every public call that takes a key passes it through here. Raises `DataError`.
    """
    if issubclass(type(rng_key), Integral):
        with suppress(OverflowError):
            return random.key(int(rng_key))
    dtype, default = getattr(rng_key, "dtype", None), random.key(0)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and not rng_key.shape:
        if dtype == default.dtype:
            return rng_key
        # NumPyro's samplers rebuild keys from their data, as that of the default kind
        return functools.reduce(random.fold_in, random.key_data(rng_key), default)
    if dtype == jnp.uint32 and rng_key.shape == random.key_data(default).shape:
        return random.wrap_key_data(jnp.asarray(rng_key))
    raise DataError(
        "rng_key must be an integer seed of at most 64 bits or one jax.random.key; got "
        f"{_described(rng_key)}. For example: {call}."
    )


def _described(value) -> str:
    shape = f" of shape {jnp.shape(value)}" if hasattr(value, "shape") else ""
    return f"{type(value).__name__}{shape}" if shape or value is None else repr(value)


def require_known(config: object) -> None:
    """Raise `DataError` where an option of a configuration, or of one inside it, is traced."""
    for f in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        value = getattr(config, f.name)
        require_known(value)
        if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(value)):
            raise DataError(
                f"{type(config).__name__}({f.name}=...) has a value that jax.jit, jax.vmap or "
                "jax.grad traces, and fit needs numbers: call it outside of them. Inside of them, "
                "pg.log_evidence(pg.Laplace(), pg.read(model, X, y=y, hyper={...}))[0] has "
                "derivatives by the values of hyper."
            )


def require_whole(owner: object, *names: str, least: int = 1) -> None:
    """Raise `DataError` unless fields are whole numbers from `least` on, or `None` by default."""
    for name in names:
        value = getattr(owner, name)
        if value is None and getattr(type(owner), name, least) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:  # pyright: ignore[reportOperatorIssue]
            raise DataError(
                f"{type(owner).__name__}({name}={value!r}): give a whole number, at least {least}."
            )


def require_positive(owner: object, *names: str) -> None:
    """Raise `DataError` unless the fields `names` are positive, finite numbers."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, Real) or not 0.0 < float(value) < math.inf:
            raise DataError(
                f"{type(owner).__name__}({name}={value!r}): give a positive, finite number."
            )


@runtime_checkable
class ChainSettings(Protocol):
    """`num_chains` chains; in each, `num_warmup` transitions that adapt, and `num_samples` that are
    kept.

    A protocol and not a base class: the samplers have their own order of these fields, among
    others, and their own defaults, which calls by position rely on.
    """

    @property
    def num_warmup(self) -> int: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def num_chains(self) -> int: ...

    @property
    def target_accept_prob(self) -> float: ...


def require_settings(config: ChainSettings, *further: str) -> None:
    """Raise `DataError` unless all numbers are whole, from 1 on, and the acceptance in (0, 1)."""
    require_whole(config, *further, "num_warmup", "num_samples", "num_chains")
    if not 0.0 < (share := config.target_accept_prob) < 1.0:
        raise DataError(
            f"{type(config).__name__}(target_accept_prob={share!r}): give a number between 0 and 1."
        )


# `integrate=` of a method: every Gaussian site that the data see through one linear predictor
GAUSSIAN = "gaussian"


class _ByValue:
    """Compares and hashes by the values of its fields, arrays included."""

    def __eq__(self, other):
        return type(self) is type(other) and self._digest() == other._digest()

    def __hash__(self):
        return hash(self._digest())

    def _digest(self) -> str:
        return digest([getattr(self, f.name) for f in fields(self)])  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, eq=False)
class _Search(_ByValue):
    """A search for a mode, and where it begins."""

    restarts: int = 1
    max_steps: int = 200
    tol: float = 1e-4
    init: Mapping[str, Any] | None = None

    def __post_init__(self):
        require_whole(self, "restarts", "max_steps")
        require_positive(self, "tol")
        if self.init is not None:
            name = f"{type(self).__name__}(init=...)"
            object.__setattr__(self, "init", _own_copy(name, self.init))


@dataclass(frozen=True, eq=False)
class MAP(_Search):
    """One best value of the hyperparameters: the maximum of log evidence plus log prior.

    The default, for many rows and few hyperparameters. A warning appears if the data hardly
    determine one of them. Then use `Grid()` or `Sample()`.

    Parameters
    ----------
    restarts : int, default 1
        Number of starts. The best is kept. The first is the prior's median, or the declared value
        of a `numpyro.param`. The others are draws from the prior. All run in one compiled call per
        step.
    max_steps : int, default 200
        Steps at most.
    tol : float, default 1e-4
        Largest entry of the gradient at the end, nats.
    init : dict, default None
        `{site: value}`, the first start on the scale of the model, inside the supports. It turns
        off the check of other starts.
    maximise : sequence of str, default ()
        Names of effects to maximise together with the hyperparameters, because you know that they
        may be treated as points. They are not integrated, and an unknown scale of theirs raises no
        error.

    Raises
    ------
    DataError
        For numbers out of range, an `init` that is not a dictionary, or `maximise` as a string. In
        `fit`, for an `init` on the edge of a support.

    Notes
    -----
    The maximum is that in the declared coordinates, without a Jacobian, as in NumPyro's
    `AutoDelta`. `numpyro.param` sites have no prior.

    Examples
    --------
    >>> method = pg.Laplace(hyper=pg.MAP(restarts=8))
    >>> method.hyper.restarts
    8
    """

    maximise: Sequence[str] = ()

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.maximise, str):
            raise DataError(
                f"MAP(maximise={self.maximise!r}): give a tuple of names of sites, "
                f"maximise=({self.maximise!r},)."
            )
        object.__setattr__(self, "maximise", tuple(self.maximise))


@dataclass(frozen=True, eq=False)
class Fixed(_ByValue):
    """Known values of the hyperparameters.

    Parameters
    ----------
    values : dict, default {}
        `{site: value}` for each hyperparameter, on the scale of the model. Numbers, lists or arrays
        of the site's shape. A param that is a tree, such as a network, takes a tree.

    Raises
    ------
    DataError
        If `values` is not a dictionary, and in `fit` for a value of another shape or outside of the
        support.
    ModelError
        In `fit`, for values that are missing, and for names that the model does not have.

    Notes
    -----
    Other values of the same shapes compile nothing.

    Examples
    --------
    >>> pg.EP(hyper=pg.Fixed({"lengthscale": 0.5})).hyper.values
    {'lengthscale': 0.5}
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "values", _own_copy("Fixed(...)", self.values))


@dataclass(frozen=True)
class Sample:
    """Draws of the hyperparameters by NUTS, with f and effects integrated by the method.

    For few data, several modes, and quantiles of the hyperparameters. It costs some hundred times
    as much as `MAP()`. `pg.marginal` has the model that is sampled.

    Parameters
    ----------
    num_warmup, num_samples, num_chains : int, default 300, 500, 1
        As in `NUTS`.
    target_accept_prob : float, default 0.8
        Acceptance probability to adapt to, in (0, 1).

    Raises
    ------
    DataError
        For numbers out of range.
    ModelError
        In `fit`, for `numpyro.param` sites, and for models without a sampled hyperparameter.

    Notes
    -----
    `fit.log_evidence` is `None`. An inner fit that does not converge counts as a divergence.

    Examples
    --------
    >>> pg.Laplace(hyper=pg.Sample(num_chains=4)).hyper.num_samples
    500
    """

    num_warmup: int = 300
    num_samples: int = 500
    num_chains: int = 1
    target_accept_prob: float = 0.8

    def __post_init__(self):
        require_settings(self)


@dataclass(frozen=True, eq=False)
class Grid(_Search):
    """A weighted average over points around the mode of the hyperparameters.

    For up to eight hyperparameters with one mode, under a local method. The first thing to try if
    `MAP()` warns.

    Parameters
    ----------
    restarts, max_steps, tol, init : default 1, 200, 1e-4, None
        Of the search for the mode, as in `MAP`.

    Raises
    ------
    DataError
        For numbers out of range, or an `init` that is not a dictionary.
    ModelError
        In `fit`, for more than eight hyperparameters, and for `numpyro.param` sites.

    Notes
    -----
    The points follow the curvature at the mode, in unconstrained coordinates. Up to three
    hyperparameters have a regular grid of 17, 37 or 93 points, and more for skewed or heavy tails.
    Four to eight have 25 to 49 points of a central composite design, stretched where the posterior
    is skewed. The draws of the fit are the points with their weights, which predictions, `loo`,
    `compare` and ArviZ use. Take quantiles of hyperparameters from `Sample()`: here they are those
    of few points.

    `stats["grid_missing_mass"]` and `stats["grid_missing_variance"]` are the shares of the mass and
    of a hyperparameter's variance that the points miss. A warning appears above 0.05 and 0.2.
    `stats["grid_stretch"]`, (2 d,), has the factors of the half axes +1 ... +d, -1 ... -d of a
    composite design. `fit.result` is `not_gaussian` if a regular grid misses over a tenth, or a
    stretch reached 1/3 or 3. It is also that if the effective number of points is below a fifth of
    that for a Gaussian. Loadings that may be rotated are an example. After Ctrl-C the fit has the
    point that the search had reached instead of weighted points, and a warning says so.

    Source: Rue, Martino & Chopin (2009), section 6.5.

    Examples
    --------
    >>> pg.EP(hyper=pg.Grid(restarts=4)).hyper.max_steps
    200
    """


def _own_copy(name, values) -> dict:
    """What the caller changes afterwards is no part of the configuration."""
    if not isinstance(values, Mapping):
        raise DataError(
            f"{name} takes a dictionary {{site: value}}, and has {type(values).__name__}."
        )
    return {
        k: copy.deepcopy(x) if isinstance(x, np.ndarray | list) else x for k, x in values.items()
    }
