"""Counts with a log-Gaussian rate (a log-Gaussian Cox process on bins), and a generator of data
like the coal-mining series.

    lengthscale ~ LogNormal(log(D) / 2, 1)          one for each column of X, in its units
    variance    ~ LogNormal(-1, 1)                  prior variance of the log rate
    log_rate    ~ N(0, 3^2)                         its prior mean, constant in X
    f | X       ~ GP(log_rate, variance (1 + s) exp(-s)),   Matern 3/2,
                    s^2 = 3 sum_d (x_d - x'_d)^2 / lengthscale_d^2
    y_n | f     ~ Poisson(exposure_n exp(f_n))

f is the log rate for one unit of exposure (a year, an area): bins of different size, and new ones,
fit together. For X that is not standardised bind a prior in its units:
`partial(poisson, lengthscale_prior=pg.priors.lengthscale(X, ard=True))`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

# (from year, to year, events a year): the rates before and after the change of about 1890 that
# Raftery & Akman (1986) found in the series of 191 British coal-mining disasters between 15 March
# 1851 and 22 March 1962 (Jarrett 1979).
COAL_PIECES = ((1851.2, 1890.5, 3.1), (1890.5, 1962.2, 0.9))


def poisson(X, y=None, exposure=1.0, lengthscale_prior=None):
    """X (N, D), y (N,) of counts or `None` to draw them; `exposure` is one positive number or
    (N,).
    """
    D = X.shape[-1]
    standard = dist.LogNormal(0.5 * jnp.log(D), 1.0).expand([D]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior or standard)
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
    log_rate = numpyro.sample("log_rate", dist.Normal(0.0, 3.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern32(variance, lengthscale), X, mean=log_rate))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + jnp.log(exposure))), obs=y)


class CoalSeries(NamedTuple):
    """Binned events: `X` (N, 1) standardised bin centres, `y` (N,) counts, `exposure` bin width in
    years, `years` (N,).
    """

    X: np.ndarray
    y: np.ndarray
    exposure: float
    years: np.ndarray


def event_times(seed: int = 0, pieces=COAL_PIECES) -> np.ndarray:
    """Sorted event times, in years, of a Poisson process with piecewise-constant rate: about 190
    for the coal pieces.
    """
    rng = np.random.default_rng(seed)
    times = [
        rng.uniform(begin, end, rng.poisson(rate * (end - begin))) for begin, end, rate in pieces
    ]
    return np.sort(np.concatenate(times))


def coal_mining_like(seed: int = 0, num_bins: int = 111) -> CoalSeries:
    """Events drawn at the coal-mining series' rates and counted in `num_bins` equal bins (one about
    a year by default).
    """
    begin, end = COAL_PIECES[0][0], COAL_PIECES[-1][1]
    y, edges = np.histogram(event_times(seed), bins=num_bins, range=(begin, end))
    years = 0.5 * (edges[1:] + edges[:-1])
    X = ((years - years.mean()) / years.std())[:, None]
    return CoalSeries(X, y, float(edges[1] - edges[0]), years)
