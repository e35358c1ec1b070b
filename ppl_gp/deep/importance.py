"""The importance-weighted bound of a datum from K copies of its latents: mathematics that `SVGP`
and NumPyro's `SVI` share.

K copies h_n^k ~ q(h_n) of a datum's latents, under one function f, have the weights
  w_nk = exp(E_q(f)[log p(y_n | f, h_n^k)]) p(h_n^k) / q(h_n^k),
and E log (1/K) sum_k w_nk is a lower bound that rises with K (Burda, Grosse & Salakhutdinov 2016;
Salimbeni, Dutordoir, Hensman & Deisenroth 2019, eq. 16-17; Leibfried et al. 2022). K = 1 is the
ELBO, with KL[q(h_n) || p(h_n)] in closed form where NumPyro has it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from numpyro.distributions.kl import kl_divergence

from ppl_gp.deep.latents import latent_form
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import ModelError
from ppl_gp.reading.roles import log_prob_per_datum, plate_scale, sum_per_datum
from ppl_gp.sparse.svgp import Layers


def drawn(layers: Layers, structure: Structure) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(GP sites that are drawn, not integrated; those drawn jointly, at copies of other inputs)."""
    each = structure.inner if layers.expected_last else structure.gps
    return each, tuple(g for g in structure.varying if g in each)


def per_datum_bound(log_weights: Callable, layers: Layers) -> tuple[Float[Array, "B"], Any]:
    """(log (1/K) sum_k w_nk, nats; what `log_weights` gives beside the weights).

    `log_weights(share)` -> (log w_nk (K, B), anything). `share` (K, B) scales what reaches q(h)'s
    parameters through each copy's latents, while those inside log q are held; `None`: all of it,
    and none is held.

    The doubly reparameterised gradient (Tucker, Lawson, Gu & Maddison 2019) is
      sum_k v_nk^2 (d log w_nk / dh_nk) (dh_nk / dphi),  v_nk = w_nk / sum_j w_nj.
    One v_nk is the derivative of the log-mean-exp, the other is `share`. Twice the passes.
    """
    share = None
    if layers.doubly_reparameterised and layers.num_importance > 1:
        share = jax.nn.softmax(lax.stop_gradient(log_weights(None)[0]), 0)
    found, beside = log_weights(share)
    return logsumexp(found, 0) - jnp.log(layers.num_importance), beside


def log_ratio(trace: dict, q: dict[str, dict], num: int, layers: Layers) -> Float[Array, "B"]:
    """sum over latents of log p(h_n) - log q(h_n), (B,), nats, of one copy: its log weight is
    log p(y_n | h_n) + beta times this.

    `trace`: the model's; `q`: {latent site: its site under q, as `own_site` gives it}.
    """
    ratios = [_log_ratio(own_site(trace, k), site, layers) for k, site in q.items()]
    return sum(ratios, jnp.zeros(num))


def _log_ratio(p: dict, q: dict, layers: Layers) -> Float[Array, "B"]:
    """Or minus its expectation KL[q || p] where that is known and K = 1; each with the `scale` of
    its own site, as NumPyro's bounds have it.
    """
    if layers.num_importance == 1:
        try:
            return -sum_per_datum(q, q["scale"] * kl_divergence(q["fn"], p["fn"]))
        except NotImplementedError:
            pass
    return log_prob_per_datum(p) - log_prob_per_datum(q)


def own_site(trace: dict, name: str) -> dict:
    """A site with the `scale` of `numpyro.handlers.scale`, without a subsampling plate's N / B."""
    site = trace[name]
    if site["scale"] is None:
        return {**site, "scale": 1.0}
    around = {frame.name for frame in site["cond_indep_stack"]}
    own = site["scale"] / plate_scale({k: s for k, s in trace.items() if k in around})
    return {**site, "scale": own}


def with_share(value: ArrayLike, site: dict, share: Float[Array, "B"]) -> ArrayLike:
    """A latent's value, of which `share` of each datum's gradient is handed on."""
    axis, _ = latent_form(site, share.shape[0])
    others = [i for i in range(jnp.ndim(value)) if i != axis]
    return _scale_gradient(value, jnp.expand_dims(share, others))


@jax.custom_vjp
def _scale_gradient(x, factor):
    """x, whose cotangent is multiplied by `factor` on its way back."""
    return x


_scale_gradient.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (factor * g, jnp.zeros_like(factor))
)


def require_separate(layers: Layers, structure: Structure, method: str) -> None:
    """Raise `ModelError` where the copies' weights depend on each other's latents: then the doubly
    reparameterised gradient does not hold.
    """
    joint = list(drawn(layers, structure)[1])
    if layers.doubly_reparameterised and joint:
        raise ModelError(
            f"{method}(doubly_reparameterised=True): the GP sites {joint} are drawn jointly at the "
            "copies, whose weights then depend on each other's latents; that gradient is for "
            "latents that enter the last layer, with expected_last=True."
        )
