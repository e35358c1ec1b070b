"""Whether a row of a model stands alone: whether it sees other rows' arguments, its own number, or the number of rows."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.arguments import Leaves
from ppl_gp.declared import Declared
from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.graph import kernel_at_constants
from ppl_gp.kernels.pairs import pair_fault
from ppl_gp.tracing import data_axis, is_gp, is_observed, run
from ppl_gp.wrappers import bare, bare_shape

_ROUNDINGS = 1e3


def mixing_sites(model: Declared, args: tuple, kwargs: dict, hyper: Mapping, f: Mapping) -> list[str]:
    """Sites whose row n changes with anything but its own arguments: GP sites by inputs, mean and kernel, observed ones by
    their log density.

    Half of the rows take the arguments of one row of the other half, which may not notice; rows that change places must take
    their terms along; a row more may change nothing. A kernel may be computed from no argument with one entry a datum (read
    off the jaxpr). Predictions of such a model would depend on which rows are asked for together, and minibatches see other
    inputs than all data do. Five runs of the model, O(N).
    """
    kernels = [k for k, _ in model.reading.kernels]
    leaves, axes = Leaves(model, args, kwargs), model.reading.row_axes
    rows = {p: jnp.asarray(leaves.arrays[p]) for p in axes if p in leaves.arrays and leaves.arrays[p].size}
    num = next((x.shape[axes[p]] for p, x in rows.items()), 0)
    if not model.reading.grows or num < 2 or any(x.shape[axes[p]] != num for p, x in rows.items()):
        return kernels

    def at(source, hyper, f) -> dict[str, np.ndarray]:
        taken = {p: jnp.take(x, source, axes[p]) for p, x in rows.items()}
        seen = _by_row(run(model, *leaves.replaced(taken), hyper, f))
        return {k: x for k, x in seen.items() if len(x) == len(source)}  # not of a plate that subsamples

    known = [{k: x for k, x in values.items() if _is_finite(x)} for values in (hyper, f)]  # a fit may have failed
    everyone, moves = np.arange(num), np.random.default_rng(0).permutation(num) < (num + 1) // 2
    here, moved = at(everyone, *known), at(np.where(moves, np.flatnonzero(~moves)[0], everyone), *known)
    found = {k for k in here if k in moved and _differ(here[k][~moves], moved[k][~moves])}
    if not _has_latents(model, here):  # which are drawn by their places
        alike = {k: x for k, x in known[0].items() if model.reading.axis(k) is None}
        first, turned = at(everyone, alike, {}), at(everyone[::-1], alike, {})
        longer = at(np.append(everyone, num - 1), alike, {})
        found |= {k for k in first if k in turned and _differ(first[k][::-1], turned[k])}
        found |= {k for k in first if k in longer and _differ(first[k], longer[k][:num])}
    return [*kernels, *(k for k in here if k in found and k not in kernels)]


def unpaired(priors: Mapping[str, GP]) -> dict[str, str]:
    """{GP site whose kernel is no function of two rows: why}: it has a training covariance, and none with new rows."""
    faults = {k: pair_fault(prior.kernel, prior.X) for k, prior in priors.items()}
    return {k: fault for k, fault in faults.items() if fault is not None}


def require_pairs(faults: Mapping[str, str]) -> None:
    """Raise `ModelError` where new rows, or inducing points, have no covariance with the training rows."""
    for name, fault in faults.items():
        raise ModelError(
            f"the kernel of GP site '{name}' is no function k(X1, X2) -> (N1, N2) of any two numbers of rows: {fault}. It reads "
            "something with one row a datum (distances computed before, weights), so that other rows have no covariance with the "
            "training rows. Put what the kernel needs of each row into the GP's inputs X, as columns, or index a fixed table by a "
            f"column of X. Laplace, EP, VI and NUTS fit the model as it stands; f at the training rows is in fit.latent['{name}']."
        )


def _has_latents(model: Declared, seen: Mapping) -> bool:
    """Whether a site stands one a datum that neither is a GP, nor observed, nor a factor."""
    return any(k not in seen for k, _ in model.reading.axes)


def _by_row(trace: dict) -> dict[str, np.ndarray]:
    """{site: (N, ...)}."""
    found = {}
    for name, site in trace.items():
        if is_gp(site) and site["data_axis"] is not None:
            found[name] = _gp_by_row(unwrap(site["fn"]))
        elif is_observed(site) and (axis := data_axis(site, len(bare_shape(site["fn"])))) is not None:
            found[name] = np.moveaxis(np.asarray(bare(site["fn"]).log_prob(site["value"])), axis, 0)
    return found


def _gp_by_row(gp) -> np.ndarray:
    """Inputs, means, and a number that tells of the kernel at fixed inputs, (N, columns)."""
    num = gp.X.shape[0]
    mean = np.reshape(np.moveaxis(np.asarray(gp.mean), -1, 0), (num, -1))
    kernel = np.full((num, 1), float(np.asarray(kernel_at_constants(gp))[0, 1]))
    return np.concatenate([np.reshape(np.asarray(gp.X), (num, -1)), mean, kernel], 1)


def _is_finite(value) -> bool:
    return all(bool(np.all(np.isfinite(x))) for x in jax.tree.leaves(value))


def _differ(a, b) -> bool:
    close = np.abs(a - b) <= _ROUNDINGS * np.finfo(np.result_type(a, float)).eps * (1.0 + np.abs(a))
    return not np.all(close | (a == b) | (np.isnan(a) & np.isnan(b)))
