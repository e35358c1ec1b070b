"""Where a sparse run starts: hyperparameters, inducing variables, q(u)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.hyperparameters import MAP, Fixed
from ppl_gp.infer.space import Space, space, starts
from ppl_gp.sparse.bound import Inducing
from ppl_gp.sparse.families import (
    Basis,
    DecoupledGaussian,
    DiagonalGaussian,
    Family,
    FullGaussian,
    Sites,
    UnwhitenedGaussian,
)
from ppl_gp.sparse.inducing import InducingVariables, Points
from ppl_gp.sparse.root import DenseRoot
from ppl_gp.sparse.select import select
from ppl_gp.sparse.svgp import SVGP
from ppl_gp.tracing import run


def fixed_values(values, names, trace) -> dict:
    """The values of `Fixed({...})`, checked: one finite constrained value for each hyperparameter."""
    missing, unknown = [n for n in names if n not in values], [n for n in values if n not in names]
    if missing or unknown:
        raise ModelError(
            f"Fixed({dict(values)!r}) does not fit the model's hyperparameters {list(names)}: "
            f"missing {missing}, unknown {unknown}. Give one constrained value for each."
        )
    hyper = {n: jnp.asarray(values[n], jnp.result_type(float)) for n in names}
    for name, value in hyper.items():
        if not bool(jnp.all(jnp.isfinite(value))):
            raise DataError(f"Fixed(...)['{name}'] = {values[name]} is not finite.")
        site = trace[name]
        if site["type"] == "sample" and not bool(jnp.all(site["fn"].support(value))):
            raise DataError(f"Fixed(...)['{name}'] = {values[name]} is outside its support, {site['fn'].support}.")
    return hyper


def initial_point(hyper, model, trace, names, key, args, kwargs) -> tuple[dict, dict]:
    """(fixed hyperparameters, unconstrained starting values of the others) for `MAP` and `Fixed`."""
    if isinstance(hyper, Fixed):
        return fixed_values(hyper.values, names, trace), {}
    if hyper.restarts > 1:
        raise DataError(f"SVGP(hyper=MAP(restarts={hyper.restarts})): sparse training has one start; give restarts=1.")
    if not names:
        return {}, {}
    where = space(trace)
    if hyper.init is not None:
        return {}, _given(hyper, where, names)
    return {}, jax.tree.map(lambda x: x[0], _starts(model, args, kwargs, key))


def _given(config: MAP, where: Space, names) -> dict:
    init = config.init or {}
    if missing := [n for n in names if n not in init]:
        raise DataError(f"MAP(init=...) lacks {missing}; it needs a value for each of {list(names)}.")
    return where.unconstrain(dict(init))


@eqx.filter_jit
def _starts(model, args, kwargs, key):
    return starts(model, args, kwargs, space(run(model, args, kwargs)), key, 1)


def initial_inducing(method: SVGP, priors: dict[str, GP], shapes: dict, inputs: dict, seed: int) -> Inducing:
    """Inducing variables of every GP site, and q(u) = p(u) over them."""
    variables = {
        k: inducing_variables(method.inducing, k, method.num_inducing, p, inputs[k], seed) for k, p in priors.items()
    }
    q = {k: _family(method, variables[k], prior, shapes[k][:-1]) for k, prior in priors.items()}
    return Inducing(variables, q)


def _of_site(choice: Any, site: str) -> Any:
    if not isinstance(choice, dict):
        return choice
    if site not in choice:
        raise DataError(f"inducing={{...}} has entries for {sorted(choice)}, and none for the GP site '{site}'.")
    return choice[site]


def inducing_variables(choice: Any, site: str, num: int, prior: GP, X, seed: int) -> InducingVariables:
    """The inducing variables of a GP site, as an `inducing=` argument says: a rule, Z, variables, or {site: one of those}."""
    choice = _of_site(choice, site)
    if isinstance(choice, InducingVariables):
        return choice
    if isinstance(choice, str):
        return Points(jnp.asarray(select(choice, prior, X, num, seed)))
    Z = jnp.asarray(choice, prior.X.dtype)
    if Z.ndim != prior.X.ndim or Z.shape[1:] != prior.X.shape[1:] or 0 in Z.shape:
        raise DataError(
            f"inducing=Z has shape {Z.shape}, and the GP site's inputs {prior.X.shape}: only the rows may differ in number."
        )
    if not bool(jnp.all(jnp.isfinite(Z))):
        raise DataError("inducing=Z has entries that are not finite.")
    return Points(Z)


def _family(method: SVGP, variables: InducingVariables, prior: GP, batch_shape) -> Family:
    root = _root(variables, prior)
    shape, dtype = (*batch_shape, variables.num), prior.X.dtype
    zeros = jnp.zeros(shape, dtype)
    eye = jnp.broadcast_to(jnp.eye(variables.num, dtype=dtype), (*shape, variables.num))
    if method.uses_natural:
        base = root.L if method.carries_sites and isinstance(root, DenseRoot) else None
        return Sites(zeros, jnp.zeros_like(eye), base)
    if method.covariance == "diagonal":
        return DiagonalGaussian(zeros, zeros)
    if not method.whiten:
        mean = jnp.broadcast_to(variables.mean(prior), shape)
        return UnwhitenedGaussian(mean, jnp.broadcast_to(root.color(jnp.eye(variables.num, dtype=dtype)), eye.shape))
    full = FullGaussian(zeros, eye)
    if method.covariance == "full":
        return full
    if not isinstance(variables, Points):
        raise DataError(f"SVGP(covariance='decoupled') needs inducing points, and has {type(variables).__name__}.")
    return DecoupledGaussian(full, Basis(_between(variables.Z), zeros))


@eqx.filter_jit
def _root(variables: InducingVariables, prior: GP):
    return variables.root(prior)


def _between(Z):
    """Further points for the mean: halfway from each inducing point to its successor, so that none coincides with one."""
    return 0.5 * (Z + jnp.roll(Z, 1, 0)) + 1e-3 * jnp.std(Z, 0)


def units(variables: InducingVariables, X) -> Any:
    """What one unit of the optimiser's step means for each trained array: a column's standard deviation for inducing points."""
    spread = np.std(np.asarray(X), 0)
    spread = np.where(spread > 0, spread, 1.0)

    def unit(x):
        return jnp.asarray(spread, x.dtype) if isinstance(variables, Points) else jnp.ones((), x.dtype)

    return jax.tree.map(unit, eqx.filter(variables, eqx.is_inexact_array))


def priors_of(trace: dict, gps) -> tuple[dict, dict]:
    """({GP site: prior}, {GP site: shape}) of a trace."""
    return {k: unwrap(trace[k]["fn"]) for k in gps}, {k: tuple(trace[k]["fn"].shape()) for k in gps}
