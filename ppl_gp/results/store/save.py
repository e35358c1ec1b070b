"""Saving a fit: one zip file with a JSON header and NumPy arrays, no pickle.

The file holds what prediction needs: hyperparameters and q(f) for *all* draws, the training inputs
and other array arguments but not the observations, and figures about the fit. `ppl_gp.load` reads
it back.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from ppl_gp.deep.encoders import MLPEncoder
from ppl_gp.deep.latents import Encoded, Forgotten
from ppl_gp.errors import DataError, StoreError
from ppl_gp.model.arguments import Leaves, argument_names, argument_of, optional_arguments
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.declared import own_function
from ppl_gp.model.fingerprint import reads
from ppl_gp.results.record import Record
from ppl_gp.results.store.coding import encode
from ppl_gp.results.store.portrait import portrait
from ppl_gp.storage.archive import write_archive

# 6: every part is one module, with digests. Earlier versions are not read.
FORMAT, FORMAT_VERSION = "ppl_gp.fit", 6


def save(fit: Record, path) -> Path:
    """Write a fit to one file, and return its path. An interruption leaves the old file, or none.

    `fit.names` is kept but for the labels of rows. Model arguments that are not arrays must be
    numbers, strings, booleans, `None`, or lists, tuples and dictionaries of those. Raises
    `DataError` naming an argument that is not, `StoreError` where the file cannot be written.
    """
    path, arrays = Path(path), {}
    args, kwargs = _without_observations(fit)
    named = dict(zip(argument_names(fit.model, len(args)), args, strict=True))
    collapsed = fit.model if isinstance(fit.model, Collapsed) else None

    def arguments(where: str, values: dict) -> dict:
        return {k: encode(v, arrays, f"{where}/{k}", f"argument '{k}'") for k, v in values.items()}

    header = {
        "args": list(arguments("args", named).values()),
        "kwargs": arguments("kwargs", kwargs),
    }
    parts = {
        "draws": fit.draws,
        "local": {k: _local(k, q) for k, q in fit.local.items()},
        "blocks": fit.blocks,
        "names": fit.names.without_rows(),
        "reading": fit.source.reading,
        "plan": collapsed and collapsed.plan,
        "skeleton": collapsed and collapsed.skeleton,
        "stats": fit.stats,
        "log_evidence": fit.log_evidence,
        "num_chains": fit.num_chains,
        "sampled": fit.sampled,
        "result": str(fit.result),
        "method": repr(fit.method),
    }
    header |= {k: encode(v, arrays, k, f"fit.{k}") for k, v in parts.items()}
    of_model = {
        "model": qualified_name(fit.model),
        "reads": reads(fit.model.function),
        "portrait": _portrait(fit, tuple(args), kwargs),
    }
    try:
        write_archive(path, FORMAT, FORMAT_VERSION, {**of_model, **header}, arrays)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return path


def _portrait(fit: Record, args: tuple, kwargs: dict) -> dict | None:
    first = fit.draws.at(0)
    try:
        return portrait(fit.source, args, kwargs, first.known, first.values)
    except Exception:  # noqa: BLE001 - a model may raise anything without observations
        return None


def qualified_name(model) -> str:
    """module.name of a function; the class's for another callable."""
    model = own_function(model)
    named = model if hasattr(model, "__qualname__") else type(model)
    return f"{named.__module__}.{named.__qualname__}"


def _without_observations(fit) -> tuple[list, dict]:
    """Arguments with observations taken out: `y`, and arrays that no distribution and no mask is
    computed from.

    Arguments are trees (`y={"u": ..., "v": ...}`): `None` stands for what is taken out, and a
    keyword that was one array is left away. Observations that do not grow with the inputs (a few
    blanks) keep their shape, as zeros: a model may ask for their number. Of the inputs as much is
    kept as their number of rows needs.
    """
    reading, leaves = fit.model.reading, Leaves(fit.model, fit.args, fit.kwargs)
    kept = {*reading.shaping, *reading.masking} - {"y"}
    inputs = [p for p in leaves.arrays if argument_of(p) == leaves.inputs]
    kept |= set(inputs if not kept.intersection(inputs) else ())
    gone = {p: x for p, x in leaves.arrays.items() if p not in kept and np.ndim(x)}
    tied = {p for p in gone if argument_of(p) == "y" or reading.axis_of(p) is not None}
    gone |= {p: None for p in gone if p in tied or argument_of(p) in optional_arguments(fit.model)}
    args, kwargs = leaves.replaced(
        {p: None if x is None else jnp.zeros_like(x) for p, x in gone.items()}
    )
    return list(args), {k: v for k, v in kwargs.items() if v is not None or fit.kwargs[k] is None}


def _local(name: str, q):
    """All that a query of new data asks: no q(h) of the training data's rows."""
    if not isinstance(q, Encoded):
        return Forgotten()
    if not isinstance(q.encoder, MLPEncoder):
        raise DataError(
            f"the encoder of latent '{name}' is a {type(q.encoder).__name__}, and a file holds no "
            "code: save() keeps the package's own encoders. Keep yours by "
            "equinox.tree_serialise_leaves(path, fit.local)."
        )
    return q
