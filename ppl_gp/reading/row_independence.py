"""Whether a row of a model stands alone: whether it sees other rows' arguments or latents, its own
number, or the number of rows.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, bare, bare_shape, unwrap
from ppl_gp.kernels.pairs import pair_fault
from ppl_gp.quick import quick_jit
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.declared import Declared
from ppl_gp.reading.growth import look_at
from ppl_gp.reading.roles import data_axis, is_gp, is_observed
from ppl_gp.reading.tracing import run
from ppl_gp.reading.user_errors import VALUE_WANTED

_TOLERANCE = 1e3 * np.finfo(float).eps
# pairs of neighbours that a kernel is judged at, rows that they are chosen among
_PROBED, _SORTED = 16, 1000
_ROUNDINGS = 1e4  # that a path gathers


def mixing_sites(model: Declared, args: tuple, kwargs: dict, hyper: Mapping) -> list[str]:
    """Sites whose row n changes with anything but its own arguments: GP sites by inputs, mean and
    kernel, observed ones by their log density.

    Half of the rows take the arguments of one row of the other half, which may not notice; rows
    that change places must take their terms along; a row more may change nothing. f is a fixed
    function of its inputs. A kernel may be computed from no argument with one entry per datum (read
    off the jaxpr) and is the same function in all runs, at inputs that the site had. Predictions of
    such a model would depend on which rows are asked for together, and minibatches see other inputs
    than all data do. Four runs of the model, O(N), compiled for two numbers of rows.
    """
    kernels = [k for k, _ in model.reading.kernels]
    leaves, axes = Leaves(model, args, kwargs), model.reading.row_axes
    rows = {
        p: np.asarray(leaves.arrays[p])
        for p in axes
        if p in leaves.arrays and leaves.arrays[p].size
    }
    num = next((x.shape[axes[p]] for p, x in rows.items()), 0)
    if not model.reading.grows or num < 2 or any(x.shape[axes[p]] != num for p, x in rows.items()):
        return kernels

    sites = frozenset(k for k, _ in model.reading.axes) - set(kernels)
    # Of the training inputs, for all runs: a kernel may refuse inputs that nobody gave it.
    finite = lambda x: all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(x))  # noqa: E731
    known = {k: x for k, x in hyper.items() if finite(x)}  # a fit may have failed
    inputs = _leniently(_inputs, model, sites, *leaves.replaced(rows), known)
    probes = {k: _some_rows(X) for k, X in inputs.items()}

    def at(source) -> dict[str, np.ndarray]:
        """{site: (N, ...)} with the arguments of other rows; a site of a plate that subsamples has
        fewer rows and is left out.
        """
        taken = leaves.replaced({p: np.take(x, source, axes[p]) for p, x in rows.items()})
        told = _leniently(_by_row, model, sites, *taken, known, probes)
        return {k: np.asarray(x) for k, x in told.items() if len(x) == len(source)}

    everyone, moves = np.arange(num), np.random.default_rng(0).permutation(num) < (num + 1) // 2
    here, moved = at(everyone), at(np.where(moves, np.flatnonzero(~moves)[0], everyone))
    found = {k for k in here if k in moved and _differ(here[k][~moves], moved[k][~moves])}
    # latents one a datum, no GP and no observation, are drawn by their places
    if all(k in here for k, _ in model.reading.axes):
        turned, longer = at(everyone[::-1]), at(np.append(everyone, num - 1))
        found |= {k for k in here if k in turned and _differ(here[k][::-1], turned[k])}
        found |= {k for k in here if k in longer and _differ(here[k], longer[k][:num])}
    return [*kernels, *(k for k in here if k in found and k not in kernels)]


def _of_inputs(site):
    """f of a GP site as a function of its inputs, nowhere zero, which would hide a factor; bounded,
    as inputs may be years.
    """
    if not is_gp(site):
        return None
    gp = unwrap(site["fn"])
    X = jnp.reshape(gp.X, (gp.X.shape[0], -1)).astype(jnp.result_type(float))
    return jnp.broadcast_to(gp.mean + 0.7 + jnp.mean(X / (1.0 + jnp.abs(X)), 1), site["fn"].shape())


def _leniently(compiled: Callable, *args) -> dict:
    """What a compiled function gives, and the function itself where the model reads the values of
    arrays.
    """
    try:
        return compiled(*args)
    except VALUE_WANTED:
        return compiled.__wrapped__(*args)


def unpaired(priors: Mapping[str, GP]) -> dict[str, str]:
    """{GP site whose kernel is no function of two rows: why}: it has a training covariance, and
    none with new rows.
    """
    faults = {k: pair_fault(prior.kernel, prior.X) for k, prior in priors.items()}
    return {k: fault for k, fault in faults.items() if fault is not None}


def require_pairs(faults: Mapping[str, str]) -> None:
    """Raise `ModelError` where new rows, or inducing points, have no covariance with the training
    rows.
    """
    for name, fault in faults.items():
        raise ModelError(
            f"the kernel of GP site '{name}' is no function k(X1, X2) -> (N1, N2) of any two "
            f"numbers of rows: {fault}. So other rows have no covariance with the training rows. "
            "Laplace, EP, VI and NUTS fit the model as it stands; f at the training rows is in "
            f"fit.latent['{name}']."
        )


def require_none_tied(sites: list[str], there: str = "fit.sites") -> None:
    """Raise `ModelError` where sites have an entry for each training row, and no others. `there`:
    where their posterior is.
    """
    if sites:
        raise ModelError(
            f"site(s) {sites} have an entry for each row of the data and covariances between "
            "them (a random walk, or a matrix, over the rows themselves), so that other rows have "
            "none of it. Declare a GP over inputs, pg.GP(kernel, X), or entries for all times "
            f"that rows index, z[time]. The posterior at the training rows is in {there}."
        )


def _seen(model, sites: frozenset[str], args: tuple, kwargs: dict, hyper: Mapping) -> dict:
    trace = run(handlers.substitute(model, substitute_fn=_of_inputs), args, kwargs, hyper)
    return {k: s for k, s in trace.items() if k in sites}


# With the model among their arguments: another fit of it compiles nothing.
@quick_jit
def _inputs(model, sites: frozenset[str], args: tuple, kwargs: dict, hyper: Mapping) -> dict:
    """{GP site: its inputs}."""
    trace = _seen(model, sites, args, kwargs, hyper)
    return {k: unwrap(s["fn"]).X for k, s in trace.items() if is_gp(s)}


@quick_jit
def _by_row(
    model, sites: frozenset[str], args: tuple, kwargs: dict, hyper: Mapping, probes: Mapping
) -> dict[str, jnp.ndarray]:
    """{site: (N, ...)}."""
    trace = _seen(model, sites, args, kwargs, hyper)
    found = {}
    for name, site in trace.items():
        if is_gp(site) and site["data_axis"] is not None:
            found[name] = _gp_by_row(unwrap(site["fn"]), probes.get(name))
        elif (
            is_observed(site) and (axis := data_axis(site, len(bare_shape(site["fn"])))) is not None
        ):
            found[name] = jnp.moveaxis(bare(site["fn"]).log_prob(site["value"]), axis, 0)
    return found


def _gp_by_row(gp: GP, probe) -> jnp.ndarray:
    """Inputs, means, and a number that tells of the kernel at the rows of `probe`, (N, columns)."""
    num = gp.X.shape[0]
    columns = [jnp.reshape(gp.X, (num, -1)), jnp.reshape(jnp.moveaxis(gp.mean, -1, 0), (num, -1))]
    if probe is not None:
        C = jnp.asarray(probe, gp.X.dtype)
        K = gp.kernel(C, C)
        # so that no two entries cancel
        weights = np.random.default_rng(1).uniform(0.5, 1.5, K.shape)
        columns.append(jnp.full((num, 1), jnp.sum(weights * K)))
    return jnp.concatenate(columns, 1)


def _some_rows(X) -> np.ndarray:
    """Up to 2 x `_PROBED` different rows of the inputs, neighbours in pairs: a short length scale
    shows in those alone.
    """
    X = np.asarray(X)
    X = np.unique(X[np.linspace(0, len(X) - 1, min(len(X), _SORTED)).astype(int)], axis=0)
    first = np.linspace(0, max(len(X) - 2, 0), min(len(X), _PROBED)).astype(int)
    return X[np.unique(np.concatenate([first, np.minimum(first + 1, len(X) - 1)]))]


def _differ(a, b, tolerance: float = _TOLERANCE) -> bool:
    close = np.abs(a - b) <= tolerance * (1.0 + np.abs(a))
    return not np.all(close | (a == b) | (np.isnan(a) & np.isnan(b)))


def tied_latents(
    model, args: tuple, kwargs: dict, known: Mapping, latents: tuple[str, ...]
) -> list[str]:
    """Those of `latents`, sites with an entry per datum, whose prior at a row sees other rows' of
    them (a path drawn by `scan`, a random walk over the rows), which are not drawn anew, row by
    row: where the values at half of the rows are others, the densities of the rest have to stay.

    A site whose axis of the data is inside an event that is no product of entries counts as one.
    `known`: {site: value} of everything, at one draw. Two runs of the model, O(N).
    """
    trace = run(model, args, kwargs, known, known)
    axes = {k: trace[k]["data_axis"] for k in latents if trace[k]["data_axis"] is not None}
    places = {k: axis + len(trace[k]["fn"].batch_shape) for k, axis in axes.items()}
    joint = [k for k in axes if places[k] >= len(bare_shape(trace[k]["fn"]))]
    apart = tuple(k for k in axes if k not in joint)
    if not apart:
        return joint
    num = {k: np.shape(trace[k]["value"])[places[k]] for k in apart}
    moves = {k: np.random.default_rng(0).permutation(n) < (n + 1) // 2 for k, n in num.items()}
    other = _moved(model, args, kwargs, dict(known), apart, places, moves)
    here, there = (
        {
            k: np.asarray(x)[~moves[k]]
            for k, x in _densities_by_row(model, args, kwargs, values, apart, places).items()
        }
        for values in (dict(known), other)
    )
    return joint + [
        k for k in apart if _differ(here[k], there[k], _ROUNDINGS * np.finfo(here[k].dtype).eps)
    ]


def grown_whole(model, args: tuple, kwargs: dict) -> frozenset[str]:
    """Sites that have more entries where there is a row more, and no axis of the data: a random
    walk over the rows, whose entries are one event. One abstract trace.
    """
    reading, leaves = model.reading, Leaves(model, args, kwargs)
    if not reading.grows or not reading.rows:
        return frozenset()
    more = {p: (axis, 1) for p, axis in reading.rows if p in leaves.arrays}
    here, there = look_at(model, leaves, {}).sites, look_at(model, leaves, more).sites
    known = {k for k, _ in reading.axes}
    sizes = lambda s: (s.shape, s.event)  # noqa: E731
    grown = {k for k in here if k in there and sizes(here[k]) != sizes(there[k])}
    return frozenset(grown - known)


@quick_jit
def _moved(model, args, kwargs, known: dict, names, places, moves) -> dict:
    """Values that differ at the rows that move: drawn anew from the prior there."""
    trace = run(model, args, kwargs, known, known)
    found = dict(known)
    for i, k in enumerate(names):
        drawn = trace[k]["fn"].sample(random.key(i))
        shape = [1] * drawn.ndim
        shape[places[k]] = -1
        found[k] = jnp.where(moves[k].reshape(shape), drawn, known[k])
    return found


@quick_jit
def _densities_by_row(model, args, kwargs, values: dict, names, places) -> dict:
    """{site: its log densities, (N, ...)}."""
    trace = run(model, args, kwargs, values, values)
    return {
        k: jnp.moveaxis(bare(trace[k]["fn"]).log_prob(trace[k]["value"]), places[k], 0)
        for k in names
    }
