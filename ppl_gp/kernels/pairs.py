"""Whether a kernel is a function of two rows: k(X1, X2) of any two numbers of rows, each entry of
its own two rows alone.

A callable may read an array with one row per datum (distances that were computed before, weights):
then its training covariance is what it says, and there is no covariance with new rows.
"""

import itertools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ppl_gp.kernels.base import CallableKernel, Kernel

_ROWS_OF_ITS_OWN = (
    "it reads something with one row per datum (distances computed before, weights): put what it "
    "needs of each row into the GP's inputs X, as columns, or index a fixed table by a column of X"
)
_COMPARED = 1000  # rows of which two kernels are compared at all pairs
_LEAST = 3  # rows, so that some are left where one is taken away and the others change places


def square_fault(kernel: Callable, X) -> str | None:
    """What is wrong with k(X, X) as a matrix (N, N), or `None`. Abstract: nothing is computed."""
    return _shape_fault(_by_row(kernel), X, X)


def pair_fault(kernel: Callable, X) -> str | None:
    """What is wrong with a kernel as a function of two rows, or `None`. X, (N, D) or (N,): rows
    that a kernel may be asked about.

    Numbers of rows that are no size of X show by shapes what is read beside the rows. Rows that
    change places, and one that is missing, must take their entries along, which shows what is read
    by the rows' numbers. One compilation; none for this package's own kernels.
    """
    if _is_own(kernel, X):
        return None
    kernel = _by_row(kernel)
    left, right = (_repeated(n, X) for n in unused(jnp.shape(X)))
    if (fault := _shape_fault(kernel, left, right)) is not None:
        return f"{fault}; {_ROWS_OF_ITS_OWN}"
    pairs = (left, right), (left[-2::-1], right[:0:-1]), (left, right[: len(left)])
    if (found := _values(kernel, *pairs)) is None:
        return None
    whole, part, square = found
    if not _close(whole[-2::-1, :0:-1], part):
        return (
            "its value at two rows depends on other rows, on the rows' numbers, or on how many "
            f"rows there are; {_ROWS_OF_ITS_OWN}"
        )
    if not _close(whole[:, : len(left)], square):
        return (
            "with as many rows as columns it is another function, as where noise is added by "
            "`if X1.shape == X2.shape`; declare the noise in the likelihood, or as "
            "kernels.White(variance), or by GP(jitter=variance)"
        )
    return None


def _is_own(kernel, X) -> bool:
    """Whether a kernel is put together of ours, with numbers, or one a column, as parameters."""
    parts = [v for v in vars(kernel).values() if callable(v)] if isinstance(kernel, Kernel) else []
    ours = type(kernel).__module__.startswith("ppl_gp.kernels.")
    ours &= not isinstance(kernel, CallableKernel)
    columns = jnp.shape(X)[1:] if jnp.shape(X)[0] not in jnp.shape(X)[1:] else ()
    numbers = all(jnp.shape(x) in ((), columns) for x in jax.tree.leaves(kernel) if not callable(x))
    return ours and numbers and all(_is_own(part, X) for part in parts)


def kernels_differ(kernel: Callable, other: Callable, X) -> bool:
    """Whether two kernels have different values at pairs of rows of X, or another shape: all pairs
    of up to 1000 rows, else those of 1000 with 10 000, evenly spread.
    """
    kernel, other = _by_row(kernel), _by_row(other)
    left, right = (_repeated(n, X) for n in unused(jnp.shape(X)))
    if _shape_fault(other, left, right) is not None:
        return True
    many = _spread(X, 10 * _COMPARED) if len(X) >= _LEAST else right
    some = jnp.concatenate([many[:1], _spread(many, _COMPARED)])  # never as many as those
    one, two = _values(kernel, (some, many)), _values(other, (some, many))
    return not (one is None or two is None or _close(*one, *two))


def _spread(X, num: int):
    """Up to `num` rows, the first and the last among them."""
    return X[np.unique(np.linspace(0, len(X) - 1, min(num, len(X)), dtype=int))]


def _by_row(kernel: Callable) -> Callable:
    """(N1, N2, R, R) of a kernel whose rows stand for R functions each, functions outermost."""
    if (R := getattr(kernel, "functions", 1)) == 1:
        return kernel

    def by_row(left, right):
        whole = jnp.reshape(kernel(left, right), (R, len(left), R, len(right)))
        return jnp.transpose(whole, (1, 3, 0, 2))

    return by_row


def unused(sizes: Collection[int]) -> list[int]:
    """Two numbers of rows that are none of these sizes."""
    return list(itertools.islice((n for n in itertools.count(_LEAST) if n not in sizes), 2))


def _repeated(num: int, X):
    """The first rows of X, and again: a kernel may refuse inputs that nobody gave it."""
    return (X if isinstance(X, Tracer) else np.asarray(X))[np.arange(num) % X.shape[0]]


def _shape_fault(kernel, left, right) -> str | None:
    wanted = (left.shape[0], right.shape[0])
    try:
        shape = jax.eval_shape(lambda a, b: kernel(a, b), left, right).shape
    except jax.errors.JAXTypeError:  # it looks at values
        return None
    except Exception as error:  # noqa: BLE001 - a callable may raise anything
        return (
            f"it cannot be called with {wanted[0]} rows and {wanted[1]} "
            f"({' '.join(str(error).split())[:200]})"
        )
    if shape[:2] == wanted:
        return None
    return f"of {wanted[0]} rows and {wanted[1]} it makes an array of shape {shape}"


def _values(kernel, *pairs) -> list[np.ndarray] | None:
    """At each pair (rows, rows); `None` under a trace, where no value can be looked at."""
    try:
        at = [tuple(map(jnp.asarray, pair)) for pair in pairs]
        return [np.asarray(x) for x in jax.jit(lambda: [kernel(*pair) for pair in at])()]
    except jax.errors.JAXTypeError:
        return None


def _close(a, b) -> bool:
    if a.shape != b.shape:
        return False
    # Distances by a matrix product lose half of the digits where inputs are large; what is read
    # beside the rows changes more.
    eps = np.finfo(a.dtype if a.dtype.kind == "f" else float).eps
    close = np.abs(a - b) <= np.sqrt(eps) * (1.0 + np.abs(a))
    return bool(np.all(close | (a == b) | (np.isnan(a) & np.isnan(b))))
