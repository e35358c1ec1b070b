"""`load`: a saved fit, checked against the model it is given."""

import json
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.declared import Declared, declare
from ppl_gp.deep.latents import Forgotten
from ppl_gp.errors import PplGpError, Result, StoreError
from ppl_gp.local.pseudo import Sites
from ppl_gp.posterior import Latent
from ppl_gp.results.archive import HEADER
from ppl_gp.results.fit import Fit
from ppl_gp.results.processes import values_at_training_inputs
from ppl_gp.results.store import FORMAT, FORMAT_VERSION, decode, qualified_name
from ppl_gp.sparse.process import SparseLatent
from ppl_gp.threads import one_at_a_time
from ppl_gp.tracing import is_gp, run


class SavedMethod:
    """The method behind a loaded fit: its description, not something to fit with."""

    def __init__(self, description: str):
        self.description = description

    def __repr__(self):
        return self.description


@one_at_a_time
def load(path, model: Callable) -> Fit:
    """Read a fit that `fit.save(path)` wrote. It predicts as the saved one did, with every draw, without training data.

    `model`: the function that was fitted; a file holds no code. The loaded fit has no observations, so that `loo` and
    the tree's log_likelihood are not available; `fit.method` is only a description.

    **Raises** `StoreError`, naming the file: truncated, not written by `save`, a newer format, or another model (its
    sites do not fit the saved ones); `FileNotFoundError`. Warns where the file holds float64 and JAX has it off.
    """
    path = Path(path)
    header, arrays = _read(path)
    parts = ("args", "kwargs", "hyper", "latent", "stats", "local")
    fields = decode({k: header[k] for k in parts if k in header}, arrays)
    local = {k: fields.get("local", {}).get(k, Forgotten()) for k in header.get("latent_sites", ())}
    args, kwargs = tuple(fields["args"]), fields["kwargs"]
    declared = declare(model, args, kwargs)
    observed = tuple(k for k in header["observed_sites"] if k not in header["gp_sites"])
    fit = Fit(
        Declared(declared.function, declared.reading.observing(observed)),
        SavedMethod(header["method"]),
        args,
        kwargs,
        fields["hyper"],
        {k: _latent(v) for k, v in fields["latent"].items()},
        header["log_evidence"],
        Result(header["result"]),
        fields["stats"],
        header["num_chains"],
        header["sampled"],
        local,
    )
    _check_model(path, header, fit)
    _warn_of_precision(path, arrays)
    return fit


def _latent(fields) -> Latent | SparseLatent:
    if isinstance(fields, SparseLatent):
        return fields
    sites = fields["sites"]
    return Latent(fields["mean"], fields["variance"], fields["alpha"], sites and Sites(sites["nat1"], sites["nat2"]))


def _read(path: Path) -> tuple[dict, dict]:
    """(header, arrays by name)."""
    foreign = f"{path} is no fit saved by ppl_gp"
    try:
        with zipfile.ZipFile(path) as archive:
            if HEADER not in archive.namelist():
                raise StoreError(f"{foreign}: it is a zip file without {HEADER}.")
            header = json.loads(archive.read(HEADER))
            _check_format(path, header)
            return header, {name: _array(archive, name) for name in header["arrays"]}
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{foreign}, or it was truncated or damaged: {error}") from error


def _array(archive, name) -> np.ndarray:
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        member.read()  # to the end, where the checksum is compared
    return array


def _check_format(path, header) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise StoreError(f"{path} is no fit saved by ppl_gp: its header does not say '{FORMAT}'.")
    if header["version"] > FORMAT_VERSION:
        raise StoreError(
            f"{path} has format version {header['version']} (written by ppl-gp {header['packages']['ppl-gp']}), and "
            f"this installation reads up to version {FORMAT_VERSION}; upgrade ppl-gp."
        )


def _check_model(path, header, fit: Fit) -> None:
    """Run the model on the saved inputs and compare its sites with the saved ones."""
    saved = f"{path} was saved from the model '{header['model']}', and '{qualified_name(fit.model)}' was given"
    hyper = jax.tree.map(lambda x: x[0], fit.hyper) if fit.sampled else fit.hyper
    try:
        trace = run(fit.model, fit.args, fit.kwargs, hyper, values_at_training_inputs(fit))
    except (AttributeError, TypeError, ValueError, PplGpError) as error:
        raise StoreError(f"{saved}, which does not run with the saved arguments: {error}") from error
    gps = {k: list(site["fn"].shape()) for k, site in trace.items() if is_gp(site)}
    if gps != header["gp_sites"]:
        raise StoreError(f"{saved}: it has the GP sites {gps} (name, shape), and the file {header['gp_sites']}.")
    found = {k: _shape(site) for k, site in trace.items() if k not in gps and _is_random(k, site, header)}
    if found != header["hyper_sites"]:
        wanted = header["hyper_sites"]
        raise StoreError(f"{saved}: it has the hyperparameters {found} (name, shape), and the file {wanted}.")


def _is_random(name, site, header) -> bool:
    """Whether a site is a hyperparameter or a local latent: not observed in training, nor imputed beside data."""
    other = (*header["observed_sites"], *header.get("latent_sites", ()))
    unknown = site["type"] == "sample" and not site["is_observed"] and name not in other
    return site["type"] == "param" or unknown


def _shape(site) -> list[int]:
    """As declared: a trace's value is the one that was substituted, whatever the model says."""
    return list(site["fn"].shape() if site["type"] == "sample" else jnp.shape(site["args"][0]))


def _warn_of_precision(path, arrays) -> None:
    if any(a.dtype == np.float64 for a in arrays.values()) and not jax.config.read("jax_enable_x64"):
        warnings.warn(
            f"{path} holds float64, which JAX has switched off: predictions will be less exact than the saved fit's. "
            "Call jax.config.update('jax_enable_x64', True) first.",
            stacklevel=3,
        )
