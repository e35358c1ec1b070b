"""One table of what was inferred: every hyperparameter and effect."""

import itertools
from typing import TYPE_CHECKING

import numpy as np
from jax import random
from numpyro.distributions import Distribution

from ppl_gp.results.record import Record

if TYPE_CHECKING:
    import pandas as pd

_DRAWS, _LEVELS = 4000, np.array([0.05, 0.95])


def summary(fit: Record) -> "pd.DataFrame":
    """Mean, standard deviation, 5 % and 95 % quantile of each hyperparameter and effect.

    Returns
    -------
    pandas.DataFrame
        One row per entry, `u[2]` for an entry of a vector. `kind` is "draws" (weighted draws of the
        posterior), "marginal" (a distribution of `fit.sites`) or "point": the fit keeps the entry
        at the value in `mean`, and its spread is unknown (NaN).
    """
    import pandas as pd  # with xarray it takes a second, which a fit need not wait for

    weights = np.exp(np.asarray(fit.draws.log_weights, float))
    even, rows = fit.draws.of_equal_weight(_DRAWS).hyper, {}
    for name, x in fit.draws.hyper.items():
        mean = np.tensordot(weights, np.asarray(x, float), 1)
        if name in fit.points:
            rows |= _rows(name, "point", mean, *np.full((3, *mean.shape), np.nan))
        else:
            variance = np.tensordot(weights, (np.asarray(x, float) - mean) ** 2, 1)
            ends = np.quantile(np.asarray(even[name]), _LEVELS, axis=0)
            rows |= _rows(name, "draws", mean, np.sqrt(variance), *ends)
    for name, q in fit.sites.items():
        if isinstance(q, Distribution) and not q.support.is_discrete:
            rows |= _rows(name, "marginal", q.mean, np.sqrt(q.variance), *_quantiles(q))
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table.set_axis(["kind", "mean", "sd", "5 %", "95 %"][: table.shape[1]], axis=1)


def _rows(name: str, kind: str, *figures) -> dict[str, tuple]:
    places = itertools.product(*map(range, np.shape(figures[0])))
    label = lambda at: f"{name}[{','.join(map(str, at))}]" if at else name  # noqa: E731
    return {label(at): (kind, *(float(np.asarray(x)[at]) for x in figures)) for at in places}


def _quantiles(q: Distribution):
    try:
        return [np.asarray(q.icdf(level)) for level in _LEVELS]
    except NotImplementedError:
        return np.quantile(q.sample(random.key(0), (_DRAWS,)), _LEVELS, axis=0)
