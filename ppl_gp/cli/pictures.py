"""The pictures of a comparison, written to its folder."""

from collections.abc import Sequence

from ppl_gp.cli.run import Problem, Recorder
from ppl_gp.results import plots
from ppl_gp.results.compare.scores import is_classification


def write_pictures(
    recorder: Recorder, problem: Problem, inputs: Sequence[str], labels: Sequence[str] | None = None, title: str = ""
) -> None:
    """evidence.png, forest.png, calibration.png, and band.png (one input) or surface.png (two, binary observations)."""
    import matplotlib

    matplotlib.use("Agg")  # files only: no window, no display needed
    import matplotlib.pyplot as plt

    for name, figure in _figures(recorder, problem, inputs, labels):
        if title:
            figure.text(0.995, 0.005, title, ha="right", va="bottom", fontsize=8, color="grey")
        figure.savefig(recorder.files.path(name), dpi=120)
        plt.close(figure)


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
        yield "surface.png", plots.plot_surface(fits, problem.X, problem.y, labels=inputs, classes=words, **kwargs)
