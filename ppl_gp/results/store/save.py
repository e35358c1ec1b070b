"""Saving a fit: one zip file with a JSON header and NumPy arrays, no pickle.

The file holds what prediction needs: hyperparameters and q(f) for *all* draws, the training inputs
and other array arguments but not the observations, and figures about the fit. `ppl_gp.load` reads
it back.

Another model is recognised by its portrait: the classes of its distributions and kernels, and
their values at the first draw of the hyperparameters, with every other site at a value of its
support that is not its mean, so that no random number enters. JAX's versions agree on these
numbers; the digest of the jaxpr is compared within one version only.
"""

import dataclasses
import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to

from ppl_gp.deep.latents import Around, Encoded, Forgotten, MLPEncoder, encoder_of
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, StoreError
from ppl_gp.frames.names import Names
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.gp import GP, unwrap
from ppl_gp.kept import Kept
from ppl_gp.local.natural import PseudoLikelihood
from ppl_gp.mean_field.family import Family
from ppl_gp.numerics.arrow import Arrow
from ppl_gp.reading.arguments import Leaves, argument_names, argument_of, optional_arguments
from ppl_gp.reading.fingerprint import reads
from ppl_gp.reading.predictor.collapsed import Collapsed, Observed, Plan
from ppl_gp.reading.predictor.skeleton import Skeleton
from ppl_gp.reading.reading import Reading, own_function
from ppl_gp.reading.tracing import run
from ppl_gp.results.record import Record
from ppl_gp.results.store.archive import NUMBER_KINDS, write_archive
from ppl_gp.sparse.inducing import InducingVariables

_ROWS = 5  # of the inputs at which a kernel is compared
_CLOSE = 1e-4  # of float32


def portrait(model, args, kwargs, hyper: dict, values: dict) -> dict:
    """{"classes": {site: words}, "numbers": {site: number}, "formula": digest}; no numbers of a
    model whose densities cannot be computed at this point. Raises whatever the model raises.
    """
    if isinstance(model, Collapsed):  # its own sites are compared, the integrated ones too
        if model.source.reading.scored:  # a factor needs some observations to be computed from
            args, kwargs = model.skeleton.arguments(model.completed(args, kwargs)[1])
        model = model.source
    first = run(model, args, kwargs, hyper, values)
    classes = {k: words for k, site in first.items() if (words := _class_of(site))}

    def numbers(hyper, values):
        known = {**hyper, **values}
        trace = run(model, args, kwargs, {**_some_values(first, known), **known}, values)
        return {k: site_number(s) for k, s in trace.items() if s["type"] == "sample"}

    try:
        formula = str(jax.make_jaxpr(numbers)(hyper, values))
        text = re.sub(r"0x[0-9a-f]+|[\d.]+(e[+-]?\d+)?", "", formula)
        found = {k: float(x) for k, x in numbers(hyper, values).items()}
    except Exception:  # noqa: BLE001 - a distribution may lack what this asks for
        return {"classes": classes, "numbers": {}, "formula": ""}
    formula = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"classes": classes, "numbers": found, "formula": formula}


def _class_of(site) -> str | None:
    """What a site is, with its shape as the model declares it, and that of a GP's inputs."""
    if site["type"] == "param":  # a network's tree of initial values has no shape
        declared = next(filter(eqx.is_array_like, site["args"]), site["value"])
        return f"param {list(jnp.shape(declared))}" if eqx.is_array_like(declared) else None
    if site["type"] != "sample":
        return None
    prior: Any = unwrap(site["fn"])
    at = f" at inputs {list(jnp.shape(prior.X))}" if isinstance(prior, GP) else ""
    seen = "observed " if site["is_observed"] else ""  # by `handlers.condition`
    return f"{seen}{_words(site['fn'])} {list(site['fn'].shape())}{at}"


def changed_classes(saved: dict, now: dict) -> list[str]:
    """Of sites with another distribution or kernel, in words."""
    old, new = saved["classes"], now["classes"]
    return [
        f"'{k}' is {new.get(k, 'absent')} and was {old.get(k, 'absent')}"
        for k in sorted({*old, *new})
        if old.get(k) != new.get(k)
    ]


def changed_numbers(saved: dict, now: dict) -> list[str]:
    """Of sites with another density, in words."""
    pairs = {k: (x, now["numbers"].get(k, np.inf)) for k, x in saved["numbers"].items()}
    return [
        f"'{k}' (from {a:.6g} to {b:.6g})"
        for k, (a, b) in pairs.items()
        if not np.isclose(a, b, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
    ]


def _some_values(trace: dict, known: dict) -> dict[str, Any]:
    """A value of every other site that does not depend on a key: waves, for at zero f - u is f + u,
    and sin(f) is f; of a discrete site, or one without a transform, the first of its support.
    """
    found = {}
    for name, site in trace.items():
        if site["type"] != "sample" or site["is_observed"] or name in known:
            continue
        support, value = site["fn"].support, site["value"]
        try:
            if isinstance(unwrap(site["fn"]), GP):
                found[name] = value + _wave(jnp.shape(value))
            elif support.is_discrete:
                found[name] = support.feasible_like(jnp.zeros_like(value))
            else:
                transform = biject_to(support)
                found[name] = transform(_wave(transform.inverse_shape(jnp.shape(value))))
        except NotImplementedError:  # its draw by the fixed key
            continue
    return found


def _wave(shape) -> jax.Array:
    return 0.3 * jnp.cos(1.0 + jnp.arange(np.prod(shape, dtype=int))).reshape(shape)


def site_number(site) -> jax.Array:
    """The weighted mean of a site's log density, or of what a GP's kernel and mean are there."""
    prior: Any = unwrap(site["fn"])
    if not isinstance(prior, GP):
        scale = 1.0 if site.get("scale") is None else site["scale"]
        return _mean(scale * site["fn"].log_prob(site["value"]))
    parts = [x for x in jax.tree.leaves(prior.kernel) if eqx.is_array_like(x)]
    rows = prior.X[:_ROWS]
    try:
        parts += [prior.kernel(rows, rows), prior.mean_function(rows)]
    except Exception:  # noqa: BLE001 - parameters with an axis of units, distances of all rows
        pass
    return sum((_mean(x) for x in parts), jnp.zeros(()))


def _mean(x) -> jax.Array:
    """With weights, so that entries that change places show."""
    flat = jnp.ravel(jnp.asarray(x, float))
    return jnp.mean(flat * jnp.linspace(1.0, 2.0, flat.size))


def _words(value) -> str:
    """The class of a distribution, kernel or mean, with those of its parts and its options."""
    if isinstance(value, dist.Distribution):
        value = unwrap(value)
        is_gp = isinstance(value, GP)
        parts = {"k": value.kernel, "m": value.mean_function} if is_gp else vars(value)
        inner = [_words(x) for _, x in sorted(parts.items()) if _has_parts(x)]
    elif isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    elif isinstance(value, eqx.Module):
        parts = [getattr(value, k) for k in value.__dataclass_fields__]
        inner = [_words(x) for x in parts if x is not None and not eqx.is_array_like(x)]
    else:
        return str(value) if isinstance(value, str | int | float) else type(value).__name__
    return f"{type(value).__name__}({', '.join(inner)})" if inner else type(value).__name__


def _has_parts(x) -> bool:
    parts = x if isinstance(x, list | tuple) else [x]
    kinds = (dist.Distribution, dist.transforms.Transform, eqx.Module)
    return len(parts) > 0 and all(isinstance(y, kinds) for y in parts)


# The classes that files name, with their subclasses in this package, and no others.
_LOCAL = (MLPEncoder, Encoded, Around, Forgotten)
_MODEL = (Reading, Plan, Observed, Skeleton, Names, ArrayNames)
_STORABLE = (Draws, Kept, PseudoLikelihood, InducingVariables, Arrow, Family, *_LOCAL, *_MODEL)
_MARK = "$"  # begins the keys that stand for what JSON has no word for
_ARRAY, _TUPLE, _MODULE, _SHAPE, _TREE = "$array", "$tuple", "$module", "$shape", "$tree"


def encode(value: Any, arrays: dict, where: str, name: str) -> Any:
    """`value` as JSON, with arrays put into `arrays` under keys that begin with `where`. Raises
    `DataError` for what a file cannot hold.
    """

    def part(value, key, label):
        return encode(value, arrays, f"{where}/{key}", f"{name}{label}")

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray):
        arrays[where] = _plain_array(value, name)
        return {_ARRAY: where}
    if isinstance(value, jax.ShapeDtypeStruct):
        return {_SHAPE: [np.dtype(value.dtype).str, list(value.shape)]}
    if isinstance(value, jax.tree_util.PyTreeDef):
        return {_TREE: part(jax.tree.unflatten(value, range(value.num_leaves)), "tree", "")}
    if _classes().get(type(value).__name__) is type(value):
        fields = {k: part(getattr(value, k), k, f".{k}") for k in _fields(type(value))}
        return {_MODULE: type(value).__name__, **fields}
    if isinstance(value, dict) and all(
        isinstance(k, str) and not k.startswith(_MARK) for k in value
    ):
        return {k: part(v, k, f"['{k}']") for k, v in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [part(v, i, f"[{i}]") for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    raise DataError(
        f"{name} is a {type(value).__name__} and cannot be saved; pass numbers, strings, arrays, "
        "or lists, tuples and dictionaries of those (keys are strings that do not begin with "
        "'$'), and bind other objects to the model with functools.partial."
    )


def _plain_array(value, name: str) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    if is_key or np.asarray(value).dtype.kind not in NUMBER_KINDS:
        raise DataError(
            f"{name} is an array of {value.dtype} and cannot be saved; pass numbers, or a list of "
            "strings."
        )
    return np.asarray(value)


def decode(value: Any, arrays: dict) -> Any:
    """The inverse of `encode`. Each array is taken out of `arrays`, so that none is used twice."""
    if isinstance(value, list):
        return [decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        return jnp.asarray(arrays.pop(value[_ARRAY]))
    if set(value) == {_SHAPE}:
        dtype, shape = value[_SHAPE]
        return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))
    inner = {k: decode(v, arrays) for k, v in value.items()}
    if set(value) == {_TUPLE}:
        return tuple(inner[_TUPLE])
    if set(value) == {_TREE}:
        return jax.tree.structure(inner[_TREE])
    return _module(inner) if _MODULE in inner else inner


def _module(fields: dict) -> Any:
    """One of our own modules, from the name of its class and its fields."""
    name = fields.pop(_MODULE)
    cls: Any = _classes().get(name)
    added = {k for k in _fields(cls) if getattr(cls, k, "") is None} if cls else ()  # by default
    fields = dict.fromkeys(added) | fields
    if cls is None or set(fields) != set(_fields(cls)):
        raise StoreError(
            f"has a '{name}' of {list(fields)}, which this installation does not know; install the "
            "version of ppl-gp that wrote it, or fit again."
        )
    if issubclass(cls, tuple):
        return cls(**fields)
    # its arrays have an axis of draws, which a constructor would not expect
    module = object.__new__(cls)
    for k, v in fields.items():
        object.__setattr__(module, k, v)
    return module


def _classes() -> dict[str, type]:
    return {cls.__name__: cls for known in _STORABLE for cls in (known, *_descendants(known))}


def _descendants(cls) -> list[type]:
    own = [d for child in cls.__subclasses__() for d in (child, *_descendants(child))]
    return [d for d in own if d.__module__.startswith("ppl_gp.")]


def _fields(cls: type) -> tuple[str, ...]:
    return getattr(cls, "_fields", ()) or tuple(f.name for f in dataclasses.fields(cls))


FORMAT, FORMAT_VERSION = "ppl_gp.fit", 7
# Fields of a fit that stand in its file under their names.
FIELDS = ("draws", "local", "blocks", "names", "stats", "log_evidence", "num_chains", "sampled")


def save(fit: Record, path) -> Path:
    """Write a fit to one file. `load` reads it.

    Parameters
    ----------
    path : str or Path
        The file. If writing is interrupted, an older file stays, or there is none.

    Returns
    -------
    Path
        The path of the file.

    Raises
    ------
    DataError
        If an argument of the model that is not an array cannot be written. Numbers, strings,
        booleans, `None`, and lists, tuples and dictionaries of those can.
    StoreError
        If the file cannot be written.

    Notes
    -----
    The file does not contain observations, code, or the row labels in `fit.names`.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> fit.save(pathlib.Path(tempfile.mkdtemp()) / "fit.zip").name
    'fit.zip'
    """
    path, arrays = Path(path), {}
    args, kwargs = _without_observations(fit)
    named = dict(zip(argument_names(fit.model, len(args)), args, strict=True))
    model, first, left = fit.model, fit.draws.at(0), Leaves(fit.model, args, kwargs).arrays
    collapsed = isinstance(model, Collapsed)
    if collapsed:  # the first entry of the observations is one of them
        known = {p: x for p, x in model.skeleton.first.items() if p in left}
        bones = dataclasses.replace(model.skeleton, first=known)
        model = Collapsed(model.source, model.plan, bones)
    told: dict = {"model": qualified_name(model), "reads": reads(model.function), "portrait": None}
    with suppress(Exception):  # a model may raise anything without observations
        told["portrait"] = portrait(model, args, kwargs, first.known, first.values)

    def arguments(where: str, values: dict) -> dict:
        return {k: encode(v, arrays, f"{where}/{k}", f"argument '{k}'") for k, v in values.items()}

    positional = list(arguments("args", named).values())
    header = {"args": positional, "kwargs": arguments("kwargs", kwargs)}
    parts = {k: getattr(fit, k) for k in FIELDS} | {
        "local": {k: _local(k, q) for k, q in fit.local.items()},
        "names": fit.names.without_rows(),
        "reading": fit.source.reading,
        "plan": model.plan if collapsed else None,
        "skeleton": model.skeleton if collapsed else None,
        "result": str(fit.result),
        "method": repr(fit.method),
    }
    header |= {k: encode(v, arrays, k, f"fit.{k}") for k, v in parts.items()}
    try:
        write_archive(path, FORMAT, FORMAT_VERSION, {**told, **header}, arrays)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return path


def qualified_name(model) -> str:
    """module.name of a function; the class's for another callable."""
    model = own_function(model)
    named = model if hasattr(model, "__qualname__") else type(model)
    return f"{named.__module__}.{named.__qualname__}"


def _without_observations(fit) -> tuple[tuple, dict]:
    """Arguments without observations: `y`, and arrays that no distribution or mask depends on.

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
    tied = {p for p in gone if argument_of(p) == "y" or reading.row_axes.get(p) is not None}
    gone |= {p: None for p in gone if p in tied or argument_of(p) in optional_arguments(fit.model)}
    gone = {p: None if x is None else jnp.zeros_like(x) for p, x in gone.items()}
    args, kwargs = leaves.replaced(gone)
    return args, {k: v for k, v in kwargs.items() if v is not None or fit.kwargs[k] is None}


def _local(name: str, q):
    """All that a query of new data asks: no q(h) of the training data's rows."""
    if (encoder := encoder_of(q)) is None:
        return Forgotten()
    if not isinstance(encoder, MLPEncoder):
        raise DataError(
            f"the encoder of latent '{name}' is a {type(encoder).__name__}, and a file holds no "
            "code: save() keeps the package's own encoders. Keep yours by "
            "equinox.tree_serialise_leaves(path, fit.local)."
        )
    return q
