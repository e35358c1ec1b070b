"""`approximate`: a model whose GP sites are drawn from posteriors; `guide`: the same as a guide."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import random
from numpyro import handlers
from numpyro.contrib.module import eqx_module
from numpyro.infer.autoguide import AutoDelta
from numpyro.primitives import Messenger

from ppl_gp.deep.latents import Amortised, Around, Encoded, FreeGaussian, LatentGuide
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper.autoguides import guide_name, make_guide, points_of, set_up
from ppl_gp.infer.maximised import require_bounded
from ppl_gp.infer.svgp.look import uses_inputs
from ppl_gp.infer.svgp.start import initial_latents, num_rows, of_site
from ppl_gp.quick import kept_values
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import is_gp, roles, subsampling
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.site import SparseMarginals, SparsePosterior


class _Replace(Messenger):
    """Gives sites other distributions, `of[name](message, rows)`; `rows`: those that a plate around
    the site has drawn. A subsampling plate that the model opens again under one name keeps them.
    """

    def __init__(self, of: Mapping[str, Callable]):
        self.of, self.plates = of, {}
        super().__init__()

    def postprocess_message(self, msg):
        if msg["type"] == "plate":
            self.plates[msg["name"]] = msg

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["value"] is None and msg["name"] in self.plates:
            msg["value"] = self.plates[msg["name"]]["value"]
        if msg["type"] == "sample" and msg["name"] in self.of:
            drawn = {k: self.plates[k]["value"] for k in subsampling(self.plates)}
            rows = [drawn[f.name] for f in msg["cond_indep_stack"] if f.name in drawn]
            msg["fn"] = self.of[msg["name"]](msg, rows[0] if rows else None)


def _posterior_at(posterior, msg, rows):
    """At a GP site a posterior at the inputs that it has there."""
    if not is_gp(msg):
        return msg["fn"]
    if isinstance(posterior, SparsePosterior):
        return posterior.at_site(msg["name"], msg["fn"], unwrap(msg["fn"]))
    if callable(posterior):
        return posterior(unwrap(msg["fn"]), joint=True)
    raise DataError(
        f"approximate({{'{msg['name']}': {posterior!r}}}): give a SparsePosterior, or a "
        "process such as fit.posterior."
    )


def approximate(model: Callable, posteriors: Mapping[str, Any]) -> Callable:
    """Replace the prior of GP sites in a model by posteriors, for example of a fit.

    Use it to put a fitted f into NumPyro code of your own, such as `Predictive`.

    Parameters
    ----------
    model : callable
        A NumPyro model.
    posteriors : dict
        `{GP site: posterior}`: `fit.posterior` of any method, drawn jointly over the rows at
        O(N^3), or a `SparsePosterior`, drawn row by row at O(M^3 + N M^2).

    Returns
    -------
    callable
        A NumPyro model in which each named site is drawn from its posterior, at the inputs that it
        has there: training or new ones. Hyperparameters are as declared, so substitute or condition
        on `fit.hyper`.

    Raises
    ------
    DataError
        When the model runs, for names that it does not have, and for other kinds of posteriors.
    ModelError
        When the model runs, if it draws other sites that the fit integrated together with f.

    Examples
    --------
    >>> def model(X):
    ...     return numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    >>> q = pg.SparsePosterior(jnp.linspace(0.0, 6.0, 5))
    >>> sparse = numpyro.handlers.seed(pg.approximate(model, {"f": q}), 0)
    >>> sparse(jnp.arange(3.0)).shape
    (3,)
    """
    beside = {k: getattr(q, "beside", ()) for k, q in posteriors.items()}
    return _replaced(model, {k: partial(_posterior_at, q) for k, q in posteriors.items()}, beside)


def _replaced(model: Callable, of: Mapping[str, Callable], beside: Mapping) -> Callable:
    def approximated(*args, **kwargs):
        with handlers.trace() as trace, _Replace(of):
            result = model(*args, **kwargs)
        if missing := [k for k in of if k not in trace]:
            raise DataError(
                f"approximate(posteriors=...) names {missing}, which the model does not have."
            )
        _require_alone(trace, beside)
        return result

    return approximated


def _require_alone(trace: Mapping, beside: Mapping) -> None:
    """Raise `ModelError` where a model draws sites `beside` a GP that depend on it."""
    for name, sites in beside.items():
        if drawn := [k for k in sites if k in trace and not trace[k].get("is_observed")]:
            raise ModelError(
                f"approximate(): the fit integrated {drawn} together with '{name}', and the model "
                "draws them independently of it. fit.sample(key, X_new, num) draws all of them "
                "jointly; or give their values by handlers.condition, or the part of the model "
                "that has this GP alone."
            )


def guide(
    model: Callable, posteriors: Mapping[str, Any], hyper: Any = AutoDelta, latents: Any = None
) -> Callable:
    """Make a guide for NumPyro's SVI: q(u) at GP sites, q(h) at latents, an autoguide elsewhere.

    Train it with `TraceMeanField_ELBO`, or with `ELBO` and the other bounds of this package.

    Parameters
    ----------
    model : callable
        A NumPyro model, or the part of one for which you want a guide.
    posteriors : dict
        `{GP site: SparsePosterior}`. It may be empty, for example for networks with random weights.
    hyper : autoguide class or callable, default AutoDelta
        A NumPyro autoguide class, or a function of a model that returns a guide, for all other
        sites. `AutoDelta` is a point, `AutoNormal` the mean-field Gaussian.
    latents : Amortised, Free or dict, default None
        q(h) of latents per row, for all or as `{site: ...}`. `None` is `Amortised()`.

    Returns
    -------
    callable
        A guide with the arguments of the model.

    Raises
    ------
    DataError
        When the guide runs, for `AutoLaplaceApproximation` and annealed guides.
    ModelError
        When the guide runs, if a point has a spread that is itself unknown.

    Notes
    -----
    The parameters are `<site>_loc` and the like (`SparsePosterior`), `<latent>_packed` of `Free`,
    and `<latent>_encoder$params` of `Amortised`. The autoguide is built on the other sites alone,
    so nothing of size N x N is factored. For minibatches, use a plate with `subsample_size` in the
    model.

    Examples
    --------
    >>> def model(X):
    ...     return numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    >>> guide = pg.guide(model, {"f": pg.SparsePosterior(jnp.linspace(0.0, 6.0, 5))})
    >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace(jnp.arange(7.0))
    >>> sorted(trace)
    ['f', 'f_Z', 'f_loc', 'f_scale_tril']
    """
    return _Guide(model, posteriors, hyper, latents)


class _Guide:
    """What a guide makes at its first call and keeps: the hyperparameters' autoguide, encoders."""

    def __init__(self, model, posteriors, hyper, latents):
        self.model, self.posteriors = model, posteriors
        self.make_hyper, self.latents = hyper, latents
        self.hyper: Any = None
        self.judged = False
        self.names: tuple[str, ...] | None = None
        self.local: dict[str, LatentGuide] = {}

    def __call__(self, *args, **kwargs):
        if self.names is None:
            self._prepare(args, kwargs)
        values = self._draw(args, kwargs) if self.names else {}
        of: dict = {k: partial(_posterior_at, q) for k, q in self.posteriors.items()}
        of |= {k: partial(self._latent_at, q, args, kwargs) for k, q in self.local.items()}

        def given(site):
            if site["type"] != "sample" or site["value"] is not None or self._is_local(site):
                return None  # conditioned, observed, or ours
            name = site["name"]
            # Observations that are missing: any value does, the guide hides them.
            return values[name] if name in values else site["fn"].sample(random.key(0))

        with handlers.block(hide_fn=self._is_hidden):
            handlers.substitute(_replaced(self.model, of, {}), substitute_fn=given)(*args, **kwargs)

    def _is_local(self, site) -> bool:
        is_sparse = site["type"] == "sample" and isinstance(unwrap(site["fn"]), SparseMarginals)
        return is_sparse or site["name"] in self.local

    def _is_hidden(self, site) -> bool:
        if site["type"] == "subsample":  # `numpyro.subsample` has no name and asks the plates
            return False
        is_param = site["type"] == "param" and site["name"] not in (self.names or ())
        return not (is_param or site["type"] in ("plate", "prng_key") or self._is_local(site))

    def _latent_at(self, q: LatentGuide, args, kwargs, msg, rows):
        """At a latent of the data its q(h), with parameters registered under the site's name."""
        if msg["value"] is not None:
            return msg["fn"]
        msg["data_axis"] = self.model.reading.axis(msg["name"])
        return _registered(msg["name"], q).at(msg, rows, args, kwargs)

    def _draw(self, args, kwargs) -> dict:
        """{hyperparameter: a draw}. The first one sets the autoguide up and judges it."""
        if self.judged:
            return self.hyper(*args, **kwargs)
        with handlers.trace() as trace, set_up(self.make_hyper):
            values = self.hyper(*args, **kwargs)
        with handlers.block():
            found = run(self.model, args, kwargs)
        own = {k: found[k] for k in self.names or ()}
        points = points_of(self.hyper, trace, self.make_hyper, own, args, kwargs)
        told = f"guide(hyper={guide_name(self.make_hyper)})"
        require_bounded(found, self.model.reading, told, points)
        self.judged = True
        return values

    def _prepare(self, args, kwargs) -> None:
        self.model = declare(self.model, args, kwargs)
        with kept_values():
            trace = run(self.model, args, kwargs)
            found, local = roles(trace), {}
            whole = Batch(args, kwargs, jnp.ones(0), None)
            sees = bool(args) and uses_inputs(self.model, whole)
            for i, name in enumerate(found.local_latents):
                config = of_site(self.latents, name, "latents") or Amortised()
                site, num = trace[name], _num_data(trace, trace[name])
                inputs = self.model.reading.inputs_of_rows(Leaves(self.model, args, kwargs))
                own, along = (site, random.key(i), num), self.model.reading.along("y")
                local[name] = initial_latents(config, *own, whole, sees, inputs, along)
        if found.hyper:
            self.hyper = make_guide(self.make_hyper, self.model)
        self.names, self.local = found.hyper, local


def _num_data(trace, site) -> int:
    """N of the plate that a latent stands in, also where that plate subsamples."""
    sizes = [trace[f.name]["args"][0] for f in site["cond_indep_stack"] if f.name in trace]
    return sizes[0] if sizes else num_rows(site)


def _registered(name: str, q: LatentGuide) -> LatentGuide:
    if isinstance(q, Around):
        return Around(_registered(name, q.guide), q.affine, q.unit, q.inputs)
    if isinstance(q, FreeGaussian):
        return FreeGaussian(jnp.asarray(numpyro.param(f"{name}_packed", q.packed)))
    assert isinstance(q, Encoded)
    return Encoded(eqx_module(f"{name}_encoder", q.encoder), q.sees, q.inputs)
