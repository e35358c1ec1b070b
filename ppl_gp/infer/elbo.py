"""Bounds as NumPyro ELBO objects: for its `SVI`, with any guide, in function space (GP sites) and
in weight space alike.

Sites in the data's plates (what is observed, and per-datum latents) enter for each
datum; every other latent site, q(u) of a GP and a network's weights among them, enters by its KL
divergence, once, outside the log. A plate that subsamples makes them minibatch bounds, unbiased for
num_importance = 1. `GlobalImportanceWeightedELBO` takes one log over draws of everything.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence
from numpyro.infer.elbo import ELBO as NumPyroELBO
from numpyro.primitives import Messenger

from ppl_gp.deep import bound as importance
from ppl_gp.deep.bound import COPIES, draw_copy
from ppl_gp.deep.structure import Structure, layers
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import bare_shape, unwrap
from ppl_gp.infer.hyper.autoguides import is_auxiliary, log_q, require_guide
from ppl_gp.reading.digest import Bones
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import (
    data_axis,
    data_plates,
    is_observed,
    log_prob_per_datum,
    plate_scale,
    require_no_subsampling,
    roles,
)
from ppl_gp.reading.tracing import annotated, bare_trace, run
from ppl_gp.settings import require_whole
from ppl_gp.sparse.expectation import Expectation, expected_log_lik
from ppl_gp.sparse.process import draws_with_inducing
from ppl_gp.sparse.site import SparseMarginals
from ppl_gp.sparse.svgp import Layers


def seeded(fn, params: dict, key):
    """A model or a guide with its parameters and a key."""
    return handlers.seed(handlers.substitute(fn, data=params), key)


def scaled(site, log_prob):
    """With the site's own `scale`."""
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def log_density(site, fn, value) -> Float[Array, ""]:
    """log p of a whole site's value under `fn`, nats, with the site's own `scale`."""
    return jnp.sum(scaled(site, fn.log_prob(value)))


def held(fn):
    """A distribution whose own parameters get no gradient. That of log q has mean zero, and what is
    left vanishes draw by draw where q is exact (Roeder, Wu & Duvenaud 2017); not inside a log over
    several draws. The mean is zero only if the support does not move with the parameters: a
    `Uniform`, or a `Delta` whose density is a Jacobian, stays as it is.
    """
    base = unwrap(fn)
    while type(base) is dist.TransformedDistribution and not jax.tree.leaves(base.transforms):
        base = unwrap(base.base_dist)
    support = getattr(type(base), "support", None)
    is_fixed = isinstance(support, constraints.Constraint) and not isinstance(support, property)
    arrays, bones = Bones.of(fn)
    return bones.with_arrays(lax.stop_gradient(arrays)) if is_fixed else fn


def auxiliary(drawn, trace, of=lambda fn: fn):
    """log q, nats, of what the guide alone draws, such as a joint vector; `of` the distribution."""
    own = [s for k, s in drawn.items() if s["type"] == "sample" and k not in trace]
    sites = [s for s in own if not s["is_observed"]]
    # a flow's draws come with terms of their own, which are not apart from its parameters
    sites = [s if s.get("intermediates") else s | {"fn": of(s["fn"])} for s in sites]
    return sum([jnp.sum(scaled(s, log_q(s))) for s in sites], jnp.zeros(()))


def require_scored(drawn: dict, trace: dict, who: str) -> None:
    """As `require_guide`; `ModelError` too where the guide scores itself by more than its draws."""
    require_guide(drawn, trace, who)
    if factors := [k for k, s in drawn.items() if is_observed(s)]:
        raise ModelError(
            f"{who}: the guide scores itself by {factors}, factors, which no bound here counts; "
            "take NumPyro's loss=Trace_ELBO()."
        )


class CopyMessenger(Messenger):
    """Copy k of K draws latents of the data by its own key, and q(f) jointly with its sisters."""

    def __init__(self, fn, plates: frozenset[str], structure: Structure, k, axis: str | None):
        self.plates, self.structure, self.k, self.axis = plates, structure, k, axis
        super().__init__(fn)

    def process_message(self, msg):
        """Stands outside of the seed, which has given the site its key."""
        if msg["type"] != "sample" or msg["value"] is not None or self.axis is None:
            return
        key, fn = msg["kwargs"].get("rng_key"), unwrap(msg["fn"])
        if isinstance(fn, SparseMarginals):
            if msg["name"] in self.structure.varying:
                msg["value"] = draw_copy(fn.process, fn.prior, key, self.axis)
        elif msg["name"] in self.structure.latents or any(
            frame.name in self.plates for frame in msg["cond_indep_stack"]
        ):
            msg["kwargs"]["rng_key"] = random.fold_in(key, self.k)


class OverRows(Messenger):
    """Draws u ~ q(u), then f ~ p(f | u) jointly over all rows; keeps each log p(u) - log q(u)."""

    def __init__(self, fn):
        self.log_ratios: dict = {}
        super().__init__(fn)

    def process_message(self, msg):
        """Stands outside of the seed."""
        fn = unwrap(msg["fn"]) if msg["type"] == "sample" else None
        if isinstance(fn, SparseMarginals) and msg["value"] is None:
            found = draws_with_inducing(fn.process, fn.prior, msg["kwargs"]["rng_key"], 1)
            msg["value"], self.log_ratios[msg["name"]] = (x[0] for x in found)


class _Given(NamedTuple):
    """What is known of a model before it is drawn."""

    structure: Structure
    plates: frozenset[str]  # the data's
    num: int  # B


class Particle(NamedTuple):
    """One estimate of the bound."""

    expectation: Expectation
    layers: Layers
    key: Any
    params: dict
    model: Any
    guide: Any
    args: tuple
    kwargs: dict

    def bound(self) -> Float[Array, ""]:
        """Of this draw of the guide, nats."""
        given = self._look()
        if self.layers.num_importance > 1:
            importance.require_separate(self.layers, given.structure, "ImportanceWeightedELBO")
        copies = partial(self._copies, given)
        per_datum, (shared, scale) = importance.per_datum_bound(copies, self.layers)
        # Global terms are the same in all copies.
        return scale[0] * jnp.sum(per_datum) + jnp.mean(shared)

    def _look(self) -> _Given:
        with handlers.block():
            drawn = self._traced(seeded(self.guide, self.params, random.key(0)))
        indices = {k: s["value"] for k, s in drawn.items() if s["type"] == "plate"}

        def rerun(values):
            return run(self.model, self.args, self.kwargs, {**self.params, **indices, **values})

        trace = rerun({})
        require_scored(drawn, trace, "ELBO")
        structure = layers(roles(trace), trace, rerun)
        if self.layers.num_importance > 1:
            _require_alone(structure.latents, drawn, trace)
        # moments and copies are of each row; one draw of f or of latents is of all rows
        sparse = [k for k in structure.gps if isinstance(unwrap(drawn[k]["fn"]), SparseMarginals)]
        latents = structure.latents if self.layers.num_importance > 1 else ()
        if sparse or latents:
            self.model.reading.require_pointwise("ELBO", (*sparse, *latents))
        self.model.reading.require_apart("without subsample_size", drawn=True)
        # the KL of a site whose rows `to_event` took is one number: it counts once
        rows = tuple(k for k in structure.latents if trace[k]["data_axis"] < 0)
        own = structure._replace(latents=rows)
        return _Given(own, frozenset(data_plates(trace)), _num_data(trace))

    def _copies(self, given: _Given, share):
        """(log w_nk (K, B), (log p - log q of what is global (K,), N / B (K,))) of all copies."""
        if (K := self.layers.num_importance) == 1:
            return jax.tree.map(lambda x: x[None], self._copy(given, 0, None))
        return jax.vmap(partial(self._copy, given), axis_name=COPIES)(jnp.arange(K), share)

    def _copy(self, given: _Given, k, share):
        key_guide, key_model = random.split(self.key)
        axis = COPIES if self.layers.num_importance > 1 else None
        guide = seeded(self.guide, self.params, key_guide)
        drawn = q = self._traced(CopyMessenger(guide, given.plates, given.structure, k, axis))
        if share is not None:
            drawn, q = self._doubly(given, drawn, share, key_guide)
        trace = self._traced(handlers.replay(seeded(self.model, self.params, key_model), drawn))
        latents = {
            h: {**trace[h], "fn": q[h]["fn"], "scale": importance.own_site(q, h)["scale"]}
            for h in given.structure.latents
        }
        ratio = importance.log_ratio(trace, latents, given.num, self.layers)
        shared, scale = self._global(given, trace, drawn), plate_scale(trace)
        log_lik = self._log_lik(given, drawn, key_model) / scale
        return log_lik + self.layers.beta * ratio, (shared, jnp.asarray(1.0 * scale))

    def _traced(self, fn) -> Any:
        return annotated(handlers.trace(fn).get_trace(*self.args, **self.kwargs), self.model)

    def _doubly(self, given: _Given, drawn: dict, share, key) -> tuple[Any, Any]:
        """The guide's trace with latents that only `share` of a gradient reaches, and the same with
        its parameters held. The guide runs again: a GP site must stand at the scaled latents, and
        one latent that depends on another must not be scaled twice.
        """
        values: Any = drawn | {
            h: {**drawn[h], "value": importance.with_share(drawn[h]["value"], drawn[h], share)}
            for h in given.structure.latents
        }

        def again(params):
            return self._traced(handlers.replay(seeded(self.guide, params, key), values))

        return again(self.params), again(lax.stop_gradient(self.params))

    def _log_lik(self, given: _Given, drawn: dict, key) -> Float[Array, "B"]:
        """E_q(f)[log p(y_n | f_n)] over f of the last layer, or log p(y_n | f_n) if f is drawn."""
        outer = {k: drawn[k]["fn"] for k in given.structure.outer if k in drawn}
        q = {k: fn for k, fn in outer.items() if isinstance(fn, SparseMarginals)}
        values = {k: s["value"] for k, s in drawn.items() if s["type"] in ("sample", "plate")}

        def log_lik(f):
            again = run(self.model, self.args, self.kwargs, {**self.params, **values, **f}, key=key)
            terms = [log_prob_per_datum(s) for s in again.values() if is_observed(s)]
            return sum([t for t in terms if t.ndim], jnp.zeros(given.num))

        if not q or not self.layers.expected_last:
            return log_lik({})
        mean = {k: fn.loc for k, fn in q.items()}
        variance = {k: fn.variance_n for k, fn in q.items()}
        return expected_log_lik(log_lik, mean, variance, self.expectation, key)

    def _global(self, given: _Given, trace: dict, drawn: dict) -> Float[Array, ""]:
        """log p - log q of sites outside the data's plates, by their KL where that is known."""
        own = {k: s for k, s in trace.items() if k not in given.structure.latents}
        sites = {k: s for k, s in own.items() if s["type"] == "sample"}
        terms = [self._global_term(s, drawn.get(k)) for k, s in sites.items()]
        return sum(terms, jnp.zeros(())) - self.layers.beta * auxiliary(drawn, trace, held)

    def _global_term(self, site: dict, drawn: dict | None):
        """-KL[q || p] of a site, or log p of something observed there."""
        if site["is_observed"]:
            shared = log_prob_per_datum(site)
            return 0.0 if jnp.ndim(shared) else shared
        if drawn is None:
            return 0.0  # missing observations integrate to one
        q, beta = drawn["fn"], self.layers.beta
        if isinstance(q, SparseMarginals):
            return -beta * jnp.sum(scaled(drawn, kl_divergence(q, unwrap(site["fn"]))))
        log_p = log_density(site, site["fn"], site["value"])
        ratio = log_p - log_density(drawn, held(q), drawn["value"])
        try:  # the value without noise, the gradient of the draw
            known = -jnp.sum(scaled(drawn, kl_divergence(q, site["fn"])))
            # p's scale may be another than q's, which the KL has
            known += log_p - log_density(drawn, site["fn"], site["value"])
        except NotImplementedError:
            return beta * ratio
        return beta * (ratio + lax.stop_gradient(known - ratio) if q.has_rsample else known)


def _require_alone(latents: tuple[str, ...], drawn: dict, trace: dict) -> None:
    """Raise `ModelError` where p or q has the latents of all rows as one value: copies of a row's
    have no weight of their own.
    """
    joint = any(is_auxiliary(s) for s in drawn.values())
    points = [k for k in latents if isinstance(unwrap(drawn[k]["fn"]), dist.Delta)]
    if whole := [k for k in latents if trace[k]["data_axis"] >= 0 or (joint and k in points)]:
        raise ModelError(
            f"ImportanceWeightedELBO(): the latents {whole} are drawn for all rows at once, by "
            "to_event or by a guide such as AutoMultivariateNormal, and it weighs draws of each "
            "row. Declare them in the data's plate and take AutoNormal, or take ELBO() or "
            "GlobalImportanceWeightedELBO()."
        )


def _num_data(trace) -> int:
    """B, the entries of what is observed along the axis of the data; 1 where nothing has one."""
    if not (sites := [s for s in trace.values() if is_observed(s) and s["data_axis"] is not None]):
        return 1  # an empty term, to which others add
    shape = bare_shape(sites[0]["fn"])
    return shape[data_axis(sites[0], len(shape))]  # pyright: ignore[reportArgumentType]


class ImportanceWeightedELBO(NumPyroELBO):
    """Importance-weighted bound for NumPyro's SVI: K draws of each row's latents in the logarithm.

    For models with latents per row, with any guide. It rises with K, and K = 1 is `ELBO`.

    Parameters
    ----------
    num_importance, num_particles : int, default 10, 1
        Draws K of the latents of each row, and independent estimates that are averaged.
    expected_last : bool, default True
        Integrate GP sites on which only the likelihood depends. `False` draws them at the copies.
    doubly_reparameterised : bool, default False
        Use the gradient of q(h) of Tucker et al. (2019). Its signal does not vanish as K grows, and
        it takes twice the forward passes.
    beta : float, default 1.0
        Weight of every KL term and log ratio, finite and at least 0. 1 gives a bound.
    num_nodes : int, default None
        Quadrature nodes per direction. See `Expectation`.

    Raises
    ------
    DataError
        For counts below 1, or a `beta` out of range.
    ModelError
        If the guide does not match the model, or scores itself by a factor. With several draws, for
        latents that p or q has for all rows at once, and for `doubly_reparameterised` ones that
        enter a GP site drawn jointly.
    NotPointwiseError
        If a row depends on a GP at other rows, or, with several draws, on latents of other rows.
        Also if a plate subsamples and a row depends on the others of its batch.

    Notes
    -----
    `sum_n (N / B) E[log (1 / K) sum_k w_nk] - sum over global sites of KL[q || p]`, nats, with
    `w_nk = exp(E_q(f)[log p(y_n | f, h_nk)]) p(h_nk) / q(h_nk)`. The loss is its negative. All K
    copies of a row pass through one function. If a plate subsamples B of N rows, the estimate is
    unbiased for K = 1. A particle costs K runs of the model, and K^3 B per GP site that is drawn
    jointly. Sources: Salimbeni et al. (2019), eq. 17; Leibfried et al. (2022).

    Examples
    --------
    >>> pg.ImportanceWeightedELBO(20).num_importance
    20
    """

    def __init__(
        self,
        num_importance: int = 10,
        num_particles: int = 1,
        *,
        expected_last: bool = True,
        doubly_reparameterised: bool = False,
        beta: float = 1.0,
        num_nodes: int | None = None,
    ):
        super().__init__(num_particles=num_particles)
        self.num_importance, self.expected_last = num_importance, expected_last
        self.beta, self.num_nodes = beta, num_nodes
        self.doubly_reparameterised = doubly_reparameterised
        require_whole(self, "num_importance", "num_particles")
        if not 0.0 <= beta < float("inf"):
            raise DataError(f"beta={beta}: give a finite weight of the KL terms, at least 0.")

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """{"loss": minus the bound, "mutable_state": None}, as NumPyro asks for it."""
        given = param_map, declare(model, args, kwargs), guide, args, kwargs
        own = ("num_importance", "expected_last", "doubly_reparameterised", "beta")
        how = Expectation(self.num_nodes), Layers(**{k: getattr(self, k) for k in own})
        keys = random.split(rng_key, self.num_particles)
        bounds = jax.vmap(lambda key: Particle(*how, key, *given).bound())(keys)
        return {"loss": -jnp.mean(bounds), "mutable_state": None}


class ELBO(ImportanceWeightedELBO):
    """The evidence lower bound for NumPyro's SVI, with f of the last layer integrated.

    As NumPyro's `TraceMeanField_ELBO`, but f is not drawn, so gradients are less noisy.

    Parameters
    ----------
    num_particles, expected_last, beta, num_nodes : default 1, True, 1.0, None
        As in `ImportanceWeightedELBO`, with the same errors.

    Notes
    -----
    `sum_n (N / B) (E[log p(y_n | f, h_n)] - KL[q(h_n) || p(h_n)]) - sum over global sites of KL[q
    || p]`, nats, for B of N rows. The loss is its negative.

    Examples
    --------
    >>> pg.ELBO(5).num_particles
    5
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        expected_last: bool = True,
        beta: float = 1.0,
        num_nodes: int | None = None,
    ):
        super().__init__(
            1, num_particles, expected_last=expected_last, beta=beta, num_nodes=num_nodes
        )


class GlobalImportanceWeightedELBO(NumPyroELBO):
    """Importance-weighted bound with one logarithm over K draws of all latents.

    For few data: with many it needs far more draws than `ImportanceWeightedELBO`.

    Parameters
    ----------
    num_importance, num_particles : int, default 100, 1
        Draws K of all latents, u and weights; independent estimates that are averaged.

    Raises
    ------
    DataError, ModelError
        For counts below 1; for a plate that subsamples, and a guide that does not match the model.

    Notes
    -----
    `E[log (1 / K) sum_k p(y, z_k) / q(z_k)]`, nats. It tends to the log evidence as K grows, and
    its exponential is an unbiased estimate of the evidence at any K. f is drawn jointly over all
    rows, O(K N^3) per GP site. Points of a guide (`AutoDelta`) count with their log prior, as under
    MAP. Sources: Burda et al. (2016); Leibfried et al. (2022), eqs. 38 and 43.

    Examples
    --------
    >>> pg.GlobalImportanceWeightedELBO(500).num_importance
    500
    """

    def __init__(self, num_importance: int = 100, num_particles: int = 1):
        super().__init__(num_particles=num_particles)
        self.num_importance = num_importance
        require_whole(self, "num_importance", "num_particles")

    def log_weights(self, rng_key, param_map, model, guide, *args, **kwargs):
        """log p(y, z_k) - log q(z_k) of each draw, (num_importance,), nats."""
        given = param_map, model, guide, args, kwargs
        keys = random.split(rng_key, self.num_importance)
        return lax.map(lambda key: self._log_weight(key, *given), keys)

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        """{"loss": minus the bound, "mutable_state": None}."""
        given = param_map, model, guide, *args
        keys = random.split(rng_key, self.num_particles)
        weights = jax.vmap(lambda key: self.log_weights(key, *given, **kwargs))(keys)
        bound = jnp.mean(logsumexp(weights, 1)) - jnp.log(self.num_importance)
        return {"loss": -bound, "mutable_state": None}

    def _log_weight(self, key, params, model, guide, args, kwargs):
        key_guide, key_model = random.split(key)
        joint = OverRows(seeded(guide, params, key_guide))
        drawn = handlers.trace(joint).get_trace(*args, **kwargs)
        require_scored(drawn, bare_trace(model, args, kwargs, params), type(self).__name__)
        replayed = handlers.replay(seeded(model, params, key_model), drawn)
        trace = handlers.trace(replayed).get_trace(*args, **kwargs)
        require_no_subsampling(trace, type(self).__name__)
        total = sum(joint.log_ratios.values(), jnp.zeros(()))
        for name, site in trace.items():
            # missing observations integrate to one
            is_scored = site["type"] == "sample" and (site["is_observed"] or name in drawn)
            if not is_scored or name in joint.log_ratios:
                continue
            total = total + log_density(site, site["fn"], site["value"])
            if not site["is_observed"]:
                total = total - log_density(drawn[name], drawn[name]["fn"], site["value"])
        return total - auxiliary(drawn, trace)
