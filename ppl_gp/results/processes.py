"""The posterior process behind a fit, rebuilt from the model, the hyperparameters and what is kept of q(f)."""

from typing import TYPE_CHECKING, cast

import equinox as eqx
import jax

from ppl_gp.deep.structure import feeds
from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.local.pseudo import Root
from ppl_gp.posterior import Mixture, Posterior, Process, process
from ppl_gp.sparse.process import SparseLatent, SparseProcess
from ppl_gp.sparse.root import Root as SparseRoot
from ppl_gp.tracing import run

if TYPE_CHECKING:
    from ppl_gp.results.fit import Fit


def prior_at(model, site: str, hyper: dict, args: tuple, kwargs: dict) -> GP:
    """The GP prior that the model declares at `args`, hyperparameters given. O(N)."""
    return unwrap(run(model, args, kwargs, hyper)[site]["fn"])


def training_prior(fit: "Fit", site: str, hyper: dict) -> GP:
    """The GP prior at the training inputs."""
    return prior_at(fit.model, site, hyper, fit.args, fit.kwargs)


@eqx.filter_jit
def _root(model, site, hyper, args, kwargs, latent) -> Root | SparseRoot:
    return process(prior_at(model, site, hyper, args, kwargs), latent).root


def posterior_of(fit: "Fit"):
    """`Posterior` where the hyperparameters are one value, else `Mixture` over the draws; {site: ...} for several.

    Raises `ModelError` for draws of GPs that feed each other, whose inputs are then random; with inducing variables each layer is a
    process at its own inputs.
    """
    if len(fit.latent) > 1 and values_at_training_inputs(fit) and feeds_another(fit):
        raise ModelError(
            f"a GP of this model is fed by another (GP sites {list(fit.latent)}), so it is no process of given inputs; "
            "fit.predict and fit.sample draw through both."
        )
    processes = {site: _one(fit, site, latent) for site, latent in fit.latent.items()}
    return next(iter(processes.values())) if len(processes) == 1 else processes


def feeds_another(fit) -> bool:
    """Whether a GP of the model stands at inputs that another GP gives."""
    hyper = jax.tree.map(lambda x: x[0], fit.hyper) if fit.sampled else fit.hyper
    known = {**hyper, **values_at_training_inputs(fit)}
    gps, trace = tuple(fit.latent), run(fit.model, fit.args, fit.kwargs, known)
    return any(feeds(g, gps, trace, lambda v: run(fit.model, fit.args, fit.kwargs, {**known, **v})) for g in gps)


def values_at_training_inputs(fit: "Fit") -> dict:
    """{GP site: a value of f there}, for running the model on its training arguments; sites without one are left out."""
    return {k: v.at_training_inputs for k, v in fit.latent.items() if v.at_training_inputs is not None}


def _one(fit, site, latent) -> Process:
    if fit.sampled:
        return Mixture(lambda hyper: training_prior(fit, site, hyper), fit.hyper, latent)
    entry = latent.draw(0)
    root = _root(fit.model, site, fit.hyper, fit.args, fit.kwargs, entry)
    # The prior is made outside the compiled function: a mean or kernel may close over the hyperparameters.
    prior = training_prior(fit, site, fit.hyper)
    if isinstance(entry, SparseLatent):
        return SparseProcess(prior, entry.inducing, cast(SparseRoot, root), entry.mean, entry.reduction, entry.basis)
    return Posterior(prior, entry.alpha, root)  # pyright: ignore[reportArgumentType]
