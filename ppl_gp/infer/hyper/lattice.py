"""Where `Grid()` asks for the density: on a lattice about the mode, grown as far as it counts.

A point is added while the tangent from a neighbour, an upper bound of a log-concave density, gives
it more than a small share of the mass or of the variance of a hyperparameter. The points so follow
skewed, heavy and bent tails. Up to `REGULAR` hyperparameters they are the design itself. For more
a composite design is compared with one line for each hyperparameter, along which it has its whole
variance if the posterior is a Gaussian.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ppl_gp.errors import warn

REGULAR = 3  # hyperparameters up to which a lattice is cheap: 17, 37 and 93 points at first
# standard deviations: sums over steps of 1.25 are exact to 1e-5 for a Gaussian; finer where cheap
_STEPS = {1: 0.5, 2: 1.0, 3: 1.25}
_BALL = {1: 4.0, 2: 3.5, 3: 3.6}
_REACH, _MOST = 16.0, 400  # standard deviations, and points, beyond which none is added
_AT_ONCE = {3: 31}  # or a multiple are added, so that few sizes are compiled
_MASS, _SPREAD = 3e-4, 4e-3  # of the mass and of a variance: shares of a point that counts
_TOLD = 0.05, 0.2  # from which on shares that are left out are reported


class Lattice(NamedTuple):
    """Points (n, d) in standard deviations, each for so much of log volume over (2 pi)^(d / 2); how
    far the log density falls there; the shares that are left out of the mass, and of the variance
    of hyperparameter `worst`.
    """

    points: np.ndarray
    log_design: np.ndarray
    falls: np.ndarray
    mass: float
    spread: float
    worst: int


def first_points(d: int) -> np.ndarray:
    """(n, d) integers: a ball of the lattice."""
    most = int(_BALL[d] / _STEPS[d])
    ball = np.array(list(itertools.product(range(-most, most + 1), repeat=d)))
    return ball[np.sum(ball**2, 1) <= (_BALL[d] / _STEPS[d]) ** 2]


def grow(ask: Callable, values: Callable, d: int) -> Lattice:
    """`ask(z)`: how far the log density falls from the mode at points z (n, d), and its slopes
    (n, d). `values(z)`: the hyperparameters there less those at the mode, (n, m), finite.
    """
    step, at_once, new = _STEPS[d], _AT_ONCE.get(d, 1), first_points(d)
    moves, size = np.concatenate([np.eye(d, dtype=int), -np.eye(d, dtype=int)]), len(new)
    falls, ahead = {}, {}  # at points that were asked, and by tangents at their neighbours
    while len(new) and len(falls) + len(new) <= _MOST:
        for q, fall, slope in zip(new, *ask(step * new), strict=True):
            falls[tuple(q)] = fall
            for move in moves:
                there, tangent = tuple(q + move), fall + step * float(slope @ move)
                ahead[there] = min(ahead.get(there, np.inf), max(tangent, 0.0))
        ahead = {q: tangent for q, tangent in ahead.items() if q not in falls}
        z = step * np.array([*falls, *ahead], float)
        fall, known = np.array([*falls.values(), *ahead.values()]), len(falls)
        x, p = values(z), np.exp(min(0.0, np.min(fall)) - fall)[:, None]
        shares = np.concatenate([p, p * (x - np.sum(p * x, 0) / max(p.sum(), 1e-300)) ** 2], 1)
        shares /= np.maximum(shares.sum(0), 1e-300)
        counts = np.max(shares[known:] / ([_MASS] + [_SPREAD] * (shares.shape[1] - 1)), 1)
        counts *= np.max(np.abs(z[known:]), 1) <= _REACH
        number = min(size, -(-np.sum(counts > 1.0) // at_once) * at_once)
        new = np.array([*ahead])[np.argsort(-counts, kind="stable")[:number]]
    mass, *spread = shares[known:].sum(0)
    volume = np.full(known, d * np.log(step / np.sqrt(2.0 * np.pi)))
    worst = int(np.argmax(spread))
    return Lattice(z[:known], volume, fall[:known], float(mass), float(spread[worst]), worst)


def compared(ask: Callable, values: Callable, points, log_design, scales: np.ndarray) -> Lattice:
    """A design in place of a lattice: it leaves out what a line has more of a variance."""

    def variances(z, log_design, fall):
        p, x = np.exp(log_design + min(0.0, np.min(fall)) - fall), values(z)
        p = p / max(p.sum(), 1e-300)
        return p @ (x - p @ x) ** 2

    lines = []
    for u in scales / np.linalg.norm(scales, axis=1, keepdims=True):

        def along(z, u=u):
            fall, slope = ask(z * u)
            return fall, slope @ u[:, None]

        line = grow(along, lambda z, u=u: values(z * u), 1)
        lines.append(variances(line.points * u, line.log_design, line.falls) / (1.0 - line.spread))
    fall = ask(points)[0]
    most = np.max(lines, 0)  # 0 of an entry that is constant
    left = (most - variances(points, log_design, fall)) / np.maximum(most, 1e-300)
    worst = int(np.argmax(left))
    return Lattice(points, log_design, fall, np.nan, max(float(left[worst]), 0.0), worst)


def tell_of_tails(found: Lattice, names: list[str]) -> dict[str, float]:
    """The shares that are left out, and a warning where they matter."""
    mass, share, name = found.mass, found.spread, names[found.worst]
    lost = "" if np.isnan(mass) else f" and {mass:.1%} of the mass"
    if mass > _TOLD[0] or share > _TOLD[1]:
        warn(
            f"Grid(): the tail of '{name}' is heavier than a Gaussian's, and the points leave out "
            f"about {share:.0%} of its variance{lost}: the sd of "
            f"'{name}' is about {1.0 - np.sqrt(1.0 - share):.0%} too small, or more, and its "
            "quantiles are better. Use hyper=Sample(), or a prior with a lighter tail."
        )
    return {"grid_missing_mass": mass, "grid_missing_variance": share}
