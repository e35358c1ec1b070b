"""A model of several Gaussian sites as a model of one GP site: its linear predictor.

`collapse(model, ...)` is an ordinary model again: the hyperparameters as they are declared, one GP
site, `eta`, over the rows of the model's arguments, and the observed sites computed from eta. So
every method and every verb for one function of a datum takes it as it stands.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from ppl_gp.errors import DataError, warn
from ppl_gp.gp import bare, hidden_axes, unwrap
from ppl_gp.quick import quick_jit
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.predictor.predictor import Innovated, ObservedPart, Rest
from ppl_gp.reading.predictor.prior import PredictorGP, RowsKernel
from ppl_gp.reading.predictor.skeleton import Skeleton
from ppl_gp.reading.reading import Declared, Reading
from ppl_gp.reading.tracing import sample_hyper


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
    and no distribution: of a likelihood that is a factor. `lone`: as `Innovated` has it; `coupled`:
    as `Cut` does.
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
    lone: tuple[str, ...] = ()
    coupled: tuple[tuple[str, str, str], ...] = ()


def with_predictor(reading: Reading, plan: Plan) -> Reading:
    """The reading with the predictor in place of what it integrates."""
    left = lambda pairs: tuple((k, v) for k, v in pairs if k not in plan.sites)  # noqa: E731
    seeing = lambda names: tuple(plan.name if k in plan.sites else k for k in names)  # noqa: E731
    paths = tuple(dict.fromkeys(p for k, v in reading.kernels if k in plan.sites for p in v))
    return replace(
        reading,
        axes=(*left(reading.axes), (plan.name, 0)),
        shaping=(*reading.shaping, *plan.seen),
        needed=(*reading.needed, *plan.seen),
        spread=left(reading.spread),
        variance=left(reading.variance),
        priors=tuple((k, seeing(names)) for k, names in left(reading.priors or ())),
        kernels=(*left(reading.kernels), *([(plan.name, paths)] if paths else [])),
        coupled=(*((k, how) for k, how, _ in plan.coupled), *reading.coupled),
        lines=(*((k, line) for k, _, line in plan.coupled), *reading.lines),
    )


class Collapsed(Declared):
    """The declared model `source` with its sites `plan.sites` integrated into one, `plan.name`."""

    def __init__(self, source: Declared, plan: Plan, skeleton: Skeleton):
        super().__init__(source.function, with_predictor(source.reading, plan))
        self.source, self.plan, self.skeleton = source, plan, skeleton

    @property
    def moved(self) -> Innovated:
        """The declared model by innovations of the integrated sites."""
        return Innovated(self.source, self.skeleton, self.plan.sites, self.plan.lone)

    @property
    def tied(self) -> list[str]:
        """Integrated sites with an entry for each row of the data and covariances between them (a
        random walk over the rows), of which other rows have none.
        """
        return [k for k in self.plan.sites if k in self.reading.whole]

    def __hash__(self):
        return hash((self.source, self.plan))

    def __eq__(self, other):
        mine = (self.source, self.plan, self.skeleton)
        return isinstance(other, Collapsed) and mine == (other.source, other.plan, other.skeleton)

    def __call__(self, *args, **kwargs):
        given = Leaves(self.source, args, kwargs).leaves
        num, arrays = self.completed(args, kwargs)
        hyper = sample_hyper(self.source, *self.skeleton.arguments(arrays), without=self.plan.sites)
        rest = Rest(arrays, hyper)
        tables = {p: x for p, x in arrays.items() if p not in dict(self.skeleton.rows)}
        prior = PredictorGP(RowsKernel(self, tables, hyper), self.skeleton.packed(arrays, num))
        eta = numpyro.sample(self.plan.name, prior)
        for name, site in self._observed(prior, eta, rest).items():
            self._emit(name, given, site)

    def completed(self, args: tuple, kwargs: dict) -> tuple[int, dict]:
        """(rows, {path: array}) with something in place of each array that is not given."""
        given = Leaves(self.source, args, kwargs).leaves
        num = self.skeleton.num_rows(given)
        return num, self.skeleton.complete(given, num)

    def _observed(self, prior: PredictorGP, eta, rest: Rest) -> dict[str, ObservedPart]:
        """The observed sites at a value of the predictor; at one row, of which no jaxpr tells the
        axis of the data, through the smallest innovations that give it.
        """
        rows = jnp.reshape(eta, (self.plan.functions, len(prior.X)))
        if len(prior.X) > 1:
            return self.moved.at(rest).observed(rows, rest)
        here = prior.behind
        first, pull = jax.vjp(lambda e: here.eta(e)[:, 0], here.zero)
        (slopes,) = jax.vmap(pull)(jnp.eye(len(first)))
        flat = [jnp.reshape(g, (len(g), -1)) for g in slopes.values()]
        gram = jnp.sum(jnp.stack([g @ g.T for g in flat]), 0)
        scale = jnp.sqrt(jnp.maximum(jnp.diag(gram), jnp.finfo(gram.dtype).tiny))  # a column's, say
        step = jnp.linalg.pinv(gram / scale / scale[:, None]) @ ((rows[:, 0] - first) / scale)
        step = step / scale
        return self.moved.observed({k: jnp.tensordot(step, g, 1) for k, g in slopes.items()}, rest)

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
            others = [k for k, s in self.plan.observed if {*lacking} & {*s.value}]
            raise DataError(
                f"site '{name}' is computed from {lacking}, which "
                + (
                    f"site '{others[0]}' observes: a fit by pg.NUTS() draws both, by fit.sample()."
                    if others
                    else "is not given as an array of numbers: a list is an option, and labels "
                    "need a fit to labels."
                )
            )
        masks = [p for p in sees.fn if p in self.reading.masking and given.get(p) is None]
        fn = site.fn
        if any(self.skeleton.entry(p).dtype != bool for p in masks):  # a stand-in might not count
            fn = bare(fn).to_event(hidden_axes(fn))
        with ExitStack() as around:
            for frame in site.frames:
                around.enter_context(numpyro.plate(frame.name, frame.size, dim=frame.dim))
            if site.scale is not None:
                around.enter_context(handlers.scale(scale=site.scale))
            numpyro.sample(sees.label, fn, obs=None if missing else site.value)


def require_levels(model: Collapsed, args: tuple, kwargs: dict, hyper: dict) -> None:
    """Raise `DataError` where an index of an effect, or of a place, is out of its range, which
    JAX would take for the nearest one inside. Not under `jit`.
    """
    names, found = _looked_up(model, args, kwargs, hyper)
    for indices, sizes, places, signed in found:
        outside = np.asarray((indices < 0) | (indices >= jnp.asarray(sizes)))
        paths = [p for i in places if i < len(names) and (p := names[i])]
        if (below := min((int(np.min(x)) for x in signed), default=0)) < 0:
            warn(
                f"argument {paths} leads to negative indices ({below}), which count from the end: "
                "-1 is the last level. Start at 0; if -1 stands for a missing group (as "
                "pandas.factorize has it), give that a level of its own."
            )
        if outside.any():
            rows, bad = outside.any(-1), np.asarray(indices)[outside]
            if len(signed) == 1 and signed[0].shape == rows.shape:  # before JAX adds the size
                bad = np.asarray(signed[0])[rows]
            raise DataError(
                f"argument {paths} leads to the index {np.unique(bad)[:3].tolist()}, and what it "
                f"looks up has {[n for n in sizes if n > 1] or sizes} entries: a level that the "
                "model does not have. Declare as many members of the plate as there are levels, "
                "new ones included: those without data keep their prior. If a table has the "
                "members, give it with the new ones at its end."
            )


@quick_jit
def lacks_levels(model: Collapsed, args: tuple, kwargs: dict, hyper: dict):
    """Whether `require_levels` has something to say, of which it needs the values."""
    _, found = _looked_up(model, args, kwargs, hyper)
    told = [jnp.any((i < 0) | (i >= jnp.asarray(sizes))) for i, sizes, *_ in found]
    told += [jnp.any(x < 0) for *_, signed in found for x in signed]
    return jnp.any(jnp.stack([jnp.zeros((), bool), *told]))


def _looked_up(model: Collapsed, args: tuple, kwargs: dict, hyper: dict) -> tuple[list, list]:
    """(names of the inputs by their places, what `Predictors.looked_up` finds)."""
    num, arrays = model.completed(args, kwargs)
    rest = Rest(arrays if num > 1 else model.skeleton.twice(arrays), hyper)
    zero = {k: np.zeros(x.shape, x.dtype) for k, x in model.moved.innovations(rest).items()}
    names = [None] * len(jax.tree.leaves(zero)) + sorted(arrays)
    return names, model.moved.at(rest).predictors.looked_up(zero, rest)
