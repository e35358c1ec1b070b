"""Points drawn evenly inside letters: a conditional density of y given x with several modes, jumps
and gaps, known exactly.

A glyph's column at x is a set of intervals, and y given x is uniform on them. The letters come from
a font through matplotlib's text paths, so no file is needed. (The task of Leibfried et al. 2022,
figure 7.)
"""

from typing import NamedTuple

import numpy as np

_PIXELS = 400  # of the mask's height


class Letters(NamedTuple):
    """`X` (N, 1) and `y` (N,), standardised by all points; `log_density(X, y)` is the exact log p(y
    | x), (N,), nats.
    """

    X: np.ndarray
    y: np.ndarray
    mask: np.ndarray  # (rows from the bottom, columns), True inside a letter
    origin: np.ndarray  # of the mask's lower left corner, in standardised units, (x, y)
    pixel: np.ndarray  # its size in those units, (x, y)

    def log_density(self, X, y) -> np.ndarray:
        """-log of the letters' height at x, or -inf outside."""
        points = np.stack([np.ravel(X), np.ravel(y)], 1)
        column, row = np.floor((points - self.origin) / self.pixel).astype(int).T
        inside = (
            (0 <= row) & (row < self.mask.shape[0]) & (0 <= column) & (column < self.mask.shape[1])
        )
        row, column = np.where(inside, row, 0), np.where(inside, column, 0)
        height = self.mask.sum(0)[column] * self.pixel[1]
        with np.errstate(divide="ignore"):
            return np.where(inside & self.mask[row, column], -np.log(height), -np.inf)


def letters(num: int, seed: int = 0, text: str = "DGP") -> Letters:
    """`num` points inside a word."""
    rng = np.random.default_rng(seed)
    mask = letter_mask(text)
    cells = np.argwhere(mask)[rng.integers(0, mask.sum(), num)]
    points = (cells + rng.uniform(size=cells.shape))[:, ::-1]  # x is the column
    mean, scale = points.mean(0), points.std(0)
    X, y = ((points - mean) / scale).T
    return Letters(X[:, None], y, mask, -mean / scale, 1.0 / scale)


def letter_mask(text: str) -> np.ndarray:
    """(rows from the bottom, columns): whether a pixel's centre is inside the text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath(
        (0, 0), text, size=_PIXELS, prop=FontProperties(family="DejaVu Sans", weight="bold")
    )
    low, high = np.floor(path.vertices.min(0)), np.ceil(path.vertices.max(0))
    x, y = (np.arange(a, b) + 0.5 for a, b in zip(low, high, strict=True))
    centres = np.stack(np.meshgrid(x, y), -1)
    mask = np.zeros(centres.shape[:2], bool)
    # holes are polygons too: inside an odd number of them is inside
    for polygon in path.to_polygons():
        mask ^= _inside(polygon, centres)
    return mask


def _inside(polygon, centres):
    from matplotlib.path import Path

    return Path(polygon).contains_points(centres.reshape(-1, 2)).reshape(centres.shape[:2])
