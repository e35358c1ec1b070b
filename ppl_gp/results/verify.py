"""Whether what a file holds can be a fit of the model that it is given: shapes, supports, finite
numbers, sites.

Raises `StoreError`. Files are not trusted: a mistake is to show here, and not as a wrong
prediction.
"""

from functools import singledispatch
from pathlib import Path
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.distributions import biject_to, constraints

from ppl_gp.deep.encoders import MLPEncoder
from ppl_gp.deep.latents import Encoded, Forgotten, LatentGuide, gaussian_at, latent_form
from ppl_gp.errors import StoreError
from ppl_gp.gp import unwrap
from ppl_gp.kept import FromDraws, FromFunctions, FromInducing, FromPseudo, Kept
from ppl_gp.local.natural import MinusRankOne
from ppl_gp.model.roles import is_gp
from ppl_gp.model.tracing import run
from ppl_gp.results.fit import Fit
from ppl_gp.results.store.save import qualified_name
from ppl_gp.sparse.several import batch_of

_ROUNDING = 1e-3  # relative: draws of a simplex in float32 are off by 1e-6 and more


def check_values(header: dict, fit: Fit) -> None:
    """The parts of a fit against each other and against the header."""
    for what, names in (("hyper", fit.hyper), ("latent", fit.latent)):
        declared = header["hyper_sites" if what == "hyper" else "gp_sites"]
        require(
            set(names) == set(declared),
            f"it declares {list(declared)} and holds {what} of {list(names)}.",
        )
    draws = fit.draws.num
    parts = {
        "its arguments": (fit.args, fit.kwargs),
        "hyper": fit.hyper,
        "q(f)": dict(fit.latent),
        "its weights": fit.draws.log_weights,
        "q(h)": fit.local,
    }
    for what, tree in parts.items():
        require(all(map(_is_finite, jax.tree.leaves(tree))), f"{what} hold NaN or infinity.")
    num = fit.num_chains if fit.sampled else 1
    counts = {draws, *(np.shape(v)[0] for v in jax.tree.leaves(dict(fit.latent)))}
    counts |= {np.shape(v)[0] for v in fit.hyper.values()} if fit.sampled else set()
    require(len(counts) == 1, f"its parts have {sorted(counts)} draws.")
    require(num > 0 and draws > 0 and draws % num == 0, f"it has {draws} draws in {num} chains.")
    require(
        fit.sampled or draws == 1, f"hyperparameters are one value, and q(f) has {draws} draws."
    )
    for name, shape in header["hyper_sites"].items():
        found = list(np.shape(fit.hyper[name])[fit.sampled :])
        right = _is_array(fit.hyper[name]) and found == shape
        require(right, f"hyperparameter '{name}' has shape {found}, not {shape}.")
    for name, latent in fit.latent.items():
        require(
            all(map(_is_array, jax.tree.leaves(latent))), f"q of '{name}' holds more than arrays."
        )
        _check_kept(latent, name, draws, header["gp_sites"][name])
    total = float(np.sum(np.exp(np.asarray(fit.draws.log_weights, float))))
    require(abs(total - 1.0) < _ROUNDING, f"its weights sum to {total}.")
    _check_locals(header, fit)
    require(
        isinstance(fit.stats.get("sample_stats", {}), dict), "its sample_stats are no dictionary."
    )


@singledispatch
def _check_kept(kept: Kept, name: str, draws: int, shape: list[int]) -> None:
    """The shapes of what is kept of q(f): of inducing variables they are checked with the model
    (`_unusable`).
    """


@_check_kept.register
def _(kept: FromDraws, name, draws, shape) -> None:
    require(kept.mean.shape == (draws, *shape), f"q of '{name}' has shape {kept.mean.shape}.")


@_check_kept.register
def _(kept: FromPseudo, name, draws, shape) -> None:
    # a plate of one around it adds no axis to an approximation
    one_function = int(np.prod(shape)) == shape[-1]
    wanted = (draws, shape[-1])
    for part in (kept.mean, kept.variance, kept.alpha, kept.sites.nat1, kept.sites.nat2):
        require(
            one_function and part.shape == wanted,
            f"q of '{name}' has a part of shape {part.shape}.",
        )
    require(bool(np.all(np.asarray(kept.variance) >= 0)), f"q of '{name}' has a negative variance.")


@_check_kept.register
def _(kept: FromFunctions, name, draws, shape) -> None:
    R, N = shape if len(shape) == 2 else (0, 0)
    wanted = {
        "mean": (draws, R, N),
        "variance": (draws, R, N),
        "alpha": (draws, R * N),
        "nat1": (draws, R * N),
        "nat2": (draws, R, N) if isinstance(kept.sites, MinusRankOne) else (draws, R, R, N),
    }
    parts = {**vars(kept), "nat1": kept.sites.nat1, "nat2": kept.sites.nat2}
    for part, right in wanted.items():
        found = np.shape(parts[part])
        require(found == right, f"q of '{name}' has a part of shape {found}.")
    proper = not isinstance(kept.sites, MinusRankOne) or np.all(np.asarray(kept.sites.nat2) >= 0)
    require(bool(proper), f"q of '{name}' has a negative weight.")
    require(bool(np.all(np.asarray(kept.variance) >= 0)), f"q of '{name}' has a negative variance.")


def _check_locals(header, fit) -> None:
    extra = set(header["local"]) - set(fit.local)
    require(not extra, f"q(h) of {sorted(extra)} belongs to no latent site.")
    absent = set(fit.local) - set(header["local"])
    known = absent if header["forgotten"] is None else set(header["forgotten"])
    require(absent == known, f"q(h) of {sorted(absent ^ known)} is missing, or was to be.")
    both = set(fit.local) & {*header["observed_sites"], *header["hyper_sites"], *header["gp_sites"]}
    require(not both, f"{sorted(both)} are latents and something else.")
    for name, q in fit.local.items():
        usable = isinstance(q, Forgotten | Encoded) or (
            isinstance(q, LatentGuide) and not q.needs_y
        )
        usable &= all(map(_is_array, jax.tree.leaves(q)))
        usable &= not isinstance(q, Encoded) or _is_network(q.encoder)
        require(usable, f"q(h) of '{name}' is a {type(q).__name__}.")


def _is_network(encoder) -> bool:
    """Whether an encoder's biases and shifts have the shapes of its weights, so that nothing is
    broadcast.
    """
    if not isinstance(encoder, MLPEncoder):
        return False
    layers = encoder.layers
    rows = [
        encoder.shift.shape == encoder.scale.shape == layers[0][0].shape[1:],
        encoder.start.shape == (),
    ]
    return all(rows) and all(
        weight.ndim == 2 and bias.shape == weight.shape[:1] for weight, bias in layers
    )


def check_model(path: Path, header: dict, fit: Fit) -> None:
    """Run the model on the saved inputs and compare its sites with the saved ones."""
    saved = (
        f"{path} was saved from the model '{header['model']}', and "
        f"'{qualified_name(fit.model)}' was given"
    )
    first = fit.draws.at(0)
    try:
        trace = run(fit.model, fit.args, fit.kwargs, first.known, first.values)
    except (
        Exception
    ) as error:  # a model may raise anything where its arguments are damaged, or another's
        raise StoreError(
            f"{saved}, which does not run with the saved arguments: {error}"
        ) from error
    gps = {k: list(site["fn"].shape()) for k, site in trace.items() if is_gp(site)}
    if gps != header["gp_sites"]:
        raise StoreError(
            f"{saved}: it has the GP sites {gps} (name, shape), and the file {header['gp_sites']}."
        )
    found = {
        k: _shape(site) for k, site in trace.items() if k not in gps and _is_random(k, site, header)
    }
    if found != header["hyper_sites"]:
        wanted = header["hyper_sites"]
        raise StoreError(
            f"{saved}: it has the hyperparameters {found} (name, shape), and the file {wanted}."
        )
    latents = {
        k for k, site in trace.items() if site["type"] == "sample" and not site["is_observed"]
    }
    if unknown := sorted(set(fit.local) - latents):
        raise StoreError(f"{saved}: it has no latent site {unknown}.")
    try:
        outside = _outside(fit, trace)
        wrong = _unusable(fit, trace)
    except Exception as error:
        raise StoreError(
            f"{saved}, with which what the file holds does not work: {error}"
        ) from error
    if outside or wrong:
        what = (
            f"hyperparameters {outside} lie outside their support"
            if outside
            else f"q of {wrong} has another shape"
        )
        raise StoreError(f"{saved}: {what}.")


def _is_random(name, site, header) -> bool:
    """Whether a site is a hyperparameter or a local latent: not observed in training, nor imputed
    beside data.
    """
    if site["type"] == "param":  # a network's tree of initial values is none
        return name in header["hyper_sites"] or hasattr(site["value"], "shape")
    other = (*header["observed_sites"], *header["latent_sites"])
    return site["type"] == "sample" and not site["is_observed"] and name not in other


def _shape(site) -> list[int]:
    """As declared: a trace's value is the one that was substituted, whatever the model says."""
    return list(site["fn"].shape() if site["type"] == "sample" else jnp.shape(site["args"][0]))


def _outside(fit: Fit, trace: dict) -> list[str]:
    """Hyperparameters with a draw outside the support that they have at that draw. O(S), nothing is
    factored.
    """

    def inside(known):
        own = (
            run(fit.model, fit.args, fit.kwargs, known, fit.draws.at(0).values)
            if fit.sampled
            else trace
        )
        return {k: _inside(own[k], v) for k, v in known.items()}

    found = jax.jit(jax.vmap(inside))(fit.hyper) if fit.sampled and fit.hyper else inside(fit.hyper)
    return [k for k, v in found.items() if not bool(jnp.all(v))]


def _inside(site, value):
    """By the constraint, or, for one that rounding may break, by a way to unconstrained numbers and
    back.
    """
    support = (
        site["kwargs"].get("constraint", constraints.real)
        if site["type"] == "param"
        else site["fn"].support
    )
    try:
        met = jnp.all(support(value))
        if support.is_discrete:
            return met
        transform = biject_to(support)
        back = transform(transform.inv(value))
    except NotImplementedError:  # a support that says no more than that it depends on parameters
        return jnp.ones((), bool)
    return met | jnp.all(
        jnp.abs(back - value) <= _ROUNDING * (jnp.abs(value) + jnp.max(jnp.abs(value)))
    )


def _unusable(fit: Fit, trace: dict) -> list[str]:
    """Sites whose inducing variables or q(h) do not give values of the site's shape. Nothing is
    computed but shapes.
    """
    wrong = []
    for name, latent in fit.latent.items():
        if isinstance(latent, FromInducing):
            entry, prior = cast(FromInducing, latent.draw(0)), unwrap(trace[name]["fn"])
            M, shape = entry.inducing.num, tuple(trace[name]["fn"].shape())
            mean, _ = eqx.filter_eval_shape(
                lambda entry, prior: entry.process(prior).marginals(prior), entry, prior
            )
            dense = entry.reduction.shape in (entry.mean.shape, (*entry.mean.shape, M))
            axes = batch_of(prior, shape)
            if not dense or entry.mean.shape != (*axes, M) or mean.shape != shape:
                wrong.append(name)
    for name, q in fit.local.items():
        if not isinstance(q, Forgotten):

            def draw(q, site=trace[name]):
                if not q.needs_y:
                    return q.at(site, None, fit.args, fit.kwargs).sample(random.key(0))
                axis, shape = latent_form(site, 0)
                rows = jnp.zeros((shape[axis], *q.encoder.shift.shape))
                return gaussian_at(site, jax.vmap(q.encoder)(rows)).sample(random.key(0))

            if eqx.filter_eval_shape(draw, q).shape != trace[name]["fn"].shape():
                wrong.append(name)
    return wrong


def _is_array(value) -> bool:
    return isinstance(value, jax.Array)


def _is_finite(leaf) -> bool:
    """Options of a model may be infinite: arrays may not."""
    return not _is_array(leaf) or leaf.dtype.kind in "biu" or bool(jnp.all(jnp.isfinite(leaf)))


def require(holds: bool, what: str) -> None:
    if not holds:
        raise StoreError(f"is damaged: {what}")
