"""`hyper=Grid()`: the hyperparameters integrated over a few points about their mode, in the manner
of INLA (Rue, Martino & Chopin 2009, section 3).

In unconstrained coordinates theta: the mode of log evidence + log prior + log |J|, its curvature by
central differences of exact gradients, and one evaluation of the log evidence at each point of a
design in the rotated and scaled coordinates: for up to three hyperparameters a lattice that grows
with the posterior, for more a composite design (`composite`), stretched along half axes where the
posterior is skewed, and compared with one line per hyperparameter. A lattice has a point where the
tangent from a neighbour, an upper bound of a log-concave density, gives it more than a small share
of the mass or of the variance of a hyperparameter: it follows skewed, heavy and bent tails.

Ctrl-C leaves the point that the search had reached, or the mode: one draw of the hyperparameters.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.special import logsumexp

from ppl_gp.draws import Draws
from ppl_gp.errors import ModelError, Result, warn
from ppl_gp.infer.hyper.map import maximise
from ppl_gp.infer.hyper.point import LocalProblem, Point, fit_at, infer_hyper, warn_if_wide
from ppl_gp.infer.hyper.restarts import UNUSABLE, Ascent, Evaluation, evaluate
from ppl_gp.infer.hyper.sample import kept_of_draws
from ppl_gp.infer.hyper.space import transform
from ppl_gp.infer.maximised import require_bounded
from ppl_gp.local.natural import as_general, as_kept
from ppl_gp.quick import quick_jit
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import Stage, interruptible, verb
from ppl_gp.settings import Grid

# From here on a posterior counts as no Gaussian, besides a stretch that had to be cut: the share of
# the points that one would use, and the mass that a lattice leaves out.
_FEWEST, _OUT = 0.2, 0.1
_PADDED = 256  # points to a multiple of which a compiled call is filled up
_STEP = 5e-3  # of the differences: their error is its square, and the gradient's error over it
MOST_POINTS = 49  # of a composite design
MOST = 8  # hyperparameters; beyond, fractions of the corners no longer tell them apart
_RADIUS = 1.1  # f_0 of Rue, Martino & Chopin 2009, section 6.5: how far beyond sqrt(d)
ASKED_AT = np.sqrt(2.0)  # standard deviations from the mode where skewness is looked for
WIDEST = 3.0  # and its reciprocal: what a half axis may be stretched by
REGULAR = 3  # hyperparameters up to which a lattice is cheap: 17, 37 and 93 points at first
# standard deviations: sums over steps of 1.25 are exact to 1e-5 for a Gaussian; finer where cheap
_STEPS = {1: 0.5, 2: 1.0, 3: 1.25}
_BALL = {1: 4.0, 2: 3.5, 3: 3.6}
_REACH, _MOST = 16.0, 400  # standard deviations, and points, beyond which none is added
_AT_ONCE = {3: 31}  # or a multiple are added, so that few sizes are compiled
_MASS, _SPREAD = 3e-4, 4e-3  # of the mass and of a variance: shares of a point that counts
_LEAST = -700.0  # of a log weight that is kept: its exponential is a number
_LOST = 1e-3  # of the weight: a share of points that failed from which on it is reported
_TOLD = 0.05, 0.2  # from which on shares that are left out are reported
# of the two-level design in five factors, the columns that further factors are products of
_PRODUCTS = ((0, 1, 2, 3, 4), (0, 1, 2), (0, 3, 4))


class Lattice(NamedTuple):
    """Points (n, d) in standard deviations, each for so much of log volume over (2 pi)^(d / 2); how
    far the log density falls there; the shares that are left out of the mass, and of the variance
    of hyperparameter `worst`.
    """

    points: np.ndarray
    log_design: np.ndarray
    falls: np.ndarray
    mass: float
    spread: float
    worst: int


@infer_hyper.register
def _fit_grid(config: Grid, problem: LocalProblem) -> Fit:
    label = f"{type(problem.method).__name__}(hyper=Grid())"
    require_bounded(problem.trace, problem.model.reading, label)
    _require_few_with_priors(problem)
    ascent, mode = maximise(config, problem, jacobian=True)
    if not verb.ended:  # a search that was stopped has no mode to lay points about
        laid, _ = interruptible(_lay(ascent, mode), label, 3, problem.progress)
        if laid is not None:
            return _fit(problem, ascent, mode, laid)
    warn(
        f"{label}: Ctrl-C came before the grid was complete. The fit has the best hyperparameters "
        "of the search, as if they were known, so predictions are too certain, above all with few "
        "data. Fit again for the grid, or use hyper=MAP(), which takes less time."
    )
    return fit_at(problem, mode)


class _Laid(NamedTuple):
    """The points about the mode, and what was found there."""

    scales: np.ndarray  # S of the covariance S S^T
    stretch: np.ndarray | None
    beyond: Lattice
    result: Result
    at: Evaluation


def _lay(ascent: Ascent, mode: Point) -> Iterator[Stage[_Laid | None]]:
    """The curvature, the half axes and the points, one after another."""
    yield Stage(None, 0)
    centre, rebuild = ravel_pytree(ascent.space.unconstrain(mode.hyper))
    d, asked, best = centre.size, [], np.asarray(ravel_pytree(mode.hyper)[0], float)
    scales, result = _scales(ascent, centre, rebuild, mode)
    yield Stage(None, 1)

    def ask(points):
        asked.append(_at(ascent, centre + points @ scales.T, rebuild, mode))
        loss = np.asarray(asked[-1].loss)
        fallen = np.where(loss < UNUSABLE, loss + mode.stats["log_posterior"], np.inf)
        return fallen, _slopes(asked[-1]) @ scales

    def values(points):
        filled = np.pad(points, ((0, -len(points) % _PADDED), (0, 0)))
        there = _values(ascent.space, mode.hyper, centre + filled @ scales.T)[: len(points)]
        eps = 16.0 * np.finfo(there.dtype).eps
        # float64 from here on, whose squares of what overflows in float32 are numbers
        there = np.nan_to_num(np.asarray(there, float), nan=0.0, posinf=1e100, neginf=-1e100)
        return np.where(np.abs(there - best) > eps * np.abs(best), there - best, 0.0)

    widths = None
    if d > REGULAR:
        widths = half_widths(ask(ASKED_AT * np.concatenate([np.eye(d), -np.eye(d)]))[0])
        beyond = compared(ask, values, *stretched(*composite(d), widths), scales)
        asked = asked[-1:]
    else:
        beyond = grow(ask, values, d)
    yield Stage(None, 2)
    if len({type(at.solution.sites) for at in asked}) > 1:  # of a softmax, as a point failed
        asked = [as_general(at) for at in asked]
    at = jax.tree.map(lambda *xs: jnp.concatenate(xs), *asked)
    yield Stage(_Laid(scales, widths, beyond, result, at), 3)


def _require_few_with_priors(problem: LocalProblem) -> None:
    """No search for a mode that no design would be laid about."""
    if problem.found.params or not problem.found.hyper:
        raise ModelError(
            f"Grid() integrates hyperparameters under their priors; the model has hyperparameters "
            f"{list(problem.found.hyper)}, and params without a prior {list(problem.found.params)}."
            " Declare them by numpyro.sample, or use MAP() or Fixed({...})."
        )
    sites = [problem.trace[name] for name in problem.found.hyper]
    free = lambda: [transform(s).inv(1.0 * jnp.asarray(s["value"])) for s in sites]  # noqa: E731
    if (d := sum(int(np.prod(x.shape)) for x in jax.eval_shape(free))) > MOST:
        raise ModelError(
            f"Grid() of {d} hyperparameters: its design is for up to {MOST}; use Sample()."
        )


def _scales(ascent: Ascent, centre, rebuild, mode: Point):
    """(S with S S^T the covariance of theta at the mode, how it ended)."""
    d = centre.size
    steps = _STEP * np.concatenate([np.eye(d), -np.eye(d)])
    slopes = _slopes(_at(ascent, centre + steps, rebuild, mode))
    H = (slopes[:d] - slopes[d:]) / (2.0 * _STEP)
    values, V = np.linalg.eigh(0.5 * (H + H.T))
    if not (np.all(np.isfinite(values)) and values[0] > 0):
        return V, Result.negative_curvature
    return V / np.sqrt(values), mode.result


def _slopes(at: Evaluation) -> np.ndarray:
    return np.asarray(jax.vmap(lambda s: ravel_pytree(s)[0])(at.slopes))


@quick_jit
def _values(space, hyper, thetas):
    rebuild = ravel_pytree(space.unconstrain(hyper))[1]
    return jax.vmap(lambda t: ravel_pytree(space.constrain(rebuild(t)))[0])(thetas)


def _at(ascent: Ascent, thetas, rebuild, mode: Point) -> Evaluation:
    """Loss, gradient and solution at points (n, d), each from the mode's pseudo-likelihood: of a
    softmax in its own form, unless a point fails in it. Calls have one size, compiled once.
    """
    n, d = thetas.shape
    size = len(first_points(d)) if d <= REGULAR else MOST_POINTS
    points, skipped = jax.vmap(rebuild)(jnp.resize(thetas, (size, d))), jnp.arange(size) >= n

    def ask(sites):
        many = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), sites)
        return jax.tree.map(lambda x: x[:n], evaluate(ascent, points, many, skipped))

    kept, general = as_kept(mode.solution.sites), as_general(mode.solution.sites)
    at = ask(kept)
    solved = np.all(np.asarray(at.loss) < UNUSABLE)
    return at if solved or type(kept) is type(general) else ask(general)


def _fit(problem: LocalProblem, ascent: Ascent, mode: Point, laid: _Laid) -> Fit:
    scales, stretch, beyond, result, at = laid
    points, log_design = beyond.points, beyond.log_design
    centre, rebuild = ravel_pytree(ascent.space.unconstrain(mode.hyper))
    solved = np.asarray(at.loss) < UNUSABLE
    # a point that the model itself excludes, by a density of zero, has no weight to lose
    excluded = np.isneginf(at.value) & (np.asarray(at.solution.code) == Result.converged.code)
    log_weights = np.where(solved, -np.asarray(at.loss), -np.inf) + log_design
    total = float(np.asarray(logsumexp(log_weights)))
    with np.errstate(invalid="ignore"):  # where no point was solved
        log_weights = log_weights - total
    names = [k for k, x in sorted(mode.hyper.items()) for _ in range(np.size(x))]
    gaussian = log_design - 0.5 * np.sum(points**2, 1)
    reach = {
        "grid_points": len(points),
        "grid_failed": warn_if_failed(~(solved | excluded), gaussian),
        "grid_effective": effective(log_weights),
        "grid_effective_gaussian": effective(gaussian),
        **({} if stretch is None else {"grid_stretch": stretch}),
        **warn_if_tails(beyond, names),
    }
    # what failed has no q to mix; all points stay where all failed, as NaN is not below
    used = ~(log_weights < _LEAST)
    log_weights, points = log_weights[used], points[used]
    hyper = jax.vmap(lambda z: ascent.space.constrain(rebuild(centre + scales @ z)))(points)
    site, sites = problem.site, jax.tree.map(lambda x: x[used], at.solution.sites)
    kept, ratios, sound = kept_of_draws(problem.setting, hyper, sites)
    half = 0.5 * len(centre) * np.log(2.0 * np.pi) + np.linalg.slogdet(scales)[1]
    return problem.fit(
        draws=Draws(hyper, {}, {site: kept}, jnp.asarray(log_weights)),
        log_evidence=None,
        result=_ended(result, reach, total) if np.all(sound) else Result.nonfinite,
        stats={
            **mode.stats,
            **warn_if_wide(problem.method, ratios, np.exp(log_weights)),
            **reach,
            # log p(y), the hyperparameters integrated too
            "log_marginal_likelihood": float(total + half),
            "steps": int(mode.solution.steps),
            "residual": float(jnp.max(at.solution.residual[used])),
        },
        sampled=True,
    )


def _ended(result: Result, reach: dict, total: float) -> Result:
    """The search's result, unless the weights say that the design does not hold the posterior."""
    if not np.isfinite(total):
        return Result.nonfinite
    few = reach["grid_effective"] < _FEWEST * reach["grid_effective_gaussian"]
    cut = np.max(np.abs(np.log(reach.get("grid_stretch", 1.0)))) > 0.999 * np.log(WIDEST)
    out = "grid_stretch" not in reach and reach["grid_missing_mass"] > _OUT
    return Result.not_gaussian if result is Result.converged and (few or cut or out) else result


def effective(log_weights: np.ndarray) -> float:
    """The number of equal weights that vary as little: (sum w)^2 / sum w^2."""
    weights = np.exp(log_weights - np.max(log_weights))
    return float(np.sum(weights) ** 2 / np.sum(weights**2))


def half_widths(falls: np.ndarray) -> np.ndarray:
    """(2 d,) of the half axes +e_1, ..., +e_d, -e_1, ..., -e_d: the standard deviation of a
    Gaussian that falls by so many nats (2 d,) from the mode to `ASKED_AT` there.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        widths = ASKED_AT / np.sqrt(2.0 * falls)
    widths = np.where(falls > 0, widths, WIDEST)  # flat, or rising: as far as is allowed
    return np.clip(np.where(np.isfinite(falls), widths, 1.0 / WIDEST), 1.0 / WIDEST, WIDEST)


def stretched(points, log_weights, widths) -> tuple[np.ndarray, np.ndarray]:
    """A design in coordinates that each half axis has its own width in (Rue, Martino & Chopin 2009,
    section 6.5, for skewed posteriors): z_i = u_i times the width of its side, whose Jacobian goes
    into the weights.
    """
    up, down = np.split(widths, 2)
    side = np.where(points > 0, up, np.where(points < 0, down, 0.5 * (up + down)))
    return points * side, log_weights + np.sum(np.log(side), 1)


def composite(d: int) -> tuple[np.ndarray, np.ndarray]:
    """(points (n, d), log weights (n,)), 15 to 49: sum_n w_n g(z_n) is about
    int g(z) dz / (2 pi)^(d / 2), for g close to exp(-z^2 / 2). The centre, and a sphere whose
    weights make the second moments those of a Gaussian (Rue, Martino & Chopin 2009, section 6.5).
    """
    axes = np.concatenate([np.eye(d), -np.eye(d)]) * np.sqrt(d)
    sphere = _RADIUS * np.concatenate([_corners(d), axes])
    points = np.concatenate([np.zeros((1, d)), sphere])
    # Centre and sphere together have mass one and second moment d: the sphere's share is 1 / f_0^2.
    share = np.log(1.0 / _RADIUS**2 / len(sphere)) + 0.5 * d * _RADIUS**2
    return points, np.array([np.log(1.0 - 1.0 / _RADIUS**2), *[share] * len(sphere)])


def _corners(d: int) -> np.ndarray:
    base = np.array(list(itertools.product((-1.0, 1.0), repeat=min(d, 5))))
    further = [np.prod(base[:, columns], 1) for columns in map(list, _PRODUCTS[: max(0, d - 5)])]
    return np.column_stack([base, *further])


def first_points(d: int) -> np.ndarray:
    """(n, d) integers: a ball of the lattice."""
    most = int(_BALL[d] / _STEPS[d])
    ball = np.array(list(itertools.product(range(-most, most + 1), repeat=d)))
    return ball[np.sum(ball**2, 1) <= (_BALL[d] / _STEPS[d]) ** 2]


def grow(ask: Callable, values: Callable, d: int) -> Lattice:
    """`ask(z)`: how far the log density falls from the mode at points z (n, d), and its slopes
    (n, d). `values(z)`: the hyperparameters there less those at the mode, (n, m), finite.
    """
    step, at_once, new = _STEPS[d], _AT_ONCE.get(d, 1), first_points(d)
    moves, size = np.concatenate([np.eye(d, dtype=int), -np.eye(d, dtype=int)]), len(new)
    falls, ahead = {}, {}  # at points that were asked, and by tangents at their neighbours
    while len(new) and len(falls) + len(new) <= _MOST:
        for q, fall, slope in zip(new, *ask(step * new), strict=True):
            falls[tuple(q)] = fall
            for move in moves:
                there, tangent = tuple(q + move), fall + step * float(slope @ move)
                ahead[there] = min(ahead.get(there, np.inf), max(tangent, 0.0))
        ahead = {q: tangent for q, tangent in ahead.items() if q not in falls}
        z = step * np.array([*falls, *ahead], float)
        fall, known = np.array([*falls.values(), *ahead.values()]), len(falls)
        x, p = values(z), np.exp(min(0.0, np.min(fall)) - fall)[:, None]
        shares = np.concatenate([p, p * (x - np.sum(p * x, 0) / max(p.sum(), 1e-300)) ** 2], 1)
        shares /= np.maximum(shares.sum(0), 1e-300)
        counts = np.max(shares[known:] / ([_MASS] + [_SPREAD] * (shares.shape[1] - 1)), 1)
        counts *= np.max(np.abs(z[known:]), 1) <= _REACH
        number = min(size, -(-np.sum(counts > 1.0) // at_once) * at_once)
        new = np.array([*ahead])[np.argsort(-counts, kind="stable")[:number]]
    mass, *spread = shares[known:].sum(0)
    volume = np.full(known, d * np.log(step / np.sqrt(2.0 * np.pi)))
    worst = int(np.argmax(spread))
    return Lattice(z[:known], volume, fall[:known], float(mass), float(spread[worst]), worst)


def compared(ask: Callable, values: Callable, points, log_design, scales: np.ndarray) -> Lattice:
    """A design in place of a lattice: it leaves out what a line has more of a variance."""

    def variances(z, log_design, fall):
        p, x = np.exp(log_design + min(0.0, np.min(fall)) - fall), values(z)
        p = p / max(p.sum(), 1e-300)
        return p @ (x - p @ x) ** 2

    lines = []
    for u in scales / np.linalg.norm(scales, axis=1, keepdims=True):

        def along(z, u=u):
            fall, slope = ask(z * u)
            return fall, slope @ u[:, None]

        line = grow(along, lambda z, u=u: values(z * u), 1)
        lines.append(variances(line.points * u, line.log_design, line.falls) / (1.0 - line.spread))
    fall = ask(points)[0]
    most = np.max(lines, 0)  # 0 of an entry that is constant
    left = (most - variances(points, log_design, fall)) / np.maximum(most, 1e-300)
    worst = int(np.argmax(left))
    return Lattice(points, log_design, fall, np.nan, max(float(left[worst]), 0.0), worst)


def warn_if_failed(failed: np.ndarray, log_gaussian: np.ndarray) -> int:
    """How many points failed, and a warning where a Gaussian at the mode gives them weight."""
    weights, num = np.exp(log_gaussian), int(np.sum(failed))
    if (share := np.sum(weights, where=failed) / np.sum(weights)) > _LOST:
        warn(
            f"Grid(): the method failed at {num} of {len(failed)} points, which are left out. A "
            f"Gaussian at the mode has {share:.1%} of its weight there, so intervals may be too "
            "narrow. Raise max_steps of the method, or compare with NUTS()."
        )
    return num


def warn_if_tails(found: Lattice, names: list[str]) -> dict[str, float]:
    """The shares that are left out, and a warning where they matter."""
    mass, share, name = found.mass, found.spread, names[found.worst]
    lost = "" if np.isnan(mass) else f" and {mass:.1%} of the mass"
    if mass > _TOLD[0] or share > _TOLD[1]:
        warn(
            f"Grid(): the tail of '{name}' is heavier than a Gaussian's, and the points leave out "
            f"about {share:.0%} of its variance{lost}: the sd of "
            f"'{name}' is about {1.0 - np.sqrt(1.0 - share):.0%} too small, or more, and its "
            "quantiles are better. Use hyper=Sample(), or a prior with a lighter tail."
        )
    return {"grid_missing_mass": mass, "grid_missing_variance": share}
