"""What a file says of the densities that q was fitted to, so that another model is known by them:
the classes of its distributions and kernels, and their values at one point.

The point is the first draw of the hyperparameters, with every other site at a value of its support
that is not its mean, so that no random number enters. Densities are numbers, which
JAX's versions agree on; the digest of the jaxpr is compared within one version only.
"""

import hashlib
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to

from ppl_gp.gp import GP, unwrap
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.tracing import run

_ROWS = 5  # of the inputs at which a kernel is compared
_CLOSE = 1e-4  # of float32


def portrait(model, args, kwargs, hyper: dict, values: dict) -> dict:
    """{"classes": {site: words}, "numbers": {site: number}, "formula": digest}; no numbers of a
    model whose densities cannot be computed at this point. Raises whatever the model raises.
    """
    if isinstance(model, Collapsed):  # its own sites are compared, the integrated ones too
        if model.source.reading.scored:  # a factor needs some observations to be computed from
            args, kwargs = model.skeleton.arguments(model.completed(args, kwargs)[1])
        model = model.source
    first = run(model, args, kwargs, hyper, values)
    classes = {k: words for k, site in first.items() if (words := _class_of(site))}

    def numbers(hyper, values):
        known = {**hyper, **values}
        trace = run(model, args, kwargs, {**_some_values(first, known), **known}, values)
        return {k: site_number(s) for k, s in trace.items() if s["type"] == "sample"}

    try:
        formula = str(jax.make_jaxpr(numbers)(hyper, values))
        text = re.sub(r"0x[0-9a-f]+|[\d.]+(e[+-]?\d+)?", "", formula)
        found = {k: float(x) for k, x in numbers(hyper, values).items()}
    except Exception:  # noqa: BLE001 - a distribution may lack what this asks for
        return {"classes": classes, "numbers": {}, "formula": ""}
    formula = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"classes": classes, "numbers": found, "formula": formula}


def _class_of(site) -> str | None:
    """What a site is, with its shape as the model declares it, and that of a GP's inputs."""
    if site["type"] == "param":  # a network's tree of initial values has no shape
        declared = next(filter(eqx.is_array_like, site["args"]), site["value"])
        return f"param {list(jnp.shape(declared))}" if eqx.is_array_like(declared) else None
    if site["type"] != "sample":
        return None
    prior: Any = unwrap(site["fn"])
    at = f" at inputs {list(jnp.shape(prior.X))}" if isinstance(prior, GP) else ""
    seen = "observed " if site["is_observed"] else ""  # by `handlers.condition`
    return f"{seen}{_words(site['fn'])} {list(site['fn'].shape())}{at}"


def changed_classes(saved: dict, now: dict) -> list[str]:
    """Of sites with another distribution or kernel, in words."""
    old, new = saved["classes"], now["classes"]
    return [
        f"'{k}' is {new.get(k, 'absent')} and was {old.get(k, 'absent')}"
        for k in sorted({*old, *new})
        if old.get(k) != new.get(k)
    ]


def changed_numbers(saved: dict, now: dict) -> list[str]:
    """Of sites with another density, in words."""
    pairs = {k: (x, now["numbers"].get(k, np.inf)) for k, x in saved["numbers"].items()}
    return [
        f"'{k}' (from {a:.6g} to {b:.6g})"
        for k, (a, b) in pairs.items()
        if not np.isclose(a, b, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
    ]


def _some_values(trace: dict, known: dict) -> dict[str, Any]:
    """A value of every other site that does not depend on a key: waves, for at zero f - u is f + u,
    and sin(f) is f; of a discrete site, or one without a transform, the first of its support.
    """
    found = {}
    for name, site in trace.items():
        if site["type"] != "sample" or site["is_observed"] or name in known:
            continue
        support, value = site["fn"].support, site["value"]
        try:
            if isinstance(unwrap(site["fn"]), GP):
                found[name] = value + _wave(jnp.shape(value))
            elif support.is_discrete:
                found[name] = support.feasible_like(jnp.zeros_like(value))
            else:
                transform = biject_to(support)
                found[name] = transform(_wave(transform.inverse_shape(jnp.shape(value))))
        except NotImplementedError:  # its draw by the fixed key
            continue
    return found


def _wave(shape) -> jax.Array:
    return 0.3 * jnp.cos(1.0 + jnp.arange(np.prod(shape, dtype=int))).reshape(shape)


def site_number(site) -> jax.Array:
    """The weighted mean of a site's log density, or of what a GP's kernel and mean are there."""
    prior: Any = unwrap(site["fn"])
    if not isinstance(prior, GP):
        scale = 1.0 if site.get("scale") is None else site["scale"]
        return _mean(scale * site["fn"].log_prob(site["value"]))
    parts = [x for x in jax.tree.leaves(prior.kernel) if eqx.is_array_like(x)]
    rows = prior.X[:_ROWS]
    try:
        parts += [prior.kernel(rows, rows), prior.mean_function(rows)]
    except Exception:  # noqa: BLE001 - parameters with an axis of units, distances of all rows
        pass
    return sum((_mean(x) for x in parts), jnp.zeros(()))


def _mean(x) -> jax.Array:
    """With weights, so that entries that change places show."""
    flat = jnp.ravel(jnp.asarray(x, float))
    return jnp.mean(flat * jnp.linspace(1.0, 2.0, flat.size))


def _words(value) -> str:
    """The class of a distribution, kernel or mean, with those of its parts and its options."""
    if isinstance(value, dist.Distribution):
        value = unwrap(value)
        is_gp = isinstance(value, GP)
        parts = {"k": value.kernel, "m": value.mean_function} if is_gp else vars(value)
        inner = [_words(x) for _, x in sorted(parts.items()) if _has_parts(x)]
    elif isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    elif isinstance(value, eqx.Module):
        parts = [getattr(value, k) for k in value.__dataclass_fields__]
        inner = [_words(x) for x in parts if x is not None and not eqx.is_array_like(x)]
    else:
        return str(value) if isinstance(value, str | int | float) else type(value).__name__
    return f"{type(value).__name__}({', '.join(inner)})" if inner else type(value).__name__


def _has_parts(x) -> bool:
    parts = x if isinstance(x, list | tuple) else [x]
    kinds = (dist.Distribution, dist.transforms.Transform, eqx.Module)
    return len(parts) > 0 and all(isinstance(y, kinds) for y in parts)
