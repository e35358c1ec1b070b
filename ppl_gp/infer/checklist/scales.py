"""What the priors of length scales imply in units of the data."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import DataError
from ppl_gp.gp import unwrap
from ppl_gp.infer.checklist.subject import Subject
from ppl_gp.kernels.stationary import Isotropic
from ppl_gp.model.tracing import run
from ppl_gp.priors import distances
from ppl_gp.quick import quick_jit

_DRAWS = 4000  # a quantile of 1 % is that of a prior of 0.7 to 1.3 %
_OUTSIDE = 0.5  # of a prior's mass outside of the data's distances, from which on it is told
_FACTOR = 3.0  # that far below the nearest and above the largest distance it still counts as inside


def length_scales(subject: Subject):
    """Of each stationary kernel: the central 98 % of its prior beside the distances of the rows."""
    drawn = jax.tree.map(np.asarray, _draws(subject.model, subject.args, subject.kwargs))
    lines, ok = [], True
    for name in subject.found.gps:
        X = np.asarray(unwrap(subject.trace[name]["fn"]).X, float)
        X = X.reshape(len(X), -1)
        for found, dims in zip(drawn[name], _dims(subject.trace[name]["fn"]), strict=True):
            line, fits = _told(name, found, X if dims is None else X[:, list(dims)])
            lines, ok = [*lines, line], ok and fits
    return ok, "; ".join(lines) or "no kernel with a length scale."


def _isotropic(fn) -> list[Isotropic]:
    """The stationary kernels with a length scale inside a GP's kernel."""
    is_one = lambda x: isinstance(x, Isotropic)  # noqa: E731
    return [k for k in jax.tree.leaves(unwrap(fn).kernel, is_leaf=is_one) if is_one(k)]


def _dims(fn) -> list:
    return [k.active_dims for k in _isotropic(fn)]


@quick_jit
def _draws(model, args, kwargs):
    """{GP site: [(S,) or (S, D) of each kernel]} from the prior."""

    def one(key):
        trace = run(model, args, kwargs, key=key)
        gps = {k: s["fn"] for k, s in trace.items() if s["type"] == "sample"}
        return {
            k: [jnp.asarray(x.lengthscale, float) for x in _isotropic(fn)]
            for k, fn in gps.items()
            if hasattr(unwrap(fn), "kernel")
        }

    return jax.vmap(one)(random.split(random.key(0), _DRAWS))


def _told(name: str, drawn: np.ndarray, X: np.ndarray) -> tuple[str, bool]:
    columns = np.reshape(drawn, (len(drawn), -1))
    shared = columns.shape[1] == 1
    parts = [X] if shared else [X[:, [d]] for d in range(X.shape[1])]
    worst, fits = None, True
    for d, part in enumerate(parts):
        try:
            nearest, largest = distances(part)
        except DataError:
            continue  # a column of one value has no scale
        values = columns[:, min(d, columns.shape[1] - 1)]
        outside = float(np.mean((values < nearest / _FACTOR) | (values > _FACTOR * largest)))
        if worst is None or outside > worst[0]:
            worst = outside, d, np.quantile(values, [0.01, 0.99]), nearest, largest
        fits = fits and outside <= _OUTSIDE
    if worst is None:
        return f"'{name}': its inputs do not vary", True
    outside, d, (low, high), nearest, largest = worst
    spread = (
        f"{low:.2g}" if np.isclose(low, high) else f"{low:.2g} to {high:.2g} (98 % of its prior)"
    )
    text = (
        f"length scale of '{name}'{'' if shared else f', column {d}'} {spread}, rows "
        f"{nearest:.2g} (to the nearest) to {largest:.2g} apart"
    )
    if not fits:
        text += (
            f": {outside:.0%} of the prior lies far outside; scale the inputs, or take "
            "pg.priors.lengthscale(X)"
        )
    return text, fits
