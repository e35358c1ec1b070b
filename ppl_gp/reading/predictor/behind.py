"""The sites that are integrated into a predictor, at rows of a model's arguments: what the
predictor is made of, their values, and the priors of its GPs.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ppl_gp.gp import GP, unwrap
from ppl_gp.kernels.base import Kernel
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.predictor.parts import Loadings, columns, factor_of, loadings
from ppl_gp.reading.predictor.predictor import Rest, Traced, innovate
from ppl_gp.reading.predictor.sites import mean_of
from ppl_gp.reading.roles import is_observed
from ppl_gp.reading.tracing import run


class MeanKernel(Kernel):
    """The covariance that a GP's mean m(X) = m_0(X) + Phi(X)^T w takes from other integrated sites,
    w ~ N(0, I) behind their innovations: k(X, X') = Phi(X)^T Phi(X').
    """

    model: Callable = eqx.field(static=True)
    site: str = eqx.field(static=True)
    args: tuple
    hyper: dict
    zero: dict[str, jax.Array]
    roots: dict[str, jax.Array]  # {site: its covariance's root, column by column, (U, *shape)}

    def basis(self, X):
        """Phi, (U, N)."""

        def mean(e):
            trace = run(innovate(self.model, {**self.zero, **e}), *self.args, self.hyper)
            return unwrap(trace[self.site]["fn"]).mean_function(X)

        at_zero = mean({})
        parts = [jax.vmap(lambda e, k=k: mean({k: e}))(x) - at_zero for k, x in self.roots.items()]
        return jnp.concatenate(parts)

    def __call__(self, X1, X2):
        return self.basis(X1).T @ self.basis(X2)

    def diag(self, X):
        return jnp.sum(self.basis(X) ** 2, 0)


class Behind:
    """By innovations e = z - c: `fns`, {site: distribution}; `zero`, {site: zero}. Sites that an e
    lacks stand at zero.

    `kernel`: of the predictor, a `RowsKernel`. `X`: rows. One row is taken twice where the
    predictor is computed: there, axes of the data cannot be told from others of size one.
    """

    def __init__(self, kernel: Any, X):
        model = kernel.model
        self.source, self.moved, self.axes = model.source, model.moved, dict(model.plan.axes)
        self.hyper, self.num = kernel.hyper, len(X)
        skeleton, given = model.skeleton, {**kernel.tables, **model.skeleton.unpacked(X)}
        arrays = skeleton.complete(given, self.num)
        self.args = skeleton.arguments(arrays)
        several = arrays if self.num > 1 else skeleton.twice(arrays)
        self.rest = Rest(several, self.hyper)
        trace = run(self.source, *self.args, self.hyper)
        self.fns = {k: trace[k]["fn"] for k in model.plan.sites}
        self.zero = {k: jnp.zeros(fn.shape()) for k, fn in self.fns.items()}

    @cached_property
    def _traced(self) -> Traced:
        return self.moved.at(self.rest)

    def eta(self, e: dict) -> jax.Array:
        """The predictor, (R, N)."""
        return self._traced.eta(self._several(e), self.rest)[:, : self.num]

    def values(self, e: dict) -> dict:
        """{site: value}."""
        trace = self.moved.trace(self._several(e), self.rest)
        return {k: self._own_rows(k, trace[k]["value"]) for k in self.fns}

    def _several(self, e: dict) -> dict:
        own = {**self.zero, **e}
        twice = {k: jnp.concatenate([own[k]] * 2, axis) for k, axis in self.axes.items()}
        return own if self.num > 1 else {**own, **twice}

    def _own_rows(self, site: str, x):
        axis = self.axes.get(site)
        return x if axis is None else lax.slice_in_dim(x, 0, self.num, axis=axis)

    def loadings(self) -> Loadings:
        """What the predictor is made of."""
        centred = run(self.source, *self.args, {**self.hyper, **self.zero}, self.zero)
        centres = {k: mean_of(centred[k]["fn"]) for k in self.fns}
        return loadings(self.eta, self.fns, centres, self.axes)

    def priors(self) -> dict[str, GP]:
        """{GP site among the integrated: its prior}, other sites at their means; what its mean
        takes from other integrated sites is in `MeanKernel`.
        """
        trace = run(innovate(self.source, self.zero), *self.args, self.hyper)
        return {k: self._prior(k, unwrap(trace[k]["fn"]), v) for k, v in self.mean_sites().items()}

    def _prior(self, site: str, prior: GP, behind: frozenset[str]) -> GP:
        if not behind:
            return prior
        roots = {j: columns(self.fns[j], lambda e: e) for j in sorted(behind)}
        more = MeanKernel(self.source, site, self.args, self.hyper, self.zero, roots)
        jitter = prior.variance - prior.kernel.diag(prior.X)  # of the declared kernel
        return GP(prior.kernel + more, prior.X, prior.mean_function, jitter[0])

    def mean_sites(self) -> dict[str, frozenset[str]]:
        """{GP site among the integrated: the integrated sites that its prior mean is computed from,
        through others too}. Abstract.
        """
        gps = [k for k, fn in self.fns.items() if isinstance(unwrap(fn), GP)]

        def means(e):
            trace = run(innovate(self.source, e), *self.args, self.hyper)
            return {k: unwrap(trace[k]["fn"]).mean for k in gps}

        return sources(means, self.zero)

    def seen_directly(self) -> frozenset[str]:
        """The integrated sites that the observed ones are computed from in other ways than through
        another integrated site. Abstract.
        """

        def likelihoods(values):
            trace = run(self.source, *self.args, {**self.hyper, **values}, values)
            return arrays_of([s["fn"] for s in trace.values() if is_observed(s)])

        return frozenset().union(*sources(likelihoods, self.zero))

    def effects(self) -> dict[str, tuple]:
        """{integrated site that belongs to no datum and is no GP: (mean, {site j: D_j})}: its value
        is mean + sum_j D_j w_j, w_j ~ N(0, I) behind the columns of site j; D_j (U, U_j), without
        the zeros of a site whose entries are seen one by one.
        """
        tables = {k: fn for k, fn in self.fns.items() if k not in self.axes}
        wanted = [k for k, fn in tables.items() if not isinstance(unwrap(fn), GP)]

        def behind(j, fn):
            values = lambda x: {k: self.values({j: x})[k] for k in wanted}  # noqa: E731
            return factor_of(values, fn, self.zero[j])

        mean = self.values({})
        seen = {j: behind(j, fn) for j, fn in tables.items()}
        return {k: (mean[k], {j: parts[k] for j, parts in seen.items()}) for k in wanted}
