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
    """Maximise log evidence + log declared priors in the declared coordinates, as NumPyro's
    AutoDelta (no Jacobian).

    Sites declared by `numpyro.param` have no prior. `init`: constrained values of the first start,
    inside the supports; by default the prior's median, and of a param its declared value.
    `restarts`: the other starts are prior draws, run in one compiled call a step; the best is kept.
    `tol`: on the largest gradient entry, nats. `maximise`: names of effects that are to be
    maximised with the hyperparameters, and neither integrated nor refused where their scale is
    unknown: "I know that they are points".
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
    """Hold the hyperparameters at these constrained values, one for each site; `{}` for a model
    without any.

    Numbers, lists and arrays of the site's shape; a param that is a tree (a network) takes a tree.
    Other values of the same shapes compile nothing.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "values", _own_copy("Fixed(...)", self.values))


@dataclass(frozen=True)
class Sample:
    """NUTS over the hyperparameters, with f integrated out by the method (`pg.marginal`)."""

    num_warmup: int = 300
    num_samples: int = 500
    num_chains: int = 1
    target_accept_prob: float = 0.8

    def __post_init__(self):
        require_settings(self)


@dataclass(frozen=True, eq=False)
class Grid(_Search):
    """Integrate the hyperparameters over weighted points about their posterior mode (INLA: Rue,
    Martino & Chopin 2009): up to eight of them, under a local method.

    The mode and its curvature in unconstrained coordinates, then a regular grid for up to three
    hyperparameters (17, 37 or 93 points, and more as far as skewed or heavy tails need) and a
    central composite design for more (25 to 49), stretched along half axes where the posterior is
    skewed. If points leave out more than 5 % of the mass, or a fifth of a hyperparameter's
    variance, a warning says so. The fit's draws are the points with their weights, which
    predictions, `loo`, `compare` and ArviZ take into account. Quantiles of hyperparameters, in
    `summary()` and trees, are those of these few values: take them from `Sample()`. `stats`:
    `grid_missing_mass` and `grid_missing_variance`, those shares; `grid_stretch`, (2 d,), the
    factors of the half axes +1 ... +d, -1 ... -d of a composite design. The fit's result is
    `not_gaussian` if a regular grid leaves out over a tenth, a stretch reached a third or three, or
    the effective number of points is below a fifth of that for a Gaussian (loadings that may be
    rotated, say). Ctrl-C leaves the point that the search for the mode had reached, as of `MAP`,
    and no weighted points, and a warning says so.
    `restarts`, `max_steps`, `tol`, `init`: of the search for the mode, as of `MAP`.
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
