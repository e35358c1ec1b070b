"""`approximate`: a model whose GP sites are drawn from posterior processes; `guide`: the same as a
guide for NumPyro's SVI.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import random
from numpyro import handlers
from numpyro.contrib.module import eqx_module
from numpyro.infer.autoguide import AutoDelta
from numpyro.primitives import Messenger

from ppl_gp.deep.latents import Amortised, Around, Encoded, FreeGaussian, LatentGuide
from ppl_gp.errors import DataError
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper.autoguides import guide_name, make_guide, points_of, set_up
from ppl_gp.infer.maximised import require_bounded
from ppl_gp.infer.svgp.look import uses_inputs
from ppl_gp.infer.svgp.start import initial_latents, num_rows, of_site
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.declared import declare
from ppl_gp.reading.reading import Reading
from ppl_gp.reading.roles import is_gp, roles
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.bound import Batch
from ppl_gp.sparse.site import SparseMarginals, SparsePosterior


class _Replace(Messenger):
    """Gives GP sites another distribution, at the inputs that they have there. A subsampling plate
    that the model opens again under one name keeps its rows.
    """

    def __init__(self, fn=None, posteriors: Mapping[str, Any] | None = None):
        self.posteriors, self.rows = posteriors or {}, {}
        super().__init__(fn)

    def postprocess_message(self, msg):
        """Remember the rows of a plate."""
        if msg["type"] == "plate":
            self.rows[msg["name"]] = msg["value"]

    def process_message(self, msg):
        """Replace the distribution of a GP site that has a posterior."""
        if msg["type"] == "plate" and msg["value"] is None:
            msg["value"] = self.rows.get(msg["name"])
        if msg["type"] != "sample" or msg["name"] not in self.posteriors or not is_gp(msg):
            return
        posterior, prior = self.posteriors[msg["name"]], unwrap(msg["fn"])
        if isinstance(posterior, SparsePosterior):
            msg["fn"] = posterior.at_site(msg["name"], msg["fn"], prior)
        elif callable(posterior):
            msg["fn"] = posterior(prior, joint=True)
        else:
            raise DataError(
                f"approximate({{'{msg['name']}': {posterior!r}}}): give a SparsePosterior, or a "
                "process such as fit.posterior."
            )


def approximate(model: Callable, posteriors: Mapping[str, Any]) -> Callable:
    """The model with each named GP site drawn from a posterior process at that site's own inputs.

    **Arguments:** `posteriors`: {GP site: process}. A process is `fit.posterior` of any method
    (drawn jointly over the rows, O(N^3)), or a `SparsePosterior`, whose parameters are
    `numpyro.param`s (drawn row by row, O(M^3 + N M^2)).

    **Returns** a NumPyro model: trace it, or hand it to `Predictive`, at training or new inputs.
    Hyperparameters are as the model declares them: condition or substitute `fit.hyper`. Raises
    `DataError` for names that are no GP site, when run.
    """

    def approximated(*args, **kwargs):
        with handlers.trace() as trace, _Replace(posteriors=posteriors):
            result = model(*args, **kwargs)
        if missing := [k for k in posteriors if k not in trace]:
            raise DataError(
                f"approximate(posteriors=...) names {missing}, which the model does not have."
            )
        return result

    return approximated


def guide(
    model: Callable, posteriors: Mapping[str, Any], hyper: Any = AutoDelta, latents: Any = None
) -> Callable:
    """A guide for NumPyro's own SVI: q(u) at the GP sites, q(h) at latents of the data, an
    autoguide for everything else.

    `SVI(model, guide(model, {"f": SparsePosterior(Z)}), optax.adam(0.01), TraceMeanField_ELBO())`,
    or one of this package's bounds. `hyper`: a NumPyro autoguide class, or a function of a model
    that returns a guide; `AutoDelta` is a point, `AutoNormal` the mean-field Gaussian (over a
    network's weights, say; `posteriors` may be empty). It is built on those sites alone: nothing of
    size N x N is factored; `DataError` for `AutoLaplaceApproximation` and annealed guides,
    `ModelError` where a point has a spread that is itself unknown. `latents`: `Amortised()` (also
    `None`) or `Free()`, for all or as {latent site: ...}. Minibatches: by a subsampling plate in
    the model.

    Parameters: `<site>_loc` and the like of `SparsePosterior`; `<latent>_packed`, or
    `<latent>_encoder$params`.
    """
    return _Guide(model, posteriors, hyper, latents)


class _Guide:
    """What a guide makes at its first call and keeps: the hyperparameters' autoguide, encoders."""

    def __init__(self, model, posteriors, hyper, latents):
        self.model, self.posteriors, self.make_hyper, self.latents = (
            model,
            posteriors,
            hyper,
            latents,
        )
        self.hyper: Any = None
        self.judged = False
        self.names: tuple[str, ...] | None = None
        self.local: dict[str, LatentGuide] = {}

    def __call__(self, *args, **kwargs):
        if self.names is None:
            self._prepare(args, kwargs)
        values = self._draw(args, kwargs) if self.names else {}

        def hidden(site):
            if site["type"] == "subsample":  # `numpyro.subsample` has no name and asks the plates
                return False
            ours = (
                site["type"] in ("param", "plate", "prng_key")
                or site["name"] in self.local
                or _is_sparse(site)
            )
            return not ours or (site["type"] == "param" and site["name"] in self.names)

        def given(site):
            if (
                site["type"] != "sample"
                or site["value"] is not None
                or site["name"] in self.local
                or _is_sparse(site)
            ):
                return None  # conditioned, observed, or ours
            # Observations that are missing: any value does, the guide hides them.
            return (
                values.get(site["name"])
                if site["name"] in values
                else site["fn"].sample(random.key(0))
            )

        with handlers.block(hide_fn=hidden), _Encode(self.local, self.model.reading, args, kwargs):
            handlers.substitute(approximate(self.model, self.posteriors), substitute_fn=given)(
                *args, **kwargs
            )

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
        require_bounded(
            found, self.model.reading, f"guide(hyper={guide_name(self.make_hyper)})", points
        )
        self.judged = True
        return values

    def _prepare(self, args, kwargs) -> None:
        self.model = declare(self.model, args, kwargs)
        with jax.ensure_compile_time_eval():
            trace = run(self.model, args, kwargs)
            found, local = roles(trace), {}
            sees_inputs = bool(args) and uses_inputs(
                self.model, Batch(args, kwargs, jnp.ones(0), None)
            )
            for i, name in enumerate(found.local_latents):
                config = of_site(self.latents, name, "latents") or Amortised()
                num = _num_data(trace, trace[name])
                inputs = self.model.reading.inputs_of_rows(Leaves(self.model, args, kwargs))
                rest = (args, kwargs, sees_inputs, None, inputs)
                local[name] = initial_latents(config, trace[name], random.key(i), num, *rest)
        if found.hyper:
            self.hyper = make_guide(self.make_hyper, self.model)
        self.names, self.local = found.hyper, local


def _num_data(trace, site) -> int:
    """N of the plate that a latent stands in, also where that plate subsamples."""
    sizes = [trace[f.name]["args"][0] for f in site["cond_indep_stack"] if f.name in trace]
    return sizes[0] if sizes else num_rows(site)


def _is_sparse(site) -> bool:
    return site["type"] == "sample" and isinstance(unwrap(site["fn"]), SparseMarginals)


class _Encode(Messenger):
    """Gives latents of the data their q(h), with parameters registered under the site's name."""

    def __init__(self, local: Mapping[str, LatentGuide], reading: Reading, args, kwargs):
        self.reading = reading
        self.local, self.args, self.kwargs, self.rows = local, args, kwargs, {}
        super().__init__(None)

    def process_message(self, msg):
        """Replace the prior of a latent."""
        if msg["type"] != "sample" or msg["name"] not in self.local or msg["value"] is not None:
            return
        msg["data_axis"] = self.reading.axis(msg["name"])
        rows = next(
            (self.rows[f.name] for f in msg["cond_indep_stack"] if f.name in self.rows), None
        )
        trained = _registered(msg["name"], self.local[msg["name"]])
        msg["fn"] = trained.at(msg, rows, self.args, self.kwargs)

    def postprocess_message(self, msg):
        """Remember which rows a subsampling plate has drawn."""
        if msg["type"] == "plate" and msg["args"][1] not in (None, msg["args"][0]):
            self.rows[msg["name"]] = msg["value"]


def _registered(name: str, q: LatentGuide) -> LatentGuide:
    if isinstance(q, Around):
        return Around(_registered(name, q.guide), q.affine, q.unit, q.inputs)
    if isinstance(q, FreeGaussian):
        return FreeGaussian(jnp.asarray(numpyro.param(f"{name}_packed", q.packed)))
    assert isinstance(q, Encoded)
    return Encoded(eqx_module(f"{name}_encoder", q.encoder), q.sees, q.inputs)
