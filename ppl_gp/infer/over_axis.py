"""One function over a leading axis: a compiled loop on CPU, a vectorised map on accelerators,
spread over devices.

On CPU every Cholesky factor already fills the cores, and a vectorised `while_loop` would run all
lanes as long as the slowest and both sides of every `cond`; on a GPU one wide kernel is worth that.
"""

import math

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec


def over_leading_axis(function, xs):
    """function mapped over the leading axis of the pytree xs, on one device."""
    return lax.map(function, xs) if jax.default_backend() == "cpu" else jax.vmap(function)(xs)


def over_devices(function, xs):
    """As `over_leading_axis`, in parallel on as many of JAX's devices as divide the axis."""
    num_devices = math.gcd(jax.tree.leaves(xs)[0].shape[0], jax.local_device_count())
    if num_devices == 1:
        return over_leading_axis(function, xs)
    mesh = jax.make_mesh(
        (num_devices,), ("chain",), (AxisType.Auto,), devices=jax.local_devices()[:num_devices]
    )
    along = PartitionSpec("chain")
    # The check of varying axes does not know every primitive that a sampler uses.
    spread = jax.shard_map(
        lambda xs: over_leading_axis(function, xs),
        mesh=mesh,
        in_specs=along,
        out_specs=along,
        check_vma=False,
    )
    return spread(xs)
