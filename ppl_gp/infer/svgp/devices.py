"""Spreading a batch's rows over devices: data-parallel training by JAX's sharding, on one process
or several.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ppl_gp.errors import DataError
from ppl_gp.sparse.bound import Batch


class Placement(NamedTuple):
    """Where batches and parameters live. Without a mesh everything stays on the default device.

    Rows are split over the mesh's one axis, parameters are on every device; the compiler adds the
    sums of partial bounds and gradients. With several processes (`jax.distributed`) every process
    must run the same program on the same data, and holds the rows of its own devices only.
    """

    mesh: Any = None

    def batch(self, batch: Batch) -> Batch:
        """Rows along the first axis."""
        return self._put(batch, 0)

    def stacked(self, batch: Batch) -> Batch:
        """Rows along the second axis: the first counts batches."""
        return self._put(batch, 1)

    def replicated(self, tree):
        """On every device."""
        if self.mesh is None:
            return tree
        return jax.tree.map(
            lambda x: self._place(x, PartitionSpec()) if eqx.is_array(x) else x, tree
        )

    def local(self, tree):
        """Back on this process' default device, where each process can use them alone."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)) if eqx.is_array(x) else x, tree)

    def _put(self, batch: Batch, axis: int) -> Batch:
        if self.mesh is None:
            return batch
        num = batch.weights.shape[axis]
        if num % self.mesh.size:  # a last sum over few data: on every device
            return self.replicated(batch)

        def put(x):
            if not eqx.is_array(x):
                return x
            rows = (
                not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
                and x.ndim > axis
                and x.shape[axis] == num
            )
            return self._place(
                x, PartitionSpec(*[None] * axis, "data") if rows else PartitionSpec()
            )

        return jax.tree.map(put, batch)

    def _place(self, x, spec):
        sharding = NamedSharding(self.mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self._place(jax.random.key_data(x), spec)
            return jax.random.wrap_key_data(data)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def placement(devices: int | None, batch_size: int | None) -> Placement:
    """A mesh over this many of all processes' devices; `None`: no mesh."""
    if devices is None:
        return Placement()
    if devices > jax.device_count():
        raise DataError(
            f"SVGP(devices={devices}): JAX sees {jax.device_count()}; on CPU ask for more with "
            "numpyro.set_host_device_count(n) before anything else."
        )
    if batch_size is not None and batch_size % devices:
        raise DataError(
            f"SVGP(devices={devices}): a batch of {batch_size} rows cannot be split evenly; "
            "choose a multiple."
        )
    return Placement(
        jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    )
