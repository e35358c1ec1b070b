"""MODEL.py:function on the command line to a function."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from ppl_gp.errors import ModelError


def load_model(location: str) -> Callable:
    """The function behind `path/to/file.py:name`. The file's folder is importable, after everything
    installed.
    """
    file, colon, name = location.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier():
        raise ModelError(
            f"'{location}' names no model; write MODEL.py:function, such as "
            "models/classification.py:binary."
        )
    if not path.is_file():
        raise ModelError(f"there is no file '{file}'.")
    spec = importlib.util.spec_from_file_location(f"_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"'{file}' is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a user's file raises becomes one line that names it
        raise ModelError(f"'{file}' cannot be imported: {type(error).__name__}: {error}") from error
    model = getattr(module, name, None)
    if not callable(model):
        found = [
            k
            for k, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", None) == spec.name
        ]
        raise ModelError(f"'{file}' defines no function '{name}'; it defines {found}.")
    return model
