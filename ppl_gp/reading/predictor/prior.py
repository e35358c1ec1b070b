"""The prior of a linear predictor eta = offset + sum_k A_k z_k, of R functions a datum, as a GP
over rows of a model's arguments.

eta_n is computed from z by the arguments of row n alone, so that cov(eta(r), eta(r')) is a function
of two rows: the sum over the sites of a(r) C a(r')^T, each a part (`parts.py`).
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.gp import GP, unwrap
from ppl_gp.kernels.base import Kernel, jitter_of
from ppl_gp.numerics.blocks import diagonal_of, matrix_of
from ppl_gp.numerics.linalg import add_diagonal
from ppl_gp.numerics.low_rank import Covariance, Dense, Independent, Loads, LowRank, OneAndOthers
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.digest import arrays_of
from ppl_gp.reading.predictor.parts import (
    FEW_LEVELS,
    Levels,
    Loadings,
    Table,
    Weighted,
    added,
    columns,
    factor_of,
    loadings,
)
from ppl_gp.reading.predictor.predictor import Rest, Traced, innovate, mean_of
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
            prior = unwrap(trace[self.site]["fn"])
            return GP(prior.kernel, X, prior.mean_function).mean

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
        self.rest = Rest(arrays if self.num > 1 else skeleton.twice(arrays), self.hyper)
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
        if site in self.moved.lone:
            return x[0]
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
        jitter = jitter_of(prior.kernel, prior.X) if prior.jitter is None else prior.jitter
        return GP(prior.kernel + more, prior.X, prior.mean_function, jitter)

    def mean_sites(self) -> dict[str, frozenset[str]]:
        """{integrated GP site: integrated sites behind its mean, through others too}. Abstract."""
        gps = [k for k, fn in self.fns.items() if isinstance(unwrap(fn), GP)]

        def means(e):
            trace = run(innovate(self.source, e), *self.args, self.hyper)
            return {k: unwrap(trace[k]["fn"]).mean for k in gps}

        return sources(means, self.zero)

    def seen_directly(self) -> frozenset[str]:
        """The integrated sites that observed ones see, not only through another one. Abstract."""

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


class RowsKernel(Kernel):
    """cov(eta(r), eta(r')) of rows r, r' of a model's arguments, as columns of numbers (N, D)."""

    model: Any = eqx.field(static=True)  # a `Collapsed`
    tables: dict[str, Any]  # arguments that belong to no datum
    hyper: dict[str, Any]
    own: bool = eqx.field(default=True, static=True)  # whether effects of each row count

    @property
    def functions(self) -> int:
        """R."""
        return self.model.plan.functions

    def at(self, X) -> Loadings:
        """The predictor at rows."""
        whole = Behind(self, X).loadings()
        return whole if self.own else whole.without_own()

    def __call__(self, X1, X2):
        return _asked(self, _cross, X1, *([] if X2 is X1 else [X2]))

    def diag(self, X):
        return _asked(self, Loadings.diag, X)

    def separate(self, X) -> Float[Array, "R N N"]:
        """k(X, X) of functions that are independent a priori, jitter included."""
        return _asked(self, _separate, X)

    def separate_cross(self, X1, X2) -> Float[Array, "R N M"]:
        """k(X1, X2) of such functions, a block each."""
        return _asked(self, _each, X1, *([] if X2 is X1 else [X2]))


class PredictorGP(GP):
    """The prior of eta at rows of a model's arguments, (N,), or (R, N) where a datum sees R
    functions. What a row shares with no other (a GP's jitter, per-datum effects) is on
    the diagonal of the covariance, as jitter is.

    The R functions stand where those of any GP site do, in the batch shape, and are correlated:
    moments are of all (R N,) values, functions outermost, and there is no density of one function.
    """

    def __init__(self, kernel: RowsKernel, X):
        super().__init__(kernel, X)
        R = kernel.functions
        self._batch_shape = () if R == 1 else (R,)

    def without_own(self) -> "PredictorGP":
        """The same without per-datum effects: they are held at their means."""
        return PredictorGP(dataclasses.replace(self.kernel, own=False), self.X)

    @property
    def behind(self) -> Behind:
        """The sites that it is made of, at its rows."""
        return Behind(self.kernel, self.X)

    @property
    def mean(self):
        """The predictor at the sites' means, (N,) or (R, N)."""
        mean = _mean(self.kernel, self.X)
        return mean[0] if self.kernel.functions == 1 else mean

    @property
    def variance(self):
        """Variances, (R N,)."""
        return diagonal_of(_asked(self.kernel, Loadings.blocks, self.X))

    @property
    def covariance_matrix(self):
        """(R N, R N)."""
        return self.kernel(self.X, self.X) + matrix_of(_asked(self.kernel, Loadings.jitter, self.X))

    def sample(self, key, sample_shape=()):
        """Draws of all functions, sample_shape + (N,) or (R, N)."""
        white = random.normal(key, (*sample_shape, self.mean.size), self.X.dtype)
        return self.mean + jnp.reshape(white @ self.scale_tril.T, sample_shape + self.shape())

    def log_prob(self, value):
        """log N(value; m, K), nats, of one function; several have no density each."""
        if self.kernel.functions > 1:
            raise NotImplementedError("the functions of a predictor are correlated.")
        return super().log_prob(value)


# What is asked for in tens of places: compiled as functions of their own, the model is traced once.
@eqx.filter_jit
def _asked(kernel: RowsKernel, question: Callable, *rows):
    """Of the predictor at some rows, or at two sets of them."""
    return question(*map(kernel.at, rows))


@eqx.filter_jit
def _mean(kernel: RowsKernel, X):
    return Behind(kernel, X).eta({})


def _cross(first: Loadings, second: Loadings | None = None):
    return first.cross(first if second is None else second)


def _separate(whole: Loadings):
    return jax.vmap(add_diagonal)(_each(whole), jnp.einsum("rrn->rn", whole.jitter()))


def _each(first: Loadings, second: Loadings | None = None) -> Float[Array, "R n m"]:
    """Covariances of each function with itself, without `jitter`."""
    there = first.parts if second is None else second.parts
    parts = {k: p for k, p in first.parts.items() if isinstance(p, Weighted)}
    return added([p.separate(there[k]) for k, p in parts.items()])  # pyright: ignore[reportArgumentType]


def _loads(whole: Loadings) -> Loads:
    return side_by_side(whole.parts, widest(whole.parts))


def widest(parts: dict) -> str | None:
    """The site of most unknowns of which each row is proved to see one; of equal ones the first."""
    sizes = {k: parts[k].num for k in sorted(parts) if isinstance(parts[k], Levels)}
    return max(sizes, key=sizes.__getitem__) if sizes else None


def side_by_side(parts: dict, levels: str | None) -> Loads:
    """F of the tables, the sites in alphabetical order; `levels` by what each row sees of it."""
    tables: dict[str, Table] = {k: parts[k] for k in sorted(parts) if isinstance(parts[k], Table)}
    most = tables.get(levels) if levels is not None else None
    if levels is None or not isinstance(most, Levels):
        return Dense(jnp.concatenate([part.flat for part in tables.values()], 1))
    flat = {k: part.flat for k, part in tables.items() if k != levels}
    start = sum(F.shape[1] for k, F in flat.items() if k < levels)
    others = jnp.concatenate([jnp.zeros((len(most.weight), 0)), *flat.values()], 1)
    return OneAndOthers(most.index, most.weight, others, most.num, start)


def loads_of(prior: Any) -> Loads:
    """F at the rows of a predictor's prior, the sites in alphabetical order."""
    return _asked(prior.kernel, _loads, prior.X)


def blocks_of(prior: Any) -> Float[Array, "R R n"]:
    """Covariances of the functions within a row."""
    return _asked(prior.kernel, Loadings.blocks, prior.X)


def covariance_of(prior: GP) -> Covariance:
    """Cov[f] at a prior's inputs in the form that fits: columns of unknowns where a predictor sees
    fewer of them than there are data, and nothing that has one entry per datum; a matrix a function
    where several are independent; else an array, with few columns beside it where there are any.
    """
    if not isinstance(prior, PredictorGP):
        return prior.covariance_matrix
    plan = prior.kernel.model.plan
    if not plan.axes and (F := loads_of(prior)).shape[1] < F.shape[0]:
        return LowRank(F)
    if plan.independent and plan.functions > 1:
        return Independent(prior.kernel.separate(prior.X))
    beside = _asked(prior.kernel, _beside, prior.X)
    return prior.covariance_matrix if beside is None else beside


def _beside(here: Loadings) -> LowRank | None:
    """The covariance with the columns of the smallest tables beside all else, if there are any."""
    tables = sorted((p.num_unknowns, k) for k, p in here.parts.items() if isinstance(p, Table))
    few: list[Table] = []
    others, left = dict(here.parts), max(FEW_LEVELS, here.offset.shape[1] // 8)
    for size, k in tables:
        if size <= left and len(others) > 1:
            few, left = [*few, others.pop(k)], left - size
    if not few:
        return None
    rest = Loadings(here.offset, others)
    flat = jnp.concatenate([part.flat for part in few], 1)
    return LowRank(Dense(flat), rest.cross(rest) + matrix_of(rest.jitter()))
