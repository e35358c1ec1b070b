"""Posterior moments of what two fits of one model both know, whether it was integrated or drawn.

A local method keeps the predictor eta of several Gaussian sites, `NUTS` the sites themselves; each
has moments of every site: of effects in closed form where they were integrated (`fit.sites`), of
GPs behind a predictor by joint draws, of sites that were drawn by the draws.
"""

import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.model.collapsed import Collapsed
from ppl_gp.results.datatree import draws_with_parts, training_moments
from ppl_gp.results.parts import effects
from ppl_gp.results.query.mixture import Moments
from ppl_gp.results.record import Record

DRAWS = 4000  # of GPs behind a predictor: means to 1/60 of a standard deviation


def shared_moments(fit: Record, other: Record) -> list[tuple[Moments, Moments]]:
    """Pairs of posterior moments of the same thing at the training inputs: the functions that both
    keep, else the Gaussian sites that both know; none where there is no such site.
    """
    ours, theirs = training_moments(fit), training_moments(other)
    if not theirs or ours.keys() != theirs.keys():
        ours, theirs = site_moments(fit, ours), site_moments(other, theirs)
    return [(ours[k], theirs[k]) for k in theirs if k in ours]


def site_moments(fit: Record, functions: dict[str, Moments]) -> dict[str, Moments]:
    """{site of the declared model: mean and variance}; `functions`: `training_moments(fit)`."""
    if isinstance(fit.model, Collapsed):
        _, _, parts = draws_with_parts(fit, random.key(0), DRAWS)
        exact = {k: Moments(q.mean, q.variance) for k, q in effects(fit).items()}
        return {k: _of_draws(x) for k, x in parts.items()} | exact
    drawn = fit.draws.known if fit.sampled and not fit.draws.is_weighted() else {}
    numbers = {k: x for k, x in drawn.items() if np.issubdtype(jnp.result_type(x), np.floating)}
    return {k: _of_draws(x) for k, x in numbers.items()} | functions


def _of_draws(x) -> Moments:
    return Moments(jnp.mean(x, 0), jnp.var(x, 0))
