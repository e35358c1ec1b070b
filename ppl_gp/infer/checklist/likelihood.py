"""Items of `check`, each (whether in order, message), about the likelihood and what can read it,
the dtype, the conditioning of K and the gradients at the prior's median, and the maximum.
"""

from collections.abc import Callable

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
from ppl_gp.infer.checklist.sites import Subject, space_of
from ppl_gp.infer.hyper.space import Space, starts
from ppl_gp.infer.maximised import require_bounded, require_no_maximised_effects
from ppl_gp.infer.mcmc.nuts import require_plain_priors, require_samplable
from ppl_gp.infer.probes import probe, probe_layers
from ppl_gp.infer.svgp.look import look_at
from ppl_gp.local.bound import LocalBound
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.vi import VI
from ppl_gp.mean_field.method import is_conjugate
from ppl_gp.quick import quick_jit
from ppl_gp.reading.factors import read
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.svgp import SVGP


def pointwise(subject: Subject):
    """Whether each datum depends on its own row of f alone."""
    R = _proved(subject).functions
    own = "its own value of f" if R == 1 else f"its own values of {R} functions"
    return True, f"each datum depends on {own}."


def of_batches(subject: Subject):
    """As `pointwise`, of a model whose own plate subsamples: what `SVGP` reads off a batch."""
    look_at(SVGP(), subject.model, subject.args, subject.kwargs, 0)
    (name, (size, batch)), *_ = subject.subsampling.items()
    return True, (
        f"plate '{name}' subsamples {batch} of {size} rows, which SVGP() takes as minibatches; the "
        "other methods take all data in every step: leave subsample_size out for those."
    )


def _proved(subject: Subject):
    """The likelihood that the local methods read, proved to be pointwise."""
    held = [k for k in subject.found.hyper if k not in subject.integrated]
    hyper = {k: subject.trace[k]["value"] for k in held}
    factors = read(subject.whole, *subject.args, hyper=hyper, **subject.kwargs)
    probe(factors.log_lik)
    return factors.log_lik


def methods(subject: Subject):
    """The methods that fit this model."""
    seen = _broadcast(subject)
    local = _local_methods(seen) + _sparse_methods(subject)
    try:
        space_of(subject)
    except ModelError:
        fitting = [name for name in local if name != "SparseNUTS"]
        told = f"{', '.join(fitting)}, each with hyper=Fixed(...)"
        return bool(fitting), told if fitting else "none."
    found = _drawing_methods(subject)
    try:
        maximum(seen)
    except ModelError:  # `SVGP` has no other hyper that takes all of these
        sampled = [name for name in local if name not in ("SVGP", "SparseNUTS")]
        found += ["SparseNUTS"] * ("SparseNUTS" in local)
        found += [f"with hyper=Sample() {', '.join(sampled)}"] * bool(sampled)
    else:
        found += local
    return bool(found), ", ".join(found) or "none."


def _drawing_methods(subject: Subject) -> list[str]:
    """The methods that draw all there is."""
    found = subject.found
    if subject.subsampling:
        return []
    if not found.gps:
        free = (*found.hyper, *found.local_latents)
        sums = any(subject.trace[k]["fn"].support.is_discrete for k in free)
        proved = is_conjugate(subject.model, subject.trace, subject.args, subject.kwargs)
        joint = ["Laplace"] if not sums and _has_joint_mode(subject) else []
        return ([] if sums else ["NUTS", "SVI"]) + joint + (["MeanField"] if proved else [])
    drawn = ["NUTS"] if _is_samplable(subject, "NUTS()", scaled=True) else []
    sliced = not found.local_latents and _is_samplable(subject, "EllipticalSlice()")
    drawn += ["EllipticalSlice"] if sliced else []
    if drawn or not is_conjugate(subject.model, subject.trace, subject.args, subject.kwargs):
        return drawn  # a proof takes seconds: of models that no sampler takes
    return ["MeanField"]


def _passes(check: Callable, *args) -> bool:
    """Whether a check raises no error of this package."""
    try:
        check(*args)
    except PplGpError:
        return False
    return True


def _is_samplable(subject: Subject, method: str, scaled: bool = False) -> bool:
    """Whether a sampler takes the model; `scaled`: priors of GPs that handlers scale as well."""
    model, args, kwargs, trace, found, _ = subject
    return _passes(require_samplable, model, trace, args, kwargs, method) and _passes(
        require_plain_priors, trace, found.gps, method, scaled
    )


def _has_joint_mode(subject: Subject) -> bool:
    """Whether `Laplace` takes all latents together: without a predictor of rows that stand alone,
    if there may be a mode.
    """
    alone = isinstance(subject.whole, Collapsed) and not subject.whole.reading.coupled
    free = not alone and not subject.found.params
    return free and _passes(require_bounded, subject.trace, subject.model.reading, "Laplace()")


def _broadcast(subject: Subject) -> Subject:
    """With sites that rows see by broadcasting integrated, in a model without another predictor."""
    if subject.found.gps or subject.whole is not subject.model or subject.subsampling:
        return subject
    return subject._replace(whole=collapse(subject.whole, subject.args, subject.kwargs, lone=True))


def _local_methods(subject: Subject) -> list[str]:
    """The local methods that can read this model; the item "likelihood" says why others cannot."""
    if subject.subsampling:
        return []
    try:
        log_lik = _proved(subject)
    except PplGpError:
        return []
    every: tuple = (EP, Laplace, LocalBound, VI)
    if isinstance(subject.whole, Collapsed) and subject.whole.plan.lone and not subject.found.gps:
        every = (EP, LocalBound, VI)  # `Laplace` has the joint mode of all latents
    return [cls.__name__ for cls in every if cls().refuses(log_lik) is None]


def _sparse_methods(subject: Subject) -> list[str]:
    """The methods with inducing variables: several latent functions are theirs too. `SVGP()` takes
    a model whole, its effects held, or with effects integrated beside the GPs.
    """
    found = subject.found
    whole = bool(found.gps) and _passes(_probe_whole, subject)
    looked = (SVGP(), subject.model, subject.args, subject.kwargs, 0)
    if not found.gps or not (whole or _passes(look_at, *looked)):
        return []
    if any(subject.trace[k]["fn"].support.is_discrete for k in found.local_latents):
        return []
    drawn = whole and not subject.subsampling and _is_samplable(subject, "SparseNUTS()")
    return ["SVGP", "SparseNUTS"] if drawn else ["SVGP"]


def _probe_whole(subject: Subject) -> None:
    """The model as it is declared, its effects held, as one of inducing variables."""
    model, args, kwargs, trace, found, _ = subject
    structure = structure_of(found, trace, lambda values: run(model, args, kwargs, values))
    num = trace[found.gps[0]]["fn"].shape()[-1]
    hyper = {k: trace[k]["value"] for k in (*found.hyper, *found.params)}
    probe_layers(model, structure, hyper, trace, Batch(args, kwargs, jnp.ones(num), random.key(0)))


_CONDITION_LIMIT = {"float64": 1e12, "float32": 1e5}


def dtype(subject: Subject):
    """Whether the inputs are of double precision."""
    found = jnp.zeros(()).dtype
    if subject.found.gps:
        found = unwrap(subject.trace[subject.found.gps[0]]["fn"]).X.dtype
    if found == jnp.float64:
        return True, "float64"
    wanted = "set jax.config.update('jax_enable_x64', True) before any array is made."
    return False, f"{found}; {wanted}"


def _median(subject: Subject) -> tuple[Space, dict, dict]:
    """(space, unconstrained, constrained) hyperparameters at the prior's median."""
    sp = space_of(subject)
    if not sp.names:
        return sp, {}, {}
    free = jax.tree.map(lambda x: x[0], starts(sp, random.key(0), 1))
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
        told = f"K of '{name}' has smallest eigenvalue {values[0]:.2g} and no jitter repairs it"
        return False, f"{told}; check the kernel."
    condition = values[-1] / max(values[0] + float(added), np.finfo(values.dtype).tiny)
    raised = f", raised by {float(added):.2g}" if added > 0 else ""
    message = (
        f"K of '{name}' at the prior's median: condition number {condition:.2g}, jitter "
        f"{jitter:.2g}{raised}"
    )
    ok = condition < _CONDITION_LIMIT[K.dtype.name]
    end = "." if ok else "; give GP(jitter=...) a larger value, or drop duplicate rows."
    return ok, message + end


def gradients(subject: Subject):
    """Whether the log density and its gradient are finite."""
    if latents := list(subject.found.local_latents):
        return True, f"not computed: the model has latents in the data's plate {latents}."
    sp, free, _ = _median(subject)
    value, gradient = _log_density(sp, subject.found.gps, free)
    bad = [k for k, g in gradient.items() if not bool(jnp.all(jnp.isfinite(ravel_pytree(g)[0])))]
    there = f"log density {float(value):.4g}, gradient"
    if bad or not bool(jnp.isfinite(value)):
        return False, f"{there} not finite in {bad}; check the data's scale and the priors."
    size = float(jnp.max(jnp.abs(ravel_pytree(gradient)[0])))
    return True, f"{there} finite at the prior's median, f drawn (largest entry {size:.2g})."


@quick_jit
def _log_density(sp: Space, gps: tuple[str, ...], free: dict):
    """Log density and its gradient by the unconstrained hyperparameters and f, a prior draw."""
    trace = run(sp.model, sp.args, sp.kwargs, sp.constrain(free))
    latent = {k: trace[k]["fn"].sample(random.key(1)) for k in gps}

    def density(point):
        values = {**sp.constrain({k: point[k] for k in free}), **{k: point[k] for k in latent}}
        # a plate that subsamples draws its rows
        return log_density(handlers.seed(sp.model, 2), sp.args, sp.kwargs, values)[0]

    return jax.value_and_grad(density)({**free, **latent})


def maximum(subject: Subject):
    """Whether the joint density is bounded, which `MAP()` needs."""
    trace = subject.trace
    if isinstance(subject.whole, Collapsed):
        trace = run(subject.whole, subject.args, subject.kwargs)
    require_bounded(trace, subject.whole.reading, "MAP()")
    require_no_maximised_effects(subject.whole, subject.args, subject.kwargs, "MAP()")
    return True, "MAP() has a maximum to find."
