"""A model of several Gaussian sites as a model of one GP site: its linear predictor.

`collapse(model, ...)` is an ordinary model again: the hyperparameters as they are declared, one GP
site, `eta`, over the rows of the model's arguments, and the observed sites computed from eta. So
every method and every verb for one function of a datum takes it as it stands.

`Plan` is what `collapse` finds in a model: which sites are integrated, and what the observed sites
are computed from.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro import handlers

from ppl_gp.errors import DataError
from ppl_gp.gp import GP, unwrap
from ppl_gp.kernels.base import Kernel
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.declared import Declared
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.predictor.parts import (
    Loadings,
    columns,
    factor_of,
    loadings,
)
from ppl_gp.reading.predictor.predictor import (
    ObservedPart,
    Rest,
    Traced,
    innovate,
    innovations,
    observed_part,
    shapes,
    traced,
    traced_at,
)
from ppl_gp.reading.predictor.prior import PredictorGP, RowsKernel
from ppl_gp.reading.predictor.sites import mean_of
from ppl_gp.reading.predictor.skeleton import Skeleton
from ppl_gp.reading.reading import Reading
from ppl_gp.reading.roles import is_observed
from ppl_gp.reading.tracing import run, sample_hyper


class Observed(NamedTuple):
    """An observed site: its name without what `obs_mask` adds, and the paths of the arguments that
    its distribution and its value are computed from.
    """

    label: str
    fn: tuple[str, ...]
    value: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What was found: the integrated sites, how many functions of them a datum sees, the axis of
    the data of those with one entry per datum, from the right, and what the predictor's site is
    called. `seen`: paths of arguments with one entry per datum that the predictor is computed from,
    and no distribution: of a likelihood that is a factor.
    """

    sites: tuple[str, ...]
    functions: int
    independent: bool  # whether the functions are, a priori
    softmax: tuple[int, ...]  # which function each score of the one categorical site is, if any
    axes: tuple[tuple[str, int], ...]
    observed: tuple[tuple[str, Observed], ...]
    hyper: tuple[str, ...]
    name: str
    seen: tuple[str, ...] = ()


def with_predictor(reading: Reading, plan: Plan) -> Reading:
    """The reading with the predictor in place of what it integrates."""
    left = lambda pairs: tuple((k, v) for k, v in pairs if k not in plan.sites)  # noqa: E731
    paths = tuple(dict.fromkeys(p for k, v in reading.kernels if k in plan.sites for p in v))
    return replace(
        reading,
        axes=(*left(reading.axes), (plan.name, 0)),
        shaping=(*reading.shaping, *plan.seen),
        needed=(*reading.needed, *plan.seen),
        spread=left(reading.spread),
        variance=left(reading.variance),
        kernels=(*left(reading.kernels), *([(plan.name, paths)] if paths else [])),
    )


class Moved(NamedTuple):
    """Integrated sites at rows, by their innovations e = z - c: {site: distribution}, {site: zero},
    e -> the predictor (R, N), e -> {site: value}. Sites that e lacks stand at zero.
    """

    fns: dict[str, dist.Distribution]
    zero: dict[str, jax.Array]
    eta: Callable
    values: Callable


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
        """The matrix k(x1_i, x2_j)."""
        return self.basis(X1).T @ self.basis(X2)

    def diag(self, X):
        """The vector k(x_n, x_n)."""
        return jnp.sum(self.basis(X) ** 2, 0)


class Collapsed(Declared):
    """The declared model `source` with its Gaussian sites `plan.sites` integrated into one,
    `plan.name`.
    """

    def __init__(self, source: Declared, plan: Plan, skeleton: Skeleton):
        super().__init__(source.function, with_predictor(source.reading, plan))
        self.source, self.plan, self.skeleton = source, plan, skeleton

    def __hash__(self):
        return hash((self.source, self.plan))

    def __eq__(self, other):
        mine = (self.source, self.plan, self.skeleton)
        return isinstance(other, Collapsed) and mine == (other.source, other.plan, other.skeleton)

    def __call__(self, *args, **kwargs):
        given = Leaves(self.source, args, kwargs).leaves
        num, arrays = self.completed(args, kwargs)
        at = self.skeleton.arguments(arrays)
        hyper = sample_hyper(self.source, *at, without=self.plan.sites)
        rest = Rest(arrays, hyper)
        tables = {p: x for p, x in arrays.items() if p not in dict(self.skeleton.rows)}
        kernel = RowsKernel(self, tables, hyper)
        X = self.skeleton.packed(arrays, num)
        eta = numpyro.sample(self.plan.name, PredictorGP(kernel, X))
        for name, site in self._observed(eta, rest, num).items():
            self._emit(name, given, site)

    def completed(self, args: tuple, kwargs: dict) -> tuple[int, dict]:
        """(rows, {path: array}) with something in place of each array that is not given."""
        given = Leaves(self.source, args, kwargs).leaves
        num = self.skeleton.num_rows(given)
        return num, self.skeleton.complete(given, num)

    def _observed(self, eta, rest: Rest, num: int) -> dict[str, ObservedPart]:
        """The observed sites at a value of the predictor."""
        rows = jnp.reshape(eta, (self.plan.functions, num))
        if num > 1:
            return self._traced(rest).observed(rows, rest)
        trace = traced_at(self.source, self.skeleton, self._of_one_row(rows[:, 0], rest), rest)
        return {k: observed_part(s) for k, s in trace.items() if is_observed(s)}

    def _of_one_row(self, value, rest: Rest) -> dict[str, jax.Array]:
        """The smallest innovations whose predictor has this value, for one row: there, axes of the
        data cannot be told from others of size one, so that the row is taken twice.
        """
        twice, axes = self.skeleton.twice(rest.arrays), dict(self.plan.axes)
        both = Rest(twice, rest.hyper)
        here = self._traced(both)
        _, zero = self._sites(self.skeleton.arguments(twice), rest.hyper)
        first, pull = jax.vjp(lambda e: here.eta(e, both)[:, 0], zero)
        (slopes,) = jax.vmap(pull)(jnp.eye(len(first)))
        flat = [jnp.reshape(g, (len(g), -1)) for g in slopes.values()]
        gram = sum(g @ g.T for g in flat)
        step = jnp.linalg.pinv(gram) @ (value - first)
        found = {k: jnp.tensordot(step, g, 1) for k, g in slopes.items()}
        return {
            k: jnp.take(x, jnp.arange(1), axes[k]) if k in axes else x for k, x in found.items()
        }

    def loadings(self, X, tables: Mapping, hyper: dict) -> Loadings:
        """Of the predictor at rows; of one row as of the first of two."""
        rows = _at_least_two(X)
        rest, at = self._at_rows(rows, tables, hyper)
        here, (fns, zero) = self._traced(rest), self._sites(at, hyper)
        centred = run(self.source, *at, {**hyper, **zero}, zero)
        centres = {k: mean_of(centred[k]["fn"]) for k in fns}
        eta = lambda e: here.eta(e, rest)  # noqa: E731
        seen = lambda site: here.one_each(site, zero, rest)  # noqa: E731
        found = loadings(eta, fns, centres, dict(self.plan.axes), seen)
        return found if len(X) > 1 else found.first_row()

    def mean(self, X, tables: Mapping, hyper: dict) -> jax.Array:
        """Of the predictor at rows, (R, N)."""
        rows = _at_least_two(X)
        rest, _ = self._at_rows(rows, tables, hyper)
        zero = innovations(self.source, self.skeleton, shapes(rest), self.plan.sites)
        zero = {k: jnp.zeros(x.shape, x.dtype) for k, x in zero.items()}
        return self._traced(rest).eta(zero, rest)[:, : len(X)]

    def _at_rows(self, rows, tables: Mapping, hyper: dict) -> tuple[Rest, tuple]:
        """(what stays when z moves, the model's arguments) at rows."""
        arrays = self.skeleton.complete({**tables, **self.skeleton.unpacked(rows)}, len(rows))
        return Rest(arrays, hyper), self.skeleton.arguments(arrays)

    def priors(self, kernel: RowsKernel, X) -> dict[str, GP]:
        """{GP site among the integrated: its prior} at rows, other sites at their means; what its
        mean takes from other integrated sites is in `MeanKernel`.
        """
        _, at = self._at_rows(X, kernel.tables, kernel.hyper)
        fns, zero = self._sites(at, kernel.hyper)
        trace = run(innovate(self.source, zero), *at, kernel.hyper)
        found, behind = {}, self.mean_sites(kernel, X)
        for k in (k for k, fn in fns.items() if isinstance(unwrap(fn), GP)):
            prior = unwrap(trace[k]["fn"])
            if behind[k]:
                roots = {j: columns(fns[j], lambda e: e) for j in sorted(behind[k])}
                more = MeanKernel(self.source, k, at, kernel.hyper, zero, roots)
                jitter = prior.variance - prior.kernel.diag(prior.X)  # of the declared kernel
                prior = GP(prior.kernel + more, prior.X, prior.mean_function, jitter[0])
            found[k] = prior
        return found

    def mean_sites(self, kernel: RowsKernel, X) -> dict[str, frozenset[str]]:
        """{GP site among the integrated: the integrated sites that its prior mean is computed from,
        through others too}. Abstract.
        """
        _, at = self._at_rows(X, kernel.tables, kernel.hyper)
        fns, zero = self._sites(at, kernel.hyper)
        gps = [k for k, fn in fns.items() if isinstance(unwrap(fn), GP)]

        def means(e):
            trace = run(innovate(self.source, e), *at, kernel.hyper)
            return {k: unwrap(trace[k]["fn"]).mean for k in gps}

        return sources(means, zero)

    def seen_directly(self, kernel: RowsKernel, X) -> frozenset[str]:
        """The integrated sites that the observed ones are computed from in other ways than through
        another integrated site. Abstract.
        """
        _, at = self._at_rows(X, kernel.tables, kernel.hyper)
        _, values = self._sites(at, kernel.hyper)

        def likelihoods(values):
            trace = run(self.source, *at, {**kernel.hyper, **values}, values)
            return arrays_of([s["fn"] for s in trace.values() if is_observed(s)])

        return frozenset().union(*sources(likelihoods, values))

    def moved(self, kernel: RowsKernel, X) -> "Moved":
        """The integrated sites and the predictor at rows as functions of innovations; of one row as
        of the first of two.
        """
        _, at = self._at_rows(X, kernel.tables, kernel.hyper)
        rest, there = self._at_rows(_at_least_two(X), kernel.tables, kernel.hyper)
        here, (fns, zero) = self._traced(rest), self._sites(at, kernel.hyper)
        axes = dict(self.plan.axes)

        def wide(e):
            own = {**zero, **e}
            twice = {k: jnp.concatenate([own[k]] * 2, axis) for k, axis in axes.items()}
            return own if len(X) > 1 else {**own, **twice}

        def values(e):
            trace = run(innovate(self.source, wide(e)), *there, kernel.hyper)
            return {k: _first(trace[k]["value"], axes.get(k), len(X)) for k in fns}

        return Moved(fns, zero, lambda e: here.eta(wide(e), rest)[:, : len(X)], values)

    def effects(self, kernel: RowsKernel, X) -> dict[str, tuple]:
        """{integrated site that belongs to no datum and is no GP: (mean, {site j: D_j})}: its value
        is mean + sum_j D_j w_j, w_j ~ N(0, I) behind the columns of site j; D_j (U, U_j), without
        the zeros of a site whose entries are seen one by one.
        """
        here = self.moved(kernel, X)
        tables = {k: fn for k, fn in here.fns.items() if k not in dict(self.plan.axes)}
        wanted = [k for k, fn in tables.items() if not isinstance(unwrap(fn), GP)]

        def behind(j, fn):
            values = lambda x: {k: here.values({j: x})[k] for k in wanted}  # noqa: E731
            return factor_of(values, fn, here.zero[j])

        mean = here.values({})
        seen = {j: behind(j, fn) for j, fn in tables.items()}
        return {k: (mean[k], {j: parts[k] for j, parts in seen.items()}) for k in wanted}

    def site_shapes(self, kernel: RowsKernel, X) -> dict[str, tuple[int, ...]]:
        """{integrated site without rows: its shape}."""
        _, at = self._at_rows(X, kernel.tables, kernel.hyper)
        _, zero = self._sites(at, kernel.hyper)
        return {k: x.shape for k, x in zero.items() if k not in dict(self.plan.axes)}

    def _sites(self, at: tuple, hyper: dict) -> tuple[dict, dict]:
        """({integrated site: its distribution}, {integrated site: zero}) at arguments."""
        trace = run(self.source, *at, hyper)
        fns = {k: trace[k]["fn"] for k in self.plan.sites}
        return fns, {k: jnp.zeros(fn.shape()) for k, fn in fns.items()}

    def _traced(self, rest: Rest) -> Traced:
        return traced(self.source, self.skeleton, self.plan.sites, rest)

    def _emit(self, name: str, given: Mapping, site: ObservedPart) -> None:
        """Declare an observed site; one whose observations are not given is drawn, and a factor of
        observations that are not given is none.
        """
        sees = dict(self.plan.observed)[name]
        missing = [p for p in sees.value if given.get(p) is None]
        lacking = [p for p in sees.fn if given.get(p) is None and p not in self.reading.masking]
        if lacking:
            if isinstance(unwrap(site.fn), dist.Unit):
                return
            raise DataError(
                f"site '{name}' is computed from {lacking}, which is not given as an "
                "array of numbers: a list is an option, and labels need a fit to labels."
            )
        with ExitStack() as around:
            for frame in site.frames:
                around.enter_context(numpyro.plate(frame.name, frame.size, dim=frame.dim))
            if site.scale is not None:
                around.enter_context(handlers.scale(scale=site.scale))
            numpyro.sample(sees.label, site.fn, obs=None if missing else site.value)


def _first(x, axis: int | None, num: int):
    """The first rows of a site's value, of one that has rows."""
    return x if axis is None else lax.slice_in_dim(x, 0, num, axis=axis)


def _at_least_two(X):
    """Rows at which a predictor can be traced: one row twice."""
    return X if len(X) > 1 else jnp.concatenate([X, X])
