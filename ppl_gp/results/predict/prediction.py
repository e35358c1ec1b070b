"""What `predict` answers: means, intervals and probabilities, and a table of them."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ppl_gp.errors import DataError
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.gp import unwrap
from ppl_gp.observations import OrdinalProbit
from ppl_gp.reading.arguments import argument_names
from ppl_gp.results.query.by_names import named_at, observed_argument
from ppl_gp.results.query.layout import ObservedSite
from ppl_gp.results.query.query import Query, query_at
from ppl_gp.results.record import Record

if TYPE_CHECKING:
    import pandas as pd

# distributions over classes, with a parameter for each; a count has a number of trials instead
_CLASSES = ("CategoricalProbs", "CategoricalLogits", "OrderedLogistic", "OrderedProbit")


class Prediction(eqx.Module):
    """Predictions at M new inputs. If several sites are observed, what is of y is {site: array}.

    `mean -+ 2 sd` and `interval` are of new observations y, `f_mean` and `f_interval` of the latent
    function. All of them are on the scale of the model's site: for a Poisson site, counts.

    Attributes
    ----------
    f_mean, f_variance : Array
        Of the latent function, (M,); (C, M) for several functions at a site, {site: array} for
        several GP sites, as samplers keep them. Where sites were integrated in one predictor
        (`Laplace`, `EP`, `VI`; effects under `SVGP`) these are the predictor's, (R, M) for R
        functions per datum, and `f_rows` says what each row is.
    mean, variance : Array or None
        Of y, (M,), or the site's own shape with M for its data axis; for outcomes from a finite
        set, of their value as a number. `None` where NumPyro's distribution has no mean or
        variance, or those of a direction (VonMises); infinite or NaN where y has none.
    probs : Array or None
        In NumPyro's convention: p(y = 1), (M,), for Bernoulli sites; (M, K) over the K outcomes in
        order where the support is finite and the same in all rows (Categorical, ordinal, Binomial
        of one total: K = total + 1). Otherwise `None`, as for Binomial totals that differ between
        the rows of X_new, and for more than 1000 outcomes.
    mean_error : Array or None
        Standard error of `mean`, in its shape, where y was averaged over draws of f, latents or
        layers given the hyperparameters, or over q of `MeanField()`. The error of the posterior's
        own draws (samplers, `Sample()`) is in no error here.
    f_quantiles, quantiles : Array or None
        Of f and of y, where `predict(quantiles=)` asked for them, in the shapes of `f_mean` and
        `mean` with the levels along a first axis: the smallest v with p(y <= v) of at least the
        level. `None` for sites whose events are vectors.
    quantiles_error : Array or None
        Of `quantiles` where y was averaged over draws, also under `MeanField()` (at 1000
        `num_draws` a few hundredths of the spread). `quantiles` -+ 2 errors holds the quantile with
        about 95 %: half the way to the farther end of the values whose p(y <= v) is within two
        standard errors of the level. Zero where they are one outcome; infinite where fewer than
        about ten draws are beyond it (`sample` has more).
    counts : bool
        Whether the outcomes of the one observed site are numbers of trials, not classes.
    f_rows : tuple of str or None
        What each row of `f_mean` (R, M) adds up, such as ("f", "g - f"): `fit.functions`. The order
        is not the declaration's. `None` where rows are the entries of a site.
    """

    f_mean: Any
    f_variance: Any
    mean: Any
    variance: Any
    probs: Any
    mean_error: Any = None
    f_quantiles: Any = None
    quantiles: Any = None
    quantiles_error: Any = None
    counts: bool = eqx.field(default=False, static=True)
    f_rows: tuple[str, ...] | None = eqx.field(default=None, static=True)

    def __getstate__(self) -> dict:
        """Without the fit, whose model need not be one that pickle takes."""
        return {k: v for k, v in vars(self).items() if k != "_question"}

    @property
    def sd(self):
        """Standard deviation of y, in the shape of `mean`."""
        return jax.tree.map(jnp.sqrt, self.variance)

    @property
    def f_sd(self):
        """Standard deviation of the latent function, in the shape of `f_mean`."""
        return jax.tree.map(jnp.sqrt, self.f_variance)

    def interval(self, level: float = 0.9):
        """Central interval of new observations y.

        Parameters
        ----------
        level : float
            The probability inside, between 0 and 1.

        Returns
        -------
        Array or dict
            The lower and the upper ends, (2,) and the shape of `mean`: the quantiles that
            `predict(quantiles=)` returns, at its cost. They are integrated if NumPyro has the
            distribution function of y and y depends on at most three functions, else estimated from
            draws. `quantiles_error` of `predict(quantiles=)` is the error of such an estimate.

        Raises
        ------
        DataError
            For another level, and for a prediction that JAX has mapped or returned from `jit`.
        """
        return self._with_ends(level).quantiles

    def f_interval(self, level: float = 0.9):
        """Central interval of the latent function, as `interval`, in the shape of `f_mean`."""
        return self._with_ends(level).f_quantiles

    def _with_ends(self, level: float) -> "Prediction":
        if not isinstance(level, int | float | np.number) or not 0.0 < level < 1.0:
            raise DataError(f"interval(level={level}): give a number between 0 and 1, such as 0.9.")
        return (question := _question(self)).ask(question, _ends(level))

    def to_frame(self, level: float = 0.9) -> "pd.DataFrame":
        """A table with one row per row of X_new.

        Parameters
        ----------
        level : float
            Of the central interval of y, whose ends are the columns "5 %" and "95 %" for 0.9.

        Returns
        -------
        pandas.DataFrame
            `mean`, `sd` and the ends of the interval of y, or `p(label)` for classes; `f_mean` and
            `f_sd`. Its index holds the row labels of X_new if X_new is a frame. Several sites,
            outputs or functions have a column each, such as `mean[0]`.

        Raises
        ------
        DataError
            As `interval`.
        """
        import pandas as pd  # with xarray it takes a second, which a fit need not wait for

        question = _question(self)
        query, names = question.query()
        sites, found = query.layout.sites, {}
        classes = [s for s in sites if s.support is not None and not observes_counts(query, s)]
        ends = self if len(classes) == len(sites) else self._with_ends(level)
        for site in sites:
            of_site = _one_of(site.label, len(sites))
            if site in classes:
                parts = _probabilities(of_site(self.probs), site, question.labels)
            else:
                q = of_site(ends.quantiles)
                q = (None, None) if q is None else q
                percents = (f"{100 * p:g} %" for p in _ends(level))
                parts = {"mean": of_site(self.mean), "sd": of_site(self.sd)}
                parts |= dict(zip(percents, q, strict=True))
            prefix = "" if len(sites) == 1 else f"{site.label} "
            for name, x in parts.items():
                found |= _columns(prefix + name, x, site.axis)
        for name, value in (("f_mean", self.f_mean), ("f_sd", self.f_sd)):
            for k, x in (value if isinstance(value, dict) else {"": value}).items():
                found |= _columns(f"{k} {name}".strip(), x, -1, self.f_rows)
        return pd.DataFrame(found, index=names.rows and list(names.rows))


class Question(NamedTuple):
    """What a prediction is the answer to. It is not a field: JAX and pickle leave it behind."""

    fit: Record
    X_new: Any
    args: tuple
    kwargs: dict
    ask: Callable  # (question, levels) -> the same prediction with quantiles

    def query(self) -> tuple[Query, ArrayNames]:
        """(laid out again, what the new inputs are called)."""
        X_new, args, kwargs, names = named_at(self.fit, self.X_new, self.args, self.kwargs)
        first = argument_names(self.fit.model, 1)[0]
        return query_at(self.fit, X_new, args, kwargs), names.get(first, ArrayNames())

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Of the classes, where the observations had some."""
        names = self.fit.names.get(observed_argument(self.fit.model))
        return None if names is None else names.level(0)


def _question(prediction: Prediction) -> Question:
    """Raises `DataError` where it is gone."""
    if (found := getattr(prediction, "_question", None)) is None:
        raise DataError(
            "this prediction went through jax.tree.map, jit or a file and has lost its fit: "
            "call interval() or to_frame() on what fit.predict(X_new) returned."
        )
    return found


def _ends(level: float) -> tuple[float, float]:
    return 0.5 * (1.0 - level), 0.5 * (1.0 + level)


def _one_of(label: str, num: int) -> Callable:
    """What is of a site in a field of a prediction of `num` of them."""
    return lambda x: x[label] if num > 1 and x is not None else x


def _probabilities(probs, site: ObservedSite, labels) -> dict[str, Any]:
    """{p(label): its probabilities}, of two outcomes the second alone."""
    if site.boolean:
        return {f"p({labels[1] if labels else 1})": probs}
    each = labels or (site.support or ())
    return {f"p({k})": probs[..., i] for i, k in enumerate(each)}


def _columns(name: str, x, axis: int | None, rows: tuple[str, ...] | None = None) -> dict:
    """{column: (M,)}, one for each further entry of a row, `rows` their names."""
    if x is None:
        return {}
    entries = np.moveaxis(np.asarray(x), axis or 0, 0)
    if entries.ndim == 1:
        return {name: entries}
    places = itertools.product(*map(range, entries.shape[1:]))
    label = lambda at: rows[at[0]] if rows else ",".join(map(str, at))  # noqa: E731
    return {f"{name}[{label(at)}]": entries[:, *at] for at in places}


def asked(question: Question, answer: Prediction) -> Prediction:
    object.__setattr__(answer, "_question", question)
    return answer


def observes_counts(query: Query, site: ObservedSite) -> bool:
    """Whether the outcomes of an observed site are numbers, and not classes."""
    if site.support is None or site.boolean:
        return False
    fn = query.ask(site, unwrap)
    return not (isinstance(fn, OrdinalProbit) or type(fn).__name__ in _CLASSES)


def is_classification(prediction: Prediction) -> bool:
    """Whether outcomes of y are classes (Bernoulli, Categorical, ordinal). Counts are numbers."""
    probs = prediction.probs
    return probs is not None and not isinstance(probs, dict) and not prediction.counts


def outcome_probabilities(prediction: Prediction) -> Float[ndarray, "... K"]:
    """p(y = k) in the shape of y and K, for Bernoulli observations too."""
    probs = np.asarray(prediction.probs)
    binary = probs.ndim == 1 or probs.shape == np.shape(prediction.mean)
    return np.stack([1.0 - probs, probs], -1) if binary else probs
