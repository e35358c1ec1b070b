"""`check`: a checklist about a model and its data that a person can read, before any inference is
run.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import log_density

from ppl_gp.deep.structure import structure_of
from ppl_gp.errors import ModelError, PplGpError
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper.space import Space, space, starts
from ppl_gp.infer.local import local_methods
from ppl_gp.infer.probes import (
    first_trace,
    probe,
    probe_layers,
    probe_predictor,
    require_bounded,
)
from ppl_gp.model.arguments import as_arrays, positional_inputs
from ppl_gp.model.collapse import collapse
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.companions import (
    mixing_sites,
    require_none_tied,
    require_pairs,
    unpaired,
)
from ppl_gp.model.declared import Declared, declare, own_function
from ppl_gp.model.factors import read
from ppl_gp.model.predictor_prior import PredictorGP
from ppl_gp.model.tracing import Roles, is_factor, require_gp, roles, run
from ppl_gp.model.user_errors import of_the_model
from ppl_gp.quick import quick_jit
from ppl_gp.sparse.bound import Batch
from ppl_gp.threads import one_at_a_time

_CONDITION_LIMIT = {"float64": 1e12, "float32": 1e5}
_MEDIAN_DRAWS_KEY = 0


class Item(NamedTuple):
    """One line of the checklist."""

    name: str
    ok: bool
    message: str


class Checklist(NamedTuple):
    """What `check` found. `ok`: every item is; `print` shows one line an item."""

    items: tuple[Item, ...]

    @property
    def ok(self) -> bool:
        """Whether every item is in order."""
        return all(item.ok for item in self.items)

    def __str__(self) -> str:
        width = max((len(item.name) for item in self.items), default=0)
        return "\n".join(
            f"{'ok ' if i.ok else 'NO '} {i.name:<{width}}  {i.message}" for i in self.items
        )


class _Subject(NamedTuple):
    """A model with its arguments and what one run of it showed; `whole`: as the local methods see
    it.
    """

    model: Callable
    args: tuple
    kwargs: dict
    trace: dict
    found: Roles
    whole: Declared

    @property
    def integrated(self) -> tuple[str, ...]:
        """Sites that local methods integrate into a predictor."""
        return self.whole.plan.sites if isinstance(self.whole, Collapsed) else ()


@one_at_a_time
@of_the_model
def check(model: Callable, *args, **kwargs) -> Checklist:
    """Check `model(*args, **kwargs)` the way `fit` would, and report instead of raising. `y` holds
    the observations.

    Items: arguments, GP sites, hyperparameters, observations (supports included), pointwise
    likelihood, dtype, conditioning of K and finite gradients at the prior's median, and the methods
    that fit this model. Where the arguments, the GP sites or the observations are not in order, the
    items that need them are left out.
    Cost: O(N^3), one eigenvalue decomposition a GP site.
    """
    try:
        args, kwargs = as_arrays(*positional_inputs(model, args, kwargs))
        model = declare(own_function(model), args, kwargs)
        trace = first_trace(model, args, kwargs)
    except (PplGpError, TypeError, ValueError) as error:
        return Checklist((Item("arguments", False, f"{type(error).__name__}: {error}"),))
    whole = collapse(model, args, kwargs) if roles(trace).observed else model
    subject = _Subject(model, args, kwargs, trace, roles(trace), whole)
    items = [
        Item("arguments", True, _describe_arguments(args, kwargs)),
        *_guarded(subject, _SITE_CHECKS),
    ]
    usable = bool((subject.found.gps or subject.integrated) and subject.found.observed)
    return Checklist((*items, *(_guarded(subject, _FURTHER_CHECKS) if usable else ())))


def _guarded(subject: _Subject, checks: dict) -> list[Item]:
    """The items of named checks; a typed error is an item's message."""
    items = []
    for name, function in checks.items():
        try:
            items.append(Item(name, *function(subject)))
        except PplGpError as error:
            items.append(Item(name, False, str(error)))
    return items


def _describe_arguments(args, kwargs) -> str:
    named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    return ", ".join(
        f"{k} {a.shape} {a.dtype}" if eqx.is_array(a) else f"{k}={a!r}" for k, a in named.items()
    )


def _gp_sites(subject: _Subject):
    if not subject.found.gps and subject.integrated:
        return True, f"none: a predictor of {list(subject.integrated)}, for local methods and NUTS."
    require_gp(subject.found, subject.trace)
    sites = {name: subject.trace[name]["fn"] for name in subject.found.gps}
    return True, "; ".join(
        f"{k} {fn.shape()}, {type(unwrap(fn).kernel).__name__}" for k, fn in sites.items()
    )


def _hyperparameters(subject: _Subject):
    names = (*subject.found.hyper, *subject.found.params)
    _space(subject)  # raises for a discrete one
    if not names:
        return True, "none: the model is fitted as it stands, with Fixed({})."
    values = {k: subject.trace[k]["value"] for k in names}
    sizes = {
        k: f"tree of {len(jax.tree.leaves(v))}"
        for k, v in values.items()
        if not eqx.is_array_like(v)
    }
    shapes = {k: sizes.get(k) or jnp.shape(v) for k, v in values.items()}
    kinds = {
        k: "param, no prior" if k in subject.found.params else _family(subject.trace[k]["fn"])
        for k in names
    }
    return True, "; ".join(f"{k} {shapes[k] or ''} {kinds[k]}".replace("  ", " ") for k in names)


def _family(fn) -> str:
    return type(unwrap(fn)).__name__


def _observations(subject: _Subject):
    sites = {k: subject.trace[k] for k in subject.found.observed}
    data = {k: s for k, s in sites.items() if not is_factor(s)}
    if not sites:
        return False, "nothing is observed; pass y=..., and obs=y in the model."
    described = [
        f"{k} {s['fn'].shape()} {_family(s['fn'])} on {unwrap(s['fn']).support}"
        for k, s in data.items()
    ]
    constant = [k for k, s in data.items() if np.ptp(np.asarray(s["value"], float)) == 0.0]
    note = f"; all values of {constant} are equal, so the data say little" if constant else ""
    return True, "; ".join(described) + note


def _predictor(subject: _Subject):
    held = [k for k in subject.found.hyper if k not in subject.integrated]
    if not subject.integrated:
        return True, "f itself: no other Gaussian site enters through one linear predictor."
    R = subject.whole.plan.functions if isinstance(subject.whole, Collapsed) else 1
    if R > 1:
        return True, (
            f"{R} functions a datum, of {list(subject.integrated)}, which Laplace, EP and VI "
            f"integrate{_held(held)}."
        )
    return True, (
        f"one, of {list(subject.integrated)}, which Laplace, EP, VI and LocalBound "
        f"integrate{_held(held)}."
    )


def _held(names: list[str]) -> str:
    return f"; {names} are hyperparameters" if names else ""


def _pointwise(subject: _Subject):
    try:
        R = _proved(subject).functions
    except ModelError as error:
        return False, str(error)
    own = "its own value of f" if R == 1 else f"its own values of {R} functions"
    return True, f"each datum depends on {own} (shown by a random probe)."


def _proved(subject: _Subject):
    """The likelihood that the local methods read, proved to be pointwise."""
    held = [k for k in subject.found.hyper if k not in subject.integrated]
    hyper = {k: subject.trace[k]["value"] for k in held}
    factors = read(subject.whole, *subject.args, hyper=hyper, **subject.kwargs)
    if isinstance(subject.whole, Collapsed):
        probe_predictor(subject.whole, cast(PredictorGP, factors.prior))
    probe(factors.log_lik)
    return factors.log_lik


def _dtype(subject: _Subject):
    dtype = jnp.zeros(()).dtype
    if subject.found.gps:
        dtype = unwrap(subject.trace[subject.found.gps[0]]["fn"]).X.dtype
    if dtype == jnp.float64:
        return True, "float64"
    return (
        False,
        f"{dtype}; set jax.config.update('jax_enable_x64', True) before any array is made.",
    )


def _space(subject: _Subject) -> Space:
    return space(subject.trace, subject.model, subject.args, subject.kwargs)


def _median(subject: _Subject) -> tuple[Space, dict, dict]:
    """(space, unconstrained, constrained) hyperparameters at the prior's median."""
    sp = _space(subject)
    if not sp.names:
        return sp, {}, {}
    free = jax.tree.map(lambda x: x[0], starts(sp, random.key(_MEDIAN_DRAWS_KEY), 1))
    return sp, free, sp.constrain(free)


def _conditioning(subject: _Subject):
    if not subject.found.gps:
        return True, "no covariance of a GP."
    _, _, hyper = _median(subject)
    trace = run(subject.model, subject.args, subject.kwargs, hyper)
    parts = [_conditioning_of(name, unwrap(trace[name]["fn"])) for name in subject.found.gps]
    return all(ok for ok, _ in parts), "; ".join(message for _, message in parts)


def _conditioning_of(name, prior):
    K = prior.covariance_matrix
    values = np.linalg.eigvalsh(np.asarray(K))
    jitter = float(jnp.max(prior.variance - prior.kernel.diag(prior.X)))
    L, added = prior.factor()
    if not bool(jnp.all(jnp.isfinite(L))):
        return (
            False,
            f"K of '{name}' has smallest eigenvalue {values[0]:.2g} and no jitter repairs it; "
            "check the kernel.",
        )
    condition = values[-1] / max(values[0] + float(added), np.finfo(values.dtype).tiny)
    raised = f", raised by {float(added):.2g}" if added > 0 else ""
    message = (
        f"K of '{name}' at the prior's median: condition number {condition:.2g}, jitter "
        f"{jitter:.2g}{raised}"
    )
    ok = condition < _CONDITION_LIMIT[K.dtype.name]
    return ok, message + (
        "." if ok else "; give GP(jitter=...) a larger value, or drop duplicate rows."
    )


def _gradient(subject: _Subject):
    if subject.found.local_latents:
        return (
            True,
            "not computed: the model has latents in the data's plate "
            f"{list(subject.found.local_latents)}.",
        )
    sp, free, _ = _median(subject)
    value, gradient = _log_density(
        subject.model, subject.found.gps, sp, subject.args, subject.kwargs, free
    )
    bad = [k for k, g in gradient.items() if not bool(jnp.all(jnp.isfinite(ravel_pytree(g)[0])))]
    if bad or not bool(jnp.isfinite(value)):
        return (
            False,
            f"log density {float(value):.4g}, gradient not finite in {bad}; check the data's "
            "scale and the priors.",
        )
    size = float(jnp.max(jnp.abs(ravel_pytree(gradient)[0])))
    return (
        True,
        f"log density {float(value):.4g}, gradient finite at the prior's median, f drawn (largest "
        f"entry {size:.2g}).",
    )


@quick_jit
def _log_density(model, gps, sp: Space, args, kwargs, free):
    """Log density of the model and its gradient in the unconstrained hyperparameters and in f, a
    prior draw.
    """
    trace = run(model, args, kwargs, sp.constrain(free))
    latent = {k: trace[k]["fn"].sample(random.key(1)) for k in gps}

    def density(point):
        values = {**sp.constrain({k: point[k] for k in free}), **{k: point[k] for k in latent}}
        # a plate that subsamples draws its rows
        return log_density(handlers.seed(model, 2), args, kwargs, values)[0]

    return jax.value_and_grad(density)({**free, **latent})


def _methods(subject: _Subject):
    local = _local_methods(subject) + _sparse_methods(subject)
    try:
        _space(subject)
    except ModelError:
        fitting = [name for name in local if name != "SparseNUTS"]
        return bool(fitting), ", ".join(
            fitting
        ) + ", each with hyper=Fixed(...)" if fitting else "none."
    draws = ["NUTS"] + ([] if subject.found.local_latents else ["EllipticalSlice"])
    return True, ", ".join(draws + local)


def _local_methods(subject: _Subject) -> list[str]:
    """The local methods that can read this model; why the others cannot stands beside the
    likelihood.
    """
    try:
        log_lik = _proved(subject)
    except PplGpError:
        return []
    return [name for name, method in local_methods().items() if method.refuses(log_lik) is None]


def _sparse_methods(subject: _Subject) -> list[str]:
    """The methods with inducing variables: several latent functions are theirs too."""
    model, args, kwargs, trace, found, _ = subject
    if not found.gps:
        return []
    try:
        structure = structure_of(found, trace, lambda values: run(model, args, kwargs, values))
        num = trace[found.gps[0]]["fn"].shape()[-1]
        hyper = {k: trace[k]["value"] for k in (*found.hyper, *found.params)}
        probe_layers(
            model, structure, hyper, trace, Batch(args, kwargs, jnp.ones(num), random.key(0))
        )
    except PplGpError:
        return []
    return ["SVGP", "SparseNUTS"]


def _rows(subject: _Subject):
    reading = subject.model.reading
    hyper = {k: subject.trace[k]["value"] for k in (*subject.found.hyper, *subject.found.params)}
    if isinstance(subject.whole, Collapsed):
        held = {k: x for k, x in hyper.items() if k not in subject.integrated}
        require_none_tied(subject.whole.tied(subject.args, subject.kwargs, held))
    require_pairs(unpaired({k: unwrap(subject.trace[k]["fn"]) for k in subject.found.gps}))
    if mixing := mixing_sites(cast(Declared, subject.model), subject.args, subject.kwargs, hyper):
        return (
            False,
            f"a row of {mixing} sees other rows' arguments: predictions would depend on their "
            "companions; standardise outside.",
        )
    if not reading.grows:
        return (
            False,
            "another number of rows cannot be traced: the model holds arrays of its own; pass "
            "them, to predict at new inputs.",
        )
    given = f"; at new inputs give {list(reading.needed)} again" if reading.needed else ""
    factors = [k for k in subject.found.observed if is_factor(subject.trace[k])]
    kinds = "".join(
        f"; factor '{k}' is {'part of the likelihood' if k in reading.scored else 'a penalty'}"
        for k in factors
    )
    return True, f"one entry a datum: {[p for p, _ in reading.rows]}{given}{kinds}."


def _maximum(subject: _Subject):
    trace = subject.trace
    if isinstance(subject.whole, Collapsed):
        trace = run(subject.whole, subject.args, subject.kwargs)
    require_bounded(trace, subject.whole.reading, "MAP()")
    return True, "MAP() has a maximum to find."


_SITE_CHECKS = {"GP sites": _gp_sites, "observations": _observations}
_FURTHER_CHECKS = {
    "hyperparameters": _hyperparameters,
    "predictor": _predictor,
    "maximum": _maximum,
    "rows": _rows,
    "likelihood": _pointwise,
    "dtype": _dtype,
    "conditioning": _conditioning,
    "gradients": _gradient,
    "methods": _methods,
}
