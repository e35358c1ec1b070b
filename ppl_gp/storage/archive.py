"""Zip files of a JSON header and NumPy arrays, no pickle, written so that no reader ever sees half
of one.
"""

import json
import os
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

HEADER = "header.json"


def write_archive(path: Path, header: dict, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `header` and {name: array} to one file. An interruption leaves the old file, or none; a
    full disk `OSError`.
    """
    # Beside the target: a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(HEADER, json.dumps(header, indent=1))
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
