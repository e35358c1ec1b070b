"""What both estimators do: parameters, the one call of `fit`, predictions, pickling."""

import abc
import dataclasses
import functools
import inspect
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from ppl_gp.errors import DataError, ModelError, Result, StoreError, warn
from ppl_gp.frames.opened import Labelled, opened
from ppl_gp.infer.fit import fit
from ppl_gp.results.fit import Fit
from ppl_gp.results.load import load
from ppl_gp.results.store.save import qualified_name
from ppl_gp.sparse.svgp import SVGP

DENSE_ROWS = 1000  # up to which a default method makes matrices of rows by rows
FLOATS = (np.float64, np.float32)  # what inputs are kept in; others become the first
_FIT = "fit_result_"
_METHOD = "method"
_BETWEEN = "__"


class GPEstimator(BaseEstimator, abc.ABC):
    """A model and a method behind scikit-learn's verbs. Parameters are stored untouched."""

    _of_default: dict[str, Any] = {"kernel": "RBF", "ard": False}  # options of the default model

    def __init__(
        self, model=None, method=None, arguments=None, random_state=None, kernel="RBF", ard=False
    ):
        self.model = model
        self.method = method
        self.arguments = arguments
        self.random_state = random_state
        self.kernel = kernel
        self.ard = ard

    @abc.abstractmethod
    def _default_model(self, X, y, weights) -> tuple[Callable, dict[str, Any]]:
        """The model where none is given, and its arguments."""

    @abc.abstractmethod
    def _default_method(self) -> Any:
        """The method of up to `DENSE_ROWS` rows where none is given."""

    def get_params(self, deep=True):
        """Return {name: value}; `deep` adds settings such as `method__hyper__restarts`."""
        own = super().get_params(deep)
        return {**own, **settings(own[_METHOD], _METHOD)} if deep else own

    def set_params(self, **params):
        """Set parameters by name. Settings of a method make a new method.

        The names are those that `get_params` gives. Raises `ValueError` for an unknown name.
        """
        inner = {k: v for k, v in params.items() if k.startswith(_METHOD + _BETWEEN)}
        super().set_params(**{k: v for k, v in params.items() if k not in inner})
        for name in sorted(inner, key=lambda name: name.count(_BETWEEN)):  # a whole before its own
            self.method = _with_one(self.method, _METHOD, name.split(_BETWEEN)[1:], inner[name])
        return self

    def _infer(self, X, y, weights=None):
        """Fit the model to checked arrays, and keep what it gives."""
        name = type(self).__name__
        model, arguments = self.model, {}
        if model is None:
            model, arguments = self._default_model(X, y, weights)
        require_arguments(name, model, self.arguments)
        method = self.method if self.method is not None else self._method_for(len(X))
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        found = fit(model, method, seed, X, y=y, **{**arguments, **(self.arguments or {})})
        require_none_of_rows(name, found, self.arguments)
        if found.result is Result.interrupted:
            warn(
                f"{name}.fit(): Ctrl-C ended the search early. Predictions and scores "
                "are those of where it stood and may be far off. Fit again for the right ones."
            )
        self.model_, self.fit_result_ = model, found
        self.log_evidence_ = found.log_evidence
        self.hyper_ = jax.tree.map(np.asarray, found.hyper)
        return self

    def _weighted(self, sample_weight, X, y):
        """(X, y, weights): rows of weight 0 left out; None for weights that are all 1. Raises
        `DataError` for what is for the default model, beside a model.
        """
        given = [k for k, v in self._of_default.items() if getattr(self, k) != v]
        given += ["sample_weight"] if sample_weight is not None else []
        if self.model is not None and given:
            raise DataError(
                f"{type(self).__name__}(model=...): {given} are for the default model; declare the "
                "same in yours. Weights go into a column w of X: dist.Normal(f, s / jnp.sqrt(w)) "
                "for numbers, numpyro.handlers.scale(scale=w) about the site for counts, classes."
            )
        if inside := {"kernel", "likelihood", "weights"} & {*(self.arguments or ())}:
            if self.model is None:
                raise DataError(
                    f"{type(self).__name__}(arguments=...): {sorted(inside)} are options; give "
                    "kernel=, likelihood= or fit(X, y, sample_weight=...)."
                )
        if sample_weight is None:
            return X, y, None
        weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        kept = weights > 0
        weights = weights[kept]
        return X[kept], y[kept], None if np.all(weights == 1) else weights

    def _method_for(self, num_rows: int):
        return self._default_method() if num_rows <= DENSE_ROWS else SVGP()

    def _checked(self, X, y="no_validation", **checks):
        """X, or (X, y), as scikit-learn checks them. A frame with columns of labels stays one, as
        `fit` reads labels itself, and the user's model takes them as integers.
        """
        table = opened("X", X)
        columns = zip(table.names.columns or (), table.parts, strict=False) if table else ()
        labelled = [k for k, part in columns if isinstance(part, Labelled)]
        if labelled and self.model is None:
            raise DataError(
                f"{type(self).__name__}: columns {labelled} of X are text, and the kernel of the "
                "default model needs numbers. Encode them in a pipeline (OneHotEncoder), or give a "
                "model= that uses them as indices of effects."
            )
        return validate_data(self, X, y, dtype=FLOATS, skip_check_array=bool(labelled), **checks)

    def _inputs(self, X):
        """X checked against the training inputs, for a prediction."""
        check_is_fitted(self)
        return self._checked(X, reset=False)

    def _predicted(self, X, **options):
        """The `Prediction` at X."""
        X = self._inputs(X)  # first: without a fit it says so
        return self.fit_result_.predict(X, **options, **self._arguments(X))

    def _arguments(self, X) -> dict[str, Any]:
        """What the default model is given at new rows: new observations have weight 1."""
        weighted = self.model is None and "weights" in self.fit_result_.kwargs
        return {"weights": np.ones(len(X))} if weighted else {}

    def _of_one_site(self, value, what: str):
        """What a prediction has of its one observed site, as NumPy has it."""
        if value is None or isinstance(value, dict):
            told = "none" if value is None else f"those of {sorted(value)}"
            raise ModelError(
                f"{type(self).__name__} wants {what} of one observed site, and the model "
                f"{self.model_!r} has {told}; ask the fit itself, estimator.fit_result_.predict(X)."
            )
        return np.asarray(value, float)

    def __getstate__(self):
        """The fit as `fit.save` writes it, without the observations; the model by its name."""
        state: Any = super().__getstate__()  # a copy, or the attributes themselves
        if _FIT not in state:
            return state
        require_importable(self.model_)
        with TemporaryDirectory() as folder:
            return {**state, _FIT: self.fit_result_.save(Path(folder) / "fit").read_bytes()}

    def __setstate__(self, state):
        saved = state.pop(_FIT, None)
        super().__setstate__(state)
        if saved is not None:
            with TemporaryDirectory() as folder:
                path = Path(folder) / "fit"
                path.write_bytes(saved)
                self.fit_result_ = load(path, self.model_)


def require_arguments(estimator: str, model: Any, arguments: Any) -> None:
    """Raise `DataError` for a model that is not a function of X and y, or lacks `arguments`."""
    if not callable(model):
        raise DataError(f"{estimator}(model={model!r}): give a function model(X, y=None, ...).")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise DataError(
            f"{estimator}(arguments={arguments!r}): give {{name: value}} of the model's arguments."
        )
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):  # a callable that does not tell
        return
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "y" not in parameters and not anything:
        raise DataError(
            f"{estimator}(model=...): the model's arguments are {list(parameters)}, and the "
            "observations reach it as `y`; call them so, model(X, y=None, ...)."
        )
    own = [k for k in list(parameters)[1:] if k != "y"]
    if unknown := [k for k in arguments or () if k not in own and (k == "y" or not anything)]:
        raise DataError(
            f"{estimator}(arguments=...): {unknown} are no arguments of the model; it has {own}."
        )


def require_none_of_rows(estimator: str, fit: Fit, arguments: Mapping | None) -> None:
    """Raise `DataError` for an argument with an entry for each row: it has none at other rows."""
    if bad := [k for k in arguments or () if fit.model.reading.row_axes.get(k) is not None]:
        raise DataError(
            f"{estimator}(arguments=...): {bad} have one entry per row of training, and new rows "
            "would need theirs; make each a column of X, which the model takes apart."
        )


def settings(value: Any, name: str) -> dict[str, Any]:
    """{name__path: value} of the settings of a configuration, and of those inside of it."""
    found = {}
    for field in _fields(value):
        inner = name + _BETWEEN + field
        found |= {inner: getattr(value, field), **settings(getattr(value, field), inner)}
    return found


def _with_one(value, name: str, path: list[str], new) -> Any:
    if not path:
        return new
    if path[0] not in _fields(value):
        raise DataError(
            f"set_params({name}{_BETWEEN}{path[0]}=...): {value!r} has no such setting; it has "
            f"{_fields(value) or 'none'}."
        )
    inner = _with_one(getattr(value, path[0]), f"{name}{_BETWEEN}{path[0]}", path[1:], new)
    return dataclasses.replace(value, **{path[0]: inner})


def _fields(value) -> list[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    return [field.name for field in dataclasses.fields(value) if field.init]


def require_importable(model: Callable) -> None:
    """Raise `StoreError` for a model that another process could not import, as neither a file nor a
    pickle holds code: a lambda, a function that was made inside of another.
    """
    while isinstance(model, functools.partial):
        model = model.func
    try:
        pickle.dumps(model)
    except Exception as error:
        raise StoreError(
            f"the model {qualified_name(model)} cannot be pickled, as it is not found in its "
            "module by that name: define it at the top level of a module, with functools.partial "
            "for its constants; or keep estimator.fit_result_.save(path)."
        ) from error
