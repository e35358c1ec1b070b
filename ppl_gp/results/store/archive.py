"""Zip files of a JSON header and NumPy arrays, no pickle, written so that no reader ever sees half
of one, and read so that a file takes memory in proportion to its own size.

A digest of the header, which contains those of the arrays, shows any accidental change.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.lib import format

from ppl_gp.errors import StoreError

HEADER = "header.json"
MAX_HEADER = 4 * 2**20  # bytes of JSON, which take up to twenty times as many in memory
NUMBER_KINDS = "biufc"  # of entries that are written without pickle and that JAX has too
_DIGEST, _ARRAYS = "digest", "arrays"
_PACKAGES = ("ppl-gp", "jax", "numpyro", "numpy")


def write_archive(
    path: Path, kind: str, version: int, header: dict, arrays: Mapping[str, np.ndarray]
) -> None:
    """Write `header` and {name: array} to one file of this format. An interruption leaves the old
    file, or none; a full disk `OSError`.
    """
    claims = {k: [x.dtype.str, list(x.shape), _of(x)] for k, x in arrays.items()}
    first = {"format": kind, "version": version, "packages": package_versions()}
    whole = json.loads(json.dumps({**first, **header, _ARRAYS: claims}))
    text = json.dumps({**whole, _DIGEST: digest_of(whole)}).encode()
    if len(text) > MAX_HEADER:
        raise StoreError(
            f"cannot write {path}: its header has {len(text)} bytes, and {MAX_HEADER} are allowed. "
            "Pass long lists among the model's arguments as arrays."
        )
    # Beside the target: a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(HEADER, text)
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_archive(
    path: Path, kind: str, version: int, check: Callable[[dict], None] = lambda header: None
) -> tuple[dict, dict]:
    """(header, {name: array}) of a file that `write_archive` wrote.

    `check(header)` may raise `StoreError` before the arrays are read. Sizes are compared before
    anything is read, and nothing is unpacked, as no member is compressed. Raises `StoreError` that
    names the file, whatever is wrong with it; `FileNotFoundError`.
    """
    with named(path, kind):
        if path.is_dir():
            raise StoreError("is a folder, and should be a file.")
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = _sizes(archive, os.fstat(file.fileno()).st_size)
            header = json.loads(archive.read(HEADER))
            _require(isinstance(header, dict), "its header is not a dictionary.")
            _require_format(header, kind, version)
            own = header.pop(_DIGEST, None)
            _require(own == digest_of(header), "its header is not the one that was written.")
            check(header)
            claims = header.pop(_ARRAYS)
            odd = sorted(members.keys() ^ {HEADER, *(f"{k}.npy" for k in claims)})
            _require(not odd, f"it has {len(members)} members; {odd[:5]} are extra or absent.")
            return header, {name: _array(archive, name, claim) for name, claim in claims.items()}


@contextmanager
def named(path: Path, kind: str) -> Iterator[None]:
    """Whatever a damaged file raises becomes one error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except StoreError as error:
        raise type(error)(f"{path} {error}") from error
    except Exception as error:
        raise StoreError(
            f"{path} is not a {_word(kind)} that ppl_gp wrote, or it was truncated or damaged: "
            f"{type(error).__name__}: {error}"
        ) from error


def _word(kind: str) -> str:
    return kind.rpartition(".")[2]


def _require_format(header: dict, kind: str, version: int) -> None:
    if (found := header.get("format")) != kind:
        raise StoreError(f"is not a {_word(kind)} that ppl_gp wrote: its format is {found!r}.")
    if (found := header.get("version")) != version:
        writer = dict(header.get("packages", {})).get("ppl-gp")
        newer = isinstance(found, int) and found > version
        raise StoreError(
            f"has format version {found!r} (written by ppl-gp {writer}), and this installation "
            f"reads version {version}; {'upgrade ppl-gp' if newer else 'fit again'}."
        )


def _sizes(archive: zipfile.ZipFile, available: int) -> dict[str, int]:
    """{member: bytes}, which are in the file as they are, once each."""
    infos = archive.infolist()
    members = {m.filename: m.file_size for m in infos}
    packed = [(m.compress_type, m.compress_size) for m in infos]
    stored = packed == [(zipfile.ZIP_STORED, m.file_size) for m in infos]
    _require(stored, "it is compressed, which no file of ppl_gp is.")
    _require(len(members) == len(infos), "two members have one name.")
    _require(sum(members.values()) <= available, "its members overlap.")
    size = members.get(HEADER, 0)
    _require(size <= MAX_HEADER, f"its header has {size} bytes; up to {MAX_HEADER} are read.")
    return members


def _array(archive: zipfile.ZipFile, name: str, claim) -> np.ndarray:
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as member:
        version = format.read_magic(member)
        read = (format.read_array_header_2_0, format.read_array_header_1_0)[version == (1, 0)]
        shape, _, dtype = read(member)
        size = info.file_size - member.tell()
    _require(dtype.kind in NUMBER_KINDS, f"array '{name}' holds {dtype}.")
    _require(
        min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == size,
        f"array '{name}' claims the shape {shape}, and has {size} bytes.",
    )
    with archive.open(info) as member:
        array = format.read_array(member, allow_pickle=False)
        member.read()  # to the end, where the zip file's checksum is compared
    found = [array.dtype.str, list(array.shape), _of(array)]
    _require(claim == found, f"array '{name}' is {found}, and should be {str(claim)[:80]}.")
    return array


def package_versions() -> dict[str, str]:
    """{package: version}; "source" for a package that is imported without being installed."""

    def of(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "source"

    return {name: of(name) for name in _PACKAGES}


def _of(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array), digest_size=8).hexdigest()  # pyright: ignore[reportArgumentType] a buffer before 3.12 too


def digest_of(header: dict) -> str:
    """Of a header without its digest."""
    text = json.dumps(header, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise StoreError(f"is damaged: {what}")
