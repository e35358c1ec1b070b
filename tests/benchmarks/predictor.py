"""Effects and many classes: fits of group effects beside statsmodels' linear mixed model, softmax
by its number of classes, and beside scikit-learn's one against rest; `SVGP` with many groups.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.metrics import log_loss
from statsmodels.regression.mixed_linear_model import MixedLM

import ppl_gp as pg
from tests.benchmarks.common import Row, ratio, seconds
from tests.benchmarks.fresh import fresh


class Size(NamedTuple):
    """Rows and groups of the mixed models, data of the softmax, and its numbers of classes."""

    rows: int
    groups: int
    data: int
    classes: tuple[int, int]
    repeats: int
    sparse: tuple[int, int, int, int, int]  # rows, groups, inducing points, steps, rows of a step
    cold: bool = True


FULL = Size(5000, 300, 500, (4, 8), 3, (1_000_000, 10_000, 50, 300, 1000))
TOY = Size(40, 16, 20, (2, 3), 1, (40, 200, 3, 4, 20), cold=False)


def mixed(X, group, num_groups, y=None, counts=False):
    """Fixed effects with wide priors and an effect a group; counts, or noise of unknown scale."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 100.0).expand([X.shape[1]]).to_event(1))
    sd = numpyro.param("sd", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
    eta = X @ beta + u[group]
    noise = None if counts else numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("data", X.shape[0]):
        shown = dist.Poisson(jnp.exp(eta)) if counts else dist.Normal(eta, noise)
        numpyro.sample("y", shown, obs=y)


def _effects(num: int, groups: int):
    """(X, group, the predictor)."""
    rng = np.random.default_rng(0)
    X = np.c_[np.ones(num), rng.normal(size=(num, 2))]
    group = rng.integers(0, groups, num)
    return X, group, X @ [0.3, 0.5, -0.4] + 0.8 * rng.normal(size=groups)[group]


def _counts(size: Size) -> Row:
    X, group, eta = _effects(size.rows, size.groups)
    y = np.random.default_rng(1).poisson(np.exp(eta))
    (times,) = seconds(
        lambda: pg.fit(mixed, pg.Laplace(), 0, X, group, size.groups, y=y, counts=True).hyper,
        repeats=size.repeats,
    )
    value = float(np.median(times))
    what = f"Laplace, whole MAP fit of {size.rows} counts with {size.groups} group effects, no GP"
    return Row(what, f"{value:.2f} s", "under 2 s", value, "s")


def _linear(size: Size) -> Row:
    """The same criterion but for their flat prior of the fixed effects (restricted likelihood)."""
    X, group, eta = _effects(size.rows, size.groups)
    y, found = eta + 0.7 * np.random.default_rng(2).normal(size=size.rows), {}

    def ours():
        fit = pg.fit(mixed, pg.Laplace(), 0, X, group, size.groups, y=y)
        found["ours"] = float(fit.hyper["sd"])
        return fit.hyper

    def theirs():
        found["theirs"] = float(MixedLM(y, X, groups=group).fit(reml=True).cov_re[0, 0]) ** 0.5

    a, b = seconds(ours, theirs, repeats=size.repeats)
    value, gap = ratio(b, a), found["ours"] - found["theirs"]
    return Row(
        f"linear mixed model against statsmodels, {size.rows} rows, {size.groups} groups",
        f"{value:.2f} x faster (sd of the groups {gap:+.1e} to theirs)",
        "at least 1 x",
        value,
        "x faster",
    )


def classes(X, num_classes, y=None):
    """Softmax of functions with one kernel, at given hyperparameters."""
    with numpyro.plate("classes", num_classes):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def _labels(num: int, num_classes: int, seed: int = 3):
    """Clusters on a circle, that overlap."""
    rng = np.random.default_rng(seed)
    y = np.r_[np.arange(num_classes), rng.integers(0, num_classes, num - num_classes)]
    angle = 2 * np.pi * y / num_classes
    return np.stack([np.cos(angle), np.sin(angle)], 1) + 0.5 * rng.normal(size=(num, 2)), y


def _by_classes(size: Size) -> Row:
    few, many = size.classes

    def evidence(num_classes):
        X, y = (jnp.asarray(x) for x in _labels(size.data, num_classes))

        @jax.jit
        def value(variance, X, y):
            def scaled(X, y=None):
                with numpyro.plate("classes", num_classes):
                    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
                with numpyro.plate("data", X.shape[0]):
                    numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

            return pg.log_evidence(pg.Laplace(), pg.read(scaled, X, y=y))[0]

        both = jax.jit(jax.value_and_grad(value))
        return lambda: both(4.0, X, y)

    a, b = seconds(evidence(many), evidence(few), repeats=size.repeats)
    value = ratio(a, b)
    return Row(
        f"softmax by Laplace with {many} classes against {few}, evidence and gradient, "
        f"n = {size.data}",
        f"{value:.2f} x ({np.median(a):.2f} s and {np.median(b):.2f} s)",
        "below 2.5 x",
        value,
        "x",
    )


def _one_against_rest(size: Size) -> Row:
    num_classes = size.classes[0]
    X, y = _labels(2 * size.data, num_classes)
    X_new, y_new, X, y, found = X[size.data :], y[size.data :], X[: size.data], y[: size.data], {}

    def ours():
        fit = pg.fit(classes, pg.Laplace(), 0, X, num_classes, y=y)
        found["ours"] = log_loss(
            y_new, fit.predict(X_new, num_classes).probs, labels=range(num_classes)
        )

    def theirs():
        peer = GaussianProcessClassifier(ConstantKernel(4.0) * RBF(1.0), optimizer=None).fit(X, y)
        found["theirs"] = log_loss(y_new, peer.predict_proba(X_new), labels=peer.classes_)

    a, b = seconds(ours, theirs, repeats=size.repeats)
    value = ratio(b, a)
    return Row(
        f"softmax by Laplace against scikit-learn's one against rest, {num_classes} classes, fit "
        f"and {size.data} predictions, n = {size.data}",
        f"{value:.2f} x faster (log loss {found['ours']:.4f}, theirs {found['theirs']:.4f})",
        "",
        value,
        "x faster",
    )


def grouped(X, W, group, num_groups, y=None):
    """Votes by a smooth effect of x, two coefficients and an effect a group."""
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, scale), X))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + W @ beta + u[group]), obs=y)


def votes(num: int, groups: int):
    """(X, W, group, y)."""
    W, group, eta = _effects(num, groups)
    rng = np.random.default_rng(4)
    X = rng.uniform(0.0, 6.0, num)
    return X, W[:, 1:], group, (rng.logistic(size=num) < eta + np.sin(X)).astype(float)


_SCRIPT = """
import json, pathlib, re
import jax
jax.config.update("jax_enable_x64", True)
import ppl_gp as pg
from tests.benchmarks.predictor import grouped, votes
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
n, groups, M, steps, B = {sparse}
X, W, group, y = votes(n, groups)
before = peak()
def fitted(steps):
    method = pg.SVGP(num_inducing=M, batch_size=B, max_steps=steps)
    fit = pg.fit(grouped, method, 0, X, W, group, groups, y=y, throw=False)
    fit.sites["u"].mean.block_until_ready()
    return fit.stats
few, many = fitted(steps), fitted(2 * steps)
told = {{"run": few["run_seconds"], "compile": few["compile_seconds"]}}
told |= {{"step": (many["run_seconds"] - few["run_seconds"]) / steps}}
print(json.dumps(told | {{"mib": (peak() - before) / 1024}}))
"""


def _many_groups(size: Size) -> Row:
    """A whole call, the bound over all data and the marginals of all groups, in a process of its
    own; seconds a step from a run of twice as many.
    """
    got = fresh(_SCRIPT.format(sparse=size.sparse), size.cold)
    n, groups, M, steps, B = size.sparse
    return Row(
        f"SVGP of {n} votes with {groups} group effects beside a GP, M = {M}, {steps} steps of {B} "
        "rows: wall time and peak memory",
        f"{got['run']:.0f} s ({1e3 * got['step']:.1f} ms a step) and {got['compile']:.0f} s of "
        f"compiling, {got['mib']:.0f} MiB beside the data",
        "reported",
        got["run"] + got["compile"],
        "s",
    )


def rows(size: Size = FULL) -> Iterator[Row]:
    """Each once."""
    for measure in (_counts, _linear, _by_classes, _one_against_rest, _many_groups):
        yield measure(size)
