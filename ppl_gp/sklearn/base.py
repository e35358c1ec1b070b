"""What both estimators do: parameters, the one call of `fit`, predictions, pickling."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ppl_gp.errors import ModelError
from ppl_gp.infer.fit import fit
from ppl_gp.sklearn.model_arguments import require_arguments, require_none_of_rows
from ppl_gp.sklearn.params import settings, with_settings
from ppl_gp.sklearn.pickling import from_bytes, to_bytes
from ppl_gp.sparse.svgp import SVGP

DENSE_ROWS = 1000  # up to which a default method makes matrices of rows by rows
FLOATS = (np.float64, np.float32)  # what inputs are kept in; others become the first
_FIT = "fit_result_"
_METHOD = "method"


class GPEstimator(BaseEstimator, abc.ABC):
    """A declared model and a method behind scikit-learn's verbs. Stores its parameters untouched.

    Fitted: `fit_result_`, the `Fit`, with all of its verbs; `model_`, the function that was fitted;
    `log_evidence_`, nats, `None` where hyperparameters are sampled; `hyper_`, {site: array};
    `n_features_in_`, `feature_names_in_`.
    """

    def __init__(self, model=None, method=None, arguments=None, random_state=None):
        self.model = model
        self.method = method
        self.arguments = arguments
        self.random_state = random_state

    @abc.abstractmethod
    def _default_model(self, X, y) -> tuple[Callable, dict[str, Any]]:
        """The model where none is given, and its arguments."""

    @abc.abstractmethod
    def _default_method(self) -> Any:
        """The method of up to `DENSE_ROWS` rows where none is given."""

    def get_params(self, deep=True):
        """{name: value} of the parameters; `deep`: with the method's own settings,
        `method__max_steps`, `method__hyper__restarts` ...
        """
        own = super().get_params(deep)
        return {**own, **settings(own[_METHOD], _METHOD)} if deep else own

    def set_params(self, **params):
        """Set parameters by the names that `get_params` gives. A method's settings are put into a
        new method. Raises `ValueError` for an unknown name.
        """
        inner = {k: v for k, v in params.items() if k.startswith(_METHOD + "__")}
        super().set_params(**{k: v for k, v in params.items() if k not in inner})
        self.method = with_settings(self.method, _METHOD, inner)
        return self

    def _infer(self, X, y):
        """Fit the model to checked arrays, and keep what it gives."""
        name = type(self).__name__
        model, arguments = self._declared(X, y)
        require_arguments(name, model, self.arguments)
        method = self.method if self.method is not None else self._method_for(len(X))
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        found = fit(model, method, seed, X, y=y, **{**arguments, **(self.arguments or {})})
        require_none_of_rows(name, found, self.arguments)
        self.model_ = model
        self._keep(found)
        return self

    def _declared(self, X, y) -> tuple[Any, dict[str, Any]]:
        return self._default_model(X, y) if self.model is None else (self.model, {})

    def _method_for(self, num_rows: int):
        return self._default_method() if num_rows <= DENSE_ROWS else SVGP()

    def _keep(self, found) -> None:
        self.fit_result_ = found
        self.log_evidence_ = found.log_evidence
        self.hyper_ = jax.tree.map(np.asarray, found.hyper)

    def _inputs(self, X):
        """X checked against the training inputs, for a prediction."""
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, reset=False, dtype=FLOATS))

    def _predicted(self, X, **options):
        """The `Prediction` at X."""
        X = self._inputs(X)
        return self.fit_result_.predict(X, **options)

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
        return {**state, _FIT: to_bytes(self.fit_result_, self.model_)}

    def __setstate__(self, state):
        super().__setstate__({k: v for k, v in state.items() if k != _FIT})
        if _FIT in state:
            self.fit_result_ = from_bytes(state[_FIT], self.model_)
