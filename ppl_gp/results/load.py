"""`load`: a saved fit, checked against the model it is given."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from ppl_gp.errors import Result, warn
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.declared import Declared, own_function
from ppl_gp.model.fingerprint import keyed
from ppl_gp.results.fit import Fit
from ppl_gp.results.store.coding import decode
from ppl_gp.results.store.save import FORMAT, FORMAT_VERSION
from ppl_gp.results.verify import check_model
from ppl_gp.storage.archive import named, read_archive
from ppl_gp.threads import one_at_a_time


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

    Raises
    ------
    StoreError
        Names the file: it was truncated or changed, `save` did not write it, another version of the
        format did, or it was saved from another model (other sites, supports or densities, or
        another name and code).
    FileNotFoundError
        There is no such file.

    Warns
    -----
    UserWarning
        A number in the model has changed, or the file has float64 and JAX has it off.
    """
    path = Path(path)
    header, arrays = read_archive(path, FORMAT, FORMAT_VERSION)
    exact = any(a.dtype == np.float64 for a in arrays.values())
    with named(path, FORMAT):
        told = {k: header.pop(k) for k in ("model", "reads", "portrait", "packages")}
        fit = _rebuilt(model, decode(header, arrays))
        numbers = check_model(told, fit)
    if numbers:
        warn(
            f"{path}: a number in the model has changed since it was fitted. At the fit's own "
            f"values this moves the mean log density, or the kernel, of {', '.join(numbers)}. The "
            "fit predicts by the new numbers, with an f that was inferred by the old ones: put "
            "these back, or fit again.",
        )
    if exact and not jax.config.read("jax_enable_x64"):
        warn(
            f"{path} holds float64, which JAX has switched off: predictions will be less exact "
            "than the saved fit's. Call jax.config.update('jax_enable_x64', True) first.",
        )
    return fit


def _rebuilt(model: Callable, parts: dict) -> Fit:
    """The model is declared with what was read off it in training."""
    declared = Declared(keyed(own_function(model)), parts["reading"])
    if parts["plan"] is not None:
        declared = Collapsed(declared, parts["plan"], parts["skeleton"])
    own = ("draws", "local", "blocks", "names", "stats", "log_evidence", "num_chains", "sampled")
    return Fit(
        model=declared,
        method=SavedMethod(parts["method"]),
        args=tuple(parts["args"]),
        kwargs=parts["kwargs"],
        result=Result(parts["result"]),
        **{k: parts[k] for k in own},
    )
