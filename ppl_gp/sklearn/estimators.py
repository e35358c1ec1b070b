"""`GPRegressor` and `GPClassifier`, and the models of estimators that are given none.

The parameters of their priors are arrays among a model's arguments and no constants of it: compiled
code is keyed by constants, and other training data (the folds of a cross-validation) shall find it.
The models are not wrapped by a checker of types: what a wrapper holds would be read with them.
"""

import math
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any, no_type_check

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets

from ppl_gp import kernels, priors
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.sklearn.base import GPEstimator


class GPRegressor(RegressorMixin, GPEstimator):
    """Regression by any model and method, as a scikit-learn estimator.

    Use it in pipelines, cross-validation and searches.

    Parameters
    ----------
    model : callable, default None
        A function `model(X, y=None, ...)` with one observed site of numbers, (N,), of any
        likelihood: Gaussian, Student-t, Poisson. None is y ~ N(f(x), s^2) with f ~ GP(mean of y, v
        k(x, x')). The priors are `priors.lengthscale(X)` for the length scale of k,
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
    kernel : str, default "RBF"
        Of the default model: "RBF", "Matern12", "Matern32", "Matern52" or "RationalQuadratic". Put
        another kernel into a model of your own.
    ard : bool, default False
        True gives the default model one length scale per column.
    likelihood : str, default "gaussian"
        Of the default model: "gaussian"; "student_t", with 4 degrees of freedom, for outliers;
        "poisson" for counts with mean exp(f(x)); "negative_binomial" for counts with a larger
        variance, mean + mean^2 / concentration. For counts, the mean of f is log(mean of y), and
        v and the concentration are LogNormal(0, 1).

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

    _of_default = {**GPEstimator._of_default, "likelihood": "gaussian"}

    def __init__(
        self,
        model=None,
        method=None,
        arguments=None,
        random_state=None,
        kernel="RBF",
        ard=False,
        likelihood="gaussian",
    ):
        super().__init__(model, method, arguments, random_state, kernel, ard)
        self.likelihood = likelihood

    def fit(self, X, y, sample_weight=None):
        """Fit to inputs and numbers.

        Parameters
        ----------
        X : array
            Inputs, (N, D).
        y : array
            Observations, (N,).
        sample_weight : array, default None
            Weights w of the rows in the default model, (N,), not negative. Numbers have noise of
            variance s^2 / w ("student_t": scale s / sqrt(w)). A count of weight 2 is two equal
            rows. A row of weight 0 is left out. The mean of f and the priors use them too.

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
        X, y = self._checked(X, y, y_numeric=True, ensure_min_samples=fewest)
        X, y, weights = self._weighted(sample_weight, X, np.asarray(y))
        if self.model is None:
            counts = self.likelihood in _COUNTS and np.all(y == np.floor(y))
            y = y.astype(int if counts else float)
        return self._infer(X, y, weights)

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
            For `return_cov` with a model of your own, or of counts. It needs y = f + noise.
        DataError
            For both `return_std` and `return_cov`.

        Notes
        -----
        scikit-learn's `GaussianProcessRegressor` predicts the same if its kernel has a
        `WhiteKernel`. For f without noise, use `fit_result_.posterior(X)`, or
        `fit_result_.predict(X)`, which after a fit with weights needs `weights=` too.
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
        drawn = self.fit_result_.sample(seed, X, n_samples, **self._arguments(X))
        return self._of_one_site(drawn.y, "draws").T

    def _covariance(self, X, variance):
        """Of y = f + noise: that of f off the diagonal, and the variances of y on it."""
        if self.model_ is not regression or self.likelihood in _COUNTS:
            raise ModelError(
                "predict(return_cov=True) is for the default model of numbers, where y is f and "
                "noise (likelihood='gaussian' or 'student_t'); "
                "fit_result_.posterior(X, joint=True) has the covariance of f, and sample_y(X, "
                "n_samples) draws y jointly."
            )
        X = self._inputs(X)
        covariance = _joint(self.fit_result_.posterior(X, joint=True))
        np.fill_diagonal(covariance, variance)
        return covariance

    def _default_model(self, X, y, weights):
        if self.likelihood not in [*_OBSERVED]:
            raise DataError(
                f"GPRegressor(likelihood={self.likelihood!r}): give one of {[*_OBSERVED]}."
            )
        own = {*(self.arguments or ())}
        arguments = kernel_arguments(self.kernel, X, self.ard, own)
        return regression, arguments | regression_arguments(y, self.likelihood, weights, own)

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
        sorted `classes_`. None is f ~ GP(0, v k(x, x')). Two classes have one function and a
        Bernoulli likelihood, and more have C functions and their softmax. The priors are
        `priors.lengthscale(X)` for the length scale of k, and LogNormal(1, 1) for v.
    method : object, default None
        Any method of `pg.fit`. None is, up to 1000 rows, `EP()` for two classes and `Laplace()` for
        more, else `SVGP()`.
    arguments : dict, default None
        As for `GPRegressor`. The default model has `lengthscale_prior` (concentration, rate).
    random_state : int or RandomState, default None
        For the key of the fit. None draws a new one each time.
    kernel, ard
        As for `GPRegressor`.

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

    def fit(self, X, y, sample_weight=None):
        """Fit to inputs and labels.

        Parameters
        ----------
        X : array
            Inputs, (N, D).
        y : array
            Labels, (N,), of any type that can be sorted.
        sample_weight : array, default None
            Weights of the rows in the default model, (N,), not negative. The likelihood of a row
            counts to the power of its weight, and a row of weight 0 is left out. `EP()` of weight
            2 is close to two equal rows, not equal: it approximates the power as one factor.

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
        X, y = self._checked(X, y)
        check_classification_targets(y)
        X, y, weights = self._weighted(sample_weight, X, np.asarray(y))
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"GPClassifier.fit(y): there is one class, {self.classes_.tolist()}"
                f"{', in rows of positive weight' if sample_weight is not None else ''}; give "
                "another."
            )
        try:
            return self._infer(X, codes, weights)
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
        best = np.argmax(self.predict_proba(X), 1)  # first: it asks for a fit
        return self.classes_[best]

    def _default_model(self, X, y, weights):
        own = {*(self.arguments or ())}
        arguments = kernel_arguments(self.kernel, X, self.ard, own) | _weights(weights)
        if len(self.classes_) == 2:
            return binary, arguments
        return multiclass, arguments | {"num_classes": len(self.classes_)}

    def _default_method(self):
        return EP() if len(self.classes_) == 2 else Laplace()


@no_type_check
def binary(X, y=None, *, lengthscale_prior, kernel="RBF", weights=None):
    """Two classes, y (N,) of 0 and 1: l ~ InverseGamma(lengthscale_prior), v ~ LogNormal(1, 1), f ~
    GP(0, v k), y_n ~ Bernoulli(sigma(f_n)).
    """
    f = numpyro.sample("f", GP(_covariance(kernel, lengthscale_prior, (1.0, 1.0)), X))
    with numpyro.plate("data", X.shape[0]), _counted(weights):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@no_type_check
def multiclass(X, y=None, *, lengthscale_prior, num_classes, kernel="RBF", weights=None):
    """C classes, y (N,) of 0 ... C - 1: f_1 ... f_C with the prior of `binary` each, l and v
    shared, y_n ~ Categorical(softmax(f_1n ... f_Cn)).
    """
    covariance = _covariance(kernel, lengthscale_prior, (1.0, 1.0))
    with numpyro.plate("classes", num_classes):
        f = numpyro.sample("f", GP(covariance, X))
    with numpyro.plate("data", X.shape[0]), _counted(weights):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@no_type_check
def regression(
    X,
    y=None,
    *,
    lengthscale_prior,
    variance_prior,
    noise_prior,
    location,
    kernel="RBF",
    likelihood="gaussian",
    weights=None,
):
    """y (N,): l ~ InverseGamma(lengthscale_prior), v ~ LogNormal(variance_prior), f ~ GP(location,
    v k), y_n as its likelihood has it about f_n, whose scale or concentration is
    LogNormal(noise_prior).
    """
    scale, observed = _OBSERVED[likelihood]
    covariance = _covariance(kernel, lengthscale_prior, variance_prior)
    noise = numpyro.sample(scale, dist.LogNormal(*noise_prior)) if scale else None
    if weights is not None and scale == "noise_scale":
        noise, weights = noise / jnp.sqrt(weights), None
    f = numpyro.sample("f", GP(covariance, X, mean=location))
    with numpyro.plate("data", X.shape[0]), _counted(weights):
        numpyro.sample("y", observed(f, noise), obs=y)


# {likelihood: (the site of its scale, (f, scale) -> distribution)}
_OBSERVED = {
    "gaussian": ("noise_scale", dist.Normal),
    "student_t": ("noise_scale", lambda f, scale: dist.StudentT(4.0, f, scale)),
    "poisson": (None, lambda f, _: dist.Poisson(jnp.exp(f))),
    "negative_binomial": ("concentration", lambda f, c: dist.NegativeBinomial2(jnp.exp(f), c)),
}
_COUNTS = ("poisson", "negative_binomial")
_KERNELS = ("RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic")


@no_type_check
def _covariance(kernel, lengthscale_prior, variance_prior):
    lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(*lengthscale_prior).to_event())
    variance = numpyro.sample("variance", dist.LogNormal(*variance_prior))
    return getattr(kernels, kernel)(variance, lengthscale)


@no_type_check
def _counted(weights):
    return nullcontext() if weights is None else numpyro.handlers.scale(scale=weights)


def kernel_arguments(kernel, X, ard, own: Collection[str] = ()) -> dict[str, Any]:
    """Of the default models: the kernel, and `priors.lengthscale(X)` by its two numbers, each (D,)
    with `ard`. `DataError` where all rows of X (N, D) are equal. `own`: what the user gives.
    """
    if kernel not in _KERNELS:
        raise DataError(f"kernel={kernel!r}: give one of {_KERNELS}, or a model with your own.")
    if not isinstance(ard, bool | np.bool_):
        raise DataError(f"ard={ard!r}: give True or False.")
    found = {} if kernel == "RBF" else {"kernel": kernel}
    if "lengthscale_prior" in own:
        return found
    prior: Any = priors.lengthscale(X, ard=bool(ard))
    prior = getattr(prior, "base_dist", prior)
    return {**found, "lengthscale_prior": _pair(prior.concentration, prior.rate)}


def regression_arguments(
    y, likelihood: str, weights=None, own: Collection[str] = ()
) -> dict[str, Any]:
    """Of `regression`: `priors.variance(y)` by its two numbers; the noise about e^-1 standard
    deviations of y (N,); `location` its mean. Of counts by the logarithm of their mean.
    `DataError` where all of y are equal, of counts where all are 0. `own`: what the user gives.
    """
    found = _weights(weights) | ({} if likelihood == "gaussian" else {"likelihood": likelihood})
    mean = float(np.average(y, weights=weights))
    if likelihood in _COUNTS:
        if np.min(y) < 0 or not mean > 0.0:
            raise DataError(
                f"GPRegressor(likelihood={likelihood!r}): y has values from {np.min(y):g} to "
                f"{np.max(y):g}; counts are 0, 1, 2 and so on, and not all 0."
            )
        scales = {"variance_prior": _pair(0.0, 1.0), "noise_prior": _pair(0.0, 1.0)}
        return {**found, **scales, "location": jnp.asarray(math.log(mean))}
    if {"variance_prior", "noise_prior"} <= {*own}:
        return {**found, "location": jnp.asarray(mean)}
    spread: Any = priors.variance(y)  # refuses y that does not vary
    log_sd = 0.5 * math.log(float(np.average((y - mean) ** 2, weights=weights)))
    return {
        **found,
        "variance_prior": _pair(2.0 * log_sd, spread.scale),
        "noise_prior": _pair(log_sd - 1.0, 1.0),
        "location": jnp.asarray(mean),
    }


def _weights(weights) -> dict[str, Any]:
    return {} if weights is None else {"weights": jnp.asarray(weights)}


def _pair(first, second) -> tuple[Any, Any]:
    return jnp.asarray(first, float), jnp.asarray(second, float)
