"""Points and weights that integrate a density close to a standard Gaussian in d dimensions."""

import itertools

import numpy as np

from ppl_gp.errors import ModelError

MOST = 8  # hyperparameters; beyond, fractions of the corners no longer tell them apart
_RADIUS = 1.1  # f_0 of Rue, Martino & Chopin 2009, section 6.5: how far beyond sqrt(d)
_FEW = 2  # hyperparameters up to which a regular grid is cheap
# standard deviations: a sum over steps of one is exact to 1e-8 for a Gaussian; finer where cheap
_STEPS = {1: 0.5, 2: 1.0}
_REACH = {1: 4.0, 2: 3.5}
ASKED_AT = np.sqrt(2.0)  # standard deviations from the mode where skewness is looked for
WIDEST = 3.0  # and its reciprocal: what a half axis may be stretched by
# of the two-level design in five factors, the columns that further factors are products of
_PRODUCTS = ((0, 1, 2, 3, 4), (0, 1, 2), (0, 3, 4))


def design(d: int) -> tuple[np.ndarray, np.ndarray]:
    """(points (n, d), log weights (n,)): sum_n w_n g(z_n) is about int g(z) dz / (2 pi)^(d / 2),
    for g close to exp(-z^2 / 2).

    A regular grid in one or two dimensions (17 and 37 points), else a central composite design (15
    to 49): the centre and a sphere whose weights make the second moments those of a Gaussian (Rue,
    Martino & Chopin 2009, section 6.5).
    """
    require_few(d)
    return _regular(d) if is_regular(d) else _central_composite(d)


def require_few(d: int) -> None:
    """Raise `ModelError` where the designs end."""
    if d > MOST:
        raise ModelError(
            f"Grid() of {d} hyperparameters: its design is for up to {MOST}; use Sample()."
        )


def effective(log_weights: np.ndarray) -> float:
    """The number of equal weights that vary as little: (sum w)^2 / sum w^2."""
    weights = np.exp(log_weights - np.max(log_weights))
    return float(np.sum(weights) ** 2 / np.sum(weights**2))


def half_widths(falls: np.ndarray) -> np.ndarray:
    """(2 d,) of the half axes +e_1, ..., +e_d, -e_1, ..., -e_d: the standard deviation of a
    Gaussian that falls by so many nats (2 d,) from the mode to `ASKED_AT` there.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        widths = ASKED_AT / np.sqrt(2.0 * falls)
    widths = np.where(falls > 0, widths, WIDEST)  # flat, or rising: as far as is allowed
    return np.clip(np.where(np.isfinite(falls), widths, 1.0 / WIDEST), 1.0 / WIDEST, WIDEST)


def stretched(points, log_weights, widths) -> tuple[np.ndarray, np.ndarray]:
    """A design in coordinates that each half axis has its own width in (Rue, Martino & Chopin 2009,
    section 6.5, for skewed posteriors): z_i = u_i times the width of its side, whose Jacobian goes
    into the weights.
    """
    up, down = np.split(widths, 2)
    side = np.where(points > 0, up, np.where(points < 0, down, 0.5 * (up + down)))
    return points * side, log_weights + np.sum(np.log(side), 1)


def _regular(d: int):
    ticks = np.arange(-_REACH[d], _REACH[d] + 1e-9, _STEPS[d])
    ticks = ticks - ticks[len(ticks) // 2]  # the mode is a point
    points = np.stack([np.ravel(x) for x in np.meshgrid(*[ticks] * d)], 1)
    points = points[np.sum(points**2, 1) <= _REACH[d] ** 2 + 1e-9]
    return points, np.full(len(points), d * np.log(_STEPS[d] / np.sqrt(2.0 * np.pi)))


def is_regular(d: int) -> bool:
    """Whether a design is a regular grid, which needs no stretching."""
    return d <= _FEW


def _central_composite(d: int):
    axes = np.concatenate([np.eye(d), -np.eye(d)]) * np.sqrt(d)
    sphere = _RADIUS * np.concatenate([_corners(d), axes])
    points = np.concatenate([np.zeros((1, d)), sphere])
    # Centre and sphere together have mass one and second moment d: the sphere's share is 1 / f_0^2.
    share = np.log(1.0 / _RADIUS**2 / len(sphere)) + 0.5 * d * _RADIUS**2
    return points, np.array([np.log(1.0 - 1.0 / _RADIUS**2), *[share] * len(sphere)])


def _corners(d: int) -> np.ndarray:
    base = np.array(list(itertools.product((-1.0, 1.0), repeat=min(d, 5))))
    further = [np.prod(base[:, columns], 1) for columns in map(list, _PRODUCTS[: max(0, d - 5)])]
    return np.column_stack([base, *further])
