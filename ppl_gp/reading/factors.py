"""Reading a model: `read(model, *args, hyper=...)` gives its GP priors and its pointwise
log-likelihood.

The model itself is the likelihood: it is run under `substitute` and `trace` with f given, and every
observed site counts, with its mask and scale. That datum n sees only its own f_n is read off the
model's jaxpr (`rows.py`).

A likelihood is proved log-concave and smooth in f by its family, and a parameter that is affine in
f or c exp(affine). Then every integral has one mode, and no scan for others is compiled. The proof
is read off the jaxpr while tracing; whatever is not on the list takes the general way.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from ppl_gp.errors import IN_ORDER, LISTED, ModelError, NotPointwiseError
from ppl_gp.gp import GP, mask_of, unwrap
from ppl_gp.observations import BernoulliProbit
from ppl_gp.reading.arguments import as_arrays, named_arrays
from ppl_gp.reading.dependence import Dependence, dependence, depends
from ppl_gp.reading.predictor.collapse import collapse
from ppl_gp.reading.predictor.predictor import require_gp
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.reading import declare
from ppl_gp.reading.refusals import observes_nothing
from ppl_gp.reading.roles import (
    Roles,
    is_observed,
    is_whole,
    log_prob_per_datum,
    roles,
    without_wrappers,
)
from ppl_gp.reading.tracing import run

_FAMILIES: dict[type, dict[str, Dependence]] = {  # how a parameter may see f
    dist.BernoulliLogits: {"logits": Dependence.affine},
    dist.BinomialLogits: {"logits": Dependence.affine, "total_count": Dependence.constant},
    BernoulliProbit: {"f": Dependence.affine},
    dist.CategoricalLogits: {"logits": Dependence.affine},
    dist.MultinomialLogits: {"logits": Dependence.affine, "total_count": Dependence.constant},
    dist.Normal: {"loc": Dependence.affine, "scale": Dependence.constant},
    dist.Poisson: {"rate": Dependence.exponential},
    dist.NegativeBinomial2: {"mean": Dependence.exponential, "concentration": Dependence.constant},
}


def is_concave(trace_at: Callable, sites: tuple[str, ...] | None, num: int) -> bool:
    """Whether the terms of `sites` (`None`: of all that is observed) in `trace_at(f)`, f (num,),
    are log-concave and smooth in f. Two abstract traces, nothing is computed.
    """
    zero = jnp.zeros((num,))
    found = trace_at(zero)
    names = [k for k, s in found.items() if is_observed(s)] if sites is None else sites
    kinds = {k: type(unwrap(found[k]["fn"])) for k in names}
    known = all(kind in _FAMILIES for kind in kinds.values())
    if not known or is_weighed_by(trace_at, names, zero):
        return False
    allowed = [(k, p, how) for k, kind in kinds.items() for p, how in _FAMILIES[kind].items()]

    def parameters(f):
        trace = trace_at(f)
        return [jnp.asarray(getattr(unwrap(trace[k]["fn"]), p)) for k, p, _ in allowed]

    pairs = zip(dependence(parameters, zero), allowed, strict=True)
    return all(way in (how, Dependence.constant) for way, (*_, how) in pairs)


def is_weighed_by(trace_at: Callable, sites: Iterable[str], f) -> bool:
    """Whether observed values, masks or scales of these sites are computed from f."""

    def around(f):
        trace = trace_at(f)
        found = [trace[k] for k in sites]
        values = [s["value"] for s in found if is_observed(s)]  # at a prediction it is drawn
        return values, [(s["scale"], mask_of(s["fn"])) for s in found]

    return depends(around, f)


class JointLogLikelihood(eqx.Module):
    """{GP site: f (N,) or (C, N)} -> log p(y_n | all functions at n), (N,), nats; a pytree."""

    model: Callable = eqx.field(static=True)
    num: int = eqx.field(static=True)
    hyper: dict[str, Any]
    args: tuple
    kwargs: dict[str, Any]
    keep: Bool[Array, "N"] | None = None  # the data that count, where not all do

    def trace(self, latent: dict | None) -> dict:
        """The model's trace with GP sites given."""
        model = declare(self.model, self.args, self.kwargs)
        sites = run(model, self.args, self.kwargs, self.hyper, latent)
        return sites if self.keep is None else {k: self._masked(s) for k, s in sites.items()}

    def _masked(self, site: dict) -> dict:
        if self.keep is None or not is_observed(site) or site["data_axis"] is None:
            return site
        mask, site = mask_of(site["fn"]), without_wrappers(site)
        shape = (-1,) + (1,) * (-1 - site["data_axis"])
        return {**site, "fn": site["fn"].mask(mask & jnp.reshape(self.keep, shape))}

    def __call__(self, latent: dict) -> Float[Array, "N"]:
        return _per_datum(self, latent)

    def shared(self, latent: dict | None = None) -> Float[Array, ""]:
        """As `shared_log_prob`, with GP sites given."""
        return shared_log_prob(self.trace(latent))


def shared_log_prob(trace: dict) -> Float[Array, ""]:
    """Log p of observed sites without a data axis (an observed hyperparameter, a factor), nats."""
    terms = [log_prob_per_datum(s) for s in trace.values() if is_observed(s)]
    return sum([t for t in terms if t.ndim == 0], jnp.zeros(()))


class LogLikelihood(eqx.Module):
    """The log likelihood per datum as a function of f, from `read`.

    Call it with f, (N,), for `log p(y_n | f_n)`, (N,), in nats. With R functions per datum, f is (R
    N,), one function after another.

    Parameters
    ----------
    joint : JointLogLikelihood
        The likelihood of all GP sites.
    site : str
        The name of the GP site.
    functions : int, default 1
        R, the number of functions per datum.
    softmax : tuple of int, default ()
        Which function each logit of a categorical site is, if all data depend on f in this way.
    """

    joint: JointLogLikelihood
    site: str = eqx.field(static=True)
    functions: int = eqx.field(default=1, static=True)
    # which function each score of a categorical site is, where that is how all data see f
    softmax: tuple[int, ...] = eqx.field(default=(), static=True)

    @property
    def num(self) -> int:
        """N."""
        return self.joint.num

    def trace(self, f) -> dict:
        """The model's trace at this f."""
        return self.joint.trace({self.site: self._shaped(f)})

    def __call__(self, f: Float[Array, "RN"]) -> Float[Array, "N"]:
        return self.joint({self.site: self._shaped(f)})

    def _shaped(self, f):
        return f if self.functions == 1 else jnp.reshape(f, (self.functions, -1))

    def softmax_weights(self, f) -> Float[Array, "R N"]:
        """The vector d with -Hessian = diag(d) - d d^T / sum d (R&W 3.38), (R, N).

        It contains the probabilities of the classes, times the factor with which masks and scales
        count a datum.
        """
        (site,) = (s for s in self.trace(f).values() if is_observed(s))
        counted = jnp.broadcast_to(mask_of(site["fn"]), (self.num,))
        weight = jnp.where(counted, 1.0 if site["scale"] is None else site["scale"], 0.0)
        p = jax.nn.softmax(unwrap(site["fn"]).logits, -1)
        return p.T[jnp.argsort(jnp.asarray(self.softmax))] * weight

    def of_rows(self, keep: Bool[Array, "N"]) -> "LogLikelihood":
        """The likelihood of the rows in `keep` alone."""
        return dataclasses.replace(self, joint=dataclasses.replace(self.joint, keep=keep))

    @property
    def is_concave(self) -> bool:
        """Whether it is proved to be log-concave and smooth in f, by two abstract traces."""
        return is_concave(self.trace, None, self.functions * self.num)

    def shared(self, f=None) -> Float[Array, ""]:
        """Log density of observed sites that do not belong to one datum, in nats."""
        return self.joint.shared(None if f is None else {self.site: self._shaped(f)})


def functions_of(log_lik: Callable) -> int:
    """How many functions a datum sees; one of a plain function of f."""
    return log_lik.functions if isinstance(log_lik, LogLikelihood) else 1


@eqx.filter_jit
def _per_datum(log_lik: JointLogLikelihood, latent):
    """Compiled on its own: a method calls it in tens of places, and traces the model once."""
    total = jnp.zeros((log_lik.num,), jnp.result_type(float, *latent.values()))
    for site in log_lik.trace(latent).values():
        if is_observed(site):
            per_datum = log_prob_per_datum(site)
            if per_datum.ndim:
                require_equal_rows(list(latent), log_lik.num, per_datum.shape[0])
            total = total + per_datum if per_datum.ndim else total
    return total


def require_equal_rows(
    gps: list[str], num_rows: int, num_data: int, remedy: str = IN_ORDER
) -> None:
    """Raise `NotPointwiseError` where GP sites have other rows than there are data."""
    if num_data != num_rows:
        raise NotPointwiseError(
            f"GP site(s) {gps} have {num_rows} rows, and there are {num_data} data: each sees a "
            "row that the model chooses. Give the GP the data's inputs (GP(kernel, X[i]) in a "
            f"plate that subsamples). {remedy} {LISTED}"
        )


class Factors(eqx.Module):
    """The GP prior and the likelihood of a model at given hyperparameters, from `read`.

    Parameters
    ----------
    priors : dict
        {site: GP prior}.
    log_lik : LogLikelihood
        The log likelihood of each datum, as a function of f.

    Notes
    -----
    `p(y, f | hyperparameters) = prod priors(f) exp(sum_n log_lik(f)_n + log_lik.shared(f))`.
    """

    priors: dict[str, GP]
    log_lik: LogLikelihood

    @property
    def prior(self) -> GP:
        """The model's only GP prior."""
        (prior,) = self.priors.values()
        return prior


def read(model: Callable, *args, hyper: dict | None = None, **kwargs) -> Factors:
    """Read the GP prior and the likelihood of a model at given hyperparameters.

    Use it to write an inference method of your own. It works under `jit`, `grad` and `vmap` with
    respect to `hyper` and the arrays in `args`.

    Parameters
    ----------
    model : callable
        A model with one GP site, or with Gaussian sites that enter through one linear predictor.
    *args, **kwargs
        The arguments of the model, as for `fit`.
    hyper : dict, default None
        {site: value} of all hyperparameters, sample and param sites alike, constrained.

    Returns
    -------
    Factors
        `priors` and `log_lik`.

    Raises
    ------
    ModelError
        If the model has no GP site, several functions that do not form a linear predictor (GPs that
        feed each other), or a latent in the data plate that is not Gaussian. Also if a
        hyperparameter is missing from `hyper`.

    Notes
    -----
    Two traces of the model, O(N), without a factorisation. `read` does not check that the
    likelihood is pointwise; `fit` and `check` do.

    Examples
    --------
    >>> def model(X, y=None):
    ...     ell = numpyro.sample("ell", dist.LogNormal(0.0, 1.0))
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, ell), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> factors = pg.read(model, np.arange(3.0), hyper={"ell": 0.5}, y=np.array([1, 0, 2]))
    >>> factors.log_lik(jnp.zeros(3)).round(2).tolist()
    [-1.0, -1.0, -1.69]
    """
    args, kwargs = as_arrays(*named_arrays(model, args, kwargs)[:2])
    model = collapse(declare(model, args, kwargs), args, kwargs, given=hyper, lone=True)
    trace, named = run(model, args, kwargs, hyper), {*(hyper or {})}
    if unknown := sorted(named - trace.keys()):
        raise ModelError(f"read(hyper=...) names {unknown}, which the model does not have.")
    if missing := [k for k in roles(trace).params if k not in named]:
        raise ModelError(f"read(hyper=...) has {sorted(named)}; give {missing} as well.")
    return factors_of(model, args, kwargs, trace, hyper)


def factors_of(model, args: tuple, kwargs: dict, trace: dict, hyper: dict | None) -> Factors:
    """As `read`, of a trace at these hyperparameters of a model that is read as it stands."""
    found = roles(trace)
    require_one_latent_function(found, trace, lambda f: run(model, args, kwargs, hyper, f))
    if missing := [k for k in found.hyper if k not in (hyper or {})]:
        raise ModelError(f"read(hyper=...) has {sorted(hyper or {})}; give {missing} as well.")
    (name,) = found.gps
    if not is_whole(trace[name]):
        raise ModelError(
            f"a scale or mask handler stands around the GP site '{name}', whose prior Laplace, "
            f"EP, VI and LocalBound take whole; move the handler to the observed sites. {LISTED}"
        )
    prior = unwrap(trace[name]["fn"])
    given = {**{k: trace[k]["value"] for k in found.params}, **(hyper or {})}
    joint = JointLogLikelihood(model, prior.event_shape[0], given, args, kwargs)
    plan = prior.kernel.model.plan if isinstance(prior, PredictorGP) else None
    seen = (plan.functions, plan.softmax) if plan is not None else (1, ())
    return Factors({name: prior}, LogLikelihood(joint, name, *seen))


def require_one_latent_function(found: Roles, trace: dict, rerun: Callable[[dict], dict]) -> None:
    """Raise `ModelError` unless the model has one GP site of shape (N,) and no local latent.

    `rerun({site: f})` traces the model again with GP sites given.
    """

    def feeds_another():
        def inputs(values):
            again = rerun(values)
            return [unwrap(again[g]["fn"]).X for g in found.gps]

        return depends(inputs, {g: trace[g]["value"] for g in found.gps})

    require_gp(found, trace)
    if not found.observed:
        raise ModelError(observes_nothing(None, found))
    if len(found.gps) > 1:
        kind = "a GP fed by another GP" if feeds_another() else "several latent functions"
        raise ModelError(
            f"the model has {kind} (GP sites {list(found.gps)}); Laplace, EP, VI and LocalBound "
            f"read one. {LISTED}"
        )
    (name,) = found.gps
    fn = trace[name]["fn"]
    if len(fn.shape()) > 1 and not isinstance(unwrap(fn), PredictorGP):
        raise ModelError(
            f"GP site '{name}' has shape {fn.shape()}: several latent functions, where Laplace, "
            f"EP, VI and LocalBound read one of shape (N,). {LISTED}"
        )
    if found.local_latents:
        raise ModelError(
            f"latent sites {list(found.local_latents)} stand in the data's plate, one per datum. "
            f"{LISTED}"
        )
