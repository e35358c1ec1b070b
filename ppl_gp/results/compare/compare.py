"""`compare`: methods for one model in one table, judged by truths that none of them provides."""

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from rich.console import Group

from ppl_gp.draws import Moments
from ppl_gp.errors import DataError, ModelError, PplGpError
from ppl_gp.reading.arguments import argument_names, as_array, parameters_of
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.results.compare import table
from ppl_gp.results.compare.table import verdict
from ppl_gp.results.compare.truth import KHAT_LIMIT, importance_sampling
from ppl_gp.results.datatree import (
    draws_with_parts,
    moments_of,
    require_same_stream,
    training_moments,
)
from ppl_gp.results.fit import Fit
from ppl_gp.results.load import SavedMethod
from ppl_gp.results.parts import effects
from ppl_gp.results.predict import scores
from ppl_gp.results.query.layout import with_observations
from ppl_gp.results.record import Record
from ppl_gp.results.tree_groups import counted_rows

BATCHES = 20  # of draws
DRAWS = 4000  # of GPs behind a predictor: means to 1/60 of a standard deviation


class _Scored(NamedTuple):
    """A method's row, its log density of each test row, and the Monte Carlo error of their mean."""

    row: dict
    densities: np.ndarray
    noise: float


@dataclasses.dataclass
class Comparison:
    """Scores of fits of one model to the same data, from `compare`.

    `print` shows one column per method, and reports label switching (`fit.symmetries`). `table` is
    a list with one {quantity: value} per method. A value is None if it does not exist, with the
    reason in `notes`. `verdicts` has one text per method.

    Notes
    -----
    The quantities of `table`:

    - `result`, `compile_seconds`, `run_seconds`.
    - `log_evidence`, `log_evidence_se`: the log evidence or bound in nats, and its error if it is a
      mean over draws. `truth`, `truth_se`: importance-sampled, at the same hyperparameters.
    - `log_density`, `log_density_se`: mean over the test data, in nats per datum, and its standard
      error. `log_density_gap`, `log_density_gap_se`: minus that of the reference, compared row by
      row. Both errors include the Monte Carlo error of the fits' draws.
    - `error`, `error_name`, `calibration`, `calibration_name`: misclassified rows and expected
      calibration error, or the root mean squared error and the gap in the coverage of intervals.
    - `khat`, `efficiency`: Pareto k-hat of q(f) against the model, jointly, and the effective share
      of its draws. Neither depends on a mode without draws. `share`: the share of the evidence that
      q's draws cover. It is below 1 if a search found other modes, and there may be more.
    - `khat_datum`: the largest k-hat of the weights that remove one datum from q, or from the
      draws.
    - `elpd_loo`, `elpd_loo_se`: by `loo` of the fit, in nats.
    - `mean_distance`, `sd_distance`: largest difference of latent means and standard deviations at
      the training inputs from the reference, in its standard deviations. It includes how the
      reference treats the hyperparameters, and its Monte Carlo error (`reference_error`). It is
      computed site by site, effects included, if one method integrates a predictor that the other
      draws.
    """

    X_test: Any
    y_test: Any
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    reference: str | None = None
    rng_key: Any = 0
    num_importance_samples: int = 20_000
    fits: dict[str, Fit] = dataclasses.field(default_factory=dict)
    notes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    _scored: dict[str, _Scored] = dataclasses.field(default_factory=dict, repr=False)

    def add(self, name: str, fit: Fit) -> None:
        """Score one more fit. Raises `DataError` for other data, `ModelError` for another model."""
        _require_same_problem(self.fits, name, fit)
        self.notes[name] = []
        self._scored[name] = self._score(name, fit)
        self.fits[name] = fit

    def _score(self, name: str, fit: Fit) -> _Scored:
        log_density, noise = self._log_density(fit)
        error, calibration = self._errors(name, fit)
        row = {
            "method": name,
            "result": str(fit.result),
            "compile_seconds": fit.stats.get("compile_seconds"),
            "run_seconds": fit.stats.get("run_seconds"),
            **(evidence := self._evidence(name, fit)),
            "log_density": float(log_density.mean()),
            "log_density_se": _standard_error(log_density, noise),
            "error": error.value,
            "error_name": error.name,
            "calibration": calibration.value,
            "calibration_name": calibration.name,
            **self._leave_one_out(name, fit, evidence["khat_datum"]),
        }
        return _Scored(row, log_density, noise)

    def _log_density(self, fit: Fit) -> tuple[np.ndarray, float]:
        """(log density of each test row that counts, Monte Carlo error of their mean), nats.

        A draw is of all rows: of the rows' errors, which know how many draws are independent, the
        mean has the share that it has of their scatter between batches of draws.
        """
        data = (self.X_test, self.y_test, *self.args)
        found = fit.log_density(*data, **self.kwargs, with_error=True)
        rows = counted_rows(scores.trace_at(fit, *data[:2], self.args, self.kwargs))
        value, errors = (np.asarray(x)[rows] for x in found)
        each, noise = fit.draws.num // BATCHES, float(np.mean(errors))
        if not fit.sampled or fit.draws.is_weighted() or each == 0 or not np.isfinite(noise):
            return value, noise
        parts = np.arange(BATCHES * each).reshape(BATCHES, each)
        few = [dataclasses.replace(fit, draws=fit.draws.part(part)) for part in parts]
        ask = lambda f: np.asarray(f.log_density(*data, **self.kwargs))[rows]  # noqa: E731
        rise = np.exp([ask(f) - value for f in few])
        alone = np.mean(np.std(rise, 0))
        return value, noise * float(np.std(np.mean(rise, 1)) / alone) if alone > 0 else noise

    def _errors(self, name: str, fit: Fit) -> tuple[scores.Score, scores.Score]:
        """(error, calibration); of a model that observes its inputs, none."""
        if self.y_test is None:
            return scores.Score(None, "RMSE"), scores.Score(None, "coverage gap")
        given = self.X_test, self.y_test, self.args, self.kwargs
        try:
            scores.query_at(fit, self.X_test, *given[2:]).layout.require_apart()
        except DataError as told:
            self.notes[name].append(f"no error and calibration: {told}")
            return scores.Score(None, "RMSE"), scores.Score(None, "coverage gap")
        prediction, y, numbers = scores.judged(fit, *given)
        return scores.error(prediction, y), scores.calibration(prediction, y, numbers)

    def _evidence(self, name, fit) -> dict:
        truth = importance_sampling(fit, self.rng_key, self.num_importance_samples)
        if truth.reason is not None:
            self.notes[name].append(f"no importance-sampled evidence: {truth.reason}")
        return {
            "log_evidence": fit.log_evidence,
            "log_evidence_se": fit.log_evidence_se,
            "truth": truth.log_evidence,
            "truth_se": truth.standard_error,
            "khat": truth.khat_q,
            "efficiency": truth.efficiency_q,
            "share": truth.share_q,
            "khat_datum": _largest(truth.khat_loo),
        }

    def _leave_one_out(self, name, fit, khat) -> dict:
        try:
            with warnings.catch_warnings():
                # ArviZ warns of a large k-hat, which is in the table
                warnings.simplefilter("ignore", UserWarning)
                loo = fit.loo()
        except PplGpError as error:
            self.notes[name].append(f"no LOO: {error}")
            return {"elpd_loo": None, "elpd_loo_se": None}
        weighted = {"khat_datum": _largest(loo.pareto_k) if khat is None else khat}
        return {"elpd_loo": float(loo.elpd), "elpd_loo_se": float(loo.se), **weighted}

    @property
    def reference_name(self) -> str | None:
        """The method that distances are taken to: `reference`, else the first fit by draws of f."""
        if self.reference is not None:
            return self.reference
        # a guide's draws are of an approximation
        free = {name: fit.latent for name, fit in self.fits.items() if fit.by_chains}
        return next((k for k, v in free.items() if all(x.is_draws for x in v.values())), None)

    @property
    def reference_error(self) -> float | None:
        """Monte Carlo error of the reference's least certain latent mean, in its standard
        deviations: 1 / sqrt(ESS); `None` for fewer draws than an ESS of at least 1 needs.
        """
        fit = self.fits.get(self.reference_name or "")
        ess = (fit.stats.get("ess") if fit is not None else None) or 0.0
        return float(1.0 / np.sqrt(ess)) if 1.0 <= ess < np.inf else None

    @property
    def table(self) -> list[dict]:
        """One {quantity: value} a method, in the order in which they were added."""
        own = lambda name: self._distances(name) | self._gap(name)  # noqa: E731
        return [{**scored.row, **own(name)} for name, scored in self._scored.items()]

    def _gap(self, name) -> dict:
        """Row by row, so that what is common to both methods has no share in the error."""
        ours, theirs = self._scored[name], self._scored.get(self.reference_name or name)
        if theirs is None or theirs is ours:
            return {"log_density_gap": None, "log_density_gap_se": None}
        gap = ours.densities - theirs.densities
        error = _standard_error(gap, np.hypot(ours.noise, theirs.noise))
        return {"log_density_gap": float(gap.mean()), "log_density_gap_se": error}

    def _distances(self, name) -> dict:
        fits, other = self.fits, self.reference_name
        judged = (fits[name], fits[other]) if other in fits and name != other else ()
        pairs = shared_moments(*judged) if judged else []
        if not pairs:
            return {"mean_distance": None, "sd_distance": None}
        means, sds = zip(*(_distance(*pair) for pair in pairs), strict=True)
        return {"mean_distance": max(means), "sd_distance": max(sds)}

    @property
    def _caption(self) -> str:
        text = f"k-hat above {KHAT_LIMIT}: q cannot be corrected by weights; it cannot see a "
        text += "mode that q has no draw in. "
        if (error := self.reference_error) is not None:
            text += f"{self.reference_name}'s own Monte Carlo error: about {error:.2f} sd. "
        for symmetry in next(iter(self.fits.values())).symmetries if self.fits else ():
            text += (
                f"Label switching: the posterior is the same under all orders of {symmetry}; what "
                "a fit says of one entry is of the order that it, or a draw, has. "
            )
        return text.strip()

    @property
    def verdicts(self) -> list[str]:
        """What the table says of each method's evidence, latents and predictions, in words."""
        return [verdict(row, self.reference_name, self.reference_error) for row in self.table]

    def to_csv(self, path) -> None:
        """Write `table` as CSV: one row a method, full precision, empty where there is no value."""
        import pandas as pd  # with xarray it takes a second, which a fit need not wait for

        names = None if self.fits else ["method"]
        pd.DataFrame(self.table, columns=names).to_csv(path, index=False)

    def _tables(self) -> list:
        return table.rich_tables(self.table, self.reference_name, self._caption)

    def __rich__(self):
        return Group(*self._tables())

    def __str__(self) -> str:
        return table.printed(*self._tables())

    def _repr_html_(self) -> str:
        return table.as_html(self.table, self.reference_name, self._caption)


def compare(
    fits: Mapping[str, Fit],
    X_test,
    y_test=None,
    *args,
    reference: str | None = None,
    rng_key=0,
    num_importance_samples: int = 20_000,
    **kwargs,
) -> Comparison:
    """Compare fits of one model to the same data, by test data and importance sampling.

    Use it to find out which inference method to trust. Add `NUTS()` as a reference if you can.

    Parameters
    ----------
    fits : mapping
        {name: fit}.
    X_test, y_test : array or frame
        Test inputs and observations. Leave `y_test` out for models that observe their inputs, such
        as a mixture; the log density alone scores their rows.
    *args, **kwargs
        The model's other arguments at the test inputs, as for `predict`.
    reference : str, default None
        The fit to which distances are measured. None is the first one by draws (`NUTS()`,
        `EllipticalSlice()`).
    rng_key : int or jax.Array, default 0
        A seed or a key for importance sampling.
    num_importance_samples : int, default 20000
        Draws per fit.

    Returns
    -------
    Comparison
        `print` it for a table with one column per method. `verdicts` says the same in sentences.

    Raises
    ------
    DataError
        Without fits, for an unknown reference, test data of different lengths, or fits to different
        data.
    ModelError
        For fits of different models. Use `compare_models` for those.

    Notes
    -----
    Cost: `predict`, `log_density` and `loo` of each fit, and O(N^2 num_importance_samples).

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fits = {"laplace": pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))}
    >>> comparison = pg.compare(fits, x + 0.05, np.sin(6.0 * x + 0.3), num_importance_samples=200)
    >>> comparison.table[0]["method"]
    'laplace'
    """
    if not (isinstance(fits, Mapping) and fits):
        raise DataError(f"compare(fits={fits!r}) has nothing to compare; give {{name: fit, ...}}.")
    if reference is not None and reference not in fits:
        raise DataError(f"compare(reference={reference!r}) is none of the fits {list(fits)}.")
    # Names are those of a fit that has some: all are fits to the same data.
    known = sorted((f for f in fits.values() if isinstance(f, Fit)), key=lambda f: not f.names)
    if known:  # else they are refused where they are added
        X_test, y_test, args, kwargs = with_observations(known[0], X_test, y_test, args, kwargs)
    X_test, y_test = as_array("X_test", X_test), as_array("y_test", y_test)
    how = reference, rng_key, num_importance_samples
    comparison = Comparison(X_test, y_test, args, kwargs, *how)
    for name, fit in fits.items():
        comparison.add(name, fit)
    return comparison


def _require_same_problem(fits: dict[str, Fit], name: str, fit: Fit) -> None:
    if not isinstance(fit, Fit):
        raise DataError(
            f"compare(fits={{{name!r}: ...}}) holds a {type(fit).__name__}; give a pg.fit's result."
        )
    if not fits:
        return
    first, other = next(iter(fits.items()))
    if fit.model.function != other.model.function:
        ours, theirs = (getattr(f.model, "__name__", repr(f.model)) for f in (fit, other))
        raise ModelError(
            f"'{name}' fits {ours} and '{first}' fits {theirs}; compare fits of one model."
        )
    require_same_stream("compare", {first: other, name: fit})
    ours, theirs = _given(fit), _given(other)
    known = {**theirs, **ours}
    if any(isinstance(f.method, SavedMethod) for f in (fit, other)):  # without observations
        known = [k for k in ours if k in theirs]
    pairs = {k: (ours.get(k), theirs.get(k)) for k in known}
    sizes = [f.stats.get("batch_size") for f in (fit, other)]  # which one of them may be given
    given = lambda v: any(type(x) is int and x in sizes for x in v)  # noqa: E731
    pairs = {k: v for k, v in pairs.items() if all(x is not None for x in v) or not given(v)}
    if differing := [k for k, (a, b) in pairs.items() if not _same(a, b)]:
        raise DataError(
            f"'{name}' and '{first}' were fitted to different data: {differing} differ. Fit "
            "both to one."
        )


def _given(fit: Fit) -> dict:
    """{argument: value} of the call, by name, with defaults; of a loaded fit what it still has."""
    given = dict(zip(argument_names(fit.model, len(fit.args)), fit.args, strict=True)) | fit.kwargs
    left = {k: p.default for k, p in parameters_of(fit.model).items() if k not in given}
    given |= {k: x for k, x in left.items() if x is not inspect.Parameter.empty}
    is_loaded = isinstance(fit.method, SavedMethod)
    return {k: x for k, x in given.items() if x is not None or not is_loaded}


def _same(a, b) -> bool:
    """Of arrays, other values, and dictionaries, tuples and lists of them."""
    none = lambda x: x is None  # noqa: E731
    if jax.tree.structure(a, is_leaf=none) != jax.tree.structure(b, is_leaf=none):
        return False
    return jax.tree.all(jax.tree.map(_same_leaf, a, b, is_leaf=none))


def _same_leaf(a, b) -> bool:
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    if any(hasattr(x, "shape") and not is_key(x) for x in (a, b)):
        return np.array_equal(np.asarray(a), np.asarray(b))
    return bool(np.all(a == b))


def _largest(khat) -> float | None:
    khat = np.asarray([] if khat is None else khat, float)
    return float(np.max(khat[np.isfinite(khat)])) if np.isfinite(khat).any() else None


def _standard_error(x, noise: float) -> float | None:
    """Of a mean over rows: their scatter, and the `noise` of the numbers themselves."""
    return float(np.hypot(x.std(ddof=1) / np.sqrt(x.size), noise)) if x.size > 1 else None


def shared_moments(fit: Record, other: Record) -> list[tuple[Moments, Moments]]:
    """Pairs of moments of functions that both keep, else of the Gaussian sites that both know."""
    ours, theirs = training_moments(fit), training_moments(other)
    if not theirs or ours.keys() != theirs.keys():
        ours, theirs = site_moments(fit, ours), site_moments(other, theirs)
    return [(ours[k], theirs[k]) for k in theirs if k in ours]


def site_moments(fit: Record, functions: dict[str, Moments]) -> dict[str, Moments]:
    """{site of the declared model: mean and variance}, in closed form of effects (`fit.sites`), and
    from draws of GPs behind a predictor and of drawn sites. `functions`: `training_moments(fit)`.
    """
    if isinstance(fit.model, Collapsed):
        _, _, parts = draws_with_parts(fit, random.key(0), DRAWS)
        exact = {k: Moments(q.mean, q.variance) for k, q in effects(fit).items()}
        return {k: moments_of(x) for k, x in parts.items()} | exact
    drawn = fit.draws.known if fit.sampled and not fit.draws.is_weighted() else {}
    numbers = {k: x for k, x in drawn.items() if np.issubdtype(jnp.result_type(x), np.floating)}
    return {k: moments_of(x) for k, x in numbers.items()} | functions


def _distance(f: Moments, reference: Moments) -> tuple[float, float]:
    """Largest |difference| of means, and of sds, in standard deviations of the reference."""
    sd, sd_ref = (np.sqrt(np.asarray(x.variance)) for x in (f, reference))
    apart = np.abs(np.asarray(f.mean) - np.asarray(reference.mean)) / sd_ref
    return float(np.max(apart)), float(np.max(np.abs(sd - sd_ref) / sd_ref))
