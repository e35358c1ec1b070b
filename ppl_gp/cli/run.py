"""Fitting one method after another, with every method's files written as soon as it ends;
and method names on the command line to configured methods.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppl_gp.errors import DataError, PplGpError, Result
from ppl_gp.frames.names import Names
from ppl_gp.infer.fit import fit
from ppl_gp.infer.mcmc.elliptical import EllipticalSlice
from ppl_gp.infer.mcmc.nuts import NUTS
from ppl_gp.infer.mcmc.sparse_nuts import SparseNUTS
from ppl_gp.local.bound import LocalBound
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.vi import VI
from ppl_gp.results.compare.compare import Comparison
from ppl_gp.results.compare.table import WIDTH, verdict
from ppl_gp.results.fit import Fit
from ppl_gp.settings import MAP, Sample
from ppl_gp.sparse.svgp import SVGP

LOCAL = {"laplace": Laplace, "ep": EP, "vi": VI, "bound": LocalBound}
DRAWS = {"nuts": NUTS, "slice": EllipticalSlice, "sparse-nuts": SparseNUTS}
NAMES = (*LOCAL, "svgp", *DRAWS)


class Effort(NamedTuple):
    """How hard to try: restarts of the maximiser, or lengths of the chains."""

    restarts: int = 1
    num_warmup: int = 500
    num_samples: int = 500
    num_chains: int = 2
    sample_hyper: bool = False  # local methods: NUTS over hyperparameters, not their maximum
    max_tree_depth: int = 10  # of nuts and sparse-nuts: at most 2^depth - 1 leapfrog steps a draw
    target_accept_prob: float = 0.8


def configured(name: str, effort: Effort):
    """The method of this name at this effort."""
    chains = {k: getattr(effort, k) for k in ("num_warmup", "num_samples", "num_chains")}
    if name in DRAWS:
        depth = {} if name == "slice" else {"max_tree_depth": effort.max_tree_depth}
        return DRAWS[name](**chains, target_accept_prob=effort.target_accept_prob, **depth)
    if name == "svgp":
        if effort.sample_hyper:
            raise DataError("svgp does not sample hyperparameters; the method sparse-nuts does.")
        return SVGP()
    hyper = Sample(**chains) if effort.sample_hyper else MAP(restarts=effort.restarts)
    return LOCAL[name](hyper=hyper)


def parse(names: str) -> list[str]:
    """The names in a comma-separated list, in its order; `DataError` for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in NAMES]:
        raise DataError(f"--methods {','.join(unknown)}: give some of {','.join(NAMES)}.")
    if not wanted:
        raise DataError(f"--methods is empty; give some of {','.join(NAMES)}.")
    return list(dict.fromkeys(wanted))


INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


def say(text: str) -> None:
    """A line for the user on stderr, where the progress bars are."""
    print(text, file=sys.stderr, flush=True)


def wrapped(text: str) -> str:
    """A sentence in lines of at most `WIDTH` columns; those that follow are set in."""
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", **how)


@dataclasses.dataclass
class Problem:
    """A model with training and test data; `kwargs` are its options (link="probit"), `names` what
    the file calls columns and labels, which every fit keeps.
    """

    model: Callable
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: Names = dataclasses.field(default_factory=Names)


@dataclasses.dataclass
class Outcome:
    """Fits by name, the errors of methods that failed, and whether the run was interrupted."""

    fits: dict[str, Fit] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0; 2 where a method could not be run; 130 after Ctrl-C."""
        return INTERRUPTED if self.interrupted else 2 if self.errors else 0


def fit_methods(
    problem: Problem, names: Iterable[str], effort: Effort, seed: int, each: Callable
) -> Outcome:
    """Fit every method in turn and call each(name, fit) as soon as one ends. A typed error is
    reported and the next method tried; Ctrl-C ends the run, and what was finished is kept.
    """
    outcome = Outcome()
    for name in names:
        try:
            fitted = fit_one(problem, name, effort, seed)
            _report(name, fitted)
            outcome.fits[name] = fitted
            outcome.interrupted = fitted.result is Result.interrupted
            each(name, fitted)
        except PplGpError as error:
            outcome.errors[name] = str(error)
            say(f"{name}: {error}")
        except KeyboardInterrupt:
            outcome.interrupted = True
        if outcome.interrupted:
            say(f"interrupted during {name}; what was finished is kept.")
            break
    return outcome


def fit_one(problem: Problem, name: str, effort: Effort, seed: int) -> Fit:
    """Fit the method of this name to the training data, with a progress bar; no status raises."""
    X, y, how = problem.X, problem.y, {"throw": False, "progress": True}
    fitted = fit(problem.model, configured(name, effort), seed, X, y=y, **how, **problem.kwargs)
    fitted.names = problem.names
    return fitted


def _report(name: str, fitted: Fit) -> None:
    evidence = "" if fitted.log_evidence is None else f", log evidence {fitted.log_evidence:.3f}"
    evidence += "" if fitted.log_evidence_se is None else f" (se {fitted.log_evidence_se:.2g})"
    say(f"{name}: {fitted.result} in {fitted.stats['seconds']:.1f} s{evidence}")
    if fitted.result not in (Result.converged, Result.interrupted):
        say(wrapped(f"{name}: {fitted.result.message} See {fitted.result.help}"))


class Files:
    """The files that a run writes into one folder."""

    def __init__(self, out: Path):
        self.out, self.written = out, []
        try:
            out.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise DataError(f"--out {out} is a file; give a folder for the results.") from error

    def path(self, name: str) -> Path:
        """A file of this run, remembered."""
        if (path := self.out / name) not in self.written:
            self.written.append(path)
        return path

    def tell(self) -> None:
        print("\n".join(str(path) for path in self.written if path.exists()))


def write_fit(files: Files, name: str, fitted: Fit, save: bool) -> None:
    """NAME.nc: the posterior as NetCDF; NAME.fit: the saved fit, on request."""
    fitted.to_datatree().to_netcdf(files.path(f"{name}.nc"), engine="h5netcdf")
    if save:
        fitted.save(files.path(f"{name}.fit"))


class Recorder:
    """Writes posterior (NetCDF), table (CSV) and, on request, the fit as each method ends."""

    def __init__(self, problem: Problem, files: Files, save_fits: bool = False):
        self.files, self.save_fits = files, save_fits
        self.comparison = Comparison(problem.X_test, problem.y_test, (), problem.kwargs)

    def __call__(self, name: str, fitted: Fit) -> None:
        write_fit(self.files, name, fitted, self.save_fits)
        self.comparison.add(name, fitted)
        self.comparison.to_csv(self.files.path("table.csv"))

    def sentences(self) -> list[str]:
        """A verdict per method; draws that have not mixed are no reference to judge others by."""
        c, unknown = self.comparison, {"mean_distance": None, "log_density_gap": None}
        reference = c.fits.get(c.reference_name or "")
        mixed = reference is not None and reference.result is Result.converged
        rows = c.table if mixed else [{**row, **unknown} for row in c.table]
        return [verdict(row, c.reference_name, c.reference_error) for row in rows]
