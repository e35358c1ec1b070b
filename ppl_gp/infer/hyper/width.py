"""How much wider than its prior a local approximation is: Laplace's near a saddle, which is told.

Data narrow a Gaussian posterior where the likelihood is log-concave. Where it is not (a noise that
is a function, heavy tails), K^-1 + W of Laplace's method (Rasmussen & Williams 2006, section 3.4)
may be nearly singular at the mode: q is then wide without end, its evidence -log|B| / 2 too high,
and a sampler of the hyperparameters goes there.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_gp.errors import warn
from ppl_gp.gp import GP
from ppl_gp.local.laplace import Laplace
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.reading.predictor.parts import Table
from ppl_gp.reading.predictor.prior import PredictorGP

WIDE = 2.0  # standard deviations of q(f_n), in prior ones, that no mode away from a saddle has
_APART = 1e3
SHARE = 0.01  # of the posterior's weight that may have such a q unsaid


def widest(prior: GP, variance: Float[Array, "RN"]) -> Float[Array, ""]:
    """The largest standard deviation of q in that of the prior, of functions that have one."""
    own = prior.variance
    return jnp.sqrt(jnp.max(jnp.where(own > 1e-13 * jnp.max(own), variance / own, 0.0)))


def wide_column(prior: GP) -> str | None:
    """In words, the unknown of a predictor that adds a thousand times as much as another term."""
    if not isinstance(prior, PredictorGP):
        return None
    sizes = {}
    for k, part in prior.kernel.at(prior.X).parts.items():
        squares = (
            part.flat**2 if isinstance(part, Table) else part.diag() + diagonal_of(part.jitter())
        )
        rms = np.sqrt(np.mean(np.asarray(squares), 0))
        sizes |= {(k, i): float(x) for i, x in enumerate(np.atleast_1d(rms)) if x > 0}
    (site, i), widest = max(sizes.items(), key=lambda entry: entry[1])
    if not (ratio := widest / min(sizes.values())) > _APART:
        return None
    return (
        f"unknown {i} of '{site}' adds {widest:.1g} prior standard deviations to the predictor, "
        f"{ratio:.0e} times as much as the smallest of its terms, and no digits may be left of the "
        f"others: centre and scale its column, or give '{site}' a narrower prior"
    )


def warn_if_wide(method, ratios, weights=None) -> dict[str, float]:
    """{"widest": the largest ratio}, and a warning where `Laplace` is wide at over a hundredth of
    the draws of the hyperparameters.
    """
    ratios = np.atleast_1d(np.asarray(ratios))
    weights = np.full(len(ratios), 1.0 / len(ratios)) if weights is None else np.asarray(weights)
    share = float(np.sum(weights, where=ratios > WIDE))
    if isinstance(method, Laplace) and share > SHARE:
        where = "" if len(ratios) == 1 else f" at {share:.0%} of the hyperparameters' posterior"
        warn(
            f"Laplace(): q(f) is up to {np.nanmax(ratios):.1f} times as wide as f's prior{where}: "
            "the likelihood is not log-concave, and the mode lies near a saddle, where a Gaussian "
            "at the mode is no approximation and its evidence is too high. Compare with EP(), "
            "VI() or NUTS()."
        )
    return {"widest": float(np.nanmax(ratios)) if np.any(np.isfinite(ratios)) else float("nan")}
