"""`approximate`: a model whose GP sites are drawn from posterior processes; `guide`: the same as a guide for NumPyro's SVI."""

from collections.abc import Callable, Mapping
from typing import Any

from jax import random
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.infer.hyper_guide import hyper_model
from ppl_gp.sparse.site import SparseMarginals, SparsePosterior
from ppl_gp.tracing import is_gp, roles, run


class _Replace(Messenger):
    """Gives GP sites another distribution, at the inputs that they have there."""

    def __init__(self, fn=None, posteriors: Mapping[str, Any] | None = None):
        self.posteriors = posteriors or {}
        super().__init__(fn)

    def process_message(self, msg):
        """Replace the distribution of a GP site that has a posterior."""
        if msg["type"] != "sample" or msg["name"] not in self.posteriors or not is_gp(msg):
            return
        posterior, prior = self.posteriors[msg["name"]], unwrap(msg["fn"])
        if isinstance(posterior, SparsePosterior):
            msg["fn"] = posterior.at_site(msg["name"], msg["fn"], prior)
        elif callable(posterior):
            msg["fn"] = posterior(prior, joint=True)
        else:
            raise DataError(
                f"approximate({{'{msg['name']}': {posterior!r}}}): give a SparsePosterior, or a process such as fit.posterior."
            )


def approximate(model: Callable, posteriors: Mapping[str, Any]) -> Callable:
    """The model with each named GP site drawn from a posterior process at that site's own inputs.

    **Arguments:** `posteriors`: {GP site: process}. A process is `fit.posterior` of any method (drawn jointly over the rows,
    O(N^3)), or a `SparsePosterior`, whose parameters are `numpyro.param`s (drawn row by row, O(M^3 + N M^2)).

    **Returns** a NumPyro model: trace it, or hand it to `Predictive`, at training or new inputs. Hyperparameters are as the
    model declares them: condition or substitute `fit.hyper`. Raises `DataError` for names that are no GP site, when run.
    """

    def approximated(*args, **kwargs):
        with handlers.trace() as trace, _Replace(posteriors=posteriors):
            result = model(*args, **kwargs)
        if missing := [k for k in posteriors if k not in trace]:
            raise DataError(f"approximate(posteriors=...) names {missing}, which the model does not have.")
        return result

    return approximated


def guide(model: Callable, posteriors: Mapping[str, Any], hyper: Any = AutoDelta) -> Callable:
    """A guide for NumPyro's own SVI: q(u) at the GP sites, and an autoguide for the hyperparameters.

    `SVI(model, guide(model, {"f": SparsePosterior(Z)}), optax.adam(0.01), TraceMeanField_ELBO())`. `hyper`: a NumPyro autoguide
    class, or a function of a model that returns a guide; `AutoDelta` is a point. It is built on the hyperparameters alone:
    nothing of size N x N is factored. Minibatches: by a subsampling plate in the model.
    """
    over_hyper: dict[str, Any] = {}

    def guided(*args, **kwargs):
        names = _hyper_names(model, args, kwargs)
        if names and "guide" not in over_hyper:
            over_hyper["guide"] = hyper(hyper_model(model))
        values = over_hyper["guide"](*args, **kwargs) if names else {}

        def hidden(site):
            ours = site["type"] in ("param", "plate") or (
                site["type"] == "sample" and isinstance(unwrap(site["fn"]), SparseMarginals)
            )
            return not ours or (site["type"] == "param" and site["name"] in names)

        def given(site):
            if site["type"] != "sample" or site["value"] is not None or isinstance(unwrap(site["fn"]), SparseMarginals):
                return None  # conditioned, observed, or ours
            # Observations that are missing: any value does, the guide hides them.
            return values.get(site["name"]) if site["name"] in values else site["fn"].sample(random.key(0))

        with handlers.block(hide_fn=hidden):
            handlers.substitute(approximate(model, posteriors), substitute_fn=given)(*args, **kwargs)

    return guided


def _hyper_names(model, args, kwargs) -> tuple[str, ...]:
    found = roles(run(model, args, kwargs))
    if found.local_latents:
        raise ModelError(
            f"latent sites {list(found.local_latents)} stand in the data's plate: guide() has no q for them."
        )
    return found.hyper
