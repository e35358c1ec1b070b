"""Small steps between compiled functions, done on the host: an operation of JAX outside `jit` costs
tens of milliseconds of compiling for each new shape.

Of concrete arrays only, and of small ones: on an accelerator they are copied to the host.
"""

import jax
import jax.numpy as jnp
import numpy as np


def entry(tree, index: int):
    """Entry `index` of the leading axis of every array of a tree, without that axis."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]), tree)


def one_entry(tree):
    """Every array of a tree with a leading axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[None]), tree)
