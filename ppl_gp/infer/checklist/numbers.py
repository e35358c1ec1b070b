"""Items about numbers, each (whether it is in order, message): the dtype, and at the prior's median
the conditioning of K and the gradients; whether there is a maximum.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import log_density

from ppl_gp.gp import unwrap
from ppl_gp.infer.checklist.sites import Subject, space_of
from ppl_gp.infer.hyper.space import Space, starts
from ppl_gp.infer.probes.demoted import require_none_demoted
from ppl_gp.infer.probes.maximum import require_bounded
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.tracing import run
from ppl_gp.quick import quick_jit

_CONDITION_LIMIT = {"float64": 1e12, "float32": 1e5}
_MEDIAN_DRAWS_KEY = 0


def dtype(subject: Subject):
    """Whether the inputs are of double precision."""
    found = jnp.zeros(()).dtype
    if subject.found.gps:
        found = unwrap(subject.trace[subject.found.gps[0]]["fn"]).X.dtype
    if found == jnp.float64:
        return True, "float64"
    return (
        False,
        f"{found}; set jax.config.update('jax_enable_x64', True) before any array is made.",
    )


def _median(subject: Subject) -> tuple[Space, dict, dict]:
    """(space, unconstrained, constrained) hyperparameters at the prior's median."""
    sp = space_of(subject)
    if not sp.names:
        return sp, {}, {}
    free = jax.tree.map(lambda x: x[0], starts(sp, random.key(_MEDIAN_DRAWS_KEY), 1))
    return sp, free, sp.constrain(free)


def conditioning(subject: Subject):
    """Condition numbers of the covariances of the GP sites."""
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


def gradients(subject: Subject):
    """Whether the log density and its gradient are finite."""
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


def maximum(subject: Subject):
    """Whether the joint density is bounded, which `MAP()` needs."""
    trace = subject.trace
    if isinstance(subject.whole, Collapsed):
        trace = run(subject.whole, subject.args, subject.kwargs)
    require_bounded(trace, subject.whole.reading, "MAP()")
    require_none_demoted(subject.whole, subject.args, subject.kwargs, "MAP()")
    return True, "MAP() has a maximum to find."
