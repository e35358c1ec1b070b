"""Whether the model that a file is given is the one that was fitted. Raises `StoreError`."""

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to, constraints

from ppl_gp.errors import StoreError
from ppl_gp.model.fingerprint import reads
from ppl_gp.model.tracing import run
from ppl_gp.results.fit import Fit
from ppl_gp.results.store.portrait import changed_classes, changed_numbers, portrait
from ppl_gp.results.store.save import qualified_name
from ppl_gp.storage.archive import package_versions

_ROUNDING = 1e-3  # relative: draws of a simplex in float32 are off by 1e-6 and more


def check_model(told: dict, fit: Fit) -> list[str]:
    """Run the model on the saved inputs and compare it with what the file says of the fitted one:
    its sites and their distributions, its code, the values that it reads, supports, and densities.

    Another likelihood or kernel under the same name is another model, and another formula if the
    versions are the file's. Returns the sites whose densities have other numbers.
    """
    given, first, saved = qualified_name(fit.model), fit.draws.at(0), told["portrait"]
    try:
        now = portrait(fit.source, fit.args, fit.kwargs, first.known, first.values)
        if saved is None:
            raise ValueError("when it was saved it did not run without its observations")
    except Exception as error:  # a model may raise anything without its observations
        raise StoreError(
            f"was saved from the model '{told['model']}', and '{given}' was given, which "
            f"does not run with the saved arguments: {error}"
        ) from error
    numbers, values = changed_numbers(saved, now), _changed_values(told["reads"], fit)
    same = saved["formula"] == now["formula"] or told["packages"] != package_versions()
    if classes := changed_classes(saved, now):
        _refuse(told, given, "; ".join(classes))
    if _is_other_code(told, given, fit):
        _refuse(told, given, "it has another name and other code")
    if values:
        raise StoreError(
            f"was saved from a model that read other values: {values} differ. Put the old "
            "values back, or fit again."
        )
    if outside := _outside(fit):
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
    names = [x.rpartition(".")[2] for x in (told["model"], given)]
    codes = [
        {v for k, v in entries.items() if _last_name(k) == name}
        for name, entries in zip(names, (told["reads"], reads(fit.model.function)), strict=True)
    ]
    return names[0] != names[1] and all(codes) and codes[0] != codes[1]


def _last_name(entry: str) -> str:
    """Of "code of 'module.outer.<locals>.model#2'"."""
    name = entry.removeprefix("code of '").removesuffix("'").partition("#")[0]
    return name.rpartition(".")[2] if entry.startswith("code of '") else ""


def _changed_values(saved: dict, fit: Fit) -> list[str]:
    """Values that the model reads (globals, closures, defaults) must be those of the fit; its code
    may have been edited.
    """
    now = reads(fit.model.function)
    return [
        k
        for k, v in saved.items()
        if not k.startswith("code of ") and not _is_function(k, saved) and now.get(k, v) != v
    ]


def _is_function(name: str, saved: dict) -> bool:
    """Whether an entry stands for a function, whose code has an entry of its own."""
    return "'" in name and f"code of '{name.split(chr(39))[1]}'" in saved


def _outside(fit: Fit) -> list[str]:
    """Hyperparameters with a draw outside the support that they have at that draw. O(S), nothing is
    factored.
    """

    def inside(draw):
        trace = run(fit.model, fit.args, fit.kwargs, draw.known, draw.values)
        return {k: _inside(trace[k], v) for k, v in draw.known.items()}

    known = fit.sampled and fit.draws.known
    found = jax.jit(jax.vmap(inside))(fit.draws) if known else inside(fit.draws.at(0))
    return [k for k, v in found.items() if not bool(jnp.all(v))]


def _inside(site, value):
    """By the constraint, or, for one that rounding may break, by a way to unconstrained numbers and
    back.
    """
    support = (
        site["kwargs"].get("constraint", constraints.real)
        if site["type"] == "param"
        else site["fn"].support
    )
    try:
        met = jnp.all(support(value))
        if support.is_discrete:
            return met
        transform = biject_to(support)
        back = transform(transform.inv(value))
    except NotImplementedError:  # a support that says no more than that it depends on parameters
        return jnp.ones((), bool)
    return met | jnp.all(
        jnp.abs(back - value) <= _ROUNDING * (jnp.abs(value) + jnp.max(jnp.abs(value)))
    )
