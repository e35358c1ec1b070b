"""Probability integral transforms: where in its predictive distribution an observation lies."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ppl_gp.errors import DataError
from ppl_gp.results.integrals.compiled import predictive
from ppl_gp.results.integrals.integration import plan_integration
from ppl_gp.results.integrals.quantiles import cdf_at
from ppl_gp.results.query.by_names import with_observations
from ppl_gp.results.query.new_observations import observations_at
from ppl_gp.results.query.query import case_at
from ppl_gp.results.record import Record


class Pit(NamedTuple):
    """p(y* < y) and p(y* <= y) of each observation, in y's shape; equal where y is continuous.

    A number drawn uniformly between the two is uniform on (0, 1) over data of the model (Czado,
    Gneiting & Held 2009).
    """

    below: Float[ndarray, "..."]
    up_to: Float[ndarray, "..."]


def pit(fit: Record, X_new, y_new, *args, **kwargs) -> Pit | None:
    """Of observations y_new at X_new under the predictive distribution; `None` where an event is a
    vector or several sites are observed. Arguments, errors and cost as for `predict`.
    """
    X_new, y_new, args, kwargs = with_observations(fit, X_new, y_new, args, kwargs)
    case = case_at(fit, X_new, args, kwargs)
    if len(case.layout.sites) != 1:
        return None
    observations_at(case, y_new)
    integration, (site,) = plan_integration(case), case.layout.sites
    if site.support is None:
        found = cdf_at(case, integration, site, jnp.asarray(y_new))
        return None if found is None else Pit(*(np.asarray(x) for x in found))
    _, _, log_probs, _ = predictive(case, integration, None)
    p = np.exp(np.asarray(log_probs[site.label]))
    if p.shape[1:] != np.shape(y_new):
        raise DataError(f"y_new has shape {np.shape(y_new)}, and predictions of it {p.shape[1:]}.")
    outcomes = np.reshape(site.support, (-1,) + (1,) * np.ndim(y_new))
    below = np.sum(np.where(outcomes < np.asarray(y_new), p, 0.0), 0)
    return Pit(below, below + np.sum(np.where(outcomes == np.asarray(y_new), p, 0.0), 0))
