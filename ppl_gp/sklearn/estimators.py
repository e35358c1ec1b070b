"""`GPRegressor` and `GPClassifier`, and the models of estimators that are given none.

The parameters of their priors are arrays among a model's arguments and no constants of it: compiled
code is keyed by constants, and other training data (the folds of a cross-validation) shall find it.
The models are not wrapped by a checker of types: what a wrapper holds would be read with them.
"""

import math
from typing import Any, no_type_check

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from ppl_gp import kernels, priors
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.sklearn.base import FLOATS, GPEstimator


class GPRegressor(RegressorMixin, GPEstimator):
    """Regression by any model and method, as a scikit-learn estimator.

    Use it in pipelines, cross-validation and searches.

    Parameters
    ----------
    model : callable, default None
        A function `model(X, y=None, ...)` with one observed site of numbers, (N,), of any
        likelihood: Gaussian, Student-t, Poisson. None is y ~ N(f(x), s^2) with f ~ GP(mean of y, v
        exp(-|x - x'|^2 / (2 l^2))). The priors are `priors.lengthscale(X)` for l,
        `priors.variance(y)` for v, and LogNormal(log sd(y) - 1, 1) for s.
    method : object, default None
        Any method of `pg.fit`. None is `Laplace()`, exact for Gaussian noise, up to 1000 rows, else
        `SVGP()`.
    arguments : dict, default None
        {name: value} of further arguments of the model, in training and in predictions. The default
        model has `lengthscale_prior` (concentration, rate), `variance_prior` and `noise_prior`
        (mean and standard deviation of the logarithm), and `location`. Put quantities with one
        value per row into columns of X, and let the model take them out.
    random_state : int or RandomState, default None
        For the key of the fit. None draws a new one each time.

    Attributes
    ----------
    fit_result_ : Fit
        The fit, with all of its methods.
    model_ : callable
        The function that was fitted.
    log_evidence_ : float or None
        In nats. None if hyperparameters are sampled.
    hyper_ : dict
        {site: array}.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Notes
    -----
    A pickle contains what `fit.save` writes, without the observations, and the model by its name. A
    lambda or a function inside another raises `StoreError`. Cost: that of the method.

    Examples
    --------
    >>> X = np.linspace(0.0, 1.0, 10)[:, None]
    >>> regressor = pg.sklearn.GPRegressor(random_state=0).fit(X, np.sin(6.0 * X[:, 0]))
    >>> regressor.predict([[0.25], [0.75]]).round(1).tolist()
    [1.0, -1.0]
    """

    def fit(self, X, y):
        """Fit to inputs and numbers.

        Parameters
        ----------
        X : array
            Inputs, (N, D).
        y : array
            Observations, (N,).

        Returns
        -------
        GPRegressor
            The estimator itself.

        Raises
        ------
        FitError
            If the method did not succeed.
        ModelError
            If the method cannot fit the model.
        DataError
            As `pg.fit`. For the default model also if all rows of X, or all of y, are equal.
        """
        fewest = 2 if self.model is None else 1  # one row has no distances and no variance
        checks = {"dtype": FLOATS, "y_numeric": True, "ensure_min_samples": fewest}
        X, y = map(np.asarray, validate_data(self, X, y, **checks))
        return self._infer(X, y.astype(X.dtype) if self.model is None else y)

    def predict(self, X, return_std=False, return_cov=False, quantiles=None):
        """Predict new observations, noise included.

        Parameters
        ----------
        X : array
            New inputs, (M, D).
        return_std : bool, default False
            Also return standard deviations, (M,).
        return_cov : bool, default False
            Also return the covariance, (M, M).
        quantiles : sequence of float, default None
            Also return quantiles at these levels in (0, 1), (M, Q).

        Returns
        -------
        array or tuple
            The mean of y, (M,), or a tuple with what else you ask for, in this order.

        Raises
        ------
        ModelError
            For `return_cov` with a model of your own. It needs y = f + noise, as in the default
            model.
        DataError
            For both `return_std` and `return_cov`.

        Notes
        -----
        scikit-learn's `GaussianProcessRegressor` predicts the same if its kernel has a
        `WhiteKernel`. For f without noise, use `fit_result_.predict(X)` and
        `fit_result_.posterior(X)`.
        """
        if return_std and return_cov:
            raise DataError("predict(return_std=True, return_cov=True): ask for one of them.")
        found = self._predicted(X, quantiles=quantiles)
        answer = [self._of_one_site(found.mean, "a mean")]
        if return_std:
            answer.append(np.sqrt(self._of_one_site(found.variance, "a variance")))
        if return_cov:
            answer.append(self._covariance(X, np.asarray(found.variance, float)))
        if quantiles is not None:
            answer.append(self._of_one_site(found.quantiles, "quantiles").T)
        return answer[0] if len(answer) == 1 else tuple(answer)

    def sample_y(self, X, n_samples=1, random_state=0):
        """Draw new observations jointly at the rows of X.

        Parameters
        ----------
        X : array
            New inputs, (M, D).
        n_samples : int, default 1
            The number of draws.
        random_state : int or RandomState, default 0
            For the key of the draws.

        Returns
        -------
        array
            (M, n_samples). f comes from its posterior, jointly over the rows, and the noise is
            added. O(M^3).
        """
        X = self._inputs(X)
        seed = check_random_state(random_state).randint(np.iinfo(np.int32).max)
        return self._of_one_site(self.fit_result_.sample(seed, X, n_samples).y, "draws").T

    def _covariance(self, X, variance):
        """Of y = f + noise: that of f off the diagonal, and the variances of y on it."""
        if self.model_ is not regression:
            raise ModelError(
                "predict(return_cov=True) is for GPRegressor(model=None), where y is f and noise; "
                "fit_result_.posterior(X, joint=True) has the covariance of f, and sample_y(X, "
                "n_samples) draws y jointly."
            )
        covariance = _joint(self.fit_result_.posterior(self._inputs(X), joint=True))
        np.fill_diagonal(covariance, variance)
        return covariance

    def _default_model(self, X, y):
        return regression, regression_arguments(X, y)

    def _default_method(self):
        return Laplace()


def _joint(f) -> np.ndarray:
    """The covariance (M, M) of a multivariate normal, or of a mixture of them over draws."""
    if not hasattr(f, "mixing_distribution"):
        return np.array(f.covariance_matrix, float)
    weights, normals = np.asarray(f.mixing_distribution.probs), f.component_distribution
    apart = np.asarray(normals.mean) - weights @ np.asarray(normals.mean)
    within = np.tensordot(weights, np.asarray(normals.covariance_matrix), 1)
    return within + (apart.T * weights) @ apart


class GPClassifier(ClassifierMixin, GPEstimator):
    """Classification by any model and method, as a scikit-learn estimator.

    Use it in pipelines, cross-validation and searches.

    Parameters
    ----------
    model : callable, default None
        A function `model(X, y=None, ...)` with one observed site of C outcomes in a finite set
        (Bernoulli, Categorical, ordinal). It gets labels as 0, ..., C - 1, in the order of the
        sorted `classes_`. None is f ~ GP(0, v exp(-|x - x'|^2 / (2 l^2))). Two classes have one
        function and a Bernoulli likelihood, and more have C functions and their softmax. The priors
        are `priors.lengthscale(X)` for l, and LogNormal(1, 1) for v.
    method : object, default None
        Any method of `pg.fit`. None is, up to 1000 rows, `EP()` for two classes and `Laplace()` for
        more, else `SVGP()`.
    arguments : dict, default None
        As for `GPRegressor`. The default model has `lengthscale_prior` (concentration, rate).
    random_state : int or RandomState, default None
        For the key of the fit. None draws a new one each time.

    Attributes
    ----------
    classes_ : array
        The sorted labels, (C,).
    fit_result_, model_, log_evidence_, hyper_, n_features_in_, feature_names_in_
        As for `GPRegressor`.

    Notes
    -----
    Pickles work as for `GPRegressor`. Cost: that of the method.

    Examples
    --------
    >>> X = np.linspace(0.0, 1.0, 10)[:, None]
    >>> y = np.where(X[:, 0] > 0.5, "yes", "no")
    >>> classifier = pg.sklearn.GPClassifier(random_state=0).fit(X, y)
    >>> classifier.predict([[0.0], [1.0]]).tolist()
    ['no', 'yes']
    """

    def fit(self, X, y):
        """Fit to inputs and labels.

        Parameters
        ----------
        X : array
            Inputs, (N, D).
        y : array
            Labels, (N,), of any type that can be sorted.

        Returns
        -------
        GPClassifier
            The estimator itself.

        Raises
        ------
        DataError
            As `pg.fit`, and for fewer than two classes.
        FitError
            If the method did not succeed.
        ModelError
            If the method cannot fit the model.
        """
        X, y = validate_data(self, X, y, dtype=FLOATS)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"GPClassifier.fit(y): there is one class, {self.classes_.tolist()}; give another."
            )
        try:
            return self._infer(np.asarray(X), codes)
        except DataError as error:
            if len(self.classes_) == 2 or "outside the support of Bernoulli" not in str(error):
                raise
            told = f"y has the {len(self.classes_)} classes {self.classes_.tolist()[:5]}, and"
            remedy = "Give a model with a categorical likelihood, or none: GPClassifier()."
            raise DataError(f"GPClassifier.fit: {told} the model observes two. {remedy}") from error

    def predict_proba(self, X):
        """Predict probabilities of classes, integrated over f and over sampled hyperparameters.

        Parameters
        ----------
        X : array
            New inputs, (M, D).

        Returns
        -------
        array
            p(y = c | x, data), (M, C), with columns in the order of `classes_`.

        Raises
        ------
        ModelError
            If the model does not have C outcomes.
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
        """Predict log p(y = c | x, data), (M, C), with columns in the order of `classes_`."""
        return np.log(self.predict_proba(X))

    def decision_function(self, X):
        """Predict log odds, for any model the scores from which `predict` follows.

        Parameters
        ----------
        X : array
            New inputs, (M, D).

        Returns
        -------
        array
            log p(y = 1) - log p(y = 0), (M,), for two classes, and log p(y = c), (M, C), for more.
        """
        probs = self.predict_proba(X)
        logs = np.log(np.maximum(probs, np.finfo(probs.dtype).tiny))
        return logs[:, 1] - logs[:, 0] if len(self.classes_) == 2 else logs

    def predict(self, X):
        """Predict the class of largest probability, (M,)."""
        probs = self.predict_proba(X)
        return self.classes_[np.argmax(probs, 1)]

    def _default_model(self, X, y):
        model = binary if len(self.classes_) == 2 else multiclass
        return model, classification_arguments(X, len(self.classes_))

    def _default_method(self):
        return EP() if len(self.classes_) == 2 else Laplace()


@no_type_check
def binary(X, y=None, *, lengthscale_prior):
    """Two classes, y (N,) of 0 and 1: l ~ InverseGamma(lengthscale_prior), v ~ LogNormal(1, 1), f ~
    GP(0, v exp(-|x - x'|^2 / (2 l^2))), y_n ~ Bernoulli(sigma(f_n)).
    """
    f = numpyro.sample("f", GP(_of_classes(lengthscale_prior), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@no_type_check
def multiclass(X, y=None, *, lengthscale_prior, num_classes):
    """C classes, y (N,) of 0 ... C - 1: f_1 ... f_C with the prior of `binary` each, l and v
    shared, y_n ~ Categorical(softmax(f_1n ... f_Cn)).
    """
    kernel = _of_classes(lengthscale_prior)
    with numpyro.plate("classes", num_classes):
        f = numpyro.sample("f", GP(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@no_type_check
def regression(X, y=None, *, lengthscale_prior, variance_prior, noise_prior, location):
    """y (N,): l ~ InverseGamma(lengthscale_prior), v ~ LogNormal(variance_prior), s ~
    LogNormal(noise_prior), f ~ GP(location, v exp(-|x - x'|^2 / (2 l^2))), y_n ~ N(f_n, s^2).
    """
    lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(*lengthscale_prior))
    variance = numpyro.sample("variance", dist.LogNormal(*variance_prior))
    noise_scale = numpyro.sample("noise_scale", dist.LogNormal(*noise_prior))
    f = numpyro.sample("f", GP(kernels.RBF(variance, lengthscale), X, mean=location))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise_scale), obs=y)


@no_type_check
def _of_classes(lengthscale_prior):
    lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(*lengthscale_prior))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    return kernels.RBF(variance, lengthscale)


def classification_arguments(X, num_classes: int) -> dict[str, Any]:
    """Of `binary` or `multiclass`: `priors.lengthscale(X)` by its two numbers. `DataError` where
    all rows of X (N, D) are equal.
    """
    prior: Any = priors.lengthscale(X)
    found: dict[str, Any] = {"lengthscale_prior": _pair(prior.concentration, prior.rate)}
    return found if num_classes == 2 else {**found, "num_classes": num_classes}


def regression_arguments(X, y) -> dict[str, Any]:
    """Of `regression`: `priors.lengthscale(X)` and `priors.variance(y)` by their two numbers each;
    the noise about e^-1 standard deviations of y (N,); `location` its mean. `DataError` where all
    rows of X, or all of y, are equal.
    """
    variance: Any = priors.variance(y)
    return {
        **classification_arguments(X, 2),
        "variance_prior": _pair(variance.loc, variance.scale),
        "noise_prior": _pair(math.log(float(np.std(y))) - 1.0, 1.0),
        "location": jnp.asarray(float(np.mean(y))),
    }


def _pair(first, second) -> tuple[Any, Any]:
    return jnp.asarray(float(first)), jnp.asarray(float(second))
