"""A batch's rows over devices: data-parallel training by JAX's sharding, in any processes."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ppl_gp.errors import DataError
from ppl_gp.infer.batches import Source
from ppl_gp.sparse.bound import Batch


class Placement(NamedTuple):
    """Where batches and parameters live; without a mesh on the default device. Rows are split over
    the mesh's one axis, parameters are on every device; the compiler adds the sums of partial
    bounds and gradients. With several processes (`jax.distributed`) every process must run the same
    program on the same data, and holds the rows of its own devices only.
    """

    mesh: Any = None

    def batch(self, batch: Batch, axis: int = 0) -> Batch:
        """Its rows along an axis: 1 where the first counts batches."""
        if self.mesh is None:
            return batch
        num, along = batch.weights.shape[axis], PartitionSpec(*[None] * axis, "data")
        if num % self.mesh.size:  # a last sum over few data: on every device
            return self.replicated(batch)

        def put(x):
            is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            has_rows = not is_key and x.ndim > axis and x.shape[axis] == num
            return self._place(x, along if has_rows else PartitionSpec())

        return self._mapped(put, batch)

    def replicated(self, tree):
        """On every device."""
        return self._mapped(lambda x: self._place(x, PartitionSpec()), tree)

    def local(self, tree):
        """Back on this process' default device, where each process can use them alone."""
        return self._mapped(lambda x: jnp.asarray(np.asarray(x)), tree)

    def _mapped(self, put, tree):
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: put(x) if eqx.is_array(x) else x, tree)

    def _place(self, x, spec):
        sharding = NamedSharding(self.mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self._place(jax.random.key_data(x), spec))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def placement(devices: int | None, source: Source) -> Placement:
    """A mesh over this many of all processes' devices; `None`: no mesh."""
    if devices is None:
        return Placement()
    if devices > jax.device_count():
        raise DataError(
            f"SVGP(devices={devices}): JAX sees {jax.device_count()}; on CPU ask for more with "
            "numpyro.set_host_device_count(n) before anything else."
        )
    if source.batch_size is not None and source.batch_size % devices:
        raise DataError(
            f"SVGP(devices={devices}): a batch of {source.batch_size} rows cannot be split evenly; "
            "choose a multiple."
        )
    some = jax.devices()[:devices]
    return Placement(jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=some))
