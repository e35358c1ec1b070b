"""Whether a kernel is a function of two rows: k(X1, X2) of any two numbers of rows, each entry of its own two rows alone.

A callable may read an array with one row a datum (distances that were computed before, weights): then its training covariance is what
it says, and there is no covariance with new rows.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_ROUNDINGS = 1e3
_LEAST = 3  # rows, so that some are left where one is taken away and the others change places


def square_fault(kernel: Callable, X) -> str | None:
    """What is wrong with k(X, X) as a matrix (N, N), or `None`. Abstract: nothing is computed."""
    return _shape_fault(kernel, X, X)


def pair_fault(kernel: Callable, X) -> str | None:
    """What is wrong with a kernel as a function of two rows, or `None`. X, (N, D) or (N,), tells of sizes alone.

    Numbers of rows that are no size of X show by shapes what is read beside the rows. Rows that change places, and one that is
    missing, must take their entries along, which shows what is read by the rows' numbers. One compilation.
    """
    left, right = (_constants(n, X) for n in _unused(X))
    if (fault := _shape_fault(kernel, left, right)) is not None:
        return fault
    whole, part = _values(kernel, left, right), _values(kernel, left[-2::-1], right[:0:-1])
    if whole is None or part is None or _close(whole[-2::-1, :0:-1], part):
        return None
    return "its value at two rows depends on other rows, on the rows' numbers, or on how many rows there are"


def kernels_differ(kernel: Callable, other: Callable, X) -> bool:
    """Whether two kernels have different values at rows of X, or another shape."""
    left, right = (jnp.take(X, jnp.arange(n) % X.shape[0], 0) for n in _unused(X))
    if _shape_fault(other, left, right) is not None:
        return True
    one, two = _values(kernel, left, right), _values(other, left, right)
    return not (one is None or two is None or _close(one, two))


def _unused(X) -> list[int]:
    return list(itertools.islice((n for n in itertools.count(_LEAST) if n not in jnp.shape(X)), 2))


def _constants(num: int, X):
    """Inputs of X's shape but for the rows, the row's number in every column: distances between them are exact."""
    rest = jnp.shape(X)[1:]
    return jnp.asarray(np.broadcast_to(np.arange(num).reshape(num, *(1 for _ in rest)), (num, *rest)), X.dtype)


def _shape_fault(kernel, left, right) -> str | None:
    wanted = (left.shape[0], right.shape[0])
    try:
        shape = jax.eval_shape(lambda a, b: kernel(a, b), left, right).shape
    except jax.errors.JAXTypeError:  # it looks at values
        return None
    except Exception as error:  # noqa: BLE001 - a callable may raise anything
        return f"it cannot be called with {wanted[0]} rows and {wanted[1]} ({' '.join(str(error).split())[:200]})"
    return None if shape == wanted else f"of {wanted[0]} rows and {wanted[1]} it makes an array of shape {shape}"


def _values(kernel, left, right):
    """`None` under a trace, where no value can be looked at."""
    try:
        return np.asarray(jax.jit(lambda: kernel(left, right))())
    except jax.errors.JAXTypeError:
        return None


def _close(a, b) -> bool:
    if a.shape != b.shape:
        return False
    close = np.abs(a - b) <= _ROUNDINGS * np.finfo(np.result_type(a, float)).eps * (1.0 + np.abs(a))
    return bool(np.all(close | (a == b) | (np.isnan(a) & np.isnan(b))))
