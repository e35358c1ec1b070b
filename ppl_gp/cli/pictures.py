"""The pictures of a comparison, written to its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ppl_gp.cli.data import Preparation
from ppl_gp.cli.run import Problem, Recorder
from ppl_gp.errors import DataError
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.report import pictures as plots
from ppl_gp.report import slices
from ppl_gp.results.fit import Fit
from ppl_gp.results.predict.prediction import is_classification


def write_pictures(
    recorder: Recorder, problem: Problem, inputs: Sequence[str], labels=None, title: str = ""
) -> None:
    """evidence, forest, calibration; band (one input) or surface (two, binary observations)."""
    for name, figure in _figures(recorder, problem, inputs, labels):
        save_figure(figure, recorder.files.path(name), title)


def require_drawable(path: Path | None, problem: Problem, along: str | None = None) -> None:
    """Raise `DataError`, before any work, where no picture shows the inputs."""
    inputs = list(next(iter(problem.names.values())).columns or ())
    if path is None:
        raise DataError(f"--along {along}: give the name of the picture too, --plot FILE.png.")
    if path.suffix != ".png":
        raise DataError(f"--plot {path}: give the name of a PNG file, FILE.png.")
    if not path.parent.is_dir():
        raise DataError(f"--plot {path}: there is no folder {path.parent}; make it first.")
    if along is not None and along not in inputs:
        raise DataError(f"--along {along}: the inputs are {inputs}; give one.")
    num = problem.X.shape[1]
    drawn = num == 1 or (num == 2 and _is_binary(problem))
    if along is None and (_holds_words(problem) or not drawn):
        raise DataError(
            f"--plot shows one input of numbers, or two with a target of two outcomes; the inputs "
            f"are {inputs}. Give --along with one of them: the others are held at their medians."
        )


def _is_binary(problem: Problem) -> bool:
    return set(np.unique(problem.y).tolist()) <= {0, 1}


def _holds_words(problem: Problem) -> bool:
    """Whether an input is the integers of labels, between which there is nothing to draw."""
    return any(next(iter(problem.names.values()), ArrayNames()).levels)


def write_picture(
    path: Path, fits: Mapping[str, Fit], problem: Problem, preparation: Preparation, along=None
) -> None:
    """The fits over one or two inputs, or a slice along one, in the file's units; a panel each."""
    X, y, kwargs, one = problem.X, problem.y, problem.kwargs, problem.X.shape[1] == 1
    scales = list(zip(preparation.shift, preparation.scale, strict=True))
    how = _shown(fits, problem) if along is not None or one else {}
    if along is not None:
        units = dict(zip(preparation.inputs, scales, strict=True))
        figure = slices.plot_predictions(fits, X, y, along=along, units=units, **how, **kwargs)
    else:
        draw = slices.plot_predictions if one else plots.plot_surface
        figure = draw(fits, X, y, **how, **kwargs)
        for ax in figure.axes[: len(fits)]:
            for axis, (shift, scale) in zip((ax.xaxis, ax.yaxis), scales, strict=False):
                axis.set_major_formatter(lambda v, _, a=shift, b=scale: f"{a + b * v:.4g}")
    save_figure(figure, path)


def _shown(fits: Mapping[str, Fit], problem: Problem) -> dict:
    """Show y with the data; for two outcomes the function by its name, which may be more than f."""
    (site, *_) = next(iter(fits.values())).latent or ("f",)
    return {"observed": not _is_binary(problem), "flabel": site}


def save_figure(figure, path, title: str = "") -> None:
    """As a PNG file, with a title at the bottom."""
    import matplotlib.pyplot as plt

    if title:
        # which the layout keeps room for
        figure.supxlabel(title, x=0.995, ha="right", fontsize=8, color="grey")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _figures(recorder: Recorder, problem: Problem, inputs, labels):
    comparison, fits = recorder.comparison, recorder.comparison.fits
    X_test, y_test, kwargs = problem.X_test, problem.y_test, problem.kwargs
    if any(row["log_evidence"] is not None for row in comparison.table):
        yield "evidence.png", plots.plot_evidence(comparison)
    yield "forest.png", plots.plot_forest(fits)
    yield "calibration.png", plots.plot_calibration(fits, X_test, y_test, **kwargs)
    words = _holds_words(problem)
    if problem.X.shape[1] == 1 and not words:
        how = {"xlabel": inputs[0], **_shown(fits, problem), **kwargs}
        yield "band.png", slices.plot_predictions(fits, problem.X, problem.y, **how)
    prediction = next(iter(fits.values())).predict(X_test, **kwargs)
    binary = is_classification(prediction) and prediction.probs.ndim == 1
    if problem.X.shape[1] == 2 and binary and not words:
        how = {"labels": inputs, "classes": labels or ("y = 0", "y = 1"), **kwargs}
        yield "surface.png", plots.plot_surface(fits, problem.X, problem.y, **how)
