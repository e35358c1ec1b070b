"""What is checked before anything is computed: arguments, shapes, supports, and that the likelihood is pointwise."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from ppl_gp.errors import DataError, ModelError, NotPointwiseError
from ppl_gp.factors import JointLogLikelihood, LogLikelihood
from ppl_gp.gp import unwrap
from ppl_gp.tracing import is_factor, is_observed, log_prob_per_datum, roles, run


def first_trace(model, args, kwargs, hyper=None) -> dict:
    """The model's trace, with every observed value checked against its distribution's shape and support."""
    lengths = {jnp.shape(a)[0] for a in (*args, *kwargs.values()) if eqx.is_array(a) and jnp.ndim(a) > 0}
    try:
        trace = run(model, args, kwargs, hyper)
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError | ModelError) or len(lengths) <= 1:
            raise
        raise DataError(f"the arguments' leading lengths {sorted(lengths)} do not fit together: {error}") from error
    for name in roles(trace).observed:
        _check_observed(name, trace[name])
    return trace


def _check_observed(name, site):
    fn, value = site["fn"], site["value"]
    if is_factor(site):
        return
    if jnp.shape(value) != tuple(fn.shape()):
        raise DataError(
            f"site '{name}' observes a value of shape {jnp.shape(value)} where its distribution has shape "
            f"{tuple(fn.shape())}; give one observation a row of X, y of shape (N,) rather than (N, 1)."
        )
    inner = unwrap(fn)
    inside = jnp.broadcast_to(inner.support(value), jnp.shape(value)[: jnp.ndim(inner.support(value))])
    if not bool(jnp.all(inside | ~_mask(fn))):
        bad = np.asarray(value)[~np.asarray(inside)].ravel()[:3]
        raise DataError(
            f"site '{name}' observes {bad.tolist()}, outside the support of {type(inner).__name__} "
            f"({inner.support}); recode the observations (binary labels are 0 and 1, not -1 and 1)."
        )


def _mask(fn):
    mask = jnp.ones((), bool)
    while fn is not unwrap(fn):
        mask = mask & fn._mask if hasattr(fn, "_mask") else mask
        fn = fn.base_dist
    return mask


@eqx.filter_jit
def _probe(log_lik: LogLikelihood, key):
    f, v = random.normal(key, (2, log_lik.num))
    g, along = jax.jvp(log_lik, (f,), (v,))
    rows = jax.jvp(log_lik, (f,), (jnp.ones_like(f),))[1]
    scale = jnp.abs(along) + jnp.abs(rows * v)
    tolerance = 1e3 * jnp.finfo(f.dtype).eps * (1.0 + scale)
    shared = jax.grad(log_lik.shared)(f)
    return jnp.all(jnp.isfinite(g)), jnp.abs(along - rows * v) <= tolerance, jnp.all(shared == 0)


def probe(log_lik: LogLikelihood) -> None:
    """Prove that the likelihood is pointwise, or raise `NotPointwiseError` naming the site.

    For a diagonal Jacobian J and any v, J v = (J 1) * v. One continuous random v finds any off-diagonal entry with
    probability one (random signs would miss a single coupled pair half of the time). Two jvps, O(N).
    """
    finite, pointwise, free = _probe(log_lik, random.key(7))
    if not bool(finite):
        raise DataError("the log-likelihood is not finite at random values of f; check the observations and the model.")
    if not (bool(jnp.all(pointwise)) and bool(free)):
        bad = np.flatnonzero(~np.asarray(pointwise))[:3].tolist()
        raise NotPointwiseError(
            f"the likelihood of site {_coupled_sites(log_lik)} couples values of f"
            f"{f' (data {bad}, ...)' if bad else ' into one number'}; Laplace, EP, VI and LocalBound need "
            "log p(y|f) = sum_n log p(y_n|f_n). Use NUTS() or EllipticalSlice()."
        )


@eqx.filter_jit
def _probe_joint(log_lik: JointLogLikelihood, shapes: tuple, key):
    names = [name for name, _ in shapes]
    keys = random.split(key, 3)
    f, v, w = ({k: random.normal(random.fold_in(one, i), s) for i, (k, s) in enumerate(shapes)} for one in keys)

    def along(directions):
        return jax.jvp(log_lik, (f,), (directions,))[1]

    def decides_one_row(name, function):
        """J 1 * J (v w) = J v * J w for random v and w, if and only if every row of J has at most one entry."""

        def only(x):
            x = jnp.reshape(x, (-1, x.shape[-1]))
            row = jnp.where(jnp.arange(x.shape[0])[:, None] == function, x, 0.0)
            return {k: jnp.reshape(row, f[k].shape) if k == name else jnp.zeros_like(f[k]) for k in names}

        ones, a, b, both = (along(only(x)) for x in (jnp.ones_like(v[name]), v[name], w[name], v[name] * w[name]))
        scale = jnp.abs(ones * both) + jnp.abs(a * b)
        return jnp.abs(ones * both - a * b) <= 1e3 * jnp.finfo(scale.dtype).eps * (1.0 + scale)

    def functions(name):
        return jnp.arange(math.prod(f[name].shape[:-1]))

    rows = [jnp.all(lax.map(lambda c, k=k: decides_one_row(k, c), functions(k)), 0) for k in names]
    free = jnp.all(jnp.stack([jnp.all(g == 0) for g in jax.tree.leaves(jax.grad(log_lik.shared)(f))]))
    return jnp.all(jnp.isfinite(log_lik(f))), jnp.all(jnp.stack(rows), 0), free


def probe_joint(log_lik: JointLogLikelihood, shapes: dict) -> None:
    """Prove that y_n depends on one value of each latent function at most, or raise `NotPointwiseError`.

    `shapes`: {GP site: (*C, N)}. Four jvps a function, O(N).
    """
    finite, pointwise, free = _probe_joint(log_lik, tuple(shapes.items()), random.key(7))
    if not bool(finite):
        raise DataError("the log-likelihood is not finite at random values of f; check the observations and the model.")
    if not (bool(jnp.all(pointwise)) and bool(free)):
        bad = np.flatnonzero(~np.asarray(pointwise))[:3].tolist()
        raise NotPointwiseError(
            f"the likelihood couples several values of one latent function{f' (data {bad}, ...)' if bad else ''}, and "
            "SVGP() needs log p(y|f) = sum_n log p(y_n|f_n). Use NUTS()."
        )


def _coupled_sites(log_lik):
    zero = jnp.zeros((log_lik.num,))
    f, v = random.normal(random.key(8), (2, log_lik.num))

    def part(name):
        return lambda f: log_prob_per_datum(log_lik.trace(f)[name], log_lik.num)

    def coupled(name):
        along, rows = (jax.jvp(part(name), (f,), (d,))[1] for d in (v, jnp.ones_like(f)))
        return bool(along != 0) if jnp.ndim(along) == 0 else not bool(jnp.allclose(along, rows * v))

    return [k for k, s in log_lik.trace(zero).items() if is_observed(s) and coupled(k)]
