"""q(h): what is believed of the per-datum latents. Free for each datum, or by an
encoder: an Equinox module from what is known of a datum to the parameters of q(h).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax, random
from jaxtyping import Array, Float
from numpyro.distributions.transforms import IdentityTransform, biject_to

from ppl_gp.errors import DataError, ModelError
from ppl_gp.reading.roles import data_axis

_DRAWS = 99  # of a prior, which say where q(h) starts


@dataclass(frozen=True)
class Free:
    """A Gaussian q(h_n) of its own for the latent of each row.

    It is more flexible than an encoder, but has N means and scales, and needs arrays, not streams.

    Parameters
    ----------
    init : array, (N, size), default None
        Means to start from. `None` takes small random ones around the prior's.
    scale : float, default 0.3
        Standard deviation to start from. Without `init`, in prior standard deviations.

    Raises
    ------
    DataError
        If `scale` is not positive.

    Examples
    --------
    >>> pg.SVGP(layers=pg.Layers(latents=pg.Free(scale=0.1))).layers.latents.scale
    0.1
    """

    init: Any = field(default=None, hash=False)
    scale: float = 0.3

    def __post_init__(self):
        if not self.scale > 0:
            raise DataError(f"Free(scale={self.scale}): give a positive standard deviation.")


@dataclass(frozen=True)
class Amortised:
    """A Gaussian q(h_n) for the latent of each row, computed by an encoder from the row.

    One encoder serves all rows, new rows included.

    Parameters
    ----------
    encoder : callable, default None
        An Equinox module, or another function that is a pytree, from a row (F,) to (2 size,):
        means, then log scales. `None` makes a network of `depth` tanh layers with `width` units.
    sees : "xy", "x" or "y", default None
        What a row contains: the columns of the first positional argument, those of y, or both.
        `None` is "xy", or "y" if the model does not use the values of its first argument. With "x",
        predictions at new rows use the encoder too.
    width, depth : int, default 32, 2
        Size of the network.

    Raises
    ------
    DataError
        For another `sees` or counts below 1. In `fit`, if the encoder fails on a row, or returns
        another number of values.

    Examples
    --------
    >>> latents = {"h": pg.Amortised(sees="x", width=16)}
    >>> pg.SVGP(layers=pg.Layers(latents=latents)).layers.latents["h"].depth
    2
    """

    encoder: Any = field(default=None, hash=False)
    sees: str | None = None
    width: int = 32
    depth: int = 2

    def __post_init__(self):
        if self.sees not in (None, "xy", "x", "y"):
            raise DataError(f"Amortised(sees={self.sees!r}): give 'xy', 'x' or 'y'.")
        if min(self.width, self.depth) < 1:
            raise DataError(f"Amortised(width={self.width}, depth={self.depth}): give at least 1.")


class LatentGuide(eqx.Module):
    """q(h) of one latent site. Its inexact arrays are trained."""

    @abstractmethod
    def unconstrained(self, rows, args: tuple, kwargs: dict) -> Float[Array, "B P"]:
        """Means and log scales of the rows of a batch."""

    @property
    def needs_y(self) -> bool:
        """Whether q(h) of a new datum needs its y."""
        return True

    def at(self, site: dict, rows, args: tuple, kwargs: dict) -> dist.Distribution:
        """The Gaussian in unconstrained coordinates, transformed to the support of a site of a
        trace, with the site's batch and event shape.
        """
        fn, packed = site["fn"], self.unconstrained(rows, args, kwargs)
        num = len(packed)
        axis, shape = latent_form(site, num)
        others = tuple(n for i, n in enumerate(shape) if i != axis)
        wanted = 2 * math.prod(others)
        if packed.ndim != 2 or packed.shape[1] != wanted:
            raise DataError(
                f"the encoder of latent '{site['name']}' gives {packed.shape[1:]} numbers per row, "
                f"and {wanted} are needed: {wanted // 2} means and as many log scales."
            )
        at_rows = lambda x: jnp.moveaxis(jnp.reshape(x, (num, *others)), 0, axis)  # noqa: E731
        loc, log_scale = map(at_rows, jnp.split(packed, 2, -1))
        base = dist.Normal(loc, jnp.exp(log_scale)).to_event(len(shape) - len(fn.batch_shape))
        transform = biject_to(fn.support)
        plain = getattr(transform, "base_transform", transform)  # `to_event` wraps it
        identity = isinstance(plain, IdentityTransform)
        return base if identity else dist.TransformedDistribution(base, transform)


class FreeGaussian(LatentGuide):
    """Row n of `packed` belongs to datum n."""

    packed: Float[Array, "N P"]

    def unconstrained(self, rows, args, kwargs):
        return self.packed if rows is None else self.packed[rows]


class Encoded(LatentGuide):
    """By an encoder. `inputs`: which arrays of the first argument hold rows, by default all."""

    encoder: Any
    sees: str = eqx.field(static=True)
    inputs: tuple[int, ...] | None = eqx.field(default=None, static=True)

    @property
    def needs_y(self):
        return "y" in self.sees

    def unconstrained(self, rows, args, kwargs):
        seen = _of_rows(encoder_rows(self.sees, args, kwargs, self.inputs), rows)
        try:
            packed = jax.vmap(self.encoder)(seen)
        except Exception as error:  # the user's own function raises whatever it likes
            raise DataError(
                f"the encoder fails on a row of shape {seen.shape[1:]}, the columns of "
                f"'{self.sees}' ({type(error).__name__}: {error}); give a function of such a row."
            ) from error
        if not isinstance(packed, jax.Array):
            raise DataError(
                f"the encoder gives a {type(packed).__name__} for a row of shape "
                f"{seen.shape[1:]}; give one array, the means and then the log scales."
            )
        return packed


class Around(LatentGuide):
    """Another's means and log scales, in standard deviations of the prior around its medians, an
    affine function of the first argument's columns: both as they were at the start.
    """

    guide: LatentGuide
    affine: Float[Array, "_ P"]
    unit: Float[Array, "P"]
    inputs: tuple[int, ...] | None = eqx.field(default=None, static=True)

    @property
    def needs_y(self):
        return self.guide.needs_y

    def unconstrained(self, rows, args, kwargs):
        affine, unit = lax.stop_gradient((self.affine, self.unit))
        mean, log_scale = jnp.split(self.guide.unconstrained(rows, args, kwargs), 2, 1)
        center = _with_ones(rows, args, kwargs, self.inputs, len(mean)) @ affine
        return jnp.concatenate([center + unit * mean, jnp.log(unit) + log_scale], 1)


def around_prior(
    guide: LatentGuide, site: dict, rows, args: tuple, kwargs: dict, inputs=None
) -> LatentGuide:
    """The guide around a latent's prior, or as it is where that is about N(0, 1): from a start far
    from the prior the run ends in a lower optimum.
    """
    axis = data_axis(site, len(site["fn"].batch_shape))
    num = site["fn"].shape()[axis] if axis is not None else 0  # latent_form refuses that
    columns = _with_ones(rows, args, kwargs, inputs, num)
    axis, shape = latent_form(site, len(columns))
    if shape[axis] != len(columns):  # a plate has drawn rows that nobody knows
        return guide
    drawn = biject_to(site["fn"].support).inv(site["fn"].sample(random.key(0), (_DRAWS,)))
    free = jnp.reshape(jnp.moveaxis(drawn, 1 + axis, 1), (_DRAWS, len(columns), -1))
    low, center, high = jnp.quantile(free, jnp.array([0.16, 0.5, 0.84]), axis=0)
    unit = jnp.exp(jnp.mean(jnp.log(0.5 * (high - low)), 0))
    # a median of so many draws has an error of 0.13
    if (jnp.abs(center) < 0.7).all() and (jnp.abs(jnp.log(unit)) < 0.2).all():
        return guide
    return Around(guide, jnp.linalg.lstsq(columns, center)[0], unit, inputs)


def encoder_of(guide: LatentGuide | None) -> Any:
    """The encoder of q(h), or `None`."""
    return getattr(getattr(guide, "guide", guide), "encoder", None)


class Forgotten(LatentGuide):
    """Of a loaded fit whose q(h) is of the training data's rows, which no new data ask for."""

    def unconstrained(self, rows, args, kwargs):
        raise ModelError(
            "a saved fit keeps encoders, and no q(h) of the training data's rows; fit the model "
            "again."
        )


def latent_form(site: dict, num: int) -> tuple[int, tuple[int, ...]]:
    """(the axis of the data, the unconstrained shape) of a latent site, or `ModelError`."""
    fn = site["fn"]
    if fn.support.is_discrete:
        raise ModelError(
            f"latent '{site['name']}' is discrete, and q(h) is Gaussian; sum it out of the "
            "likelihood."
        )
    if (axis := data_axis(site, len(fn.batch_shape))) is None:
        raise ModelError(
            f"latent '{site['name']}' of batch shape {fn.batch_shape} has no axis of {num} data."
        )
    return axis + len(fn.batch_shape), tuple(biject_to(fn.support).inverse_shape(fn.shape()))


def latent_size(site: dict, num: int) -> int:
    """Numbers that one datum's latent has, unconstrained."""
    axis, shape = latent_form(site, num)
    return math.prod(n for i, n in enumerate(shape) if i != axis)


class MLPEncoder(eqx.Module):
    """The default encoder: standardised rows through tanh layers to means and log scales."""

    layers: tuple[tuple[Float[Array, "_ _"], Float[Array, "_"]], ...]  # weight and bias of each
    shift: Float[Array, "F"]
    scale: Float[Array, "F"]
    start: Float[Array, ""]  # log scale that the network's output is added to

    def __call__(self, row: Float[Array, "F"]) -> Float[Array, "P"]:
        x = (row - lax.stop_gradient(self.shift)) / lax.stop_gradient(self.scale)
        for weight, bias in self.layers[:-1]:
            x = jnp.tanh(weight @ x + bias)
        weight, bias = self.layers[-1]
        mean, log_scale = jnp.split(weight @ x + bias, 2)
        return jnp.concatenate([mean, lax.stop_gradient(self.start) + log_scale])


def mlp_encoder(
    rows: Float[Array, "B F"], size: int, width: int, depth: int, key, scale: float = 0.5
) -> MLPEncoder:
    """An encoder for rows like these."""
    rows = np.asarray(rows)
    spread = np.where(rows.std(0) > 0, rows.std(0), 1.0)
    sizes, dtype = (rows.shape[1], 2 * size, width, depth), rows.dtype
    mlp = eqx.nn.MLP(*sizes, activation=jnp.tanh, dtype=dtype, key=key)
    layers = [(layer.weight, jnp.zeros(layer.out_features, dtype)) for layer in mlp.layers]
    weight, bias = layers[-1]
    layers[-1] = (weight.at[size:].multiply(0.1), bias)
    start = jnp.asarray(np.log(scale), dtype)
    return MLPEncoder(tuple(layers), jnp.asarray(rows.mean(0)), jnp.asarray(spread), start)


def encoder_rows(sees: str, args: tuple, kwargs: dict, inputs=None) -> Float[Array, "B F"]:
    """The columns of the first argument, of y, or of both; `DataError` where y is not given.
    `inputs`: which arrays of the first argument hold rows, by default all.
    """
    if "y" in sees and kwargs.get("y") is None:
        raise DataError(
            "q(h | x, y) needs y of every datum; give y=..., or an encoder that sees only x, "
            "Amortised(sees='x')."
        )
    given = _inputs(args, inputs) * ("x" in sees)
    given += jax.tree.leaves([kwargs.get("y")] * ("y" in sees))
    return jnp.concatenate([_columns(x) for x in given], 1)


def _inputs(args: tuple, inputs) -> list:
    leaves = jax.tree.leaves(args[:1])
    return leaves if inputs is None else [leaves[i] for i in inputs]


def _of_rows(seen, rows):
    """Where the model's own plate subsamples, the arguments hold all data."""
    return seen if rows is None or len(seen) == len(rows) else seen[rows]


def _with_ones(rows, args: tuple, kwargs: dict, inputs, num: int) -> Float[Array, "B _"]:
    """Of `num` rows where the first argument holds none."""
    if not _inputs(args, inputs):
        return jnp.ones((num, 1))
    X = _of_rows(encoder_rows("x", args, kwargs, inputs), rows)
    return jnp.concatenate([jnp.ones((len(X), 1), X.dtype), X], 1)


def _columns(x) -> Float[Array, "B F"]:
    x = jnp.asarray(x)
    dtype = jnp.result_type(float) if x.dtype.kind in "iub" else x.dtype
    return jnp.reshape(x, (x.shape[0], -1)).astype(dtype)
