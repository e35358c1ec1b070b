"""Where a sparse run starts: hyperparameters, inducing variables, q(u); and where else it may."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.deep import latents
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError
from ppl_gp.gp import GP, unwrap
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.hyper.map import other_scales
from ppl_gp.infer.hyper.space import Space, fixed_values, space, starts
from ppl_gp.infer.svgp.look import Subject
from ppl_gp.infer.svgp.problem import Placement, Problem, hyper_at
from ppl_gp.infer.svgp.step import State, begin
from ppl_gp.quick import entry, quick_jit
from ppl_gp.reading.digest import at_once
from ppl_gp.reading.factors import JointLogLikelihood, LogLikelihood
from ppl_gp.reading.predictor.parts import Weighted
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.settings import MAP, Fixed
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.families import DiagonalGaussian, Family, FullGaussian, NaturalGaussian
from ppl_gp.sparse.inducing import InducingVariables, Points, select
from ppl_gp.sparse.parts import PartsVariables, natural_prior, parts_variables
from ppl_gp.sparse.process import batch_of
from ppl_gp.sparse.svgp import SVGP, SparseMethod

INNER_SCALE = 1e-2  # standard deviation of q(v) in inner layers at the start
_WIDTH = 0.3  # of q(v) around a draw, in standard deviations of the prior


class Begun(NamedTuple):
    """A run before its first step."""

    problem: Problem
    state: State
    subject: Subject
    method: SparseMethod
    spread: Placement
    key: Any  # that it was prepared with
    seed: int

    def batch(self, key) -> Batch:
        """The first one."""
        return as_batch(self.subject.first, key)


def num_rows(site: dict) -> int:
    """B: the rows of a latent that has one entry per datum."""
    return site["fn"].shape()[len(site["fn"].batch_shape) + site["data_axis"]]


def initial_point(hyper, subject: Subject, batch: Batch, key) -> tuple[dict, dict]:
    """(fixed hyperparameters, unconstrained starts of the others) for `MAP` and `Fixed`."""
    at = batch.args, batch.kwargs
    if isinstance(hyper, Fixed):
        return fixed_values(hyper, Space(subject.model, subject.names, *at, {})), {}
    own = {k: getattr(hyper, k) for k in ("restarts", "max_steps", "tol")}
    if other := {k: x for k, x in own.items() if x != getattr(MAP, k)}:
        raise DataError(
            f"MAP({', '.join(f'{k}={x}' for k, x in other.items())}): sparse training has one "
            "start, and the method has max_steps and tol itself; leave them out of MAP()."
        )
    if not subject.names:
        return {}, {}
    where = space(subject.trace, subject.model, *at)
    if hyper.init is not None:
        return {}, where.unconstrain(fixed_values(hyper, where))
    return {}, entry(_starts(where, key, 1), 0)


_starts = quick_jit(starts)


def initial_variational(
    method: SparseMethod, trace: dict, structure: Structure, inputs: dict, seed: int, moves: bool
) -> Variational:
    """Inducing variables of every GP site; q(u) = p(u) over them, nearly certain in inner
    layers. `moves`: whether the hyperparameters will.
    """
    priors, shapes = priors_of(trace, structure.gps)
    variables = {
        k: _of_parts(method, p, inputs[k], seed, moves)
        if isinstance(p, PredictorGP)
        else inducing_variables(method, k, p, inputs[k], seed, moves)
        for k, p in priors.items()
    }
    require_known_sites(method.inducing, variables)
    q = {
        k: _family(method, variables[k], p, batch_of(p, shapes[k]), k in structure.inner)
        for k, p in priors.items()
    }
    return Variational(variables, q)


def require_known_sites(choice: Any, variables: dict) -> None:
    """Raise `DataError` for entries of `inducing={...}` that are of no GP site."""
    parts = [v.gps if isinstance(v, PartsVariables) else {k: v} for k, v in variables.items()]
    names = {k for found in parts for k in found}
    if isinstance(choice, dict) and (unknown := sorted(set(choice) - names)):
        raise DataError(
            f"inducing={{...}} has entries for {unknown}; the GP sites with inducing variables are "
            f"{sorted(names)}."
        )


def _of_parts(method: SparseMethod, prior: PredictorGP, rows, seed: int, moves) -> PartsVariables:
    """Inducing variables of each GP behind a predictor, and what else there is."""
    priors = at_once(_priors_of_parts, prior, jnp.asarray(rows))
    gps = {
        k: inducing_variables(method, k, p, np.asarray(p.X), seed, moves) for k, p in priors.items()
    }
    # the collapsed bound and q(u) by the optimiser have dense forms alone
    arrow = isinstance(method, SVGP) and method.training.uses_natural
    return parts_variables(prior, gps, arrow=arrow)


def _priors_of_parts(prior: PredictorGP, rows) -> dict[str, GP]:
    return {k: p.prior for k, p in prior.kernel.at(rows).parts.items() if isinstance(p, Weighted)}


def of_site(choice: Any, site: str, option: str) -> Any:
    """What an option says of a site: {site: ...} or one for all; `DataError` where it lacks it."""
    if not isinstance(choice, dict):
        return choice
    if site not in choice:
        kind = "latent" if option == "latents" else "GP site"
        raise DataError(
            f"{option}={{...}} has entries for {sorted(choice)}, and none for the {kind} '{site}'."
        )
    return choice[site]


def inducing_variables(
    method: Any, site: str, prior: GP, X, seed: int, moves: bool
) -> InducingVariables:
    """As a method's `inducing` says: a rule, Z, variables, or {site: one of those}."""
    choice = of_site(method.inducing, site, "inducing")
    if isinstance(choice, InducingVariables):
        return choice
    if isinstance(choice, str):
        return Points(jnp.asarray(select(choice, prior, X, method.num_inducing, seed, moves=moves)))
    Z = jnp.asarray(choice, prior.X.dtype)
    if Z.ndim != prior.X.ndim or Z.shape[1:] != prior.X.shape[1:] or 0 in Z.shape:
        raise DataError(
            f"inducing=Z has shape {Z.shape}, and the GP site's inputs {prior.X.shape}: only the "
            "rows may differ in number."
        )
    if not bool(jnp.all(jnp.isfinite(Z))):
        raise DataError("inducing=Z has entries that are not finite.")
    return Points(Z)


def initial_latents(
    config,
    site: dict,
    key,
    num_data: int,
    batch: Batch,
    uses_inputs: bool,
    inputs=None,
    along: int = 0,
) -> latents.LatentGuide:
    """q(h) of one latent site as `Layers(latents=...)` says. O(N). `inputs`: which arrays of the
    first argument hold rows, by default all; `along`: the axis of y that does.
    """
    args, kwargs, rows = batch.args, batch.kwargs, batch.rows
    num, dtype = num_rows(site), jnp.result_type(float)
    size = latents.latent_size(site, num)
    if isinstance(config, latents.Free):
        given, form = config.init is not None, (num_data, size)
        means = jnp.asarray(config.init, dtype) if given else 0.1 * random.normal(key, form)
        if means.shape != form:
            raise DataError(
                f"Free(init=...) has shape {means.shape}; latent '{site['name']}' needs "
                f"({num_data}, {size})."
            )
        scales = jnp.full_like(means, jnp.log(config.scale))
        free = latents.FreeGaussian(jnp.concatenate([means, scales], 1))
        return free if given else latents.around_prior(free, site, rows, args, kwargs, inputs)
    if not isinstance(config, latents.Amortised):
        raise DataError(
            f"latents={config!r}: give Free(), Amortised(), or {{latent site: one of those}}."
        )
    sees = config.sees or ("xy" if uses_inputs and inputs != () else "y")
    if "x" in sees and inputs == ():
        raise DataError(
            f"Amortised(sees={sees!r}): the encoder of '{site['name']}' sees the first argument, "
            "which holds no rows: it is a table. Give the rows' inputs first, or sees='y'."
        )
    if "y" in sees and along != 0:
        raise DataError(
            f"Amortised(): y has its rows along axis {along}, and the encoder of '{site['name']}' "
            "sees rows along the first. Pass it transposed, and write obs=y.T in the model; or "
            "take Free()."
        )
    own, seen = config.encoder is not None, latents.encoder_rows(sees, args, kwargs, inputs)
    form = seen, size, config.width, config.depth
    made = config.encoder if own else latents.mlp_encoder(*form, key)
    numbers, rest = eqx.partition(made, eqx.is_inexact_array)  # some libraries make float32 always
    made = eqx.combine(jax.tree.map(lambda x: x.astype(dtype), numbers), rest)
    guide = latents.Encoded(made, sees, inputs)
    guide.at(site, jnp.arange(num), args, kwargs)  # its shape is checked
    return guide if own else latents.around_prior(guide, site, rows, args, kwargs, inputs)


def _family(method: SparseMethod, variables, prior: GP, batch_shape, is_inner: bool) -> Family:
    """q(u) = p(u); in inner layers nearly the prior mean, so that what is drawn there has little
    noise at first (Salimbeni & Deisenroth 2017, 4).
    """
    # X may be float32, and the kernel float64
    dtype = jax.eval_shape(lambda: prior.variance).dtype
    shape = (*batch_shape, variables.num)
    if method.training.uses_natural and not is_inner:
        return natural_prior(variables, shape, dtype)
    zeros = jnp.zeros(shape, dtype)
    if method.training.covariance == "diagonal" and not is_inner:
        return DiagonalGaussian(zeros, zeros)
    root = (INNER_SCALE if is_inner else 1.0) * jnp.eye(variables.num, dtype=dtype)
    return FullGaussian(zeros, jnp.broadcast_to(root, (*shape, variables.num)))


def units(variables: InducingVariables, X, given: bool) -> Any:
    """What one unit of the optimiser's step means for each trained array: for inducing points about
    the distance between neighbours, a column's standard deviation / M^(1 / columns), if inputs are
    `given`: in longer steps the points of minibatches do not settle. Those of latents and layers
    move, and their points have to follow: a column's standard deviation.
    """
    if isinstance(variables, PartsVariables):
        gps = variables.gps.items()
        each = {k: units(v, getattr(v, "Z", None), given) for k, v in gps}
        return dataclasses.replace(variables, gps=each)
    places = lambda v: isinstance(v, InducingVariables) and hasattr(v, "Z")  # noqa: E731

    def unit(v):
        own = X is None or np.shape(X)[1:] != v.Z.shape[1:]  # of some columns
        spread = np.std(np.asarray(v.Z if own else X), 0)
        varying = max(1, int(np.sum(spread > 0)))
        return np.where(spread > 0, spread, 1.0) / v.num ** (given / varying)

    def of(v):
        size = unit(v) if places(v) else 1.0
        return jax.tree.map(lambda x: jnp.asarray(size, x.dtype), v)

    return jax.tree.map(of, eqx.filter(variables, eqx.is_inexact_array), is_leaf=places)


def priors_of(trace: dict, gps) -> tuple[dict, dict]:
    """({GP site: prior}, {GP site: shape}) of a trace."""
    return {k: unwrap(trace[k]["fn"]) for k in gps}, {k: tuple(trace[k]["fn"].shape()) for k in gps}


def starts_elsewhere(begun: Begun) -> Iterator[State]:
    """States of the first one's shapes, which its compiled step serves: other length scales; where
    the likelihood is not proved log-concave, q(u) around a draw from the prior and around minus it.
    """
    problem, start = begun.problem, begun.state
    for free in other_length_scales(begun, start.free):
        yield begin(problem, free, start.variational)
    if _has_modes(begun.subject):
        yield from (_around_draw(problem, start, sign) for sign in (-1.0, 1.0))


def other_length_scales(begun: Begun, free: dict) -> Iterator[dict]:
    """`other_scales`, where nobody has given a start."""
    config, batch = begun.method.hyper, begun.batch(random.key(0))
    if isinstance(config, MAP) and config.init is None:
        hyper = hyper_at(begun.problem, free, batch)[0] | batch.given
        yield from other_scales(free, begun.subject.model, batch.args, batch.kwargs, hyper)


def _has_modes(subject: Subject) -> bool:
    """Whether q(f) of the one function may have several. Abstract."""
    shapes = [subject.trace[k]["fn"].shape() for k in subject.gps]
    if not subject.structure.is_shallow or len(shapes) > 1 or len(shapes[0]) > 1:
        return False
    batch = as_batch(subject.first, random.key(0))
    hyper = {k: subject.trace[k]["value"] for k in subject.names} | batch.given
    joint = JointLogLikelihood(subject.model, batch.num, hyper, batch.args, batch.kwargs)
    return not LogLikelihood(joint, subject.gps[0]).is_concave


def _around_draw(problem: Problem, start: State, sign: float) -> State:
    def moved(q):
        narrow = q.narrowed(_WIDTH)
        draw = random.normal(random.key(11), narrow.nat1.shape, narrow.nat1.dtype)
        return dataclasses.replace(narrow, nat1=narrow.nat1 + sign * draw / _WIDTH**2)

    variational = start.variational
    q = {k: moved(q) if isinstance(q, NaturalGaussian) else q for k, q in variational.q.items()}
    return begin(problem, start.free, variational._replace(q=q))
