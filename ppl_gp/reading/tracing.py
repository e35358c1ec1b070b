"""Running a model with hyperparameters and f given; and the shapes of sites, plates and values that
one abstract trace shows: nothing is computed, unless the model looks at values.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from jax.core import Tracer
from numpyro import handlers
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.distributions.constraints import is_dependent
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP, bare, bare_shape, evened, hidden_axes, mask_of, unwrap
from ppl_gp.quick import quick_jit
from ppl_gp.reading.arguments import Leaves, is_array
from ppl_gp.reading.digest import at_once, attributes_of, distributions, own_density
from ppl_gp.reading.fingerprint import by_shapes
from ppl_gp.reading.roles import (
    Roles,
    cannot_be_drawn,
    is_factor,
    is_gp,
    is_missing_part,
    is_observed,
    roles,
)

# the shape of a gamma from which on its draws have a logarithm as a rule
_VAGUE = 0.1
_GAMMAS = (dist.Gamma, dist.InverseGamma)
# samplers of many steps
_LONG = (dist.Wishart, dist.WishartCholesky, dist.InverseWishart, dist.LKJ, dist.LKJCholesky)


class pin(Messenger):
    """Gives sites without a value one that needs no long computation: a GP site its `values`, by
    default its prior mean, so that tracing a model never factorises a matrix; one that cannot be
    drawn (an improper prior, a class without `sample`) some value of its support.

    `drawn(name)`, where it is given: whether a prediction is of a site, which is left to chance.
    Other vague gamma and inverse gamma sites (shape below 0.1) get shape / rate, or its inverse:
    their draws are zero or infinite in floating point. And each site whose sampler takes many steps
    is drawn by one program: step by step a Wishart site compiles 74 of them, three seconds.
    """

    def __init__(
        self,
        fn=None,
        values: Mapping[str, Any] | None = None,
        drawn: Callable[[str], bool] | None = None,
    ):
        self.values, self.drawn = values or {}, drawn
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        fn, name = unwrap(msg["fn"]), msg["name"]
        if is_gp(msg):
            value = self.values.get(name)
            msg["value"] = _prior_mean(msg) if value is None else value
        elif cannot_be_drawn(msg) or isinstance(fn, dist.ImproperUniform):
            msg["value"] = msg["fn"].support.feasible_like(jnp.zeros(msg["fn"].shape()))
        elif self.drawn is not None and isinstance(fn, _GAMMAS) and not self.drawn(name):
            msg["value"] = _settled(msg, fn)
        elif self.drawn is not None and type(fn) in _LONG:  # of a subclass JAX need not know
            own = msg["kwargs"]
            msg["value"] = _drawn(msg["fn"], own["rng_key"], own.get("sample_shape", ()))


def _prior_mean(site):
    mean, shape = unwrap(site["fn"]).mean, site["fn"].shape()
    if mean.shape != shape[len(shape) - mean.ndim :]:
        P = len(mean)
        remedy = f"a mean a unit needs a plate of {P} units around it, numpyro.plate('units', {P})"
        if mean.shape[-1] != shape[-1]:
            remedy = "give one number per row, (N,), such as mean=lambda X: slope * X[:, 0]"
        raise DataError(
            f"GP site '{site['name']}' has shape {shape}, and its mean function gives "
            f"{mean.shape}: {remedy}."
        )
    return jnp.broadcast_to(mean, shape)


def _settled(site, gamma: Any):
    """The draw of a gamma site, or its middle where it is vague."""
    ratio, is_vague = gamma.concentration / gamma.rate, gamma.concentration < _VAGUE
    middle = ratio if isinstance(gamma, dist.Gamma) else 1.0 / ratio
    return jnp.where(is_vague, middle, site["fn"](*site["args"], **site["kwargs"]))


@quick_jit
def _drawn(fn, key, shape):
    return fn(rng_key=key, sample_shape=shape)


class _unique(handlers.trace):
    """A trace that refuses a name of two: NumPyro puts a plate in the place of a site before it;
    and latents of a scan from the end, whose values NumPyro takes and gives in opposite orders.
    """

    def postprocess_message(self, msg):
        """Record it. A plate may be opened again, and a parameter asked for again."""
        name, kind = msg.get("name"), msg["type"]
        if msg.get("fn") is scan_wrapper and msg["args"][4]:
            sites = msg["value"][1][0].trace.items()
            if drawn := [k for k, s in sites if s["type"] == "sample" and not s["is_observed"]]:
                raise ModelError(
                    f"scan(..., reverse=True) draws {drawn}, and NumPyro takes their values in the "
                    "order of the steps, but gives them in the order of xs: draws would be read "
                    "backwards. Scan over the entries of xs in turned order, xs[::-1], without "
                    "reverse, and turn the result, z[::-1]."
                )
        before = self.trace[name]["type"] if name in self.trace else None
        if before and (before != kind or kind in ("sample", "deterministic")):
            raise ModelError(f"two sites named {name!r}, a {before} and a {kind}; rename one.")
        super().postprocess_message(msg)


class set_gps(Messenger):
    """Gives every unset GP site the value `value(name, prior at the inputs that it has there)`."""

    def __init__(self, fn, value: Callable[[str, GP], Any]):
        self.value = value
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["value"] is None and is_gp(msg):
            msg["value"] = self.value(msg["name"], unwrap(msg["fn"]))


def run(model, args, kwargs, hyper=None, latent=None, key=None) -> dict:
    """Trace of the model with hyperparameters and GP sites given, its sites annotated; nothing
    leaks to outer handlers.

    Sites given in neither are drawn with `key`, by default a fixed one. O(N), no factorisation; a
    model that was not declared is read off first.
    """
    from ppl_gp.reading.reading import declare  # here, as it imports this file

    declared = model if reading_of(model) is not None else declare(model, args, kwargs)
    reading = reading_of(declared)

    def drawn(name: str) -> bool:
        return reading.predicts(name) or reading.axis(name) is not None

    return annotated(bare_trace(model, args, kwargs, hyper, latent, key, drawn), declared)


def run_at_once(model, args, kwargs, hyper=None, latent=None) -> dict:
    """As `run`, `at_once`; again, operation by operation, where NumPyro refuses a parameter, which
    it says of values alone.
    """
    inputs = model, args, kwargs, hyper, latent
    if not isinstance(model, Messenger):  # which is equal to no other one
        trace, valid = at_once(_valid_run, *inputs)
        if isinstance(valid, Tracer) or valid:
            return trace
    return run(*inputs)


def _valid_run(*inputs) -> tuple[dict, jax.Array]:
    """(the trace, whether NumPyro takes all parameters)."""
    trace = run(*inputs)
    return trace, is_valid(trace)


def is_valid(trace: dict) -> jax.Array:
    """Whether NumPyro takes the parameters of all sites."""
    checks = _checks([s["fn"] for s in trace.values() if s["type"] == "sample"])
    return jnp.all(jnp.stack([jnp.ones((), bool), *checks]))


def _checks(tree) -> list[jax.Array]:
    """What NumPyro asks of the parameters of distributions, where it does, and of those in them,
    which do not know it any more if they have been through a tree.
    """
    fns, default = distributions(tree), dist.Distribution._validate_args
    asking = [fn for fn in fns if (default if fn._validate_args is None else fn._validate_args)]
    asked = [(fn, k, x) for fn in asking for k, x in fn.get_args().items()]
    known = [(fn.arg_constraints[k], x) for fn, k, x in asked]
    own = [jnp.all(where(x)) for where, x in known if not is_dependent(where)]
    return own + [check for fn in fns for check in _checks(attributes_of(fn))]


def bare_trace(
    model,
    args,
    kwargs,
    hyper=None,
    latent=None,
    key=None,
    drawn: Callable[[str], bool] = lambda name: False,
) -> dict:
    """As `run`, unannotated: what is read off. Vague gammas are settled, but for `drawn` ones."""
    with handlers.block():
        seeded = handlers.seed(model, random.key(0) if key is None else key)
        given = handlers.substitute(seeded, data=dict(hyper or {}))
        return _unique(pin(given, latent, drawn)).get_trace(*args, **kwargs)


def annotated(trace: dict, model) -> dict:
    """A trace of a declared model whose sites know their axis of the data, `site["data_axis"]`, and
    whether they score observations; of another model as it is.

    The axis counts from the border between batch and event: -1 is the last batch axis, 0 the first
    axis that `to_event` took; `None` is a site without data.
    """
    reading = reading_of(model)
    if reading is not None:
        sites = {k: site for k, site in trace.items() if site["type"] == "sample"}
        observing = [sites[k] for k in reading.observed if k in sites and not is_factor(sites[k])]
        # a factor sees what is drawn in the place of observations that are not given
        factors = reading.scored if any(map(is_observed, observing)) or not observing else ()
        for name, site in sites.items():
            site["fn"], site["data_axis"] = evened(site["fn"]), reading.axis(name)
            site["is_scored"] = is_observed(site) and (not is_factor(site) or name in factors)
    return trace


def reading_of(model) -> Any:
    """What was read off a declared model, also one with handlers around it; `None` of others."""
    while not hasattr(model, "reading") and isinstance(model, Messenger):
        model = model.fn
    return getattr(model, "reading", None)


def sample_hyper(model, args, kwargs, local: bool = True, without: Collection[str] = ()) -> dict:
    """Run the model so that its hyperparameters alone talk to the outer handlers; {site: value} of
    them.

    `local=False` keeps per-datum latents from them too, and `without` further sites.
    Only the model's own sites are hidden, by name: outer handlers send messages of their own
    through this stack, such as the log-Jacobian with which NumPyro's samplers transform a site, and
    those must pass. O(N), no factorisation.
    """
    found, missing, others = _names(model, args, kwargs)
    left = {*without, *(() if local else found.local_latents)}
    # Missing observations integrate to one: any value does, and outer handlers, which give keys,
    # are not asked. GPs are pinned.
    drawn = {*left, *missing} - {*found.gps}
    hidden = {*drawn, *found.gps, *found.observed, *others}

    def any_value(site):
        return site["fn"].sample(random.key(0)) if site["name"] in drawn else None

    with (
        handlers.trace() as trace,
        handlers.block(hide_fn=lambda site: site.get("name") in hidden),
        pin(),
    ):
        handlers.substitute(model, substitute_fn=any_value)(*args, **kwargs)
    wanted = (*found.hyper, *found.params, *found.local_latents)
    return {k: trace[k]["value"] for k in wanted if k not in left}


@by_shapes
def _names(model, args, kwargs) -> tuple[Roles, list[str], list[str]]:
    """(Roles of sites, missing observations, plates and deterministic sites)."""
    own = run(model, args, kwargs)
    missing = [k for k in own if is_missing_part(k, own)]
    return (
        roles(own),
        missing,
        [k for k, s in own.items() if s["type"] in ("plate", "deterministic")],
    )


ARGUMENT, SITE = "argument ", "site "  # what names of `named_trace` begin with
Sizes = tuple[int | np.integer, int | np.integer]


class Site(NamedTuple):
    """Of one sample site."""

    shape: tuple[int, ...]  # without masks and `to_event`
    event: tuple[int, ...]
    hidden: int
    frames: tuple[tuple[str, int], ...]  # (plate, axis in `shape`, negative)
    matches: bool  # whether value, parameters and `scale` have shapes that fit together
    is_gp: bool
    observed: bool
    is_factor: bool


class Look(NamedTuple):
    """One trace: sample sites, plates with whole and subsampled sizes, shapes of all values."""

    sites: dict[str, Site]
    plates: dict[str, Sizes]
    values: dict[str, Any]  # of unobserved sites and `numpyro.param`s


def look_at(model, leaves: Leaves, shapes: dict[str, jax.ShapeDtypeStruct] | None = None) -> Look:
    """One trace, with arguments of other `shapes` {path: shape}."""
    arrays = leaves.arrays
    abstract = {p: like(x) for p, x in arrays.items()} | (shapes or {})
    seen = []

    def trace(values):
        seen.append(_seen(bare_trace(model, *leaves.replaced(values))))

    try:
        jax.eval_shape(trace, abstract)
    except jax.errors.JAXTypeError:  # the model looks at values
        if shapes:
            raise
        trace(arrays)
    return seen[-1]


def like(x) -> jax.ShapeDtypeStruct:
    """The shape of an array, of the type that JAX gives it."""
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def named_trace(model, leaves: Leaves, base: Look, arrays) -> tuple[dict, Callable]:
    """({name: shape} of these arguments' arrays and of the random values of `base`, the function
    from such values to the sample sites of a trace).
    """
    dynamic, static = eqx.partition(base.values, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    named = {ARGUMENT + p: like(x) for p, x in arrays.items()}

    def at(named) -> dict:
        values = eqx.combine({k: named[SITE + k] for k in dynamic}, static)
        args, kwargs = leaves.replaced({p: named[ARGUMENT + p] for p in arrays})
        trace = bare_trace(model, args, kwargs, values, values)
        return {k: s for k, s in trace.items() if s["type"] == "sample"}

    return named | {SITE + k: x for k, x in dynamic.items()}, at


def _seen(trace) -> Look:
    sites = {k: _site(s) for k, s in trace.items() if s["type"] == "sample"}
    plates = {k: _sizes(k, *s["args"]) for k, s in trace.items() if s["type"] == "plate"}
    free = {k: s["value"] for k, s in trace.items() if _is_free(k, s, trace)}
    return Look(sites, plates, jax.tree.map(_shape_of, free))


def _sizes(name: str, size, part) -> Sizes:
    if bad := [n for n in (size, part) if not isinstance(n, int | np.integer | None)]:
        raise DataError(
            f"plate '{name}' has the size {bad[0]!r}, and sizes are options of a model, which its "
            "arrays have: give a Python integer, int(num_groups)."
        )
    return size, part or size


def _is_free(name, site, trace) -> bool:
    if site["type"] != "sample":
        return site["type"] == "param"
    return not (site["is_observed"] or is_missing_part(name, trace))


def _shape_of(x):
    is_number = is_array(x) or isinstance(x, float | int)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) if is_number else x


def _site(site) -> Site:
    fn = site["fn"]
    hidden = hidden_axes(fn)
    frames = tuple((f.name, f.dim - hidden) for f in site["cond_indep_stack"])
    return Site(
        bare_shape(fn),
        tuple(unwrap(fn).event_shape),
        hidden,
        frames,
        _matches(site),
        is_gp(site),
        is_observed(site),
        is_factor(site),
    )


def _matches(site) -> bool:
    scaled = _fits(np.shape(site["scale"]), site["fn"].batch_shape)  # () of None
    fits = jax.eval_shape(lambda: own_density(site["fn"], site["value"])) is not None
    free = not is_observed(site) or is_factor(site)
    return scaled and fits and (free or jnp.shape(site["value"]) == tuple(site["fn"].shape()))


def unused_length(leaves: Leaves, base: Look, num: int) -> int:
    """Further rows such that their number is no other size of the model."""
    shapes = [x.shape for x in (*leaves.arrays.values(), *base.sites.values())]
    taken = {1, *itertools.chain(*shapes, *base.plates.values())}
    return next(more for more in itertools.count(1) if num + more not in taken)


def parts_of(site: dict) -> tuple[list, list, list]:
    """Arrays that say what a site sees: the terms of its density, or a GP's inputs and mean; its
    kernel at inputs that are computed from nothing; masks and scales.
    """
    fn = unwrap(site["fn"])
    if isinstance(fn, GP):
        mean = jnp.broadcast_to(fn.mean, (*jnp.shape(fn.mean)[:-1], fn.X.shape[0]))
        return [fn.X, mean], [kernel_beside(fn)], []
    terms: jax.Array = _terms(bare(site["fn"]), site["value"])
    around, scale = [mask_of(site["fn"])], site["scale"]
    if scale is not None:
        around.append(jnp.reshape(scale, (*jnp.shape(scale), *[1] * hidden_axes(site["fn"]))))
    fitting = [x for x in around if _fits(x.shape, terms.shape)]
    return [terms], [], [jnp.broadcast_to(x, terms.shape) for x in fitting]


def _terms(fn, value):
    """Values of a type or a shape that a density does not take are refused later, by name."""
    if jnp.shape(value) != tuple(fn.shape()):
        value = jnp.zeros(fn.shape(), jnp.result_type(value))
    try:
        return fn.log_prob(value)
    except TypeError:
        return fn.log_prob(jnp.asarray(value).astype(int))


def _fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in pairs)


def kernel_beside(fn: GP):
    """The kernel at two rows that are computed from nothing, so that no number in it is that of
    rows; at as many as the inputs have where a kernel takes no others.
    """
    C = jnp.zeros((2, *fn.X.shape[1:]), fn.X.dtype)
    try:
        return fn.kernel(C, C)
    except Exception:  # noqa: BLE001 - whatever a user's kernel raises
        C = jnp.zeros(fn.X.shape, fn.X.dtype)
        return fn.kernel(C, C)
