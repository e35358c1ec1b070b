"""Status as data (`Result`) and the typed errors that are raised at the boundary.

Inside compiled code a status is a small integer, `Result.<member>.code`; `Result.from_code` turns
it back. Every error names the argument, its value and the remedy. `FitError` carries the fit, so
nothing computed is lost. `help` of a result or an error is where the documentation says more.
"""

import enum
import os
import sys
import warnings
from typing import Any

# Relative to the repository: the heading of a result or an error is its name, and so its anchor.
_PAGE = "docs/troubleshooting.md"


# In a message of a `ModelError`: `fit` replaces it by the methods that take the model.
LISTED = "pg.check(model, ...) lists the methods that fit this model."
IN_ORDER = (
    "Where the model looks f up, f[index], pass X[index] to fit in place of X, and write f instead "
    "of f[index]. Declare a path over the rows over its times, and look it up, z[time]."
)
ONE_SITE = "Declare one observed site in a plate of the rows, not a site for each datum."
ONE_PAIR = (
    "Observe each pair as a row of its own: flatten y, pass the row numbers i and j of each pair "
    "as arguments, and write f[i] - f[j], or f[i] + f[j]."
)
ONE_TERM = (
    "Declare the factor in the plate of the rows, with one term per row: leave the sum over rows "
    "out."
)
ONE_TABLE = (
    "Give all observations as rows of one table, with a flag that says which they are: eta = "
    "jnp.where(is_z, eta_z, eta_y), and in the plate of the rows each observed site under its own "
    "numpyro.handlers.mask(mask=is_z), with any value where it is masked"
)

HERE = os.path.join(os.path.dirname(__file__), "")
_AROUND = ("contextlib", "jaxtyping", "beartype", "equinox", "jax", "numpyro", "sklearn")


def warn(message: str) -> None:
    """A `UserWarning` at the line outside of the package that called it, however deep the cause."""
    frame: Any = sys._getframe(1)
    user = frame
    while frame is not None:
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_filename.startswith(HERE) or (user is frame and name in _AROUND):
            user = frame.f_back or frame
        frame = frame.f_back
    registry = user.f_globals.setdefault("__warningregistry__", {})
    where = user.f_code.co_filename, user.f_lineno, user.f_globals.get("__name__")
    warnings.warn_explicit(message, UserWarning, *where, registry)


class Result(enum.StrEnum):
    """How an inference ended, as `fit.result`. The members are strings.

    `fit.result == "converged"` works. `fit` raises `FitError` unless the result is `converged`,
    `completed` or `interrupted`. `not_pointwise` is for methods of your own: for the package's
    methods, `NotPointwiseError` comes before any work.

    Examples
    --------
    >>> pg.Result.converged == "converged"
    True
    >>> pg.Result.converged.message
    'converged.'
    """

    converged = "converged"
    max_steps = "max_steps"
    nonfinite = "nonfinite"
    negative_curvature = "negative_curvature"
    negative_cavity = "negative_cavity"
    not_pointwise = "not_pointwise"
    interrupted = "interrupted"
    not_mixed = "not_mixed"
    completed = "completed"
    stream_ended = "stream_ended"
    diverged = "diverged"
    not_gaussian = "not_gaussian"

    @property
    def code(self) -> int:
        """The integer that represents this member in compiled code."""
        return list(Result).index(self)

    @classmethod
    def from_code(cls, code) -> "Result":
        """The member with this integer code. For several codes, pass the worst one."""
        return list(cls)[int(code)]

    @property
    def message(self) -> str:
        """What happened and what to do about it."""
        return _MESSAGES[self]

    @property
    def help(self) -> str:
        """The page and the section of the documentation about it."""
        return f"{_PAGE}#{self.value}"


_MESSAGES = {
    Result.converged: "converged.",
    Result.max_steps: "the step limit was reached before the tolerance; raise `max_steps` (MAP's "
    "where map_steps has reached it), loosen `tol`, or lower `damping` where the method has one.",
    Result.nonfinite: "a value that is not finite appeared; run pg.check(model, ...) and look at "
    "the data's scale, the jitter and the hyperparameters.",
    Result.negative_curvature: "the Gaussian's precision K^-1 + T stopped being positive "
    "definite (a likelihood that is not log-concave); try NUTS(), or for a model with a GP "
    "EP(power=0.5, damping=0.5).",
    Result.negative_cavity: "a cavity precision was not positive; lower EP's `power` or `damping`.",
    Result.not_pointwise: f"the likelihood couples several values of f. {LISTED}",
    Result.interrupted: "interrupted by the user; what was reached is kept.",
    Result.not_mixed: "the chains disagree or are too short to tell (r-hat above 1.05, fewer than "
    "10 effective draws a chain, or divergences); run more warm-up and samples, or raise "
    "target_accept_prob.",
    Result.completed: "the run ended as planned, by its steps or its patience; whether the bound "
    "had stopped rising is for fit.stats['bounds'] to show.",
    Result.stream_ended: "the stream of batches ended, or failed, before the last step; give an "
    "iterable that can (a list, a function that returns an iterator), or fewer max_steps.",
    Result.diverged: "all steps were made, and the bound ended far below its start; shuffle the "
    "rows of a stream, lower natural_rate and learning_rate, or take larger "
    "batches; fit.stats['bounds'] shows where it fell.",
    Result.not_gaussian: "the hyperparameters' posterior is not a Gaussian about its mode; "
    "Grid()'s points do not cover it (stats: grid_effective, grid_stretch, grid_missing_mass); use "
    "Sample().",
}


class PplGpError(Exception):
    """Base class of every error that ppl_gp raises on purpose.

    Attributes
    ----------
    help : str
        The page and the section of the documentation about it. It is a note of the error
        (`__notes__`): tracebacks end with it, but `str(error)` does not contain it.
    """

    help: str = f"{_PAGE}#errors"

    def __init_subclass__(cls):
        if cls.__module__ == __name__:  # another's subclass has the heading of its base
            cls.help = f"{_PAGE}#{cls.__name__.lower()}"

    def __init__(self, *args: object):
        super().__init__(*args)
        self.add_note(f"See {self.help}")


class DataError(PplGpError, ValueError):
    """The value of an argument cannot be used: NaN, a wrong shape, a label outside the support."""


class ModelError(PplGpError, ValueError):
    """The model does not suit the method: without a GP site, local latents, a GP fed by a GP."""


class NotPointwiseError(ModelError):
    """The likelihood of a datum depends on other values of f than the datum's own value."""


class NotConjugateError(ModelError):
    """`MeanField` needs a site's density to be affine in another factor's statistics."""


class StoreError(PplGpError, ValueError):
    """A file cannot be loaded: truncated, foreign, of another version or of another model."""


class MissingPackageError(PplGpError, ImportError):
    """An optional package is not installed, or too old. The message has the `pip install`."""


class FitError(PplGpError, RuntimeError):
    """An inference did not succeed.

    Attributes
    ----------
    fit : Fit
        Everything that was computed. `error.fit.result` says why it ended.
    help : str
        The section of the documentation about that result.
    """

    def __init__(self, message: str, fit: Any = None):
        if fit is not None:
            self.help = fit.result.help
        super().__init__(message)
        self.fit = fit
