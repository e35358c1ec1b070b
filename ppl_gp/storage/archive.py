"""Zip files of a JSON header and NumPy arrays, no pickle, written so that no reader ever sees half
of one, and read so that a file takes memory in proportion to its own size.
"""

import hashlib
import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.lib import format

from ppl_gp.errors import StoreError

HEADER = "header.json"
MAX_HEADER = 4 * 2**20  # bytes of JSON, which take up to twenty times as many in memory
NUMBER_KINDS = "biufc"  # of entries that are written without pickle and that JAX has too
_DIGEST, _DIGESTS = "digest", "array_digests"


def write_archive(path: Path, header: dict, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `header` and {name: array} to one file, with a digest of each. An interruption leaves
    the old file, or none; a full disk `OSError`.
    """
    whole = json.loads(json.dumps({**header, _DIGESTS: {k: _of(x) for k, x in arrays.items()}}))
    text = json.dumps({**whole, _DIGEST: _of_header(whole)}).encode()
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


def read_archive(path: Path, expected: Callable[[dict], Mapping]) -> tuple[dict, dict]:
    """(header, {name: array}) of a file that `write_archive` wrote.

    `expected(header)`: {name: [dtype, shape], or `None` for any}, all that the file may hold. Sizes
    are compared before anything is read, and nothing is unpacked, as no member is compressed. A
    file of an earlier version has no digests, which are then not compared. Raises `StoreError`
    without the path, or whatever a damaged zip file raises.
    """
    if path.is_dir():
        raise StoreError("is a folder, and should be a file.")
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        members = _sizes(archive, os.fstat(file.fileno()).st_size)
        header = json.loads(archive.read(HEADER))
        _require(isinstance(header, dict), "its header is not a dictionary.")
        wanted = expected(header)
        odd = sorted(members.keys() ^ {HEADER, *(f"{k}.npy" for k in wanted)})
        _require(not odd, f"it has {len(members)} members, of which {odd[:5]} are extra or absent.")
        arrays = {name: _array(archive, name, claim) for name, claim in wanted.items()}
    _check_digests(header, arrays)
    return header, arrays


def _sizes(archive: zipfile.ZipFile, available: int) -> dict[str, int]:
    """{member: bytes}, which are in the file as they are, once each."""
    members = {m.filename: m.file_size for m in archive.infolist()}
    stored = all(
        m.compress_type == zipfile.ZIP_STORED and m.file_size == m.compress_size
        for m in archive.infolist()
    )
    _require(stored, "it is compressed, which no file of ppl_gp is.")
    _require(len(members) == len(archive.infolist()), "two members have one name.")
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
    found = [dtype.str, list(shape)]
    _require(claim in (None, found), f"array '{name}' is {found}, and should be {str(claim)[:80]}.")
    _require(
        min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == size,
        f"array '{name}' claims the shape {shape}, and has {size} bytes.",
    )
    with archive.open(info) as member:
        array = format.read_array(member, allow_pickle=False)
        member.read()  # to the end, where the zip file's checksum is compared
    return array


def _check_digests(header: dict, arrays: dict) -> None:
    """Arrays or words that changed places have the shapes and the zip file's checksums of old."""
    if _DIGEST not in header:
        return
    own = header.pop(_DIGEST)
    _require(own == _of_header(header), "its header is not the one that was written.")
    changed = [k for k, x in arrays.items() if header[_DIGESTS].get(k) != _of(x)]
    _require(not changed, f"the arrays {changed[:5]} are not those that were written.")


def _of(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array), digest_size=8).hexdigest()


def _of_header(header: dict) -> str:
    text = json.dumps(header, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise StoreError(f"is damaged: {what}")
