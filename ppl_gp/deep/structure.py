"""What feeds what in a model: layers of GP sites, and per-datum latents."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import LISTED, ModelError
from ppl_gp.gp import unwrap
from ppl_gp.reading.dependence import depends, reached
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.predictor.predictor import require_gp
from ppl_gp.reading.refusals import observes_nothing
from ppl_gp.reading.roles import Roles


class Structure(NamedTuple):
    """Names of sites, in the order of their declaration. Static: a compiled step is found again."""

    gps: tuple[str, ...]
    inner: tuple[str, ...]  # GP sites that another GP's inputs, or a latent's prior, come from
    latents: tuple[str, ...]  # one per datum
    varying: tuple[str, ...]  # GP sites whose inputs are computed from a latent
    given: tuple[str, ...]  # GP sites whose inputs are computed from the data alone

    @property
    def outer(self) -> tuple[str, ...]:
        """GP sites that only the likelihood sees."""
        return tuple(g for g in self.gps if g not in self.inner)

    @property
    def is_shallow(self) -> bool:
        """Whether every GP stands at given inputs."""
        return not self.inner and not self.latents


def structure_of(found: Roles, trace: dict, rerun: Callable[[dict], dict]) -> Structure:
    """Read the layers off a model. `rerun({site: value})` traces it again with values given. O(L)
    traces, no factorisation.

    Raises `ModelError` without a GP site or an observation, and where a kernel or a mean function
    (rather than the inputs of a GP) is computed from another GP or from a latent.
    """
    require_gp(found, trace)
    if not found.observed:
        raise ModelError(observes_nothing(None, found))
    return layers(found, trace, rerun)


def layers(found: Roles, trace: dict, rerun: Callable[[dict], dict]) -> Structure:
    """As `structure_of`, of any model, such as one without a GP site."""
    gps, latents = found.gps, found.local_latents
    fed = {s: _fed_by(s, found, trace, rerun) for s in (*gps, *latents)}
    inner = tuple(g for g in gps if fed[g] or _is_in_priors(g, latents, trace, rerun))
    varying = _downstream(found, fed, latents)
    random = _downstream(found, fed, (*gps, *latents))
    return Structure(gps, inner, latents, varying, tuple(g for g in gps if g not in random))


def _fed_by(source: str, found: Roles, trace: dict, rerun) -> tuple[str, ...]:
    """GP sites whose inputs are computed from the values of a site."""
    X, rest = _reached_priors(source, found.gps, trace, rerun)
    if any(jax.tree.leaves(rest)):
        named = [g for g, hit in rest.items() if any(jax.tree.leaves(hit))]
        raise ModelError(
            f"the kernel or mean of the GP sites {named} is computed from site '{source}'; a GP "
            f"may only feed another's inputs, GP(kernel, X=...). {LISTED}"
        )
    return tuple(g for g, hit in X.items() if hit)


def _is_in_priors(gp: str, latents: tuple[str, ...], trace: dict, rerun) -> bool:
    """Whether the prior of a latent is computed from the values of a GP site."""
    priors = lambda f: [arrays_of(rerun({gp: f})[k]["fn"]) for k in latents]  # noqa: E731
    return bool(latents) and depends(priors, trace[gp]["value"])


def is_below(gp: str, gps, latents: tuple[str, ...], trace: dict, rerun) -> bool:
    """Whether another GP, or the prior of a latent, is computed from the values of a GP site."""
    is_in_priors = _is_in_priors(gp, latents, trace, rerun)
    return is_in_priors or (len(gps) > 1 and feeds(gp, gps, trace, rerun))


def feeds(source: str, gps: tuple[str, ...], trace: dict, rerun: Callable[[dict], dict]) -> bool:
    """Whether another GP is computed from the values of a site."""
    return any(jax.tree.leaves(_reached_priors(source, gps, trace, rerun)))


def _reached_priors(source, gps, trace, rerun) -> tuple[dict, dict]:
    """({GP site: whether a site reaches its inputs}, {GP site: the same of kernel and mean})."""
    others = [g for g in gps if g != source]

    def inputs(value):
        again = rerun({source: value})
        priors = {g: unwrap(again[g]["fn"]) for g in others}
        rest = {g: _parameters(p) for g, p in priors.items()}
        return {g: p.X for g, p in priors.items()}, rest

    return reached(inputs, trace[source]["value"])


def _parameters(prior) -> list:
    """What kernel and mean are computed from, at fixed inputs: both may be any callable."""
    rows = np.arange(len(prior.X)).reshape((-1,) + (1,) * (prior.X.ndim - 1))
    X = jnp.asarray(np.broadcast_to(rows, prior.X.shape), prior.X.dtype)
    return [prior.kernel(X, X), prior.mean_function(X), *jax.tree.leaves(prior.jitter)]


def _downstream(found: Roles, fed: dict, sources) -> tuple[str, ...]:
    """GP sites whose inputs are computed from the sources, also through other GPs."""
    seen, front = set(), list(sources)
    while front:
        new = [g for g in fed[front.pop()] if g not in seen]
        seen.update(new)
        front.extend(new)
    return tuple(g for g in found.gps if g in seen)
