"""`predict` and `sample`: the one way to ask any fit about new inputs; and what `predict` answers:
means, intervals and probabilities, and a table of them.

What is averaged over draws at X_new has a fixed internal key and a standard error. Fits with draws
are mixtures over them; memory does not grow with their number.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Float
from numpy import ndarray

from ppl_gp.errors import DataError, ModelError
from ppl_gp.frames.opened import ArrayNames
from ppl_gp.gp import unwrap
from ppl_gp.observations import OfClasses
from ppl_gp.reading.arguments import Leaves, argument_names
from ppl_gp.reading.reading import Declared
from ppl_gp.results.integrals.compiled import check_link_approximation, joint_draws, predictive
from ppl_gp.results.integrals.factorised import integrated_moments, warn_if_infinite
from ppl_gp.results.integrals.quantiles import quantiles_at
from ppl_gp.results.parts import function_rows
from ppl_gp.results.query.layout import (
    ObservedSite,
    by_names,
    named_at,
    observed_argument,
)
from ppl_gp.results.query.query import Integration, Query, query_at
from ppl_gp.results.record import Record
from ppl_gp.settings import as_key

if TYPE_CHECKING:
    import pandas as pd


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

    def _of(self, sites: set[str]) -> "Prediction":
        """Probabilities of these sites alone: others' outcomes are as many in a few rows only."""
        if isinstance(self.probs, dict):
            probs = {k: x if k in sites else None for k, x in self.probs.items()}
            return dataclasses.replace(self, probs=probs)
        return self if sites else dataclasses.replace(self, probs=None, counts=False)

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

    def _repr_html_(self) -> str | None:
        """As notebooks show it: without intervals, which may take seconds. None without a table."""
        try:
            return self.to_frame(None)._repr_html_()
        except DataError:
            return None

    def to_frame(self, level: float | None = 0.9) -> "pd.DataFrame":
        """Make a pandas table with one row per row of X_new.

        Parameters
        ----------
        level : float or None, default 0.9
            Of the central interval of y, whose ends are the columns "5 %" and "95 %" for 0.9. None
            leaves them out.

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
        ends = self
        if level is not None and len(classes) < len(sites):
            ends = self._with_ends(level)
        for site in sites:
            of_site = _one_of(site.label, len(sites))
            if site in classes:
                own = question.labels if len(sites) == 1 or site.label == "y" else None
                parts = _probabilities(of_site(self.probs), site, own)
            else:
                q = of_site(ends.quantiles)
                q = (None, None) if q is None else q
                parts = {"mean": of_site(self.mean), "sd": of_site(self.sd)}
                if level is not None:
                    percents = (f"{100 * p:g} %" for p in _ends(level))
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
    if labels and len(labels) != (num := np.shape(probs)[-1]):
        raise DataError(
            f"y has {len(labels)} labels, {list(labels)}, and site '{site.label}' observes {num} "
            f"classes: fit to pandas.Categorical(y, categories=[...]) with the names of the {num}."
        )
    return {f"p({k})": probs[..., i] for i, k in enumerate(labels or (site.support or ()))}


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
    classes = OfClasses | dist.CategoricalProbs | dist.CategoricalLogits
    parts = getattr(fn := query.ask(site, unwrap), "component_distributions", [fn])
    return not any(isinstance(unwrap(part), classes) for part in parts)


def is_classification(prediction: Prediction) -> bool:
    """Whether outcomes of y are classes (Bernoulli, Categorical, ordinal). Counts are numbers."""
    probs = prediction.probs
    return probs is not None and not isinstance(probs, dict) and not prediction.counts


def outcome_probabilities(prediction: Prediction) -> Float[ndarray, "... K"]:
    """p(y = k) in the shape of y and K, for Bernoulli observations too."""
    probs = np.asarray(prediction.probs)
    binary = probs.ndim == 1 or probs.shape == np.shape(prediction.mean)
    return np.stack([1.0 - probs, probs], -1) if binary else probs


class PredictiveDraws(NamedTuple):
    """Joint draws at X_new, from `fit.sample`.

    Attributes
    ----------
    f : array or dict
        (num_samples, M), or (num_samples, R, M) for a predictor of R functions in the order of
        `fit.functions`, or {GP site: draws}.
    y : array or dict
        New observations, one set per draw of f; {site: draws} for several observed sites.
    """

    f: Any
    y: Any


def predict(
    fit: Record,
    X_new,
    *args,
    link_approximation: str | None = None,
    quantiles: Sequence[float] | None = None,
    **kwargs,
) -> Prediction:
    """Predict the function and new observations at new inputs.

    Parameters
    ----------
    X_new : array or frame
        New inputs, (M, D) or (M,), as in training. Columns of a frame are selected by name.
    *args, **kwargs
        The model's other arguments at the new inputs. Give arrays with one value per row again,
        such as an offset. Other arguments are remembered. Leave out observations, and masks
        for which the model takes `None`.
    link_approximation : str, default None
        None integrates the model's likelihood by quadrature, to about 1e-9 for latent standard
        deviations up to 30. `"mackay"` is cheaper and off by up to 0.02, for
        `Bernoulli(logits=...)` with logits affine in f.
    quantiles : sequence of float, default None
        Levels in (0, 1), such as (0.05, 0.95). They cost 10 to 25 times the rest.

    Returns
    -------
    Prediction
        Means, variances, probabilities and quantiles. Each observed site is predicted by itself.

    Raises
    ------
    DataError
        If X_new has NaN, no rows, or other columns than in training, or if arrays are missing.
    ModelError
        If there is nothing to predict, as for a mixture that observes its inputs, or if the link
        approximation does not fit the model.

    Notes
    -----
    - For sampled fits, f is matched by its moments, and y and its probabilities are the mixture
      over draws.
    - Quantiles invert the integrated `p(y <= t)`, to about 1e-8 of the spread of y, and to 1e-3 in
      the tails for several functions.
    - If y depends on latents, layers or more than three functions, it is averaged over at least
      1000 draws, with errors `mean_error` and `quantiles_error`. Means that are proved affine in
      the functions, with a constant variance, stay exact. Quantiles need draws too if y has no
      distribution function.
    - A site that the model observes from an argument given here is not conditioned on. For a
      generative classifier p(x, y), use two calls of `log_density`: the ratio of their densities is
      `p(y* | x*)`.

    More than 10 007 rows are predicted in chunks, so memory does not grow with them. Cost for K
    outcomes: O(M N^2 + 384 K M) at one setting of the hyperparameters. S draws cost O(S (N^3 + M
    N^2 + 192 K M)). Source of `"mackay"`: MacKay (1992); Bishop (2006), equations 4.153-4.154.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> fit.predict(np.array([0.25, 0.75])).mean.round(1).tolist()
    [1.0, -1.0]
    """
    if "y" in kwargs:
        raise DataError(
            "predict(y=...): y is what is predicted; log_density(X_new, y_new) scores observations."
        )
    levels = () if quantiles is None else _levels(quantiles)
    question = Question(fit, X_new, args, kwargs, partial(_again, link_approximation))
    X_new, args, kwargs = by_names(fit, X_new, args, kwargs)
    if many_separate_rows(fit, X_new, args, kwargs):
        options = {"link_approximation": link_approximation, "quantiles": levels or None}
        known = {s.label for s in query_at(fit, X_new, args, kwargs).layout.sites if s.support}
        ask = lambda X, a, k: predict(fit, X, *a, **options, **k)._of(known)  # noqa: E731
        return asked(question, by_rows(ask, fit.model, X_new, args, kwargs))
    query = query_at(fit, X_new, args, kwargs)
    query.layout.require_apart()
    check_link_approximation(query, link_approximation)
    exact = integrated_moments(query, fit.blocks) if fit.blocks else None
    if exact is not None:
        query.require_valid()
    elif fit.blocks:
        warn_if_infinite(query, fit.blocks)
    f, y = exact or predictive(query, link_approximation, judged=bool(fit.blocks))
    _require_any(fit, f, y, "predict")
    f_quantiles, y = quantiles_at(query, levels, y) if levels else ({}, y)
    finite = [s for s in query.layout.sites if y[s.label].log_probs is not None]
    probs = {s.label: _numpyro_convention(y[s.label].log_probs, s.boolean) for s in finite}

    def of_y(name, source=y):
        return _one_or_all({k: getattr(v, name, None) for k, v in source.items()})

    def where_any(name):
        return of_y(name) if any(getattr(v, name) is not None for v in y.values()) else None

    moments = {k: v.moments for k, v in y.items()}
    answer = Prediction(
        of_y("mean", f),
        of_y("variance", f),
        of_y("mean", moments),
        of_y("variance", moments),
        _one_or_all({k: probs.get(k) for k in y}),
        where_any("mean_error"),
        _one_or_all(f_quantiles),
        of_y("quantiles") if levels else None,
        where_any("quantiles_error"),
        len(y) == 1 and observes_counts(query, query.layout.sites[0]),
        function_rows(fit),
    )
    return asked(question, answer)


def _again(link_approximation, question: Question, levels: tuple[float, float]) -> Prediction:
    how = {"quantiles": levels, "link_approximation": link_approximation}
    return predict(question.fit, question.X_new, *question.args, **how, **question.kwargs)


def _levels(quantiles) -> tuple[float, ...]:
    try:
        levels = tuple(float(q) for q in np.ravel(np.asarray(quantiles, float)))
    except (TypeError, ValueError):
        levels = (float("nan"),)  # of what is no number
    if not levels or not all(0.0 < q < 1.0 for q in levels):
        raise DataError(
            f"predict(quantiles={quantiles}): give levels between 0 and 1, as (0.05, 0.95), or "
            "leave it out."
        )
    return levels


def many_separate_rows(fit, X_new, args, kwargs) -> bool:
    """Whether more than `ROWS` rows are asked for that do not depend on each other."""
    if not getattr(X_new, "ndim", 0) or X_new.shape[0] <= ROWS:
        return False
    if fit.model.reading.row_axes.get(argument_names(fit.model, 1)[0]) != 0:
        return False  # a table, which all rows look something up in
    query = query_at(fit, *rows_from(0, fit.model, X_new, args, kwargs))
    return query.integration is not Integration.joint_draws


@partial(jax.jit, static_argnames="boolean")
def _numpyro_convention(log_probs, boolean: bool):
    probs = jnp.exp(log_probs)
    return probs[1] if boolean else jnp.moveaxis(probs, 0, -1)


def _one_or_all(by_site: dict):
    """The value of a single site, {site: value} for several, `None` for none."""
    return next(iter(by_site.values())) if len(by_site) == 1 else by_site or None


def sample(fit: Record, rng_key, X_new, num_samples, *args, **kwargs) -> PredictiveDraws:
    """Draw the function jointly over all rows of X_new, and new observations given it.

    Use it for questions about several rows together, such as the place of a maximum.

    Parameters
    ----------
    rng_key : int or jax.Array
        A seed or a key.
    X_new : array or frame
        New inputs, as for `predict`.
    num_samples : int
        The number of draws. For sampled fits they are spread evenly over the posterior draws.
    *args, **kwargs
        The model's other arguments at the new inputs, as for `predict`.

    Returns
    -------
    PredictiveDraws
        `f` and `y`, (num_samples, M) each. `f` is (num_samples, R, M) for R functions per row. With
        several sites they are dictionaries.

    Raises
    ------
    DataError
        As `predict`, and for `num_samples` below 1.

    Notes
    -----
    O(M^3 + M N^2) per posterior draw that is used, and O(N^3) too if the hyperparameters are
    sampled.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> fit.sample(1, np.array([0.25, 0.75]), 100).f.shape
    (100, 2)
    """
    if not isinstance(num_samples, int | np.integer) or num_samples < 1:
        told = num_samples if np.ndim(num_samples) == 0 else f"array {np.shape(num_samples)}"
        raise DataError(
            f"sample(num_samples={told}): give a whole number of at least 1 after the inputs, and "
            "the model's other arguments after it: sample(rng_key, X_new, num_samples, ...)."
        )
    key = as_key(rng_key, "fit.sample(0, X_new, 100)")
    X_new, args, kwargs = by_names(fit, X_new, args, kwargs)
    f, y, _ = joint_draws(query_at(fit, X_new, args, kwargs), key, int(num_samples))
    _require_any(fit, f, y, "sample")
    return PredictiveDraws(_one_or_all(f), _one_or_all(y))


def _require_any(fit: Record, f, y, verb: str) -> None:
    if f or y:
        return
    reading = fit.model.reading
    if whole := [k for k in reading.observed if reading.axis(k) is None]:
        raise ModelError(
            f"{verb}: site(s) {whole} have no entry per row of the inputs, as one event of all "
            "rows has none, so that a row has no prediction of its own. The posterior is in "
            "fit.sites."
        )
    raise ModelError(
        f"{verb}: the model has no function, and observes the inputs themselves, so that there "
        "is nothing to predict at them; log_density(X_new) scores rows, fit.sites has the "
        "posterior."
    )


# A prime: no other axis of a result is likely to have this size.
ROWS = 10_007


def by_rows(
    function: Callable, model: Declared, X, args: tuple, kwargs: dict, observed: tuple = ()
):
    """function(X, observed + args, kwargs) on chunks of `ROWS` rows, put together.

    `observed`: y_new by position, one entry per row. The last chunk is filled with rows before it,
    which are dropped. For functions whose rows do not depend on each other.
    """
    num = jnp.shape(X)[0]
    starts = [*range(0, num - ROWS, ROWS), num - ROWS]
    parts = []
    for start in starts:
        first, others, named = rows_from(start, model, X, args, kwargs)
        own = (y[start : start + ROWS] for y in observed)
        parts.append(function(first, (*own, *others), named))

    def joined(*chunks):
        axis = chunks[0].shape.index(ROWS)
        *whole, last = (np.asarray(x) for x in chunks)
        own = np.arange(ROWS * len(starts) - num, ROWS)
        return jnp.asarray(np.concatenate([*whole, np.take(last, own, axis)], axis))

    return jax.tree.map(joined, *parts)


def rows_from(start: int, model: Declared, X, args: tuple, kwargs: dict) -> tuple:
    """(X, args, kwargs) at `ROWS` rows from `start` on."""
    leaves, axes = Leaves(model, (X, *args), kwargs), model.reading.row_axes
    rows = {
        p: x[(slice(None),) * axes[p] + (slice(start, start + ROWS),)]
        for p, x in leaves.arrays.items()
        if p in axes and x.shape
    }
    (first, *others), named = leaves.replaced(rows)
    return first, tuple(others), named
