"""`load`: a saved fit, checked against the model it is given."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints

from ppl_gp.errors import Result, StoreError, warn
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.fingerprint import keyed, reads
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.reading import Declared, own_function
from ppl_gp.reading.refusals import require_drawn
from ppl_gp.reading.tracing import run
from ppl_gp.results.fit import Fit
from ppl_gp.results.store import save
from ppl_gp.results.store.archive import named, package_versions, read_archive
from ppl_gp.runtime import one_at_a_time

_ROUNDING = 1e-3  # relative: draws of a simplex in float32 are off by 1e-6 and more


@dataclasses.dataclass(repr=False, frozen=True)
class SavedMethod:
    """The method behind a loaded fit: its description, not something to fit with."""

    description: str

    def __repr__(self):
        return self.description


@one_at_a_time
def load(path, model: Callable) -> Fit:
    """Read a fit that `fit.save(path)` wrote. It predicts as the saved one did.

    Parameters
    ----------
    path : str or Path
        The file.
    model : callable
        The function that was fitted, because a file contains no code.

    Returns
    -------
    Fit
        With every draw, but without observations: it has no `loo`, and no `log_likelihood` in its
        tree. `fit.method` is a description of the method.

    Raises
    ------
    StoreError
        If the file was truncated or changed, or if `save` did not write it or wrote another version
        of the format. Also if it belongs to another model, with other sites, supports or densities,
        or with another name and code.
    FileNotFoundError
        If the file does not exist.

    Warns
    -----
    UserWarning
        If a number in the model has changed, or the file has float64 and JAX is set to float32.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.3), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> fit = pg.fit(model, pg.Laplace(), 0, x, y=np.sin(6.0 * x))
    >>> path = fit.save(pathlib.Path(tempfile.mkdtemp()) / "fit.zip")
    >>> pg.load(path, model).log_evidence == fit.log_evidence
    True
    """
    path = Path(path)
    header, arrays = read_archive(path, save.FORMAT, save.FORMAT_VERSION)
    exact = any(a.dtype == np.float64 for a in arrays.values())
    with named(path, save.FORMAT):
        told = {k: header.pop(k) for k in ("model", "reads", "portrait", "packages")}
        fit = _rebuilt(model, save.decode(header, arrays))
        numbers = check_model(told, fit)
    if numbers:
        warn(
            f"{path}: a number in the model has changed since it was fitted. This moves the mean "
            f"log density, or the kernel, of {', '.join(numbers)}. The fit predicts by the new "
            "numbers, with an f that was inferred by the old ones: put these back, or fit again."
        )
    if exact and not jax.config.read("jax_enable_x64"):
        warn(
            f"{path} holds float64, which JAX has switched off: predictions will be less exact "
            "than the saved fit's. Call jax.config.update('jax_enable_x64', True) first."
        )
    draws_of_f = any(kept.is_draws for kept in fit.draws.kept.values())
    if arrays and not exact and draws_of_f and jax.config.read("jax_enable_x64"):
        warn(
            f"{path} holds draws of f in float32, with the jitter of float32 (1e-5 of the "
            "variance), which float64 takes for a part of the function: far from the data means "
            "were 1 off of 2. Switch float64 off to use this fit, or fit again."
        )
    return fit


def _rebuilt(model: Callable, parts: dict) -> Fit:
    """The model is declared with what was read off it in training."""
    declared = Declared(keyed(own_function(model)), parts["reading"])
    if parts["plan"] is not None:
        declared = Collapsed(declared, parts["plan"], parts["skeleton"])
    return Fit(
        model=declared,
        method=SavedMethod(parts["method"]),
        args=tuple(parts["args"]),
        kwargs=parts["kwargs"],
        result=Result(parts["result"]),
        **{k: parts[k] for k in save.FIELDS},
    )


def check_model(told: dict, fit: Fit) -> list[str]:
    """Run the model on the saved inputs and compare it with what the file says of the fitted one:
    its sites and their distributions, its code, the values that it reads, supports, and densities.

    Another likelihood or kernel under the same name is another model, and another formula if the
    versions are the file's. Returns the sites whose densities have other numbers.
    """
    given, first, saved = save.qualified_name(fit.model), fit.draws.at(0), told["portrait"]
    try:
        require_drawn(fit.model.function.__wrapped__, Leaves(fit.model, fit.args, fit.kwargs))
        now = save.portrait(fit.model, fit.args, fit.kwargs, first.known, first.values)
        if saved is None:
            raise ValueError("when it was saved it did not run without its observations")
        classes = save.changed_classes(saved, now)
        outside = [] if classes else _outside(fit)
    except Exception as error:  # a model may raise anything without its observations
        raise StoreError(
            f"was saved from the model '{told['model']}', and '{given}' was given, which "
            f"does not run with the saved arguments: {error}"
        ) from error
    numbers, values = save.changed_numbers(saved, now), _changed_values(told["reads"], fit)
    same = saved["formula"] == now["formula"] or told["packages"] != package_versions()
    if classes:
        _refuse(told, given, "; ".join(classes))
    if _is_other_code(told, given, fit):
        _refuse(told, given, "it has another name and other code")
    if values:
        raise StoreError(
            f"was saved from a model that read other values: {values} differ. Put the old "
            "values back, or fit again."
        )
    if outside:
        _refuse(told, given, f"the saved hyperparameters {outside} lie outside its support")
    if numbers and not same:
        _refuse(told, given, f"there are other formulas behind {', '.join(numbers)}")
    return numbers


def _refuse(told: dict, given: str, why: str) -> None:
    raise StoreError(
        f"was saved from another model, '{told['model']}', than the one that was given, "
        f"'{given}': {why}. Give the function that was fitted, which keeps its name if you edit "
        "it, or fit again."
    )


def _is_other_code(told: dict, given: str, fit: Fit) -> bool:
    """A function of another name and other code is another model, with priors that q was not
    fitted to; one that was renamed, moved or edited is the same.
    """
    old, new = (x.rpartition(".")[2] for x in (told["model"], given))
    before, now = _codes(told["reads"], old), _codes(reads(fit.model.function), new)
    return old != new and bool(before and now) and before != now


def _codes(entries: dict, name: str) -> set[str]:
    """Those of functions of this name, as "code of 'module.outer.<locals>.name#2'"."""
    wanted = re.compile(rf"code of '([^#']*\.)?{re.escape(name)}(#.*)?'")
    return {v for k, v in entries.items() if wanted.fullmatch(k)}


def _changed_values(saved: dict, fit: Fit) -> list[str]:
    """Values that the model reads (globals, closures, defaults); its code may have been edited."""
    now = reads(fit.model.function)
    code = "code of "  # an entry that is a function has one for its code as well
    moved = [k for k, v in saved.items() if not k.startswith(code) and now.get(k, v) != v]
    return [k for k in moved if "'" not in k or f"{code}'{k.split(chr(39))[1]}'" not in saved]


def _outside(fit: Fit) -> list[str]:
    """Hyperparameters with a draw outside the support that they have there. Factors nothing."""

    def inside(draw):
        trace = run(fit.model, fit.args, fit.kwargs, draw.known, draw.values)
        parts = {k: jax.tree.leaves(v) for k, v in draw.known.items()}  # a param may be a tree
        return {k: jnp.asarray([_inside(trace[k], x) for x in own]) for k, own in parts.items()}

    known = fit.sampled and fit.draws.known
    found = jax.jit(jax.vmap(inside))(fit.draws) if known else inside(fit.draws.at(0))
    return [k for k, v in found.items() if not bool(jnp.all(v))]


def _inside(site, value):
    """By the constraint, or up to rounding by a way to unconstrained numbers and back."""
    is_param = site["type"] == "param"
    support = site["kwargs"].get("constraint", constraints.real) if is_param else site["fn"].support
    try:
        met = jnp.all(support(value))
        if support.is_discrete:
            return met
        transform = biject_to(support)
        back = transform(transform.inv(value))
    except NotImplementedError:  # a support that says no more than that it depends on parameters
        return jnp.ones((), bool)
    near = _ROUNDING * (jnp.abs(value) + jnp.max(jnp.abs(value)))
    return met | jnp.all(jnp.abs(back - value) <= near)
