"""`Fit`: a record of what was inferred with the verbs that ask it."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ppl_gp.errors import DataError, FitError, ModelError, Result
from ppl_gp.reading.arguments import argument_names, argument_of, require_no_such_argument
from ppl_gp.reading.reading import require_unchanged
from ppl_gp.reading.refusals import of_the_model
from ppl_gp.results.datatree import to_datatree
from ppl_gp.results.loo import loo
from ppl_gp.results.parts import components, effects, function_rows
from ppl_gp.results.predict.prediction import predict, sample
from ppl_gp.results.predict.scores import infer_latents, log_density
from ppl_gp.results.query.layout import observed_argument
from ppl_gp.results.record import Record, unfolded
from ppl_gp.results.store.save import save
from ppl_gp.results.symmetry import Symmetry, symmetries
from ppl_gp.runtime import one_at_a_time

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_T = TypeVar("_T")


def _verb(function: Callable[..., _T]) -> Callable[..., _T]:
    """A question to a fit: by one thread at a time, and of the model that was fitted.

    Inputs may go by the model's name of them, as in `fit`. Given by name, the question's own
    argument after the inputs leaves all positions to the model's arguments.
    """
    order = [*inspect.signature(function).parameters]
    place = order.index("X_new") if "X_new" in order else 0
    own = next((k for k in ("y_new", "num_samples") if k in order), None)
    kinds = {k: p.kind for k, p in inspect.signature(function).parameters.items()}
    options = [k for k, kind in kinds.items() if k == own or kind is inspect.Parameter.KEYWORD_ONLY]
    options = options if inspect.Parameter.VAR_KEYWORD in kinds.values() else []

    @functools.wraps(function)
    def ask(self, *args, **kwargs):
        require_unchanged(self.model)
        require_no_such_argument(self.model, function.__name__, options, self.kwargs)
        _require_numbers(self, function.__name__)
        if len(args) < place and "X_new" not in kwargs:
            kwargs["X_new"] = _inputs(self, function.__name__, kwargs)
        if len(args) > place and own in kwargs:
            args = (*args[:place], kwargs.pop(own), *args[place:])
        return function(self, *args, **kwargs)

    return one_at_a_time(of_the_model(ask))


def _inputs(fit: Record, verb: str, kwargs: dict):
    """The model's first argument: by its own name, as in `fit`; a table is remembered."""
    name = argument_names(fit.model, 1)[0]
    if name in kwargs:
        return kwargs.pop(name)
    if fit.args and all(argument_of(p) != name for p in fit.model.reading.row_axes):
        return fit.args[0]
    raise DataError(f"{verb}() needs new inputs: give '{name}', the model's first argument, first.")


def _require_numbers(fit: Record, verb: str) -> None:
    """A fit that went wrong may have sites that are no numbers, which no answer comes from."""
    if fit.result in (Result.converged, Result.completed):
        return
    bad = [k for k, v in unfolded(fit.hyper).items() if not np.all(np.isfinite(np.asarray(v)))]
    if bad:
        raise FitError(
            f"{verb}: the fit ended as '{fit.result}', and what it has of {bad} is not finite. "
            f"{fit.result.message}",
            fit,
        )


def summary(fit: "Fit") -> "pd.DataFrame":
    """Summarise hyperparameters and effects in a table: mean, sd, 5 % and 95 % quantile.

    Returns
    -------
    pandas.DataFrame
        One row per entry, such as `u[2]` for an entry of a vector, or `net$params.weight[0,1]` for
        one of a network. The column `kind` is "draws" (weighted draws of the posterior), "marginal"
        (a distribution of `fit.sites`) or "point". A point has one value, in `mean`, and its spread
        is unknown (NaN).

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(level + f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=2.0 + np.sin(6.0 * x))
    >>> fit.summary().loc["level", "kind"]
    'marginal'
    """
    return _report("effects").summary(fit)


def plot(fit: "Fit", X=None, y=None, **options) -> "Figure":
    """Plot predictions with the data, by `pg.plot_predictions(fit, X, y, ...)`.

    Parameters
    ----------
    X, y : array or frame, default None
        The data to show. By default those of training, which a loaded fit does not have.
    **options
        Options of `plot_predictions`, such as `along="age"` for inputs with several columns.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    DataError
        As `plot_predictions`, for one of X and y, and for a loaded fit without both.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> figure = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x)).plot()
    >>> len(figure.axes)
    1
    """
    if (X is None) != (y is None):
        raise DataError("plot(): give both X and y, or neither for the training data.")
    name = observed_argument(fit.model)
    X, y = fit.args[0] if X is None and fit.args else X, fit.kwargs.get(name) if y is None else y
    if X is None or y is None:
        raise DataError(
            "plot(): this fit holds no training data (it was loaded, or fitted to a Stream); give "
            "the data to show, fit.plot(X, y)."
        )
    return _report("slices").plot_predictions(fit, X, y, **options)


def _report(name: str):
    """Tables and pictures are an edge of the package, and loaded when they are asked for."""
    return importlib.import_module(f"ppl_gp.report.{name}")


class Fit(Record):
    """A fitted model, which every method of `fit` returns.

    Ask it with its methods: `predict`, `log_density`, `sample`, `posterior`, `components`, `loo`,
    `summary`, `plot`, `to_datatree`, `infer_latents` and `save`.

    Attributes
    ----------
    result : Result
        How the run ended.
    log_evidence : float or None
        Log evidence, or a lower bound on it, at `hyper`, in nats. None if the hyperparameters were
        sampled, or Ctrl-C came before it was computed.
    hyper : dict
        {site: value} of hyperparameters, params and drawn latents, with a first axis of S draws if
        they were sampled.
    latent : Mapping
        {GP site: the approximate posterior of f}, with a first axis of S draws, or of 1.
    sites : dict
        {site: posterior} of the effects.
    draws : Draws
        The S weighted draws behind `hyper` and `latent`.
    sampled, num_chains : bool, int
        Whether the hyperparameters have draws, and of how many chains, one after another.
    local : dict
        {latent site with one entry per datum: its q(h)}.
    blocks : tuple
        The factors of `MeanField()`. Empty for other methods.
    stats : dict
        Numbers of the run: steps, residual, seconds, jitter and others.
    names : Names
        Columns, category labels and row labels of arguments that were frames or DataArrays.
    model, method, args, kwargs
        What `fit` was called with.

    Examples
    --------
    >>> def model(X, y=None):
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(slope * X, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=2.0 * x)
    >>> round(float(fit.sites["slope"].mean), 1)
    2.0
    """

    predict = _verb(predict)
    log_density = _verb(log_density)
    sample = _verb(sample)
    infer_latents = _verb(infer_latents)
    components = _verb(components)
    loo = _verb(loo)
    to_datatree = _verb(to_datatree)
    summary = _verb(summary)
    plot = one_at_a_time(plot)
    save = _verb(save)

    def _repr_html_(self) -> str:
        """As notebooks show it: effects are in `summary`, which may take seconds."""
        return _report("effects").as_html(self)

    @functools.cached_property
    def sites(self):
        """{site: posterior} of the integrated sites that are not GPs (`effects`).

        For `MeanField()`, the marginal of each site under q. For other fits without a GP, the
        draws.
        """
        require_unchanged(self.model)
        if self.blocks:
            return {k: d for q in self.blocks for k, d in q.distributions().items()}
        return effects(self) if self.latent else dict(self.draws.known)

    @functools.cached_property
    def factors(self) -> list[list[str]]:
        """The blocks of mean field: lists of sites that share a factor of q, discrete first."""
        if not self.blocks:
            raise ModelError(
                f"factors: {type(self.method).__name__} does not factorise; MeanField() does."
            )
        return [list(q.sites) for q in sorted(self.blocks, key=lambda q: not q.is_discrete)]

    @functools.cached_property
    def functions(self) -> tuple[str, ...] | None:
        """The name of each row of `f_mean` and `components`, such as ("f", "g - f").

        None with one function per row, and if the rows are the entries of a site.
        """
        require_unchanged(self.model)
        return function_rows(self)

    @functools.cached_property
    def symmetries(self) -> tuple[Symmetry, ...]:
        """Plates whose entries can swap places without changing the posterior (label switching)."""
        require_unchanged(self.model)
        _require_numbers(self, "symmetries")
        return symmetries(self)
