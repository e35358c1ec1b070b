"""Saving a fit: one zip file with a JSON header and NumPy arrays, no pickle.

The file holds what prediction needs: hyperparameters and q(f) for *all* draws, the training inputs
and other array arguments but not the observations, and figures about the fit. `ppl_gp.load` reads
it back.
"""

import dataclasses
import hashlib
import json
from functools import singledispatch
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.deep.encoders import MLPEncoder
from ppl_gp.deep.latents import Encoded
from ppl_gp.errors import DataError, StoreError
from ppl_gp.kept import FromDraws, FromFunctions, FromInducing, FromPseudo, Kept
from ppl_gp.local.natural import MinusRankOne
from ppl_gp.model.arguments import Leaves, argument_names, argument_of, optional_arguments
from ppl_gp.model.declared import own_function
from ppl_gp.model.fingerprint import reads
from ppl_gp.model.roles import is_gp
from ppl_gp.model.tracing import run
from ppl_gp.results.datatree import training_sites
from ppl_gp.results.record import Record
from ppl_gp.results.store.coding import encode, encode_module
from ppl_gp.results.store.names import encode_names
from ppl_gp.results.store.portrait import portrait
from ppl_gp.results.store.predictors import encode_predictor, source_of
from ppl_gp.storage.archive import write_archive
from ppl_gp.storage.versions import package_versions

# 2: draws have weights. 3: sites were integrated into a predictor. 4: a softmax's precisions are
# kept as minus rank one. 5: encoders that see y are kept. A file without these is version 1.
FORMAT, FORMAT_VERSION = "ppl_gp.fit", 5


def save(fit: Record, path) -> Path:
    """Write a fit to one file, and return its path. An interruption leaves the old file, or none.

    `fit.names` is kept but for the labels of rows. Model arguments that are not arrays must be
    numbers, strings, booleans, `None`, or lists, tuples and dictionaries of those. Raises
    `DataError` naming an argument that is not, `StoreError` where the file cannot be written.
    """
    path, arrays = Path(path), {}
    args, kwargs = _without_observations(fit)
    names, training = argument_names(fit.model, len(args)), training_sites(fit)
    reading, weighted = dataclasses.asdict(source_of(fit.model).reading), fit.draws.is_weighted()
    predictor, values = encode_predictor(fit.model), fit.draws.at(0).values
    first = jax.tree.map(lambda x: x[0], fit.hyper) if fit.sampled else fit.hyper
    header = {
        "format": FORMAT,
        "version": _version(fit, predictor),
        "packages": package_versions(),
        "model": qualified_name(fit.model),
        "gp_sites": {k: list(training[k]["fn"].shape()) for k in fit.latent},
        "hyper_sites": {k: list(np.shape(v)[fit.sampled :]) for k, v in fit.hyper.items()},
        "latent_sites": list(fit.local),
        "reads": reads(fit.model.function),
        "portrait": portrait(source_of(fit.model), tuple(args), kwargs, first, values),
        "reading": reading,
        "reading_digest": reading_digest(reading),
        "predictor": predictor,
        "observed_sites": _observed_sites(fit, training, args, kwargs),
        "method": repr(fit.method),
        "result": str(fit.result),
        "log_evidence": fit.log_evidence,
        "num_chains": fit.num_chains,
        "sampled": fit.sampled,
        "args": [
            encode(v, arrays, f"args/{k}", f"argument '{k}'")
            for k, v in zip(names, args, strict=True)
        ],
        "kwargs": {
            k: encode(v, arrays, f"kwargs/{k}", f"argument '{k}'") for k, v in kwargs.items()
        },
        "log_weights": encode(
            fit.draws.log_weights if weighted else None, arrays, "log_weights", "log_weights"
        ),
        "hyper": encode(fit.hyper, arrays, "hyper", "hyper"),
        "latent": {k: _encode_kept(v, arrays, f"latent/{k}") for k, v in fit.latent.items()},
        "local": {k: _encode_local(k, q, arrays) for k, q in fit.local.items() if _is_kept(q)},
        "blocks": [
            encode_module(q, arrays, f"blocks/{i}", f"q({', '.join(q.sites)})")
            for i, q in enumerate(fit.blocks)
        ],
        "forgotten": [k for k, q in fit.local.items() if not _is_kept(q)],
        "stats": encode(fit.stats, arrays, "stats", "fit.stats"),
        "names": encode_names(fit.names),
    }
    try:
        claims = {k: [a.dtype.str, list(a.shape)] for k, a in sorted(arrays.items())}
        write_archive(path, {**header, "arrays": claims}, arrays)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return path


def _version(fit: Record, predictor) -> int:
    if any(isinstance(q, Encoded) and q.needs_y for q in fit.local.values()):
        return 5
    return 4 if _has_softmax(fit) else 3 if predictor else 2 if fit.draws.is_weighted() else 1


def _has_softmax(fit: Record) -> bool:
    kept = fit.latent.values()
    return any(isinstance(v, FromFunctions) and isinstance(v.sites, MinusRankOne) for v in kept)


def reading_digest(reading: dict) -> str:
    """By which a reading is known to be whole: no other part of a file would show that a name is
    missing.
    """
    return hashlib.sha256(json.dumps(reading, sort_keys=True).encode()).hexdigest()[:16]


def _observed_sites(fit, trace, args, kwargs) -> list[str]:
    """Sites that were not inferred. Also where the observations are gone, as in a fit that was
    loaded: a model may draw y at a site that it does not have in training, where a `numpyro.factor`
    observes them.
    """
    known, first = (*fit.hyper, *fit.local), fit.draws.at(0)
    try:
        without = run(fit.model, tuple(args), kwargs, first.known, first.values)
    except Exception:  # noqa: BLE001 - it does not run without observations, which `load` says
        without = {}
    return [
        k
        for k, s in {**trace, **without}.items()
        if s["type"] == "sample" and k not in known and not is_gp(s)
    ]


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


def _is_kept(q) -> bool:
    """All that a query of new data asks: no q(h) of the training data's rows."""
    return isinstance(q, Encoded) or not q.needs_y


def _encode_local(name: str, q, arrays) -> dict:
    if isinstance(q, Encoded) and not isinstance(q.encoder, MLPEncoder):
        raise DataError(
            f"the encoder of latent '{name}' is a {type(q.encoder).__name__}, and a file holds no "
            "code: save() keeps the package's own encoders. Keep yours by "
            "equinox.tree_serialise_leaves(path, fit.local)."
        )
    return encode_module(q, arrays, f"local/{name}", f"q({name})")


@singledispatch
def _encode_kept(kept: Kept, arrays, where) -> dict:
    raise TypeError(f"{type(kept).__name__} has no form in a file")


@_encode_kept.register
def _(kept: FromInducing, arrays, where) -> dict:
    return encode_module(kept, arrays, where, where)


@_encode_kept.register(FromPseudo)
@_encode_kept.register(FromFunctions)
def _(kept, arrays, where) -> dict:
    sites = {"nat1": kept.sites.nat1, "nat2": kept.sites.nat2}
    fields = {"mean": kept.mean, "variance": kept.variance, "alpha": kept.alpha, "sites": sites}
    return encode(fields, arrays, where, where)


@_encode_kept.register
def _(kept: FromDraws, arrays, where) -> dict:
    fields = {"mean": kept.mean, "variance": kept.variance, "alpha": None, "sites": None}
    return encode(fields, arrays, where, where)
