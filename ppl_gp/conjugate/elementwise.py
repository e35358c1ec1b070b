"""Terms that see one block and have an entry for each of its elements, priors of a plate as a rule,
by their coefficients: log p_e = c_e . (1, t_e), solved for at random values of the block and right
at others.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.conjugate.discrete import Discrete
from ppl_gp.conjugate.family import Family, moments
from ppl_gp.conjugate.log_joint import LogJoint
from ppl_gp.quick import quick_jit

MOST = 600  # functions of a row, or statistics, that are solved for
MORE = 8  # random values beyond the unknowns
SPREAD = 0.5
RESIDUAL = 1e-9  # of the largest entry of a row's terms


class Elementwise(eqx.Module):
    """E_q[sum_e log p_e] of a term with an entry for each element of one block: `table` of the
    coefficients of (1, t_e).
    """

    table: Float[Array, "E T"]

    def mean(self, statistics: Float[Array, "E S"]) -> Array:
        """Given E[t] of each element, nats."""
        return jnp.sum(self.table[:, 0]) + jnp.sum(self.table[:, 1:] * statistics)


def elementwise(joint: LogJoint, names: tuple[str, ...], q: Family) -> dict[str, Elementwise]:
    """{term: its form} of terms that see one block and have an entry for each of its elements;
    those that have one.
    """
    statistics = moments(q)
    if statistics is None or statistics.shape[1] >= MOST or isinstance(q, Discrete):
        return {}
    size = statistics.shape[1] + 1
    values, t = jax.device_get(_probed_alone(joint, names, q, size + MORE + 2))
    found = {}
    for name in names:
        tables = [_fit(t[:, e], values[name][:, e]) for e in range(len(statistics))]
        proved = [c for c in tables if c is not None]
        if len(proved) == len(tables):
            found[name] = Elementwise(jnp.asarray(np.stack(proved)))
    return found


def _fit(t, y) -> np.ndarray | None:
    """The coefficients of y (points,) in t (points, T), by all but two points, and right at all."""
    if not np.all(np.isfinite(y)):
        return None
    scale = np.max(np.abs(t), 0)
    scale = np.where(scale > 0, scale, 1.0)
    c = np.linalg.lstsq(t[:-2] / scale, y[:-2], rcond=None)[0] / scale
    return c if np.all(np.abs(t @ c - y) <= RESIDUAL * (1.0 + np.abs(y).max())) else None


@quick_jit
def _probed_alone(joint: LogJoint, names: tuple[str, ...], q: Family, num: int):
    """({term: (num, E)}, (1, t) (num, E, T)) at random values."""
    keys = random.split(random.key(3), num)
    free = jax.vmap(lambda key: q.free(key, SPREAD))(keys)

    def terms(row):
        return {k: joint.term(k, q.at(row)).reshape(-1) for k in names}

    t = jax.vmap(jax.vmap(q.statistics))(free)
    return lax.map(terms, free), jnp.concatenate([jnp.ones((*t.shape[:2], 1), t.dtype), t], 2)


def entries_of(joint: LogJoint, name: str) -> tuple[int, ...]:
    """The shape of a term."""
    return jax.eval_shape(lambda: joint.term(name, {})).shape
