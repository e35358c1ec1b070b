"""What the points of `Grid()` leave out: the density along each half axis, beyond its last point.

Along a half axis the fall from the mode is a parabola up to the first point where the density is
asked, and lines through the points from there on. A heavy tail of a positive hyperparameter
(inverse gamma, half-Cauchy) is a line in its logarithm, for which extrapolation is exact. Axes are
straight: a tail along which another hyperparameter has to move, too, is not seen.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ppl_gp.errors import warn

_FAR = (3.0, 5.0)  # widths from the mode where the density is asked, too
_REACH, _END = 16.0, 32.0  # sds: points at most at, extrapolated to
_STEP = 0.05
_MASS, _SPREAD = 1e-3, 0.01  # of the mass and of a variance, what a half axis may leave out
_TOLD = 0.02, 0.25  # from which on they are reported


class Tails(NamedTuple):
    """How far the half axes +1 ... +d, -1 ... -d go, (2 d,), in standard deviations; the share of
    the mass, and of the variance of the hyperparameter where it is largest, that points leave out.
    """

    reach: np.ndarray | None
    mass: float
    spread: float
    name: str


def radii(widths: np.ndarray, near: float) -> np.ndarray:
    """Where half axes (2 d,) are asked, (3, 2 d)."""
    return np.stack([near + x * widths for x in (0.0, *_FAR)])


def tails(falls, at, widths, entries: Callable, least: float | None, names: list[str]) -> Tails:
    """The tails of a log density that falls by (3, 2 d) nats from the mode, at radii `at` (3, 2 d).
    `entries(axis, z)`: hyperparameters (n, m), called `names`, along an axis.

    A regular grid goes from `least` as far as it has to; without it, a composite design stands for
    the Gaussian of `widths`.
    """
    d, z = len(widths) // 2, np.arange(-_END, _END + _STEP, _STEP)
    fall, gaussian = np.moveaxis([_along(z, a, falls, at, widths) for a in range(d)], 1, 0)
    p = np.exp(-fall)
    p /= p.sum(1, keepdims=True)
    values = np.stack([entries(a, z) for a in range(d)])
    values = np.nan_to_num(values, nan=0.0, posinf=1e100, neginf=-1e100)
    spread = p[..., None] * (values - np.sum(p[..., None] * values, 1, keepdims=True)) ** 2
    spread /= np.maximum(spread.sum((0, 1)), 1e-300)
    shares, reach = np.concatenate([p[..., None], spread], -1), None  # (d, n, 1 + m)
    outside = -np.expm1(np.minimum(fall - gaussian, 0.0))
    if least is not None:
        reach = np.clip([*map(_until, shares), *map(_until, shares[:, ::-1])], least, _REACH)
        outside = (z > reach[:d, None]) | (-z > reach[d:, None])
    mass, *left = np.sum(shares * outside[..., None], (0, 1))
    return Tails(reach, float(mass), float(max(left)), names[int(np.argmax(left))])


def _along(z, axis: int, falls, at, widths):
    """The fall along an axis at z (n,), and that of the Gaussian of its half axes."""
    fall, gaussian = np.zeros((2, len(z)))
    for i, side in ((axis, z), (axis + len(widths) // 2, -z)):
        f, r = np.clip(falls[:, i], None, 1e3), at[:, i]
        slope = max(f[2] - f[1], 0.0) / (r[2] - r[1])
        parabola = 0.5 * (side / widths[i]) ** 2
        line = np.interp(side, r, f) + slope * np.maximum(side - r[2], 0.0)
        fall = np.where(side < 0, fall, np.where(side < r[0], parabola, line))
        gaussian = np.where(side < 0, gaussian, parabola)
    return fall, gaussian


def _until(shares: np.ndarray) -> float:
    """The end of an axis (n, 1 + m) beyond which little enough is left of every share."""
    beyond = np.cumsum(shares[::-1], 0)[::-1]
    few = np.all(beyond <= np.array([_MASS] + [_SPREAD] * (shares.shape[1] - 1)), 1)
    return float(-_END + _STEP * np.argmax(few)) if few.any() else _END


def tell_of_tails(found: Tails) -> dict[str, float]:
    """The shares that are left out, and a warning where they matter."""
    _, mass, share, name = found
    if mass > _TOLD[0] or share > _TOLD[1]:
        off = f"about {1.0 - np.sqrt(1.0 - share):.0%} too small" if share < 0.98 else "not finite"
        warn(
            f"Grid(): the tail of '{name}' is heavier than a Gaussian's, and the points leave out "
            f"about {mass:.1%} of the posterior's mass and {share:.0%} of this variance: the sd of "
            f"'{name}' is {off}, its quantiles are better. Use hyper=Sample(), or a prior with a "
            "lighter tail."
        )
    return {"grid_missing_mass": mass, "grid_missing_variance": share}
