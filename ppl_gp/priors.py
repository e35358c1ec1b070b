"""Priors of kernel parameters that are computed from the data, in the units of X and y.

Make them from the training data, outside of the model. Predictions at other rows then have the
prior of the fit:

    lengthscale = pg.priors.lengthscale(X)

    def model(X, y=None):
        ell = numpyro.sample("lengthscale", lengthscale)
"""

import math
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer

from ppl_gp.errors import DataError
from ppl_gp.frames.names import plain_numbers

_ROWS = 2000  # that distances are taken of; of more, rows spread evenly over them
_FACTOR = 10.0  # of the variance of y: where the prior of a variance has its tails


def lengthscale(X, *, ard: bool = False, tail: float = 0.01) -> dist.Distribution:
    """Prior of a length scale, from the distances between the training inputs.

    Below the distance to the nearest row, the data do not inform the length scale. Beyond the
    extent of the data, the function is a straight line. The prior has little mass in both.

    Parameters
    ----------
    X : array or frame
        Training inputs, (N,) or (N, D).
    ard : bool, default False
        True gives one length scale per column, an event (D,), by the distances along it. False
        gives one for all columns, by Euclidean distances.
    tail : float, default 0.01
        The mass below and above, in (0, 1/2).

    Returns
    -------
    Distribution
        An inverse gamma, in units of X, so that a change of units changes no prediction.

    Raises
    ------
    DataError
        For fewer than two different rows, or with `ard` two different values in each column. Also
        if X is not a table of real numbers, and inside a model that is being compiled.

    Notes
    -----
    p(l < nearest) = p(l > largest) = `tail`, with the median distance to the nearest row and the
    largest distance (Betancourt 2017). For example, two rows or a column of zeros and ones have
    largest < 2 nearest. Then these masses are below d / sqrt(10) and above d sqrt(10), with d the
    geometric mean of the two. O(N log N), and O(n^2 D) for n <= 2000 rows.

    Examples
    --------
    >>> prior = pg.priors.lengthscale(np.linspace(0.0, 1.0, 11))
    >>> round(float(prior.cdf(0.1)), 3), round(float(prior.cdf(1.0)), 3)
    (0.01, 0.99)
    """
    X = _array("lengthscale", X)
    if not 0.0 < tail < 0.5:
        raise DataError(f"priors.lengthscale(tail={tail}): give a number in (0, 1/2).")
    if not ard:
        return dist.InverseGamma(*_inverse_gamma(*distances(X), tail))
    each = [distances(X[:, [d]], f" in column {d}") for d in range(X.shape[1])]
    found = [_inverse_gamma(*pair, tail) for pair in each]
    alpha, beta = (jnp.asarray(np.array(x)) for x in zip(*found, strict=True))
    return dist.InverseGamma(alpha, beta).to_event(1)


def variance(y, *, tail: float = 0.01) -> dist.Distribution:
    """Prior of the variance of a function in the units of y, from the variance of y.

    Use it with a Gaussian or Student-t likelihood, but not behind a link.

    Parameters
    ----------
    y : array
        The observations.
    tail : float, default 0.01
        The mass below var(y) / 10 and above 10 var(y), in (0, 1/2).

    Returns
    -------
    Distribution
        A log-normal about var(y).

    Raises
    ------
    DataError
        If y does not vary or is not an array of real numbers, and inside a model that is being
        compiled.

    Examples
    --------
    >>> prior = pg.priors.variance(np.array([-1.0, 1.0]))
    >>> round(float(prior.cdf(0.1)), 3), round(float(prior.cdf(10.0)), 3)
    (0.01, 0.99)
    """
    if not 0.0 < tail < 0.5:
        raise DataError(f"priors.variance(tail={tail}): give a number in (0, 1/2).")
    y = _array("variance", y)
    unit = float(np.max(np.abs(y))) or 1.0  # squares of large or small numbers leave floating point
    found = float(np.var(y / unit))
    if not found > 0.0:
        raise DataError("priors.variance(y): all values of y are equal; give your own prior.")
    log_variance = math.log(found) + 2.0 * math.log(unit)
    return dist.LogNormal(log_variance, math.log(_FACTOR) / NormalDist().inv_cdf(1.0 - tail))


def distances(X: np.ndarray, where: str = "") -> tuple[float, float]:
    """(the median distance from a row to its nearest other one, the largest distance) of rows
    (N, D), repeated ones counted once. Raises `DataError` for fewer than two.
    """
    from scipy.spatial import KDTree
    from scipy.spatial.distance import pdist

    rows = np.unique(X, axis=0)
    if len(rows) < 2:
        raise DataError(f"priors.lengthscale(X): all rows{where} are equal; give your own prior.")
    nearest = np.median(KDTree(rows).query(rows, k=2)[0][:, 1])
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).astype(int)]
    largest = pdist(some).max() if X.shape[1] > 1 else np.ptp(rows)
    return float(nearest), float(largest)


def _inverse_gamma(low: float, high: float, tail: float) -> tuple[float, float]:
    """(alpha, beta) with p(l < low) = p(l > high) = tail. Where the distances hardly differ (of two
    rows, say), the prior spans a factor of 10 about them.
    """
    from scipy.optimize import brentq
    from scipy.special import gammainccinv, gammaincinv

    if high < 2.0 * low:
        low, high = math.sqrt(low * high / _FACTOR), math.sqrt(low * high * _FACTOR)

    def miss(log_alpha):
        alpha = math.exp(log_alpha)
        return math.log(gammainccinv(alpha, tail) / gammaincinv(alpha, tail)) - math.log(high / low)

    log_alpha: Any = brentq(miss, math.log(0.02), math.log(1e5))
    alpha = math.exp(log_alpha)
    return alpha, low * float(gammainccinv(alpha, tail))


def _array(name: str, values) -> np.ndarray:
    if isinstance(values, Tracer):
        raise DataError(
            f"priors.{name}(...) was called on an array that JAX traces: make the prior outside of "
            "the model, from the training data, and use it there."
        )
    found = _real(name, plain_numbers(f"priors.{name}(...)", values))
    if found.size == 0 or not np.all(np.isfinite(found)):
        raise DataError(f"priors.{name}(...): give finite numbers, at least one.")
    if name == "lengthscale" and found.ndim not in (1, 2):
        raise DataError(f"priors.lengthscale(X): give X (N,) or (N, D), and not {found.shape}.")
    return found[:, None] if name == "lengthscale" and found.ndim == 1 else found


def _real(name: str, values) -> np.ndarray:
    """Integers, floats and truth values as floats, also where they stand in an array of objects."""
    try:
        found = np.asarray(values)
        if found.dtype.kind in "biufO":
            return found.astype(float)
    except (TypeError, ValueError) as error:
        raise DataError(f"priors.{name}(...): give an array of real numbers; {error}.") from error
    raise DataError(
        f"priors.{name}(...): give an array of real numbers, and not of {found.dtype}; dates as "
        "numbers in a unit of your choice."
    )
