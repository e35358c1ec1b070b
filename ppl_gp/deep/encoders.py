"""Encoders: Equinox modules from what is known of a datum to the parameters of q(h)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.errors import DataError


class MLPEncoder(eqx.Module):
    """The default encoder: standardised rows through tanh layers to means and log scales, which
    start small.
    """

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
    dtype = rows.dtype
    mlp = eqx.nn.MLP(
        rows.shape[1], 2 * size, width, depth, activation=jnp.tanh, dtype=dtype, key=key
    )
    layers = [(layer.weight, jnp.zeros(layer.out_features, dtype)) for layer in mlp.layers]
    weight, bias = layers[-1]
    layers[-1] = (weight.at[size:].multiply(0.1), bias)
    start = jnp.asarray(np.log(scale), dtype)
    return MLPEncoder(tuple(layers), jnp.asarray(rows.mean(0)), jnp.asarray(spread), start)


def encoder_rows(sees: str, args: tuple, kwargs: dict) -> Float[Array, "B F"]:
    """What an encoder sees of each datum: the columns of the first argument, of y, or of both, (B,
    F).

    Raises `DataError` where y is needed and not given.
    """
    if "y" in sees and kwargs.get("y") is None:
        raise DataError(
            "q(h | x, y) needs y of every datum; give y=..., or an encoder that sees only x, "
            "Amortised(sees='x')."
        )
    parts = [args[0]] * ("x" in sees) + [kwargs.get("y")] * ("y" in sees)
    return jnp.concatenate([_columns(x) for x in jax.tree.leaves(parts)], 1)


def _columns(x) -> Float[Array, "B F"]:
    x = jnp.asarray(x)
    return jnp.reshape(x, (x.shape[0], -1)).astype(
        jnp.result_type(float) if x.dtype.kind in "iub" else x.dtype
    )
