"""A model's arguments: arrays checked at the boundary, and trees whose leaves have names."""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from ppl_gp.errors import DataError
from ppl_gp.frames.names import TREES, Names, arrays, refilled


def as_arrays(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """NumPy arrays and pandas columns as JAX arrays, in dictionaries, tuples and lists too; other
    arguments as they are.

    A list or a tuple of numbers is an array where it is the first positional argument or `y`, and
    an option elsewhere; a single NumPy integer, such as `group.max() + 1`, is a Python one there.
    Integers take JAX's default type, in which small numbers cannot wrap around. `y` given as
    booleans becomes integers; a boolean mask stays one. Raises `DataError` for NaN, infinity,
    masked arrays, integers beyond that type or entries that are not numbers, naming the argument.
    """
    pairs = enumerate(args)
    positional = tuple(as_array(f"positional argument {i}", v, lists=i == 0) for i, v in pairs)
    named = {k: as_array(f"argument '{k}'", v, lists=k == "y") for k, v in kwargs.items()}
    if "y" in named:
        named["y"] = jax.tree.map(_observed, named["y"])
    return positional, named


def _observed(leaf):
    return leaf.astype(int) if eqx.is_array(leaf) and leaf.dtype == bool else leaf


def as_array(name: str, value: Any, *, lists: bool = True) -> Any:
    """One argument of this name, as `as_arrays` has it. A memory map is checked as it is read."""
    if type(value) in TREES:
        named = ((k, as_array(f"{name}[{k!r}]", v, lists=lists)) for k, v in value.items())
        return refilled(value, named)
    if lists and isinstance(value, list | tuple) and _is_rows(value):
        return _checked(name, value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(as_array(f"{name}[{i}]", v, lists=lists) for i, v in enumerate(value))
    if isinstance(value, tuple):
        fields = cast(Any, value)._asdict().items()
        return type(value)(*(as_array(f"{name}.{k}", v, lists=lists) for k, v in fields))
    if isinstance(value, list):
        return [as_array(f"{name}[{i}]", v, lists=False) for i, v in enumerate(value)]
    if isinstance(value, np.memmap):
        return value
    if hasattr(value, "toarray") and hasattr(value, "nnz"):
        raise DataError(
            f"{name} is a sparse {type(value).__name__} of shape {value.shape}; pass "
            "X.toarray(), which takes 8 bytes for each entry, or fewer columns."
        )
    if isinstance(value, np.integer | np.bool_) and not lists:
        return value.item()
    if not (isinstance(value, jax.Array) or hasattr(value, "__array__")):
        return value
    return _checked(name, value)


def _is_rows(value) -> bool:
    """Whether a list, or a tuple without arrays, is rows of numbers of one shape, or of words and
    gaps, which are refused as an array of them is.
    """
    kinds = (tuple,) if isinstance(value, tuple) else (list, tuple)  # ([1, 2], [3]) are two arrays
    plain = lambda x: type(x) in kinds and all(map(one, x))  # noqa: E731
    one = lambda x: x is None or np.isscalar(x) or plain(x)  # noqa: E731
    if not isinstance(value, list) and not (value and plain(value)):
        return False
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        return False
    return array.dtype.kind in "biuf" or (plain(value) and any(x is not None for x in array.flat))


def _checked(name: str, value):
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"{name} is a NumPy masked array, whose mask would be lost; fill it, "
            f"{name}.filled(value in the support), and leave the entries out of the likelihood in "
            "the model, numpyro.handlers.mask(mask=...) or obs_mask=..."
        )
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise DataError(f"{name} is a random key; pass its seed, an integer.")
    if not array.dtype.isnative:  # of FITS or netCDF files: JAX takes this machine's order of bytes
        array = array.astype(array.dtype.newbyteorder("="))
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise DataError(f"{name} holds {array.dtype} entries; convert them to numbers.")
    if jnp.issubdtype(array.dtype, jnp.integer):
        ours = isinstance(array, Tracer) or array.dtype == wide(array.dtype)
        array = array if ours else np.asarray(array)  # which jax.jit does not trace
        found = array.astype(wide(array.dtype))
        if not ours and np.any(found != array):
            raise DataError(f"{name} has integers beyond {found.dtype}; give .astype(float).")
        return jnp.asarray(found)
    if isinstance(array, Tracer):  # in `read`, whose values are not known
        return array
    if jnp.issubdtype(array.dtype, jnp.floating) and not bool(np.all(np.isfinite(array))):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(np.asarray(array)))[0])
        raise DataError(f"{name} has {array[where]} at index {where}; {_remedy(array[where])}")
    # a copy: on a CPU JAX may share NumPy's memory, which its owner may write to after the fit
    return array if isinstance(array, jax.Array) else jnp.asarray(array.copy())


def wide(dtype):
    """JAX's type for arrays of this one; of integers its default, as uint8 would wrap around."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    return jnp.result_type(int) if whole else jax.dtypes.canonicalize_dtype(dtype)


def _remedy(entry) -> str:
    if np.isinf(entry):
        return (
            "arguments are finite numbers: drop or replace the row, or give a large finite number "
            "for 'no bound'. A limit that all rows share can be a plain Python number."
        )
    return (
        "drop or impute the row. A missing observation is filled with any value of its support "
        "first, and then left out of the likelihood by numpyro.handlers.mask or obs_mask."
    )


def argument_names(model: Callable, num: int) -> list[str]:
    """Names of the model's first `num` positional arguments; `arg<i>` where they are not known."""
    known = parameters_of(model).items()
    named = [k for k, p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [named[i] if i < len(named) else f"arg{i}" for i in range(num)]


def optional_arguments(model: Callable) -> set[str]:
    return {name for name, p in parameters_of(model).items() if p.default is not p.empty}


def parameters_of(model: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's signature; none of a callable whose signature is not known."""
    try:
        return inspect.signature(model).parameters
    except (TypeError, ValueError):
        return {}


def require_no_such_argument(
    model: Callable, call: str, options: Iterable[str], given: Container[str] = ()
) -> None:
    """Raise `DataError` where an argument of the model is called as one of the call's options."""
    if taken := [name for name in options if name in parameters_of(model) or name in given]:
        raise DataError(
            f"the model has arguments {taken}, which {call} takes as its own options; give the "
            "model's another name."
        )


def named_arrays(model: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict, Names]:
    """The arguments with the model's first one positional, however it was given, and `y` by name,
    frames and labelled arrays as NumPy arrays, and what these were called.
    """
    (name,) = argument_names(model, 1)
    first = parameters_of(model).get(name)
    if not args and name in kwargs and first is not None and first.kind is not first.KEYWORD_ONLY:
        args, kwargs = (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    names = argument_names(model, len(args))
    start = names.index("y") if "y" in names[1:] else len(args)
    is_one = not any(isinstance(y, tuple | dict) for y in args[start : start + 1])  # no mask in it
    if is_one and all(_by_name(model, k) and k not in kwargs for k in names[start:]):
        kwargs = {**kwargs, **dict(zip(names[start:], args[start:], strict=True))}
        args, names = args[:start], names[:start]
    return arrays(names, args, kwargs)


def _by_name(model: Callable, name: str) -> bool:
    own = inspect.signature(model, follow_wrapped=False).parameters  # a decorator may have *args
    return name in own and own[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


class Leaves:
    """The leaves of a model's arguments by path, `"X"` or `"covariates['age']"`: an argument's name
    first, however it was passed.
    """

    def __init__(self, model: Callable, args: tuple, kwargs: dict):
        names = argument_names(model, len(args))
        flat, self._structure = tree_flatten_with_path((args, kwargs))
        # {path: leaf}, options too
        self.leaves: dict[str, Any] = {_path(keys, names): leaf for keys, leaf in flat}
        self.inputs = argument_names(model, 1)[0] if args else None

    @property
    def arrays(self) -> dict[str, Any]:
        """{path: array}."""
        return {p: x for p, x in self.leaves.items() if is_array(x)}

    def replaced(self, values: Mapping[str, Any], others: Any = ...) -> tuple[tuple, dict]:
        """(args, kwargs) with these leaves, and `others`, if given, for all that are left."""
        leaves = [values.get(p, x if others is ... else others) for p, x in self.leaves.items()]
        return jax.tree.unflatten(self._structure, leaves)


def is_array(x) -> bool:
    """Whether a leaf is an array of numbers, on the device, on the host or on disk."""
    typed = hasattr(x, "shape") and hasattr(x, "dtype")
    return typed and jnp.issubdtype(x.dtype, jnp.number) | jnp.issubdtype(x.dtype, bool)


def argument_of(path: str) -> str:
    """The name of the argument that a leaf's path begins with."""
    return path.split("[")[0].split(".")[0]


def _path(keys, names: list[str]) -> str:
    which, argument, *rest = keys
    name = names[argument.idx] if which.idx == 0 else str(argument.key)
    return name + keystr(tuple(rest))
