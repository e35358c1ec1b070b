"""p(y <= t) at new inputs, (Q, ...) as t: averaged over f by nodes, or over draws above y."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jax.core import Tracer
from jax.scipy.special import betainc
from jaxtyping import Array, Float
from numpyro.distributions.discrete import ZeroInflatedLogits, ZeroInflatedProbs
from numpyro.distributions.transforms import AffineTransform

from ppl_gp.gp import bare, bare_shape, unwrap
from ppl_gp.quick import full_jit
from ppl_gp.reading.digest import Bones
from ppl_gp.results.integrals import cubature, several
from ppl_gp.results.query.layout import ObservedSite
from ppl_gp.results.query.query import BY_DRAWS, Integration, Query, drawn_runs


@dataclass(frozen=True)
class Kind:
    """What the values of a site are: any numbers where `low` is `None`, else those above `low` and
    below `high`, where it is given; or integers, of which `low` is the smallest.
    """

    low: float | None
    high: float | None
    integers: bool
    has_cdf: bool

    def value(self, u):
        """A value from a real number."""
        if self.low is None or self.integers:
            return u
        if self.high is None:
            return self.low + jnp.exp(u)
        return self.low + (self.high - self.low) * jax.nn.sigmoid(u)


def kind_of(query: Query, site: ObservedSite) -> Kind | None:
    """`None` where an event is a vector."""

    def kind(fn):
        core = unwrap(fn)
        if core.event_dim:
            return None
        try:
            jax.eval_shape(lambda: cumulative(fn, jnp.ones(bare_shape(fn))))
        except NotImplementedError:
            return _kind(core.support, False)
        return _kind(core.support, True)

    return query.ask(site, kind)


def _kind(support, has_cdf: bool) -> Kind:
    low, high = (_number(getattr(support, a, None)) for a in ("lower_bound", "upper_bound"))
    if support.is_discrete:
        return Kind(low, None, low is not None, has_cdf)
    # an upper bound that is no constant
    is_open = high is None and hasattr(support, "upper_bound")
    return Kind(None if is_open else low, high, False, has_cdf)


def _number(bound) -> float | None:
    """A bound that is one constant."""
    if bound is None or isinstance(bound, Tracer) or jnp.ndim(bound):
        return None
    return float(bound)


@full_jit
def marginals_of_draws(query: Query) -> tuple[dict[str, Any], Any]:
    """({GP site: moments of f with a leading axis of T draws}, their log weights (T,))."""
    if query.integration not in BY_DRAWS:
        return lax.map(query.marginals, query.draws), query.draws.log_weights
    return _each_run(query, lambda _, f: f)[:2]


def by_nodes(query: Query, site: ObservedSite, functions, f: dict[str, Any]) -> Callable:
    """t -> p(y <= t) of entries that see `functions`, f the moments of all at each draw."""
    effort = cubature.effort_of(query)._replace(nodes=cubature.num_nodes(query))

    def at(t):
        def component(draw, f):
            rows, rebuild = several.stacked(f)
            fn_at = lambda x: query.trace(draw, rebuild(x))[site.name]["fn"]  # noqa: E731
            log_p = lambda x: bare(fn_at(x)).log_prob(t)  # noqa: E731
            below = lambda x: cumulative(fn_at(x), t)  # noqa: E731

            def ask(own, f):
                return cubature.share_below(own(log_p), own(below), f, effort, site.concave)

            return jnp.log(several.over_entries(site, t.shape, functions, rows, ask))

        return jnp.exp(query.mixture(component, f))

    return lambda t: lax.map(at, t)


def of_draws(query: Query, site: ObservedSite, kind: Kind):
    """(t -> p(y <= t | draw), (T, ...), log weights (T,), how many independent draws they are
    worth); of drawn values 0 or 1 where y has no distribution function.
    """
    bones: list[Bones] = []

    def arrays(trace):
        found, rest = Bones.of(unwrap(trace[site.name]["fn"]))
        bones.append(rest)
        return found

    if query.integration is Integration.given and kind.has_cdf:
        found = lax.map(lambda draw: arrays(query.trace(draw, {})), query.draws)
        weights = query.draws.log_weights, query.draws.effective
    else:
        read = arrays if kind.has_cdf else lambda trace: trace[site.name]["value"]
        found, *weights = _each_run(query, lambda trace, _: read(trace))
    if not kind.has_cdf:
        return lambda t: jnp.where(found <= t, 1.0, 0.0), *weights
    below = lambda x, t: cumulative(bones[-1].with_arrays(x), t)  # noqa: E731
    return lambda t: jax.vmap(lambda x: below(x, t))(found), *weights


def _each_run(query: Query, function: Callable):
    """(function(trace, moments of f) of T runs, log weights (T,), independent draws in them)."""

    def component(entry):
        draw, keys = entry
        drawn = drawn_runs(query, draw)
        return lax.map(lambda key: function(*drawn(key)), keys)

    each = cubature.repeats(query, cubature.LATENT_DRAWS)
    found = lax.map(component, (query.draws, cubature.keys_of(query, cubature.LATENT_DRAWS)))
    found = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), found)
    log_weights = jnp.repeat(query.draws.log_weights, each) - jnp.log(each)
    return found, log_weights, query.draws.effective * each


def cumulative(fn: dist.Distribution, value) -> Float[Array, "..."]:
    """p(y <= value) of every entry of fn, in the shape of `value` against `bare_shape(fn)`.

    Raises `NotImplementedError` where neither NumPyro nor this module has the function.
    """
    found = _cumulative(unwrap(fn), value)
    shape = jnp.broadcast_shapes(bare_shape(fn), jnp.shape(value))
    return jnp.broadcast_to(jnp.clip(jnp.nan_to_num(found, nan=0.0), 0.0, 1.0), shape)


def _cumulative(core: Any, value):
    p: Any = getattr(core, "probs", None)
    if isinstance(core, dist.BinomialProbs | dist.BinomialLogits):
        return _binomial(p, core.total_count, value)
    if isinstance(core, dist.GeometricProbs | dist.GeometricLogits):
        return 1.0 - jnp.exp((jnp.floor(value) + 1.0) * jnp.log1p(-p))
    if isinstance(core, ZeroInflatedProbs | ZeroInflatedLogits):
        gate: Any = core.gate
        return gate * (value >= 0) + (1.0 - gate) * _cumulative(unwrap(core.base_dist), value)
    if isinstance(core, dist.MixtureGeneral):  # each component beyond its own support
        w: Any = core.mixing_distribution.probs
        parts = core.component_distributions
        return sum(w[..., i] * cumulative(part, value) for i, part in enumerate(parts))
    if isinstance(core, dist.TransformedDistribution):
        # by the base's, whose bounds are constants where those of y depend on f
        return _through(tuple(core.transforms), unwrap(core.base_dist), value)
    truncated = dist.LeftTruncatedDistribution | dist.TwoSidedTruncatedDistribution
    found = _truncated(core, value) if isinstance(core, truncated) else core.cdf(value)
    return _inside(found, core.support, value)


def _truncated(core: Any, value):
    """(F(t) - F(low)) / (F(high) - F(low)), by the tail on the side of `low`: of a location far
    below `low` each F is 1 to all digits.
    """
    base, low = core.base_dist, core.low
    is_above = base.loc < low
    tail = lambda x: base.cdf(jnp.where(is_above, 2.0 * base.loc - x, x))  # noqa: E731
    end = tail(core.high) if hasattr(core, "high") else jnp.where(is_above, 0.0, 1.0)
    return (tail(value) - tail(low)) / (end - tail(low))


def _through(transforms: tuple, base, value):
    """p(t_k(... t_1(x)) <= value): 0 and 1 beyond what t_k reaches, where its inverse has no
    number, before an earlier or later map turns it around.
    """
    if not transforms:
        return _cumulative(base, value)
    *before, last = transforms
    below = _through(tuple(before), base, last.inv(value))
    found = jnp.where(last.sign > 0, below, 1.0 - below)
    # an affine map has its inverse everywhere, and NumPyro's codomain is that of a positive scale
    return found if isinstance(last, AffineTransform) else _inside(found, last.codomain, value)


def _inside(found, support, value):
    """0 and 1 beyond the support, where NumPyro has any number or none for some distributions."""
    low, high = (getattr(support, k, None) for k in ("lower_bound", "upper_bound"))
    above: Array = found if low is None else jnp.where(value < low, 0.0, found)
    return above if high is None else jnp.where(value >= high, 1.0, above)


def _binomial(p, total, value):
    """I_{1 - p}(n - k, k + 1) (DLMF 8.17.5)."""
    k = jnp.floor(value)
    inside = betainc(jnp.maximum(total - k, 0.5), jnp.maximum(k + 1.0, 0.5), 1.0 - p)
    return jnp.where(k < 0, 0.0, jnp.where(k >= total, 1.0, inside))
