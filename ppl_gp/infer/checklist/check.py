"""`check`: a checklist about a model and its data, before any inference is run."""

import inspect
import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax

from ppl_gp.errors import LISTED, PplGpError
from ppl_gp.gp import unwrap
from ppl_gp.infer.checklist import likelihood, sites
from ppl_gp.infer.checklist.sites import Subject
from ppl_gp.infer.fit import list_methods_by
from ppl_gp.infer.probes import checked_trace
from ppl_gp.reading import refusals
from ppl_gp.reading.arguments import Leaves, as_arrays, named_arrays
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.reading import declare, own_function
from ppl_gp.reading.roles import is_factor, roles
from ppl_gp.reading.tracing import run
from ppl_gp.runtime import one_at_a_time


class Item(NamedTuple):
    """One line of the checklist."""

    name: str
    ok: bool
    message: str


class Checklist(NamedTuple):
    """The items that `check` found. `print` shows one line per item.

    Attributes
    ----------
    items : tuple of Item
        Each has `name`, `ok` and `message`.
    ok : bool
        Whether every item is in order.
    """

    items: tuple[Item, ...]

    @property
    def ok(self) -> bool:
        """Whether every item is in order."""
        return all(item.ok for item in self.items)

    def __str__(self) -> str:
        width = max((len(item.name) for item in self.items), default=0)
        lines = (f"{'ok ' if i.ok else 'NO '} {i.name:<{width}}  {i.message}" for i in self.items)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import pandas as pd  # with xarray it takes a second, which a fit need not wait for

        with pd.option_context("display.max_colwidth", None):
            return pd.DataFrame(self.items).to_html(index=False)


def rows(subject: Subject):
    """Whether a row is predicted by its own arguments alone, and which those are."""
    reading = subject.model.reading
    if isinstance(subject.whole, Collapsed):
        refusals.require_none_tied(subject.whole.tied)
    gps = {k: unwrap(subject.trace[k]["fn"]) for k in subject.found.gps}
    refusals.require_pairs(refusals.unpaired(gps))
    if mixing := reading.mixed:
        return False, f"{mixing}: {reading.why_mixed()}"
    if not subject.args:
        return False, (
            "no argument is positional, and the first positional one holds the inputs; declare the "
            "inputs as model(X, ...), to predict at new ones."
        )
    if reading.held:
        return False, f"no prediction at new rows: {reading.held}"
    given = f"; at new inputs give {list(reading.needed)} again" if reading.needed else ""
    factors = [k for k in subject.found.observed if is_factor(subject.trace[k])]
    parts = {k: "part of the likelihood" if k in reading.scored else "a penalty" for k in factors}
    kinds = "".join(f"; factor '{k}' is {part}" for k, part in parts.items())
    return True, f"one entry per datum: {[p for p, _ in reading.rows]}{given}{kinds}."


_SITE_CHECKS = {"GP sites": sites.gp_sites, "observations": sites.observations}
_FURTHER_CHECKS = {
    "hyperparameters": sites.hyperparameters,
    "length scales": sites.length_scales,
    "predictor": sites.predictor,
    "maximum": likelihood.maximum,
    "rows": rows,
    "likelihood": likelihood.pointwise,
    "dtype": likelihood.dtype,
    "conditioning": likelihood.conditioning,
    "gradients": likelihood.gradients,
    "methods": likelihood.methods,
}
# of a model whose own plate subsamples: no method but SVGP reads it
_OF_BATCHES = {
    **{k: f for k, f in _FURTHER_CHECKS.items() if k not in ("predictor", "maximum")},
    "likelihood": likelihood.of_batches,
}
# of a model without functions and without a predictor
_WITHOUT_FUNCTIONS = ("hyperparameters", "rows", "dtype", "gradients", "methods")


@one_at_a_time
@refusals.of_the_model
def check(model: Callable, *args, **kwargs) -> Checklist:
    """Check a model and its data as `fit` would, and report instead of raising.

    Run it before a long fit. It finds arrays of the wrong shape, priors that do not match the data,
    and likelihoods that a method cannot use.

    Parameters
    ----------
    model : callable
        As for `fit`.
    *args, **kwargs
        The arguments of the model, as for `fit`; `y` are the observations.

    Returns
    -------
    Checklist
        `items` with `name`, `ok` and `message`, and `ok`: whether all are in order. `print` it for
        one line per item.

    Notes
    -----
    The items describe arguments, GP sites, hyperparameters, observations and their supports. Priors
    of length scales are compared with the distances between rows. `rows` lists the arguments with
    one value per row. Further items are the pointwise likelihood, dtype, conditioning of K and
    finite gradients at the prior's median. The last line lists the methods that accept the model.
    If the arguments, GP sites or observations are not in order, the items that need them are left
    out. O(N^3): one eigenvalue decomposition per GP site.

    Examples
    --------
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> checklist = pg.check(model, x, y=np.sin(6.0 * x))
    >>> checklist.ok
    True
    """
    try:
        args, kwargs, names = named_arrays(model, args, kwargs)
        args, kwargs = as_arrays(args, kwargs)
        refusals.require_drawn(own_function(model), Leaves(model, args, kwargs))
        model = declare(own_function(model), args, kwargs)
        names.require_same_rows(model.reading.row_axes)
        trace = checked_trace(model, args, kwargs)
    except (PplGpError, TypeError, ValueError) as error:
        if isinstance(error, jax.errors.JAXTypeError):
            raise  # NumPy on a traced value: `of_the_model` has the line of the model
        return Checklist((Item("arguments", False, f"{type(error).__name__}: {error}"),))
    subject = _subject(model, args, kwargs, trace)
    arguments = Item("arguments", True, _describe_arguments(model, args, kwargs))
    return Checklist((arguments, *_guarded(subject, _SITE_CHECKS | _further(subject))))


def _subject(model, args, kwargs, trace: dict) -> Subject:
    subject = Subject(model, args, kwargs, trace, roles(trace), model)
    is_read = subject.found.observed and not subject.subsampling
    return subject._replace(whole=collapse(model, args, kwargs)) if is_read else subject


def _fitting(model, args, kwargs) -> str:
    """A sentence that names the methods that take a declared model."""
    try:
        with warnings.catch_warnings():  # the call that failed has given its own
            warnings.simplefilter("ignore")
            subject = _subject(model, args, kwargs, run(model, args, kwargs))
            found, names = likelihood.methods(subject)
    except PplGpError:
        return LISTED
    if not found:
        return "No method of this package takes this model."
    return f"Methods that take this model: {names}."


list_methods_by(_fitting)


def _further(subject: Subject) -> dict:
    """The checks of the rest of the model, by what there is."""
    found = subject.found
    if not found.observed:
        return {}
    if found.gps or subject.integrated:
        return _OF_BATCHES if subject.subsampling else _FURTHER_CHECKS
    drawn = bool(found.hyper or found.local_latents)
    return {k: _FURTHER_CHECKS[k] for k in _WITHOUT_FUNCTIONS} if drawn else {}


def _guarded(subject: Subject, checks: dict) -> list[Item]:
    """The items of named checks; a typed error is an item's message."""
    items = []
    for name, function in checks.items():
        try:
            items.append(Item(name, *function(subject)))
        except PplGpError as error:
            items.append(Item(name, False, str(error)))
    return items


def _describe_arguments(model, args, kwargs) -> str:
    names = [*inspect.signature(model).parameters, *map(str, range(len(args)))]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return ", ".join(
        f"{k} {a.shape} {a.dtype}" if eqx.is_array(a) else f"{k}={a!r}" for k, a in named.items()
    )
