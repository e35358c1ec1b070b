"""What the model's own observed sites say about y given f, entry by entry and row by row."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jaxtyping import Array, Float

from ppl_gp.draws import Moments
from ppl_gp.errors import ModelError
from ppl_gp.gp import unwrap
from ppl_gp.reading.roles import log_prob_per_datum
from ppl_gp.results.query.layout import ObservedSite


def by_datum(x, site: ObservedSite):
    """(entries, M): a site's values with the data last and its other axes in one."""
    return jnp.reshape(jnp.moveaxis(x, site.axis, -1), (-1, x.shape[site.axis]))  # pyright: ignore[reportArgumentType]


def over_entries(site: ObservedSite, shape, functions, f: Moments, ask: Callable):
    """What ask(read, f of the entry (D, M)) says of each entry of a site, (M,), put together in the
    site's `shape`.

    `functions`: rows of f (F, M) that each entry sees, one tuple for all or one for each.
    read(value) makes a function of all rows, with values in the site's shape, one of the entry's
    own rows, with values (M,).
    """
    others = tuple(n for i, n in enumerate(shape) if i != site.axis)
    num = math.prod(others)
    index = jnp.broadcast_to(jnp.asarray(functions), (num, len(functions[0])))

    def one(entry):
        e, own = entry
        place = lambda x: x if len(f.mean) == 1 else f.mean.at[own].set(x)  # noqa: E731
        of_entry = lambda x: by_datum(x, site)[e]  # noqa: E731
        read = lambda value: lambda x: jax.tree.map(of_entry, value(place(x)))  # noqa: E731
        return ask(read, Moments(f.mean[own], f.variance[own]))

    found = lax.map(one, (jnp.arange(num), index))
    back = lambda x: jnp.moveaxis(jnp.reshape(x, (*others, -1)), -1, site.axis)  # noqa: E731  # pyright: ignore[reportArgumentType]
    return jax.tree.map(back, found)


# `mean` and `variance` of these are a direction's, not the expectations of y and (y - E[y])^2
_CIRCULAR = (dist.VonMises, dist.SineSkewed, dist.SineBivariateVonMises, dist.ProjectedNormal)


def mean_and_variance(fn) -> list[Float[Array, "..."]]:
    """Of y; raises `NotImplementedError` where NumPyro has none, or has a circular one."""
    if _is_circular(fn):
        raise NotImplementedError
    return [jnp.broadcast_to(x, fn.shape()) for x in (fn.mean, fn.variance)]


def _is_circular(fn) -> bool:
    """Also of mixtures, and what is built on another distribution."""
    core = unwrap(fn)
    inner = [getattr(core, k, None) for k in ("base_dist", "component_distribution")]
    inner += getattr(core, "component_distributions", ())
    return isinstance(core, _CIRCULAR) or any(_is_circular(x) for x in inner if x is not None)


def log_density_per_datum(trace: dict, weighed: bool = False) -> Float[Array, "M"]:
    """sum over observed sites of log p(y_n | f), (M,), nats. Masks hold; `scale`, a device of
    training, does not unless `weighed`.

    A factor counts where it sees observations (censored data, say); another one is a penalty, and
    no part of a density of y. Raises `ModelError` where no observed site has a log density for each
    datum.
    """
    sites = [s for s in trace.values() if s["type"] == "sample" and s["is_scored"]]
    terms = [log_prob_per_datum(s if weighed else {**s, "scale": None}) for s in sites]
    pointwise = [t for t in terms if jnp.ndim(t)]
    if not sites:
        raise ModelError(
            "log_density scores observations, and the model was given none: give them after X_new, "
            "or by keyword, y=..."
        )
    if not pointwise:
        raise ModelError(
            f"the model's observed sites {[s['name'] for s in sites]} have no log density for "
            "each datum: each is one event. Put them into a plate with one entry per row of X_new."
        )
    return sum(pointwise[1:], pointwise[0])
