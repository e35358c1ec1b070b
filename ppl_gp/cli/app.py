"""The commands: arguments in, one line out for every typed error (exit code 2, no traceback)."""

import functools
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import pandas as pd
import typer
from threadpoolctl import threadpool_limits

from ppl_gp import __version__
from ppl_gp.cli.data import Preparation, digest
from ppl_gp.cli.demo import METHODS as DEMO_METHODS
from ppl_gp.cli.demo import require_drawable, run_demo, write_picture, write_pictures
from ppl_gp.cli.problem import load_model, read_problem
from ppl_gp.cli.run import (
    INTERRUPTED,
    NAMES,
    Effort,
    Files,
    Recorder,
    fit_methods,
    parse,
    say,
    wrapped,
    write_fit,
)
from ppl_gp.cli.tables import Columns, read_table
from ppl_gp.errors import DataError, ModelError, PplGpError
from ppl_gp.infer.checklist.check import check as check_model
from ppl_gp.quick import cache
from ppl_gp.reading.arguments import argument_names
from ppl_gp.results.fit import Fit
from ppl_gp.results.load import load
from ppl_gp.results.predict.prediction import Prediction, is_classification, outcome_probabilities

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(metavar="MODEL.py:FUNCTION", help="The declared model.")]
ALL = ", ".join(NAMES)
DEMO_ALL = ",".join(DEMO_METHODS)
Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA.csv",
        help="One row per datum; the first row names the columns. Or DATA.parquet.",
    ),
]
Target = Annotated[str, typer.Option(help="The column of the observations; all others are inputs.")]
Out = Annotated[Path, typer.Option(help="Folder for the results, which is made if need be.")]
Methods = Annotated[str, typer.Option(help=f"Separated by commas, some of: {ALL}.")]
Restarts = Annotated[int, typer.Option(min=1, help="Starts of the hyperparameters' maximisation.")]
NumWarmup = Annotated[int, typer.Option(min=1, help="Warm-up transitions of a chain.")]
NumSamples = Annotated[int, typer.Option(min=1, help="Draws of a chain.")]
NumChains = Annotated[int, typer.Option(min=1, help="Chains.")]
SampleHyper = Annotated[
    bool, typer.Option("--sample-hyper", help="Local methods sample the hyperparameters by NUTS.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of everything random.")]
Standardise = Annotated[
    bool, typer.Option(help="Shift and scale the inputs to mean 0 and standard deviation 1.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Draw the fits: over one input, two of a binary target, or --along one of several.",
    ),
]
Along = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN", help="The input that varies in --plot, the others held at their medians."
    ),
]
Setting = Annotated[
    list[str],
    typer.Option("--set", metavar="NAME=VALUE", help="An option of the model, link=probit."),
]


def _tell_version(asked: bool) -> bool:
    if asked:
        print(f"ppl-gp {__version__}")
        raise typer.Exit()
    return asked  # what the command is given


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Version.")
    ] = False,
):
    """Gaussian-process models declared in NumPyro, fitted by every method and compared. Computes in
    float64.
    """


def _keep_compiled() -> None:
    """The next command finds what this process compiles, if there is a folder for it."""
    try:
        cache()
    except DataError as error:
        say(f"compiled functions are not kept: {error}")


def _command(command):
    """A command. A typed error, or an unusable file, is one line and exit code 2; Ctrl-C is 130."""

    @functools.wraps(command)
    def wrapped(*args, **kwargs):
        try:
            jax.config.update("jax_enable_x64", True)
            os.environ["MPLBACKEND"] = "Agg"  # files only: no window, no display needed
            _keep_compiled()
            # Threads cost more than they give at a few hundred rows: 20 times on shared cores.
            threadpool_limits(1, user_api="blas")
            code = command(*args, **kwargs)
        except (PplGpError, OSError) as error:
            say(f"error: {' '.join(str(error).split())}")
            code = 2
        except KeyboardInterrupt:
            say("interrupted.")
            code = INTERRUPTED
        raise typer.Exit(code or 0)

    return app.command()(wrapped)


@_command
def check(
    model: Model,
    data: Data,
    target: Target,
    standardise: Standardise = True,
    settings: Setting = [],  # noqa: B006
):
    """Check a model against data and print the findings; exit code 1 if anything is wrong."""
    problem, _ = read_problem(model, data, target, standardise, 0.0, 0, settings)
    found = check_model(problem.model, problem.X, y=problem.y, **problem.kwargs)
    print(found)
    return 0 if found.ok else 1


@_command
def fit(
    model: Model,
    data: Data,
    target: Target,
    methods: Methods = "ep",
    out: Out = Path("ppl_gp_out"),
    restarts: Restarts = 1,
    num_warmup: NumWarmup = 500,
    num_samples: NumSamples = 500,
    num_chains: NumChains = 2,
    sample_hyper: SampleHyper = False,
    seed: Seed = 0,
    standardise: Standardise = True,
    plot: Plot = None,
    along: Along = None,
    settings: Setting = [],  # noqa: B006
):
    """Fit by each method; write METHOD.fit, METHOD.nc (posterior) and preparation.json to --out."""
    names = parse(methods)
    problem, preparation = read_problem(model, data, target, standardise, 0.0, seed, settings)
    if plot is not None or along is not None:
        require_drawable(plot, problem, along)
    files = Files(out)

    def keep(name, fitted):
        # with the first fit: a run without one leaves an earlier run's files as they fit each other
        preparation.save(files.path("preparation.json"))
        write_fit(files, name, fitted, save=True)

    effort = Effort(restarts, num_warmup, num_samples, num_chains, sample_hyper)
    outcome = fit_methods(problem, names, effort, seed, keep)
    if plot is not None and outcome.fits:
        write_picture(plot, outcome.fits, problem, preparation, along)
        print(plot)
    files.tell()
    return outcome.exit_code


@_command
def predict(
    model: Model,
    data: Data,
    saved: Annotated[
        Path, typer.Option("--fit", help="METHOD.fit as written by `ppl-gp fit`, in its folder.")
    ],
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path("predictions.csv"),
    quantiles: Annotated[
        str, typer.Option(help="Levels of the quantiles of a new observation.")
    ] = "0.05,0.5,0.95",
):
    """Predict at every row of DATA.csv from a saved fit; the training data are not needed."""
    if not saved.is_file():
        raise DataError(f"--fit {saved} is no file; give METHOD.fit as `ppl-gp fit` wrote it.")
    preparation = Preparation.load(saved.parent / "preparation.json")
    try:
        levels = tuple(map(float, quantiles.split(",")))
    except ValueError as error:
        raise DataError(f"--quantiles {quantiles}: give levels such as 0.05,0.5,0.95.") from error
    fitted, columns = load(saved, load_model(model)), read_table(data)
    require_same_run(saved, fitted, preparation)
    X = preparation.X(columns)
    found = fitted.predict(X)
    if not (isinstance(found.mean, dict) or is_classification(found)):
        found = fitted.predict(X, quantiles=levels)
    write_predictions(out, found, preparation, columns, levels)
    print(out)


@_command
def compare(
    model: Model,
    data: Data,
    target: Target,
    methods: Methods = "laplace,ep,vi,nuts",
    out: Out = Path("ppl_gp_out"),
    restarts: Restarts = 1,
    num_warmup: NumWarmup = 500,
    num_samples: NumSamples = 500,
    num_chains: NumChains = 2,
    sample_hyper: SampleHyper = False,
    test_fraction: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Share of the rows kept for testing.")
    ] = 0.25,
    seed: Seed = 0,
    save: Annotated[
        bool, typer.Option("--save", help="Also save every fit, for `predict`.")
    ] = False,
    standardise: Standardise = True,
    settings: Setting = [],  # noqa: B006
):
    """Fit by each method, score on held-out rows; write table, pictures and posteriors to --out."""
    names = parse(methods)
    problem, preparation = read_problem(
        model, data, target, standardise, test_fraction, seed, settings
    )
    recorder = Recorder(problem, Files(out), save)
    preparation.save(recorder.files.path("preparation.json"))
    effort = Effort(restarts, num_warmup, num_samples, num_chains, sample_hyper)
    outcome = fit_methods(problem, names, effort, seed, recorder)
    if outcome.fits:
        print(recorder.comparison)
        print("\n".join(map(wrapped, recorder.sentences())))
    if outcome.fits and not outcome.interrupted:
        write_pictures(recorder, problem, tuple(preparation.inputs), preparation.labels)
    recorder.files.tell()
    return outcome.exit_code


@_command
def demo(
    out: Out = Path("demo_out"),
    model: Annotated[str, typer.Option(help="The classifier to run.")] = "",
    num_train: Annotated[int, typer.Option(min=10, help="Training rows of each data set.")] = 300,
    num_warmup: NumWarmup = 200,
    num_samples: NumSamples = 400,
    num_chains: NumChains = 1,
    methods: Methods = DEMO_ALL,
    seed: Seed = 0,
):
    """One classifier of two real data sets by several methods: table, pictures, and verdicts."""
    own = find_spec("ppl_gp.models.classification")  # in a wheel and in a clone
    effort = Effort(1, num_warmup, num_samples, num_chains)
    declared = load_model(model or f"{own and own.origin}:binary")
    return run_demo(declared, out, parse(methods), effort, num_train, seed)


def require_same_run(saved: Path, fit: Fit, preparation: Preparation) -> None:
    """Raise `DataError` if a fit has other inputs or labels than its folder's preparation."""
    kept = saved.parent / "preparation.json"
    remedy = "(did a later run write there?); fit again, each data set into a folder of its own."
    if preparation.digest and preparation.digest not in map(digest, fit.args[:1]):
        raise DataError(f"{saved} was fitted to other inputs than {kept} lists {remedy}")
    for name, now in preparation.names(argument_names(fit.model, 1)[0]).items():
        then = fit.names.get(name)
        if then and (then.columns, then.levels) != (now.columns, now.levels):
            raise DataError(
                f"{saved} was fitted to {then.columns} with the labels {list(then.levels)}, and "
                f"{kept} has {now.columns} with {list(now.levels)} {remedy}"
            )


_FROM_PYTHON = "predict from Python: pg.load(...).predict(X_new)."


def write_predictions(
    path: Path, prediction: Prediction, preparation: Preparation, columns: Columns, levels: tuple
) -> None:
    """One row per input row: its number and inputs as they are in the file, mean and standard
    deviation of f; p(y = k) for each label, else mean, sd and quantiles of y at these `levels`.
    """
    if isinstance(prediction.f_mean, dict) or isinstance(prediction.mean, dict):
        raise ModelError(f"the model has several GP or observed sites; {_FROM_PYTHON}")
    table, classes = {}, is_classification(prediction)
    if not classes or np.ndim(prediction.f_mean) < 2:  # else only differences of f are known
        table = {"f_mean": prediction.f_mean, "f_sd": np.sqrt(np.asarray(prediction.f_variance))}
    if classes:
        probs = outcome_probabilities(prediction)
        labels = preparation.labels or [str(k) for k in range(probs.shape[1])]
        if len(labels) != probs.shape[1]:
            raise DataError(
                f"the fit has {probs.shape[1]} outcomes, and preparation.json the labels {labels}."
            )
        table |= {f"p({label})": probs[:, k] for k, label in enumerate(labels)}
    elif prediction.mean is not None:
        table |= {"mean": prediction.mean, "sd": np.sqrt(np.asarray(prediction.variance))}
    if prediction.quantiles is not None:
        ends = np.asarray(prediction.quantiles)
        table |= {f"y_{level:g}": ends[i] for i, level in enumerate(levels)}
    if several := {name: np.shape(x) for name, x in table.items() if np.ndim(x) != 1}:
        raise ModelError(f"a row has several values of {several}; {_FROM_PYTHON}")
    taken = {*table, "row"}
    cells = {f"{k} (input)" if k in taken else k: columns.cells(k) for k in preparation.inputs}
    rows = {"row": range(1, len(columns.rows) + 1)}
    pd.DataFrame({**rows, **cells, **table}).to_csv(path, index=False, na_rep="nan")
