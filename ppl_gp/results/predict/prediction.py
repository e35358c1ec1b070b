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
    """Predictions at M new inputs, from `fit.predict`.

    `mean`, `sd` and `interval` describe new observations y. `f_mean`, `f_sd` and `f_interval`
    describe the latent function. Observations are on the scale of the model's site: counts for a
    Poisson site. With several observed sites, what describes y is a dictionary {site: array}.

    Attributes
    ----------
    f_mean, f_variance : array or dict
        Of the latent function, (M,), or (C, M) for C functions at a site. For several GP sites,
        {site: array}, as samplers keep them. If sites were integrated in one linear predictor
        (`Laplace`, `EP`, `VI`; effects under `SVGP`), these describe the predictor: (R, M) for R
        functions per datum, with names in `f_rows`.
    mean, variance : array, dict or None
        Of y, (M,), or the site's shape with M for its data axis. For a finite set of outcomes, of
        the outcome as a number. None if NumPyro's distribution does not have a mean or a variance,
        or has those of a direction (VonMises). Infinite or NaN if y has none.
    probs : array, dict or None
        p(y = 1), (M,), for Bernoulli sites. (M, K) over the K outcomes in order if they are
        finitely many and the same in all rows: Categorical, ordinal, Binomial with one total (K =
        total + 1). Otherwise None, as for totals that differ between the rows, or more than 1000
        outcomes.
    mean_error : array, dict or None
        Standard error of `mean`, if y was averaged over draws of f, latents or layers given the
        hyperparameters, or over q of `MeanField()`. No error here includes that of the posterior's
        own draws (samplers, `Sample()`).
    f_quantiles, quantiles : array, dict or None
        Of f and of y, if `predict(quantiles=)` asked for them, with the levels along a first axis.
        For y, the smallest v for which p(y <= v) is at least the level. None for sites whose events
        are vectors.
    quantiles_error : array, dict or None
        Error of `quantiles`, if y was averaged over draws. The quantile lies within two errors with
        about 95 % probability. It is half the distance to the farther end of the values whose p(y
        <= v) is within two standard errors of the level. It is zero if they are one outcome. It is
        infinite if fewer than about ten draws lie beyond: use `sample` with more draws. None under
        `MeanField()` if y has a distribution function: with 1000 `num_draws`, quantiles are then
        off by up to a few hundredths of the spread.
    counts : bool
        Whether the outcomes of the one observed site are numbers of trials instead of classes.
    f_rows : tuple of str or None
        The name of each row of `f_mean`, such as ("f", "g - f"), as in `fit.functions`. The order
        can differ from the model's. None if rows are the entries of a site.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> fit.predict(x[:4]).to_frame().shape
    (4, 6)
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
        level : float, default 0.9
            The probability inside, between 0 and 1.

        Returns
        -------
        array or dict
            The lower and the upper ends, (2,) and the shape of `mean`.

        Raises
        ------
        DataError
            For a level outside (0, 1), and for a prediction that JAX has mapped or returned from
            `jit`.

        Notes
        -----
        The ends are the quantiles of `predict(quantiles=)`, at its cost. They are integrated if
        NumPyro has the distribution function of y and y depends on at most three functions.
        Otherwise they are estimated from draws, with the error `quantiles_error` of that call.
        """
        return self._with_ends(level).quantiles

    def f_interval(self, level: float = 0.9):
        """Central interval of the latent function, in the shape of `f_mean`.

        Parameters
        ----------
        level : float, default 0.9
            The probability inside, between 0 and 1.

        Returns
        -------
        array or dict
            The lower and the upper ends, (2,) and the shape of `f_mean`.

        Raises
        ------
        DataError
            As `interval`.
        """
        return self._with_ends(level).f_quantiles

    def _with_ends(self, level: float) -> "Prediction":
        if not isinstance(level, int | float | np.number) or not 0.0 < level < 1.0:
            raise DataError(f"interval(level={level}): give a number between 0 and 1, such as 0.9.")
        return (question := _question(self)).ask(question, _ends(level))

    def to_frame(self, level: float = 0.9) -> "pd.DataFrame":
        """Make a pandas table with one row per row of X_new.

        Parameters
        ----------
        level : float, default 0.9
            Of the central interval of y, whose ends are the columns "5 %" and "95 %" for 0.9.

        Returns
        -------
        pandas.DataFrame
            `mean`, `sd` and the ends of the interval of y, or `p(label)` for classes; `f_mean` and
            `f_sd`. Its index contains the row labels of X_new if X_new is a frame. Several sites,
            outputs or functions have one column each, such as `mean[0]`.

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
