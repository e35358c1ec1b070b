"""Other modes of p(f | y): ascents from points far from q(f), where no draw of q would go.

In u with f = mean + R u, u ~ N(0, I): Newton's method with the curvature of the likelihood where it
is positive, and steps shortened until the density rises. O(N^3) a step.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.model.factors import functions_of
from ppl_gp.numerics.blocks import positive_part, times
from ppl_gp.numerics.lapack import cholesky
from ppl_gp.numerics.linalg import add_diagonal, half_log_det, tril_inverse
from ppl_gp.numerics.modes import derivatives
from ppl_gp.quick import full_jit

STARTS = 6  # draws of the prior, beside q's mean and its mirror image
STEPS = 40
FRACTIONS = (1.0, 0.5, 0.2, 0.05, 0.005)  # of a Newton step that are tried
SMALL_SHARE = 1e-3  # of the evidence by Laplace's approximation, below which a mode is left out
MAX_MODES = 4
_APART = 1e-2  # of the root of N, in u, beyond which two ends of ascents are two modes


def precision_factor(log_lik, mean, R, u, width=1.0) -> Float[Array, "N N"]:
    """Lower Cholesky factor of I + R^T D R / width^2, D the likelihood's curvature at u where it is
    positive. O(N^3).
    """
    h = derivatives(log_lik, mean + R @ u, functions_of(log_lik))[1]
    D = positive_part(jnp.where(jnp.isfinite(h), -h, 0.0)) / width**2
    return cholesky(add_diagonal(R.T @ times(D, R), 1.0))


def other_modes(log_lik, mean, R, centre, key) -> np.ndarray:
    """Modes (K, N) in u, without the one that q's centre ascends to: those with more than
    `SMALL_SHARE` of the evidence, at most `MAX_MODES`.
    """
    ends, log_shares = map(np.asarray, _ascents(log_lik, mean, R, centre, key))
    found = [0]
    for i in np.argsort(-log_shares):
        far = min(np.linalg.norm(ends[i] - ends[j]) for j in found) > _APART * np.sqrt(len(centre))
        if (
            far
            and np.isfinite(log_shares[i])
            and log_shares[i] > np.nanmax(log_shares) + np.log(SMALL_SHARE)
        ):
            found.append(i)
    return ends[found[1 : 1 + MAX_MODES]]


@full_jit
def _ascents(log_lik, mean, R, centre, key):
    """(ends (STARTS + 2, N), their log evidence by Laplace's approximation); the first starts at
    `centre`.
    """

    def objective(u):
        return jnp.sum(log_lik(mean + R @ u)) - 0.5 * u @ u

    def step(state):
        u, _, steps = state
        g = R.T @ jnp.nan_to_num(derivatives(log_lik, mean + R @ u)[0]) - u
        inverse = tril_inverse(precision_factor(log_lik, mean, R, u))
        direction = inverse.T @ (inverse @ g)
        trials = u + jnp.array((0.0, *FRACTIONS), u.dtype)[:, None] * direction
        values = jnp.nan_to_num(jax.vmap(objective)(trials), nan=-jnp.inf)
        new = trials[jnp.argmax(values)]
        return new, jnp.max(jnp.abs(new - u)), steps + 1

    def ascend(start):
        moves = lambda state: (state[1] > 1e-6) & (state[2] < STEPS)  # noqa: E731
        u, _, _ = lax.while_loop(moves, step, (start, jnp.asarray(jnp.inf, start.dtype), 0))
        return u, objective(u) - half_log_det(precision_factor(log_lik, mean, R, u))

    far = random.normal(key, (STARTS, *centre.shape), centre.dtype)
    return lax.map(ascend, jnp.concatenate([centre[None], -centre[None], far]))
