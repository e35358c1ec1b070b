"""The pictures of a comparison, written to its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ppl_gp.cli.data import Preparation
from ppl_gp.cli.run import Files, Problem, Recorder
from ppl_gp.errors import DataError
from ppl_gp.results import plots
from ppl_gp.results.compare.scores import is_classification
from ppl_gp.results.fit import Fit


def write_pictures(
    recorder: Recorder,
    problem: Problem,
    inputs: Sequence[str],
    labels: Sequence[str] | None = None,
    title: str = "",
) -> None:
    """evidence.png, forest.png, calibration.png, and band.png (one input) or surface.png (two,
    binary observations).
    """
    _without_display()
    for name, figure in _figures(recorder, problem, inputs, labels):
        _save(figure, recorder.files.path(name), title)


def require_drawable(path: Path, problem: Problem) -> None:
    """Raise `DataError`, before any work, where no picture shows the inputs."""
    inputs = next(iter(problem.names.values())).columns
    if path.suffix != ".png":
        raise DataError(f"--plot {path}: give the name of a PNG file, FILE.png.")
    binary = set(np.unique(problem.y).tolist()) <= {0, 1}
    if problem.X.shape[1] > 2 or (problem.X.shape[1] == 2 and not binary):
        raise DataError(
            f"--plot shows one input, or two with a target of two outcomes; the inputs are "
            f"{list(inputs or ())}. Leave it out, or draw terms by ppl_gp.results.part_plots."
        )


def write_picture(
    path: Path, fits: Mapping[str, Fit], problem: Problem, preparation: Preparation
) -> None:
    """The fits over one input or two, on the file's own scale, one panel a method."""
    _without_display()
    draw = plots.plot_band if problem.X.shape[1] == 1 else plots.plot_surface
    figure = draw(fits, problem.X, problem.y, **problem.kwargs)
    for ax in figure.axes[: len(fits)]:
        for axis, shift, scale in zip(
            (ax.xaxis, ax.yaxis), preparation.shift, preparation.scale, strict=False
        ):
            axis.set_major_formatter(lambda v, _, a=shift, b=scale: f"{a + b * v:.4g}")
    _save(figure, path, "")


def write_surface(
    files: Files,
    fits: Mapping[str, Fit],
    problem: Problem,
    inputs: Sequence[str],
    labels: Sequence[str],
    title: str,
) -> None:
    """surface.png: p(y = 1) over two inputs by each fit, and the training rows."""
    _without_display()
    figure = plots.plot_surface(
        fits, problem.X, problem.y, labels=inputs, classes=labels, **problem.kwargs
    )
    _save(figure, files.path("surface.png"), title)


def _save(figure, path, title: str) -> None:
    import matplotlib.pyplot as plt

    if title:
        # which the layout keeps room for
        figure.supxlabel(title, x=0.995, ha="right", fontsize=8, color="grey")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _without_display() -> None:
    """Files only: no window, no display needed."""
    import matplotlib

    matplotlib.use("Agg")


def _figures(recorder: Recorder, problem: Problem, inputs, labels):
    comparison, fits = recorder.comparison, recorder.comparison.fits
    X_test, y_test, kwargs = problem.X_test, problem.y_test, problem.kwargs
    if any(row["log_evidence"] is not None for row in comparison.table):
        yield "evidence.png", plots.plot_evidence(comparison)
    yield "forest.png", plots.plot_forest(fits)
    yield "calibration.png", plots.plot_calibration(fits, X_test, y_test, **kwargs)
    if problem.X.shape[1] == 1:
        yield "band.png", plots.plot_band(fits, problem.X, problem.y, xlabel=inputs[0], **kwargs)
    prediction = next(iter(fits.values())).predict(X_test, **kwargs)
    if problem.X.shape[1] == 2 and is_classification(prediction) and prediction.probs.ndim == 1:
        words = labels or ("y = 0", "y = 1")
        yield (
            "surface.png",
            plots.plot_surface(fits, problem.X, problem.y, labels=inputs, classes=words, **kwargs),
        )
