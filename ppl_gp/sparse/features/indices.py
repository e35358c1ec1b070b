"""Static settings of features: numbers that shapes depend on, boxes, and which products of 1-D
features are taken.

None of it may depend on hyperparameters, which are traced while they are trained.
"""

import heapq
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import numpy as np

from ppl_gp.errors import DataError

Numbers = float | tuple[float, ...]


def as_numbers(value: Any) -> Numbers:
    """One finite number, or one for each column, as what a static field may hold."""
    try:
        array = np.asarray(value, float)
    except (jax.errors.TracerArrayConversionError, TypeError, ValueError):
        raise DataError(
            f"features got {value!r}; their box or measure is fixed: give numbers known outside "
            "of jit and the model."
        ) from None
    if array.ndim > 1 or not np.all(np.isfinite(array)) or array.size == 0:
        raise DataError(
            f"features got {value!r}; give one finite number, or one for each input column."
        )
    return float(array) if array.ndim == 0 else tuple(array.tolist())


def as_num(num: Any) -> int | tuple[int, ...]:
    """How many features: a total, or a tuple with one number for each input column (their full
    grid).
    """
    values = num if isinstance(num, tuple | list) else (num,)
    if not values or any(isinstance(n, bool) or int(n) != n or n < 1 for n in values):
        raise DataError(
            f"the number of features is {num!r}; give a positive integer, or a tuple of them, one "
            "a column."
        )
    return tuple(int(n) for n in values) if isinstance(num, tuple | list) else int(num)


def check_box(low: Numbers, high: Numbers, name: str) -> None:
    """`DataError` unless low < high in every column."""
    try:
        good = np.all(np.asarray(low) < np.asarray(high))
    except ValueError:
        good = False
    if not good:
        raise DataError(
            f"{name}(low={low}, high={high}) is no box; give low < high in every input column."
        )


def per_dimension(value: Numbers, D: int, name: str) -> np.ndarray:
    """One number for each of D columns, (D,)."""
    if np.shape(value) not in ((), (D,)):
        raise DataError(
            f"{name} has {np.size(value)} numbers, and the kernel sees {D} input column(s): give "
            f"{D}, or one."
        )
    return np.broadcast_to(np.asarray(value, float), (D,))


def count(num: int | tuple[int, ...]) -> int:
    """M."""
    return num if isinstance(num, int) else prod(num)


def multi_indices(
    num: int | tuple[int, ...], D: int, cost: Callable[[int, int], float], name: str
) -> np.ndarray:
    """(M, D) of indices from 0: the full grid where `num` is a tuple, else the M with the smallest
    sum_d cost(d, j_d).

    `cost` grows with j. Ties go to the lexicographically smaller, so that the choice is
    deterministic. O(M D log M).
    """
    if isinstance(num, tuple):
        if len(num) != D:
            raise DataError(
                f"{name}(num={num}) is for {len(num)} input column(s); the kernel sees {D}."
            )
        return np.indices(num).reshape(D, -1).T
    taken, queue, seen = [], [(0.0, (0,) * D)], {(0,) * D}
    while len(taken) < num:
        _, index = heapq.heappop(queue)
        taken.append(index)
        for d in range(D):
            after = (*index[:d], index[d] + 1, *index[d + 1 :])
            if after not in seen:
                seen.add(after)
                # Rounded, so that equal costs stay ties whatever order they were summed in.
                heapq.heappush(
                    queue, (round(sum(cost(e, j) for e, j in enumerate(after)), 9), after)
                )
    return np.array(taken)
