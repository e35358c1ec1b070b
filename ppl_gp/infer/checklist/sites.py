"""A model under `check`, and items, each (whether in order, message), about what it declares: its
sites, the predictor, and what the priors of length scales imply in units of the data.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.errors import DataError
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper.space import Space, space
from ppl_gp.kernels.stationary import Isotropic
from ppl_gp.priors import distances
from ppl_gp.quick import quick_jit
from ppl_gp.reading.predictor.collapsed import Collapsed, require_levels
from ppl_gp.reading.predictor.predictor import require_gp
from ppl_gp.reading.reading import Declared
from ppl_gp.reading.refusals import require_observations
from ppl_gp.reading.roles import Roles, is_factor, subsampling
from ppl_gp.reading.tracing import run


class Subject(NamedTuple):
    """A model, its arguments and one run of it; `whole`: the model as the local methods see it."""

    model: Callable
    args: tuple
    kwargs: dict
    trace: dict
    found: Roles
    whole: Declared

    @property
    def integrated(self) -> tuple[str, ...]:
        """Sites that local methods integrate into a predictor."""
        return self.whole.plan.sites if isinstance(self.whole, Collapsed) else ()

    @property
    def subsampling(self) -> dict[str, tuple]:
        """{plate of the model that subsamples: (its rows, rows of a batch)}."""
        return subsampling(self.trace)


def space_of(subject: Subject) -> Space:
    """Its hyperparameters. Raises `ModelError` for a discrete one."""
    return space(subject.trace, subject.model, subject.args, subject.kwargs)


def gp_sites(subject: Subject):
    """Shapes and kernels of the GP sites."""
    if not subject.found.gps and subject.integrated:
        return True, f"none: a predictor of {list(subject.integrated)}, for local methods and NUTS."
    if not subject.found.gps and (subject.found.hyper or subject.found.local_latents):
        return (True, "none, and no linear predictor of Gaussian sites (the methods stand below).")
    require_gp(subject.found, subject.trace)
    sites = {name: subject.trace[name]["fn"] for name in subject.found.gps}
    told = (f"{k} {fn.shape()}, {type(unwrap(fn).kernel).__name__}" for k, fn in sites.items())
    return True, "; ".join(told)


def hyperparameters(subject: Subject):
    """Shapes and priors of what is neither a GP, nor integrated, nor observed."""
    held = [k for k in subject.found.hyper if k not in subject.integrated]
    names = (*held, *subject.found.params)
    space_of(subject)  # raises for a discrete one
    if not names:
        return True, "none: the model is fitted as it stands, with Fixed({})."
    told = []
    for k in names:
        value, is_param = subject.trace[k]["value"], k in subject.found.params
        tree = f"tree of {len(jax.tree.leaves(value))}"
        shape = jnp.shape(value) if eqx.is_array_like(value) else tree
        kind = "param, no prior" if is_param else _family(subject.trace[k]["fn"])
        told.append(f"{k} {shape or ''} {kind}".replace("  ", " "))
    return True, "; ".join(told)


def _family(fn) -> str:
    return type(unwrap(fn)).__name__


def observations(subject: Subject):
    """Shapes, families and supports of the observed sites."""
    sites = {k: subject.trace[k] for k in subject.found.observed}
    data = {k: s for k, s in sites.items() if not is_factor(s)}
    require_observations(subject.model, subject.args, subject.kwargs, subject.trace)
    if not sites:
        return False, "nothing is observed; pass y=..., and obs=y in the model."
    described = [
        f"{k} {s['fn'].shape()} {_family(s['fn'])} on {unwrap(s['fn']).support}"
        for k, s in data.items()
    ]
    several = {k: x for k, s in data.items() if np.size(x := np.asarray(s["value"], float)) > 1}
    constant = [k for k, x in several.items() if np.ptp(x) == 0.0]
    note = f"; all values of {constant} are equal, so the data say little" if constant else ""
    return True, "; ".join(described) + note


def predictor(subject: Subject):
    """Which Gaussian sites the local methods integrate, and which they hold."""
    held = [k for k in subject.found.hyper if k not in subject.integrated]
    if isinstance(subject.whole, Collapsed):
        hyper = {k: subject.trace[k]["value"] for k in subject.whole.plan.hyper}
        require_levels(subject.whole, subject.args, subject.kwargs, hyper)
    if not subject.integrated:
        return True, "f itself: no other Gaussian site enters through one linear predictor."
    R = subject.whole.plan.functions if isinstance(subject.whole, Collapsed) else 1
    many = "one" if R == 1 else f"{R} functions a datum"
    methods = "EP, VI and LocalBound" if R == 1 else "EP and VI"
    rest = f"; {held} are hyperparameters" if held else ""
    return True, f"{many}, of {list(subject.integrated)}, which Laplace, {methods} integrate{rest}."


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
        for found, k in zip(drawn[name], _isotropic(subject.trace[name]["fn"]), strict=True):
            dims = k.active_dims
            line, fits = _told(name, found, X if dims is None else X[:, list(dims)])
            lines, ok = [*lines, line], ok and fits
    return ok, "; ".join(lines) or "no kernel with a length scale."


def _isotropic(fn) -> list[Isotropic]:
    """The stationary kernels with a length scale inside a GP's kernel."""
    is_one = lambda x: isinstance(x, Isotropic)  # noqa: E731
    return [k for k in jax.tree.leaves(unwrap(fn).kernel, is_leaf=is_one) if is_one(k)]


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
