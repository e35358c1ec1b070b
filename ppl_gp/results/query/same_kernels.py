"""Whether the kernels and means at a prediction's arguments are those of training: one function for
training rows, new rows and both.
"""

import jax
import numpy as np

from ppl_gp.errors import DataError
from ppl_gp.gp import GP, unwrap
from ppl_gp.kernels.pairs import kernels_differ
from ppl_gp.model.arguments import Leaves, argument_of
from ppl_gp.model.predictor_prior import PredictorGP
from ppl_gp.model.tracing import run
from ppl_gp.results.record import Record


def require_same_kernels(fit: Record, new_args: tuple, new_kwargs: dict) -> None:
    """Raise `DataError` where an argument that is given anew changes a kernel, or the mean of the
    training rows: the training covariance, and what the data told, have the old one.

    Compared at the training inputs, where a larger table that a kernel looks up says what the
    smaller one said. Nothing is run unless an argument without an axis of the data has changed.
    """
    changed = _changed(fit, Leaves(fit.model, new_args, new_kwargs))
    if not changed:
        return
    first = fit.draws.at(0)
    trained = run(fit.model, fit.args, fit.kwargs, first.known, first.values)
    new = run(fit.model, new_args, new_kwargs, first.hyper)
    for name in fit.latent:
        prior, other = unwrap(trained[name]["fn"]), unwrap(new[name]["fn"])
        if _means_differ(prior, other):
            raise DataError(
                f"the prior mean of '{name}' at the training rows is another one with what is "
                f"given for {changed} than in training: the data have told about the old one. "
                "Leave it out (it is remembered), or fit again."
            )
        if kernels_differ(prior.kernel, other.kernel, prior.X):
            raise DataError(
                f"the kernel of GP site '{name}' is another one with what is given for {changed} "
                "than in training: training rows and new rows would have no common covariance. "
                "Leave it out (it is remembered), fit again, or, where it holds one entry a row, "
                "put it into the GP's inputs X as a column."
            )


def _means_differ(prior: GP, other: GP) -> bool:
    """At the training rows; a mean that cannot be computed there (an array of one entry a new row)
    is not judged.
    """
    try:
        there = (
            PredictorGP(other.kernel, prior.X).mean
            if isinstance(other, PredictorGP)
            else GP(other.kernel, prior.X, other.mean_function).mean
        )
        return not np.allclose(prior.mean, there, rtol=1e-9, atol=1e-12)
    except (TypeError, ValueError):
        return False


def _changed(fit: Record, new: Leaves) -> list[str]:
    """Paths of what a kernel could be computed from, no row's and no observation, whose value is
    not the one of training.
    """
    reading, trained = fit.model.reading, Leaves(fit.model, fit.args, fit.kwargs).leaves
    skipped = {*reading.row_axes, *(p for p in new.arrays if p not in reading.shaping), "y"}
    others = {p: x for p, x in new.leaves.items() if not {p, argument_of(p)} & skipped}
    return [p for p, x in others.items() if p in trained and not _same(x, trained[p])]


def _same(a, b) -> bool:
    try:
        return a is b or (np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a == b))))
    except (TypeError, ValueError, jax.errors.JAXTypeError):  # an option that cannot be compared
        return False
