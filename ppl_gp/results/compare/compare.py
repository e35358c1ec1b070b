"""`compare`: every method of one model on the same data in one table, judged by truths that none of
them provides.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from rich.console import Group

from ppl_gp.errors import DataError, ModelError, PplGpError
from ppl_gp.reading.arguments import as_array
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.results.compare import scores, table
from ppl_gp.results.compare.table import verdict
from ppl_gp.results.compare.truth import KHAT_LIMIT, importance_sampling
from ppl_gp.results.datatree import draws_with_parts, require_same_stream, training_moments
from ppl_gp.results.fit import Fit
from ppl_gp.results.parts import effects
from ppl_gp.results.predict.log_density import pit
from ppl_gp.results.query.by_names import with_observations
from ppl_gp.results.query.mixture import Moments
from ppl_gp.results.record import Record

BATCHES = 20  # of draws
DRAWS = 4000  # of GPs behind a predictor: means to 1/60 of a standard deviation


@dataclasses.dataclass
class Comparison:
    """Fits of one model to the same data, and their scores. Made by `compare`; `add` takes a
    further fit.

    `print(comparison)` shows one column a method, and tells of label switching
    (`fit.symmetries`); `table` is a list of {quantity: value}, one a method, `None` where a
    quantity does not exist, with the reasons in `notes`:

    - `result`, `compile_seconds`, `run_seconds`;
    - `log_evidence`, `log_evidence_se`: log evidence or bound, nats, and its error where it is a
      mean over draws; `truth`, `truth_se`: importance-sampled, at the
      same hyperparameters;
    - `log_density`, `log_density_se`: mean over the test data, nats a datum, and its standard
      error; `log_density_gap`, `log_density_gap_se`: less the reference method's, row by row. Both
      errors include the Monte Carlo error of the fits' draws;
    - `error` and `error_name`, `calibration` and `calibration_name`: as `results.scores` defines
      them;
    - `khat`, `efficiency`: Pareto k-hat of q(f) against the model, jointly, and the effective share
      of its draws: of q where it has draws; neither sees a mode without one. `share`: the share of
      the evidence that q's draws meet, below 1 where a search for other modes found one, which is
      no proof that there are no more;
    - `khat_datum`: the largest k-hat of a datum, of the weights that turn q, or the draws, into the
    posterior without it;
    - `elpd_loo`, `elpd_loo_se`: by the fit's own `loo`, nats;
    - `mean_distance`, `sd_distance`: largest difference of latent means and standard deviations at
      the training inputs to the reference method's, in its standard deviations. It includes what
      the reference does with the hyperparameters, and its Monte Carlo error (`reference_error`).
      Where one method integrates a predictor whose sites the other draws, site by site, effects
      included.
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
    _rows: dict[str, dict] = dataclasses.field(default_factory=dict, repr=False)
    _densities: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    _noise: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)

    def add(self, name: str, fit: Fit) -> None:
        """Score one more fit. Raises `DataError` or `ModelError` where it is of another model or of
        other data.
        """
        _require_same_problem(self.fits, name, fit)
        self.notes[name] = []
        self._rows[name] = self._score(name, fit)
        self.fits[name] = fit

    def _score(self, name: str, fit: Fit) -> dict:
        log_density, noise = self._log_density(fit)
        error, calibration = self._errors(fit)
        self._densities[name], self._noise[name] = log_density, noise
        return {
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

    def _log_density(self, fit: Fit) -> tuple[np.ndarray, float]:
        """(log density of each test row, Monte Carlo error of their mean), nats.

        A draw is of all rows: of the rows' errors, which know how many draws are independent, the
        mean has the share that it has of their scatter between batches of draws.
        """
        data = (self.X_test, self.y_test, *self.args)
        value, errors = map(np.asarray, fit.log_density(*data, **self.kwargs, with_error=True))
        each, noise = fit.draws.num // BATCHES, float(np.mean(errors))
        if not fit.sampled or fit.draws.is_weighted() or each == 0 or not np.isfinite(noise):
            return value, noise
        parts = np.arange(BATCHES * each).reshape(BATCHES, each)
        few = [dataclasses.replace(fit, draws=fit.draws.part(part)) for part in parts]
        rise = np.exp([np.asarray(f.log_density(*data, **self.kwargs)) - value for f in few])
        alone = np.mean(np.std(rise, 0))
        return value, noise * float(np.std(np.mean(rise, 1)) / alone) if alone > 0 else noise

    def _errors(self, fit: Fit) -> tuple[scores.Score, scores.Score]:
        """(error, calibration); of a model that observes its inputs, none."""
        if self.y_test is None:
            return scores.Score(None, "RMSE"), scores.Score(None, "coverage gap")
        prediction = fit.predict(self.X_test, *self.args, **self.kwargs)
        numbers = None if scores.is_classification(prediction) else self._pit(fit)
        error = scores.error(prediction, self.y_test)
        return error, scores.calibration(prediction, self.y_test, numbers)

    def _pit(self, fit):
        if isinstance(self.y_test, dict):
            return None
        return pit(fit, self.X_test, self.y_test, *self.args, **self.kwargs)

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
        # a guide's draws, which have a bound, are of an approximation
        free = {name: fit.latent for name, fit in self.fits.items() if fit.log_evidence is None}
        return next((k for k, v in free.items() if all(x.is_draws for x in v.values())), None)

    @property
    def reference_error(self) -> float | None:
        """Monte Carlo error of the reference's least certain latent mean, in its standard
        deviations: 1 / sqrt(ESS).

        `None` without an effective sample size of at least 1 (too few draws to estimate one).
        """
        fit = self.fits.get(self.reference_name or "")
        ess = (fit.stats.get("ess") if fit is not None else None) or 0.0
        return float(1.0 / np.sqrt(ess)) if 1.0 <= ess < np.inf else None

    @property
    def table(self) -> list[dict]:
        """One {quantity: value} a method, in the order in which they were added."""
        return [
            {**row, **self._distances(name), **self._gap(name)} for name, row in self._rows.items()
        ]

    def _gap(self, name) -> dict:
        """Row by row, so that what is common to both methods has no share in the error."""
        reference = self.reference_name or name
        if reference not in self._densities or name == reference:
            return {"log_density_gap": None, "log_density_gap_se": None}
        gap = self._densities[name] - self._densities[reference]
        noise = np.hypot(self._noise[name], self._noise[reference])
        error = _standard_error(gap, noise)
        return {"log_density_gap": float(gap.mean()), "log_density_gap_se": error}

    def _distances(self, name) -> dict:
        reference = self.reference_name
        judged = reference in self.fits and name != reference
        pairs = shared_moments(self.fits[name], self.fits[reference]) if judged else []
        if not pairs:
            return {"mean_distance": None, "sd_distance": None}
        means, sds = zip(*(scores.distance(*pair) for pair in pairs), strict=True)
        return {"mean_distance": max(means), "sd_distance": max(sds)}

    @property
    def _caption(self) -> str:
        text = (
            f"k-hat above {KHAT_LIMIT}: q cannot be corrected by weights; it cannot see a "
            "mode that q has no draw in. "
        )
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
        """Write `table` as CSV, one row a method."""
        table.write_csv(self.table, path)

    def __rich__(self):
        return Group(*table.rich_tables(self.table, self.reference_name, self._caption))

    def __str__(self) -> str:
        return table.as_text(self.table, self.reference_name, self._caption)

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
    """Compare fits of one model to the same data.

    **Arguments:** `fits`: {name: fit}; `X_test` (M, D), `y_test` (M,), arrays or frames with the
    columns of training; `y_test` is left out for models that observe their inputs (a mixture),
    whose rows are scored by log density alone; the model's other arguments at the test inputs
    (`exposure=...`) as in `fit.predict`; `reference`: the name of the fit that distances are taken
    to, by default the first one by draws (`NUTS()`, `EllipticalSlice()`).

    **Returns** a `Comparison`; `print` it. **Raises** `DataError`: no fits, an unknown reference,
    test data of different lengths, fits to different data; `ModelError`: fits of different models.
    Cost: `predict`, `log_density` and `loo` of each fit, and O(N^2 num_importance_samples).
    """
    if not fits:
        raise DataError("compare(fits={}) has nothing to compare; give {name: fit, ...}.")
    if reference is not None and reference not in fits:
        raise DataError(f"compare(reference={reference!r}) is none of the fits {list(fits)}.")
    X_test, y_test, args, kwargs = _plain(fits, X_test, y_test, args, kwargs)
    X_test, y_test = as_array("X_test", X_test), as_array("y_test", y_test)
    if y_test is not None and np.shape(X_test)[:1] != np.shape(y_test)[:1]:
        raise DataError(
            f"X_test has shape {np.shape(X_test)} and y_test {np.shape(y_test)}; give one "
            "observation per row of X_test."
        )
    comparison = Comparison(
        X_test, y_test, args, kwargs, reference, rng_key, num_importance_samples
    )
    for name, fit in fits.items():
        comparison.add(name, fit)
    return comparison


def _plain(fits, X_test, y_test, args, kwargs) -> tuple[Any, Any, tuple, dict]:
    """Test data as arrays, by the names of a fit that has some: all are fits to the same data."""
    known = sorted((f for f in fits.values() if isinstance(f, Fit)), key=lambda f: not f.names)
    if not known:  # which is refused where it is added
        return X_test, y_test, args, kwargs
    return with_observations(known[0], X_test, y_test, args, kwargs)


def _require_same_problem(fits: dict[str, Fit], name: str, fit: Fit) -> None:
    if not isinstance(fit, Fit):
        raise DataError(
            f"compare(fits={{{name!r}: ...}}) holds a {type(fit).__name__}; give a pg.fit's result."
        )
    if not fits:
        return
    first, other = next(iter(fits.items()))
    if fit.model.function != other.model.function:
        raise ModelError(
            f"'{name}' fits {_name(fit.model)} and '{first}' fits {_name(other.model)}; compare "
            "fits of one model."
        )
    require_same_stream("compare", {first: other, name: fit})
    if differing := [k for k, (a, b) in _shared_arguments(fit, other).items() if not _same(a, b)]:
        raise DataError(
            f"'{name}' and '{first}' were fitted to different data: {differing} differ. Fit them "
            "to the same."
        )


def _shared_arguments(fit: Fit, other: Fit) -> dict:
    positional = {
        f"argument {i}": pair for i, pair in enumerate(zip(fit.args, other.args, strict=False))
    }
    return positional | {
        k: (fit.kwargs[k], other.kwargs[k]) for k in fit.kwargs.keys() & other.kwargs.keys()
    }


def _same(a, b) -> bool:
    """Of arrays, other values, and dictionaries, tuples and lists of them."""
    (ours, form), (theirs, other_form) = (
        jax.tree.flatten(x, is_leaf=lambda x: x is None) for x in (a, b)
    )
    return form == other_form and all(_same_leaf(*pair) for pair in zip(ours, theirs, strict=True))


def _same_leaf(a, b) -> bool:
    is_array = [
        hasattr(x, "shape") and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        for x in (a, b)
    ]
    return np.array_equal(np.asarray(a), np.asarray(b)) if any(is_array) else bool(np.all(a == b))


def _name(model) -> str:
    return getattr(model, "__name__", repr(model))


def _largest(khat) -> float | None:
    khat = np.asarray([] if khat is None else khat, float)
    return float(np.max(khat[np.isfinite(khat)])) if np.isfinite(khat).any() else None


def _standard_error(x, noise: float) -> float | None:
    """Of a mean over rows: their scatter, and the `noise` of the numbers themselves."""
    return float(np.hypot(x.std(ddof=1) / np.sqrt(x.size), noise)) if x.size > 1 else None


def shared_moments(fit: Record, other: Record) -> list[tuple[Moments, Moments]]:
    """Pairs of posterior moments of the same thing at the training inputs: the functions that both
    keep, else the Gaussian sites that both know; none where there is no such site.
    """
    ours, theirs = training_moments(fit), training_moments(other)
    if not theirs or ours.keys() != theirs.keys():
        ours, theirs = site_moments(fit, ours), site_moments(other, theirs)
    return [(ours[k], theirs[k]) for k in theirs if k in ours]


def site_moments(fit: Record, functions: dict[str, Moments]) -> dict[str, Moments]:
    """{site of the declared model: mean and variance}; `functions`: `training_moments(fit)`.

    A local method keeps the predictor of several Gaussian sites, `NUTS` the sites themselves: of
    integrated effects the moments are in closed form (`fit.sites`), of GPs behind a predictor from
    joint draws, of drawn sites from the draws.
    """
    if isinstance(fit.model, Collapsed):
        _, _, parts = draws_with_parts(fit, random.key(0), DRAWS)
        exact = {k: Moments(q.mean, q.variance) for k, q in effects(fit).items()}
        return {k: _of_draws(x) for k, x in parts.items()} | exact
    drawn = fit.draws.known if fit.sampled and not fit.draws.is_weighted() else {}
    numbers = {k: x for k, x in drawn.items() if np.issubdtype(jnp.result_type(x), np.floating)}
    return {k: _of_draws(x) for k, x in numbers.items()} | functions


def _of_draws(x) -> Moments:
    return Moments(jnp.mean(x, 0), jnp.var(x, 0))
