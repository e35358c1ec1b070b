"""Where `Grid()` asks for the density: on a lattice about the mode, grown as far as it counts.

A point is added while the tangent from a neighbour, an upper bound of a log-concave density, gives
it more than a small share of the mass or of the variance of a hyperparameter. The points so follow
skewed, heavy and bent tails. Up to `REGULAR` hyperparameters they are the design itself. For more
the lattice has the axes alone, and says what a composite design leaves out along them.
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
    """Points (n, d) in standard deviations, each for so much `log_volume` over (2 pi)^(d / 2); the
    shares that are left out of the mass, and of the variance of hyperparameter `worst`.
    """

    points: np.ndarray
    log_volume: float
    mass: float
    spread: float
    worst: int


def first_points(d: int) -> np.ndarray:
    """(n, d) integers: a ball of the lattice, or its axes alone."""
    if d > REGULAR:
        return np.unique(np.concatenate([k * np.eye(d, dtype=int) for k in range(-3, 4)]), axis=0)
    most = int(_BALL[d] / _STEPS[d])
    ball = np.array(list(itertools.product(range(-most, most + 1), repeat=d)))
    return ball[np.sum(ball**2, 1) <= (_BALL[d] / _STEPS[d]) ** 2]


def grow(ask: Callable, values: Callable, d: int, widths: np.ndarray | None = None) -> Lattice:
    """`ask(z)`: how far the log density falls from the mode at points z (n, d), and its slopes
    (n, d). `values(z)`: the hyperparameters there, (n, m). `widths`, (2 d,), of half axes: those of
    the Gaussian that is used in place of an axis.
    """
    step, at_once, new = _STEPS.get(d, 1.0), _AT_ONCE.get(d, 1), first_points(d)
    moves, size = np.concatenate([np.eye(d, dtype=int), -np.eye(d, dtype=int)]), len(new)
    falls, ahead = {}, {}  # at points that were asked, and by tangents at their neighbours
    while len(new) and len(falls) + len(new) <= _MOST:
        for q, fall, slope in zip(new, *ask(step * new), strict=True):
            falls[tuple(q)] = fall
            for move in moves:
                there, tangent = tuple(q + move), fall + step * float(slope @ move)
                if d <= REGULAR or np.count_nonzero(there) == 1:
                    ahead[there] = min(ahead.get(there, np.inf), max(tangent, 0.0))
        ahead = {q: tangent for q, tangent in ahead.items() if q not in falls}
        z = step * np.array([*falls, *ahead], float)
        fall, known = np.array([*falls.values(), *ahead.values()]), len(falls)
        shares = _shares(z, fall, values(z))
        counts = np.max(shares[known:] / ([_MASS] + [_SPREAD] * (shares.shape[1] - 1)), 1)
        counts *= np.max(np.abs(z[known:]), 1) <= _REACH
        number = min(size, -(-np.sum(counts > 1.0) // at_once) * at_once)
        new = np.array([*ahead])[np.argsort(-counts, kind="stable")[:number]]
    left = np.arange(len(z)) >= known
    if widths is not None:
        side = np.max(np.concatenate([z, -z], 1) / widths, 1)
        left = -np.expm1(np.minimum(fall - 0.5 * side**2, 0.0))
    mass, *spread = left @ shares
    volume, worst = d * np.log(step / np.sqrt(2.0 * np.pi)), int(np.argmax(spread))
    return Lattice(z[:known], float(volume), float(mass), float(spread[worst]), worst)


def _shares(z, fall, values) -> np.ndarray:
    """(n, 1 + m): of each point, in the mass of its line and in the variances that lines add up."""
    lines = np.count_nonzero(z, 1)[:, None] == (z != 0)
    lines = lines.T if z.shape[1] > REGULAR else [np.ones(len(z), bool)]
    values = np.nan_to_num(values, nan=0.0, posinf=1e100, neginf=-1e100)
    found = np.zeros((len(z), 1 + values.shape[1]))
    for line in lines:
        p = np.exp(min(0.0, np.min(fall)) - fall[line])[:, None]
        p = p / max(p.sum(), 1e-300)
        found[line] += np.concatenate([p, p * (values[line] - np.sum(p * values[line], 0)) ** 2], 1)
    found[:, 1:] /= np.maximum(found[:, 1:].sum(0), 1e-300)
    return found


def tell_of_tails(found: Lattice, names: list[str]) -> dict[str, float]:
    """The shares that are left out, and a warning where they matter."""
    mass, share, name = found.mass, found.spread, names[found.worst]
    if mass > _TOLD[0] or share > _TOLD[1]:
        warn(
            f"Grid(): the tail of '{name}' is heavier than a Gaussian's, and the points leave out "
            f"about {mass:.1%} of the posterior's mass and {share:.0%} of this variance: the sd of "
            f"'{name}' is about {1.0 - np.sqrt(1.0 - share):.0%} too small, or more, and its "
            "quantiles are better. Use hyper=Sample(), or a prior with a lighter tail."
        )
    return {"grid_missing_mass": mass, "grid_missing_variance": share}
