"""`load`: a saved fit, checked against the model it is given."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import jax
import numpy as np

from ppl_gp.deep.latents import Forgotten
from ppl_gp.draws import Draws
from ppl_gp.errors import Result, StoreError, warn
from ppl_gp.kept import FromDraws, FromFunctions, FromPseudo, Kept
from ppl_gp.local.natural import of_arrays
from ppl_gp.model.declared import Declared, declare, own_function
from ppl_gp.model.fingerprint import keyed, reads
from ppl_gp.model.reading import Reading
from ppl_gp.results.fit import Fit
from ppl_gp.results.store.coding import decode
from ppl_gp.results.store.names import decode_names
from ppl_gp.results.store.portrait import changed_classes, changed_numbers, portrait
from ppl_gp.results.store.predictors import decode_predictor, source_of
from ppl_gp.results.store.save import FORMAT, FORMAT_VERSION, qualified_name, reading_digest
from ppl_gp.results.verify import check_model, check_values, require
from ppl_gp.storage.archive import read_archive
from ppl_gp.storage.versions import package_versions
from ppl_gp.threads import one_at_a_time

# What a header says. A field that not every file of this version has (a new one) has a default,
# too.
_FIELDS = {
    "model": str,
    "gp_sites": dict,
    "hyper_sites": dict,
    "observed_sites": list,
    "method": str,
    "result": str,
    "log_evidence": float | int | None,
    "num_chains": int,
    "sampled": bool,
    "args": list,
    "kwargs": dict,
    "hyper": dict,
    "latent": dict,
    "stats": dict,
    "arrays": dict | list,  # {name: [dtype, shape]}, or the names alone
    "latent_sites": list,
    "local": dict,
    "reads": dict | None,  # what the model read when it was fitted
    "portrait": dict | None,  # None where the model does not run without observations
    "reading_digest": str | None,
    "reading": dict | None,  # None in files of earlier versions
    "predictor": dict | None,  # None where no sites were integrated
    "log_weights": dict | None,  # None where draws have equal weights
    "blocks": list | None,  # the factors of mean field
    "forgotten": list | None,  # latent sites whose q(h) needs y, which is not in the file
    "names": dict | None,  # None where no argument came with names
}
_DEFAULTS = {
    "latent_sites": [],
    "local": {},
    "blocks": None,
    "forgotten": None,
    "reading": None,
    "reading_digest": None,
    "reads": None,
    "portrait": None,
    "predictor": None,
    "log_weights": None,
    "names": None,
}
# The fields that hold arrays, tuples or modules.
_PARTS = ("args", "kwargs", "hyper", "latent", "stats", "local", "log_weights", "blocks")


class SavedMethod:
    """The method behind a loaded fit: its description, not something to fit with."""

    def __init__(self, description: str):
        self.description = description

    def __repr__(self):
        return self.description


@one_at_a_time
def load(path, model: Callable) -> Fit:
    """Read a fit that `fit.save(path)` wrote. It predicts as the saved one did, with every draw,
    without training data.

    `model`: the function that was fitted; a file holds no code. The loaded fit has no observations,
    so that `loo` and the tree's log_likelihood are not available; `fit.method` is only a
    description.

    **Raises** `StoreError`, naming the file: truncated, not written by `save`, a newer format,
    values that no fit has (NaN, outside a support, of another shape), or another model (its sites
    do not fit the saved ones, or name and code are others); `FileNotFoundError`. Warns where the
    file holds float64 and JAX has it off.
    """
    path = Path(path)
    with _named(path):
        header, arrays = read_archive(path, _arrays_of)
        exact = any(a.dtype == np.float64 for a in arrays.values())
        fit = _rebuilt(model, header, arrays)
        check_values(header, fit)
        require(not arrays, f"nothing is made of the arrays {sorted(arrays)[:5]}.")
    check_model(path, header, fit)
    _check_function(path, header, fit)
    _check_constants(path, header["reads"], fit)
    with _named(path):
        moved = _changed_densities(header, fit)
    _warn_of_numbers(path, moved)
    _warn_of_precision(path, exact)
    return fit


@contextmanager
def _named(path: Path):
    """Whatever a damaged file raises becomes one error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except StoreError as error:
        raise StoreError(f"{path} {error}") from error
    except Exception as error:
        raise StoreError(
            f"{path} is no fit saved by ppl_gp, or it was truncated or damaged: "
            f"{type(error).__name__}: {error}"
        ) from error


def _arrays_of(header: dict) -> dict:
    """{name: [dtype, shape]}, or `None` for a shape that an early file does not claim."""
    _check_format(header)
    claims = header["arrays"]
    return claims if isinstance(claims, dict) else dict.fromkeys(claims)


def _check_format(header: dict) -> None:
    if header.get("format") != FORMAT:
        raise StoreError(f"is no fit saved by ppl_gp: its header does not say '{FORMAT}'.")
    version = header.get("version")
    if type(version) is not int or version < 1:
        raise StoreError(f"is damaged: its format version is {version!r}.")
    if version > FORMAT_VERSION:
        packages = header.get("packages")
        writer = packages.get("ppl-gp") if isinstance(packages, dict) else None
        raise StoreError(
            f"has format version {version} (written by ppl-gp {writer}), and this installation "
            f"reads up to version {FORMAT_VERSION}; upgrade ppl-gp."
        )
    header |= {k: v for k, v in _DEFAULTS.items() if k not in header}
    for name, kind in _FIELDS.items():
        if (
            name not in header
            or not isinstance(header[name], kind)
            or (kind is int and header[name] is True)
        ):
            raise StoreError(
                f"is damaged: the header's '{name}' is {str(header.get(name))[:100]!r}."
            )


def _rebuilt(model, header, arrays) -> Fit:
    fields = decode({k: header[k] for k in _PARTS}, arrays)
    if header["result"] not in list(Result):
        raise StoreError(
            f"ended as '{header['result']}', which this installation does not know; upgrade ppl-gp."
        )
    args, kwargs = tuple(fields["args"]), fields["kwargs"]
    return Fit(
        model=_declared(model, header, args, kwargs),
        method=SavedMethod(header["method"]),
        args=args,
        kwargs=kwargs,
        draws=_draws(header["sampled"], fields),
        log_evidence=header["log_evidence"],
        result=Result(header["result"]),
        stats=fields["stats"],
        num_chains=header["num_chains"],
        sampled=header["sampled"],
        local={k: fields["local"].get(k, Forgotten()) for k in header["latent_sites"]},
        blocks=tuple(fields["blocks"] or ()),
        names=decode_names(header["names"]),
    )


def _declared(model, header, args, kwargs) -> Declared:
    """The model with what was read off it in training; of a file that does not hold that, what its
    arguments still tell.
    """
    if header["reading"] is not None:
        if reading_digest(header["reading"]) != header["reading_digest"]:
            raise StoreError(
                "is damaged: its reading of the model is not the one that was written."
            )
        source = Declared(
            keyed(own_function(model)),
            Reading(**cast(dict, {k: _tuples(v) for k, v in header["reading"].items()})),
        )
        return decode_predictor(source, header["predictor"])
    try:
        declared = declare(model, args, kwargs)
    except Exception as error:
        raise StoreError(
            f"was saved from the model '{header['model']}', and the one given does not run with "
            f"its arguments: {error}"
        ) from error
    return Declared(declared.function, declared.reading.observing(tuple(header["observed_sites"])))


def _check_function(path: Path, header: dict, fit: Fit) -> None:
    """A function of another name and other code is another model, with priors that q was not
    fitted to; one that was renamed, moved or edited is the same.
    """
    saved, given = header["model"], qualified_name(fit.model)
    names = [x.rpartition(".")[2] for x in (saved, given)]
    codes = [
        {v for k, v in (entries or {}).items() if _last_name(k) == name}
        for name, entries in zip(names, (header["reads"], reads(fit.model.function)), strict=True)
    ]
    if names[0] != names[1] and all(codes) and codes[0] != codes[1]:
        raise StoreError(
            f"{path} was saved from the model '{saved}', and '{given}' was given, whose code is "
            "another: q was fitted to other densities. Give the function that was fitted; one that "
            "was edited keeps its name."
        )


def _last_name(entry: str) -> str:
    """Of "code of 'module.outer.<locals>.model#2'"."""
    name = entry.removeprefix("code of '").removesuffix("'").partition("#")[0]
    return name.rpartition(".")[2] if entry.startswith("code of '") else ""


def _check_constants(path: Path, saved: dict | None, fit: Fit) -> None:
    """Values that the model reads (globals, closures, defaults) must be those of the fit; its code
    may have been edited.
    """
    now = reads(fit.model.function)
    values = [
        k for k in saved or {} if not k.startswith("code of ") and not _is_function(k, saved or {})
    ]
    if differing := [k for k in values if now.get(k, saved[k]) != saved[k]]:  # pyright: ignore[reportOptionalSubscript]
        raise StoreError(
            f"{path} was saved from a model that read other values: {differing} differ. Put the "
            "old values back, or fit again."
        )


def _changed_densities(header: dict, fit: Fit) -> list[str]:
    """Sites whose densities have other numbers in the same formula. Another likelihood or kernel
    under the same name is refused, and another formula where the versions are the file's.
    """
    saved, first = header["portrait"], fit.draws.at(0)
    now = portrait(source_of(fit.model), fit.args, fit.kwargs, first.known, first.values)
    if saved is None or now is None:
        return []
    same = saved["formula"] == now["formula"] or header.get("packages") != package_versions()
    classes, numbers = changed_classes(saved, now), changed_numbers(saved, now)
    if classes or (numbers and not same):
        told = "; ".join(classes) or f"there are other formulas behind {', '.join(numbers)}"
        raise StoreError(
            f"was saved from another model of the name '{qualified_name(fit.model)}': {told}. Give "
            "the function that was fitted, or fit again."
        )
    return numbers


def _warn_of_numbers(path: Path, moved: list[str]) -> None:
    if moved:
        warn(
            f"{path}: a number in the model has changed since it was fitted. At the fit's own "
            f"values this moves the mean log density, or the kernel, of {', '.join(moved)}. The "
            "fit predicts by the new numbers, with an f that was inferred by the old ones: put "
            "these back, or fit again.",
        )


def _is_function(name: str, saved: dict) -> bool:
    """Whether an entry stands for a function, whose code has an entry of its own."""
    return "'" in name and f"code of '{name.split(chr(39))[1]}'" in saved


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _draws(sampled: bool, fields) -> Draws:
    kept = {k: _kept(k, v) for k, v in fields["latent"].items()}
    stored = jax.tree.leaves(fields["hyper"], is_leaf=lambda x: x is None)
    require(all(isinstance(x, jax.Array) for x in stored), "hyper hold more than arrays.")
    if not sampled:
        return Draws.one(fields["hyper"], kept)
    draws = Draws.equal(fields["hyper"], kept)
    return (
        draws
        if fields["log_weights"] is None
        else Draws(draws.hyper, {}, kept, fields["log_weights"])
    )


def _kept(name: str, fields) -> Kept:
    """Of a file that says what it is (`FromInducing`), or by the parts that it has."""
    if isinstance(fields, Kept):
        return fields
    mean, variance, alpha, sites = (fields[k] for k in ("mean", "variance", "alpha", "sites"))
    if sites is None and alpha is None:
        require(not np.any(np.asarray(variance)), f"draws of '{name}' have a variance.")
        return FromDraws(mean)
    if sites is None or alpha is None:
        raise StoreError(f"is damaged: q of '{name}' lacks a part.")
    pseudo = of_arrays(sites["nat1"], sites["nat2"])
    if np.ndim(pseudo.nat2) > 2:
        return FromFunctions(mean, variance, alpha, pseudo)
    for part in (mean, variance):
        require(np.shape(part) == np.shape(alpha), f"q of '{name}' has shape {np.shape(part)}.")
    return FromPseudo(mean, variance, alpha, pseudo)


def _warn_of_precision(path, exact: bool) -> None:
    if exact and not jax.config.read("jax_enable_x64"):
        warn(
            f"{path} holds float64, which JAX has switched off: predictions will be less exact "
            "than the saved fit's. Call jax.config.update('jax_enable_x64', True) first.",
        )
