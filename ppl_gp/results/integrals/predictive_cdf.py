"""p(y <= t) at new inputs, (Q, ...) for t of that shape: averaged over f by nodes, or over draws of
all that decides y's distribution.

Nodes stand where p(y = t | f) lives under f's Gaussian (`numerics.quadrature`), as that is where
p(y <= t | f) changes with f; they reach over all of the Gaussian, and their weights add up to one.
"""

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
from numpyro.distributions import constraints
from numpyro.distributions.discrete import ZeroInflatedLogits, ZeroInflatedProbs
from numpyro.distributions.transforms import AffineTransform

from ppl_gp.gp import bare, bare_shape, unwrap
from ppl_gp.numerics.quadrature import likelihood_nodes
from ppl_gp.quick import full_jit
from ppl_gp.reading.digest import Bones
from ppl_gp.results.integrals import cubature
from ppl_gp.results.integrals.averages import (
    LATENT_DRAWS,
    all_marginals,
    effort_of,
    keys_of,
    num_nodes,
    repeats,
)
from ppl_gp.results.integrals.integration import Integration
from ppl_gp.results.integrals.likelihood import by_datum, floored, from_by_datum
from ppl_gp.results.integrals.several import stacked
from ppl_gp.results.query.layout import ObservedSite
from ppl_gp.results.query.mixture import Moments, plain
from ppl_gp.results.query.query import Query, drawn_trace

_BY_DRAWS = (Integration.layers, Integration.joint_draws)


@dataclass(frozen=True)
class Kind:
    """What the values of a site are. `map`: "real", "above" low, "between" low and high; `low` of
    integers is the smallest.
    """

    map: str
    low: float
    high: float
    integers: bool
    has_cdf: bool

    def value(self, u):
        """A value from a real number."""
        if self.map == "above":
            return self.low + jnp.exp(u)
        return self.low + (self.high - self.low) * jax.nn.sigmoid(u) if self.map == "between" else u


def kind_of(query: Query, site: ObservedSite) -> Kind | None:
    """`None` where an event is a vector."""
    found = []

    def look(draw):
        fn = query.trace(draw, {})[site.name]["fn"]
        core = unwrap(fn)
        if core.event_dim:
            return 0
        try:
            jax.eval_shape(lambda: cumulative(fn, jnp.ones(bare_shape(fn))))
        except NotImplementedError:
            found.append(_kind(core.support, False))
        else:
            found.append(_kind(core.support, True))
        return 0

    jax.eval_shape(look, query.draws.at(0))
    return found[0] if found else None


def _kind(support, has_cdf: bool) -> Kind:
    low, high = (_number(getattr(support, a, None)) for a in ("lower_bound", "upper_bound"))
    if support.is_discrete:
        return Kind("real", 0.0 if low is None else low, 0.0, low is not None, has_cdf)
    if low is None:
        return Kind("real", 0.0, 0.0, False, has_cdf)
    if isinstance(support, type(constraints.unit_interval)) or high is not None:
        return Kind("between", low, 1.0 if high is None else high, False, has_cdf)
    is_half = hasattr(support, "upper_bound")  # an upper bound that is no constant
    return Kind("real" if is_half else "above", low, 0.0, False, has_cdf)


def _number(bound) -> float | None:
    """A bound that is one constant."""
    if bound is None or isinstance(bound, Tracer) or jnp.ndim(bound):
        return None
    return float(bound)


def shape_of(query: Query, site: ObservedSite) -> tuple[int, ...]:
    """Of the site's values."""
    found = []

    def look(draw):
        found.append(bare_shape(query.trace(draw, {})[site.name]["fn"]))
        return 0

    jax.eval_shape(look, query.draws.at(0))
    return found[0]


@full_jit
def marginals_of_draws(query: Query, integration: Integration) -> tuple[dict[str, Any], Any]:
    """({GP site: moments of f with a leading axis of T draws}, their log weights (T,))."""
    if integration not in _BY_DRAWS:
        return lax.map(
            lambda draw: all_marginals(query, draw), query.draws
        ), query.draws.log_weights
    joint = integration is Integration.joint_draws
    found = _each_draw(
        query, lambda *a: {k: plain(v) for k, v in drawn_trace(query, *a, joint=joint)[1].items()}
    )
    return found, _log_weights(query)


def by_nodes(query: Query, site: ObservedSite, functions, f: dict[str, Any]) -> Callable:
    """t -> p(y <= t) of entries that see one to three functions, f their moments at each draw.
    `functions`: which ones (rows of `flatten`), `None` where there is one in all.
    """

    def at(t):
        def component(draw, f):
            if functions is None:
                return jnp.log(_of_one(query, site, draw, f[query.site], t))
            return jnp.log(_of_several(query, site, draw, jnp.asarray(functions), f, t))

        return jnp.exp(query.mixture(component, f))

    return lambda t: lax.map(at, t)


def _reader(site: ObservedSite, fn_at: Callable, t):
    """(log p(t | f), p(y <= t | f)) of entry e at f, (M,) each."""

    def log_p(f, e):
        return by_datum(bare(fn_at(f)).log_prob(t), site)[e]

    def below(f, e):
        return by_datum(cumulative(fn_at(f), t), site)[e]

    return log_p, below


def _of_one(query: Query, site: ObservedSite, draw, f: Moments, t):
    log_p, below = _reader(site, lambda x: query.trace(draw, {query.site: x})[site.name]["fn"], t)

    def entry(e):
        nodes, log_w = likelihood_nodes(
            lambda x: log_p(x, e),
            f.mean,
            floored(f).variance,
            num=num_nodes(query),
            concave=site.concave,
        )
        w = jnp.exp(log_w)
        return jnp.sum(w * jax.vmap(lambda x: below(x, e))(nodes), 0) / jnp.sum(w, 0)

    return _entries(entry, site, t)


def _of_several(query: Query, site: ObservedSite, draw, functions, f: dict[str, Any], t):
    mean, variance, rebuild = stacked(f)
    sd, dims = jnp.sqrt(variance), functions.shape[1]
    log_p, below = _reader(site, lambda rows: query.trace(draw, rebuild(rows))[site.name]["fn"], t)
    many = effort_of(query, 1).many
    num = (cubature.PAIR_NODES if dims == 2 else cubature.TRIPLE_NODES)[many]

    def entry(e):
        i = functions[e]
        rows = lambda z: mean.at[i].set(mean[i] + sd[i] * z)  # noqa: E731
        if dims == 1:
            one = Moments(mean[i[0]], sd[i[0]] ** 2)
            at = lambda x: mean.at[i].set(x[None])  # noqa: E731
            nodes, log_w = likelihood_nodes(
                lambda x: log_p(at(x), e), one.mean, one.variance, num=num_nodes(query)
            )
            w = jnp.exp(log_w)
            return jnp.sum(w * jax.vmap(lambda x: below(at(x), e))(nodes), 0) / jnp.sum(w, 0)
        nodes = cubature.product_nodes(lambda z: log_p(rows(z), e), dims, mean[0], num)

        def part(z, log_w):
            w = jnp.exp(log_w)
            return jnp.sum(w * jax.vmap(lambda z: below(rows(z), e))(z), 0), jnp.sum(w, 0)

        zero = jnp.zeros_like(mean[0])
        total, weight = nodes.fold(part, lambda a, b: jax.tree.map(jnp.add, a, b), (zero, zero))
        return total / weight

    return _entries(entry, site, t)


def _entries(entry: Callable, site: ObservedSite, t):
    found = lax.map(entry, jnp.arange(by_datum(t, site).shape[0]))
    return from_by_datum(found, site, t.shape)


def of_draws(query: Query, integration: Integration, site: ObservedSite, kind: Kind):
    """(t -> p(y <= t | draw), (T, ...), log weights (T,), how many independent draws they are
    worth); of drawn values 0 or 1 where y has no distribution function.
    """
    bones: list[Bones] = []

    def arrays(drawn):
        found, rest = Bones.of(unwrap(drawn["fn"]))
        bones.append(rest)
        return found

    if integration is Integration.given and kind.has_cdf:
        found = lax.map(lambda draw: arrays(query.trace(draw, {})[site.name]), query.draws)
        return _below(bones, found), query.draws.log_weights, query.draws.effective
    joint, name = integration is Integration.joint_draws, site.name

    def one(*a):
        drawn = drawn_trace(query, *a, joint=joint)[0][name]
        return arrays(drawn) if kind.has_cdf else drawn["value"]

    found, num = _each_draw(query, one), query.draws.effective * repeats(query, LATENT_DRAWS)
    if kind.has_cdf:
        return _below(bones, found), _log_weights(query), num
    return lambda t: jnp.where(found <= t, 1.0, 0.0), _log_weights(query), num


def _below(bones, arrays) -> Callable:
    return lambda t: jax.vmap(lambda x: cumulative(bones[-1].with_arrays(x), t))(arrays)


def _each_draw(query: Query, function: Callable):
    """function(draw, conditionals, key) for `LATENT_DRAWS` keys in all, in a leading axis."""

    def component(entry):
        draw, keys = entry
        conditionals = query.conditionals(draw)
        return lax.map(lambda key: function(draw, conditionals, key), keys)

    found = lax.map(component, (query.draws, keys_of(query, LATENT_DRAWS)))
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), found)


def _log_weights(query: Query):
    each = repeats(query, LATENT_DRAWS)
    return jnp.repeat(query.draws.log_weights, each) - jnp.log(each)


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
        return gate * (value >= 0) + (1.0 - gate) * _cumulative(core.base_dist, value)
    if isinstance(core, dist.TransformedDistribution):
        # by the base's, whose bounds are constants where those of y depend on f
        return _through(tuple(core.transforms), unwrap(core.base_dist), value)
    return _inside(core.cdf(value), core.support, value)


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
    found = found if low is None else jnp.where(value < low, 0.0, found)
    return found if high is None else jnp.where(value >= high, 1.0, found)


def _binomial(p, total, value):
    """I_{1 - p}(n - k, k + 1) (DLMF 8.17.5)."""
    k = jnp.floor(value)
    inside = betainc(jnp.maximum(total - k, 0.5), jnp.maximum(k + 1.0, 0.5), 1.0 - p)
    return jnp.where(k < 0, 0.0, jnp.where(k >= total, 1.0, inside))
