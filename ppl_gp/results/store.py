"""Saving a fit: one zip file with a JSON header and NumPy arrays, no pickle.

The file holds what prediction needs: hyperparameters and q(f) for *all* draws, the training inputs and other array
arguments but not the observations, and figures about the fit. `ppl_gp.load` reads it back.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.arguments import argument_names
from ppl_gp.declared import own_function
from ppl_gp.deep.encoders import MLPEncoder
from ppl_gp.deep.latents import Encoded
from ppl_gp.errors import DataError, StoreError
from ppl_gp.results.archive import write_archive
from ppl_gp.results.inference_data import training_sites
from ppl_gp.results.new_inputs import shaping_arguments
from ppl_gp.results.storable import storable_modules
from ppl_gp.results.versions import package_versions
from ppl_gp.sparse.process import SparseLatent
from ppl_gp.tracing import is_gp

if TYPE_CHECKING:
    from ppl_gp.results.fit import Fit

FORMAT, FORMAT_VERSION = "ppl_gp.fit", 1
_ARRAY, _TUPLE, _MODULE = "$array", "$tuple", "$module"


def save(fit: "Fit", path) -> Path:
    """Write a fit to one file, and return its path. An interruption leaves the old file, or none.

    Model arguments that are not arrays must be numbers, strings, booleans, `None`, or lists, tuples and dictionaries of
    those. Raises `DataError` naming an argument that is not, `StoreError` where the file cannot be written.
    """
    path, arrays = Path(path), {}
    args, kwargs = _without_observations(fit)
    names, training = argument_names(fit.model, len(args)), training_sites(fit)
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "packages": package_versions(),
        "model": qualified_name(fit.model),
        "gp_sites": {k: list(training[k]["fn"].shape()) for k in fit.latent},
        "hyper_sites": {k: list(np.shape(v)[fit.sampled :]) for k, v in fit.hyper.items()},
        "latent_sites": list(fit.local),
        "observed_sites": _observed_sites(fit, training),
        "method": repr(fit.method),
        "result": str(fit.result),
        "log_evidence": fit.log_evidence,
        "num_chains": fit.num_chains,
        "sampled": fit.sampled,
        "args": [encode(v, arrays, f"args/{k}", f"argument '{k}'") for k, v in zip(names, args, strict=True)],
        "kwargs": {k: encode(v, arrays, f"kwargs/{k}", f"argument '{k}'") for k, v in kwargs.items()},
        "hyper": encode(fit.hyper, arrays, "hyper", "hyper"),
        "latent": {k: _encode_latent(v, arrays, f"latent/{k}") for k, v in fit.latent.items()},
        "local": {k: _encode_local(k, q, arrays) for k, q in fit.local.items() if not q.needs_y},
        "stats": encode(fit.stats, arrays, "stats", "fit.stats"),
    }
    try:
        write_archive(path, {**header, "arrays": sorted(arrays)}, arrays)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return path


def _observed_sites(fit, trace) -> list[str]:
    """Also where the observations are gone, as in a fit that was loaded."""
    known = (*fit.hyper, *fit.local)
    return [k for k, s in trace.items() if s["type"] == "sample" and k not in known and not is_gp(s)]


def qualified_name(model) -> str:
    """module.name of a function; the class's for another callable."""
    model = own_function(model)
    named = model if hasattr(model, "__qualname__") else type(model)
    return f"{named.__module__}.{named.__qualname__}"


def _without_observations(fit) -> tuple[list, dict]:
    """Arguments with observations taken out: `y`, and arrays that no distribution and no mask is computed from."""
    shaping = shaping_arguments(fit, masks=True) - {"y"}
    names = argument_names(fit.model, len(fit.args))
    shaping |= set(names[:1])  # the inputs: a model may need no more than their number
    args = [a if n in shaping or not eqx.is_array(a) else None for n, a in zip(names, fit.args, strict=True)]
    kwargs = {k: v for k, v in fit.kwargs.items() if k in shaping or not eqx.is_array(v)}
    return args, kwargs


def _encode_local(name: str, q, arrays) -> dict:
    if isinstance(q, Encoded) and not isinstance(q.encoder, MLPEncoder):
        raise DataError(
            f"the encoder of latent '{name}' is a {type(q.encoder).__name__}, and a file holds no code: save() keeps the package's "
            "own encoders. Keep yours by equinox.tree_serialise_leaves(path, fit.local)."
        )
    return encode_module(q, arrays, f"local/{name}", f"q({name})")


def _encode_latent(latent, arrays, where) -> dict:
    if isinstance(latent, SparseLatent):
        return encode_module(latent, arrays, where, where)
    sites = None if latent.sites is None else {"nat1": latent.sites.nat1, "nat2": latent.sites.nat2}
    fields = {"mean": latent.mean, "variance": latent.variance, "alpha": latent.alpha, "sites": sites}
    return encode(fields, arrays, where, where)


def encode(value: Any, arrays: dict, where: str, name: str) -> Any:
    """`value` as JSON, with arrays put into `arrays` under keys that begin with `where`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, jax.Array | np.ndarray):
        arrays[where] = np.asarray(value)
        return {_ARRAY: where}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: encode(v, arrays, f"{where}/{k}", f"{name}['{k}']") for k, v in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [encode(v, arrays, f"{where}/{i}", f"{name}[{i}]") for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__name__ in storable_modules():
        return encode_module(value, arrays, where, name)
    raise DataError(
        f"{name} is a {type(value).__name__} and cannot be saved; pass numbers, strings, arrays, or lists, tuples and "
        "dictionaries of those, and bind other objects to the model with functools.partial."
    )


def decode(value: Any, arrays) -> Any:
    """The inverse of `encode`; `arrays` maps keys to arrays."""
    if isinstance(value, list):
        return [decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        return jnp.asarray(arrays[value[_ARRAY]])
    if set(value) == {_TUPLE}:
        return tuple(decode(v, arrays) for v in value[_TUPLE])
    if _MODULE in value:
        return _decode_module(value, arrays)
    return {k: decode(v, arrays) for k, v in value.items()}


def encode_module(value: Any, arrays: dict, where: str, name: str) -> dict:
    """One of our own modules (inducing variables, q(u)) as the name of its class and its fields."""
    fields = (
        value._asdict()
        if hasattr(value, "_fields")
        else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    )
    return {
        _MODULE: type(value).__name__,
        **{k: encode(v, arrays, f"{where}/{k}", f"{name}.{k}") for k, v in fields.items()},
    }


def _decode_module(value: dict, arrays) -> Any:
    cls = storable_modules().get(value[_MODULE])
    if cls is None:
        raise StoreError(f"the file holds a '{value[_MODULE]}', which this installation does not know; upgrade ppl-gp.")
    fields = {k: decode(v, arrays) for k, v in value.items() if k != _MODULE}
    if issubclass(cls, tuple):
        return cls(**fields)
    module = object.__new__(cls)  # its arrays have an axis of draws, which a constructor would not expect
    for k, v in fields.items():
        object.__setattr__(module, k, v)
    return module
