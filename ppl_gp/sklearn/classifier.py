"""`GPClassifier`."""

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from ppl_gp.errors import DataError, ModelError
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.sklearn.base import FLOATS, GPEstimator
from ppl_gp.sklearn.models import binary, classification_arguments, multiclass


class GPClassifier(ClassifierMixin, GPEstimator):
    """Classification by a declared model and any method, as a scikit-learn estimator.

    **Arguments:**

    - `model`: a function `model(X, y=None, ...)` with one observed site of C outcomes in a finite
      set (Bernoulli, Categorical, ordinal); y are the labels' places 0 ... C - 1 in `classes_`,
      which is sorted. `None`: f ~ GP(0, v exp(-|x - x'|^2 / (2 l^2))), one function and a Bernoulli
      likelihood for two classes, C functions and their softmax for more; the prior of l is
      `priors.lengthscale(X)`, that of v LogNormal(1, 1).
    - `method`: any method of `pg.fit`. `None`: up to 1000 rows `EP()` for two classes and
      `Laplace()` for more, else `SVGP()`.
    - `arguments`: {name: value} of further arguments of the model, in training and in predictions;
      of the model `None` `{"lengthscale_prior": (concentration, rate)}`. What has an entry for each
      row belongs into columns of X, which the model takes apart.
    - `random_state`: an integer, a `RandomState` or `None`, for the key of the fit.

    **Fitted:** `classes_` (C,), `fit_result_` (the `Fit`), `model_`, `log_evidence_` (nats, `None`
    where hyperparameters are sampled), `hyper_`, `n_features_in_`, `feature_names_in_`.

    A pickle holds what `fit.save` writes, without the observations, and the model by its name:
    `StoreError` for a lambda or a function inside of another. Cost: that of the method.
    """

    def fit(self, X, y):
        """Fit to X (N, D) and labels y (N,), of any type that sorts.

        Raises `DataError` for fewer than two classes, and what `pg.fit` raises: `FitError` where
        the method did not succeed, `ModelError` where it does not fit the model.
        """
        X, y = validate_data(self, X, y, dtype=FLOATS)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"GPClassifier.fit(y): there is one class, {self.classes_.tolist()}; give rows of "
                "two classes or more."
            )
        return self._infer(np.asarray(X), codes)

    def predict_proba(self, X):
        """p(y = c | x, data), (M, C), columns in the order of `classes_`: integrated over f, and
        over the hyperparameters where they are sampled.

        Raises `ModelError` where the model has not C outcomes.
        """
        found = self._of_one_site(self._predicted(X).probs, "probabilities of outcomes")
        probs = np.stack([1.0 - found, found], -1) if found.ndim == 1 else found
        if probs.shape[-1] != len(self.classes_):
            raise ModelError(
                f"the model {self.model_!r} has {probs.shape[-1]} outcomes, and y has "
                f"{len(self.classes_)} classes; give it their number, arguments={{...}}."
            )
        return probs

    def predict_log_proba(self, X):
        """log p(y = c | x, data), (M, C)."""
        return np.log(self.predict_proba(X))

    def decision_function(self, X):
        """The log odds log p(y = 1) - log p(y = 0), (M,), of two classes, and log p(y = c), (M, C),
        of more: of predictive probabilities, so that `predict` follows from it for every model.
        """
        probs = self.predict_proba(X)
        logs = np.log(np.maximum(probs, np.finfo(probs.dtype).tiny))
        return logs[:, 1] - logs[:, 0] if len(self.classes_) == 2 else logs

    def predict(self, X):
        """The class of largest probability, (M,)."""
        probs = self.predict_proba(X)
        return self.classes_[np.argmax(probs, 1)]

    def _default_model(self, X, y):
        model = binary if len(self.classes_) == 2 else multiclass
        return model, classification_arguments(X, len(self.classes_))

    def _default_method(self):
        return EP() if len(self.classes_) == 2 else Laplace()
