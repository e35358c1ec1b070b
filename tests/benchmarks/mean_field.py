"""Mean field: sweeps and whole fits of a mixture of normals beside scikit-learn's
BayesianGaussianMixture, and beside BayesPy's where that is installed, as `make bench` sees to.

The same rows, components and priors; labels start at random. BayesPy's means and precisions are
apart in q, ours and scikit-learn's are one block.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture

import ppl_gp as pg
from models.mixture import mixture
from ppl_gp.infer.probes import first_trace
from ppl_gp.mean_field.forms import with_forms
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.mean_field.method import _climb
from ppl_gp.mean_field.structure import find_structure, start_of
from ppl_gp.mean_field.sweep import begin
from ppl_gp.reading.reading import declare
from tests.benchmarks.common import Row, ratio, seconds
from tests.benchmarks.fresh import fresh


class Size(NamedTuple):
    """Rows, columns and components; sweeps that are timed together."""

    rows: int
    columns: int
    components: int
    sweeps: int
    repeats: int
    cold: bool = True


FULL, TOY = Size(2000, 10, 40, 10, 5), Size(30, 2, 2, 2, 1, cold=False)
CONCENTRATION = 0.1


def data(size: Size) -> np.ndarray:
    """Rows about half as many centres as there are components, standardised."""
    rng = np.random.default_rng(0)
    centres = 3.0 * rng.normal(size=(max(1, size.components // 2), size.columns))
    X = centres[rng.integers(0, len(centres), size.rows)] + rng.normal(
        size=(size.rows, size.columns)
    )
    return (X - X.mean(0)) / X.std(0)


def ours(size: Size) -> Callable:
    """So many sweeps of a start, compiled."""
    args = (jnp.asarray(data(size)), size.components, CONCENTRATION)
    model = declare(mixture, args, {})
    trace = first_trace(model, args, {})
    structure = find_structure(log_joint_of(model, trace, args, {}), trace, None, True)
    structure = with_forms(structure, trace)
    q = start_of({}, structure, trace, random.key(0))
    state = jax.vmap(begin)(jax.tree.map(lambda x: x[None], q))
    # a tolerance that no sweep falls short of
    return lambda: _climb.full(structure.joint, structure.terms, state, -jnp.inf, size.sweeps)


def sklearn_mixture(size: Size, **options) -> BayesianGaussianMixture:
    """The same priors."""
    D = size.columns
    return BayesianGaussianMixture(
        n_components=size.components,
        reg_covar=0.0,
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=CONCENTRATION,
        mean_precision_prior=1.0,
        mean_prior=np.zeros(D),
        degrees_of_freedom_prior=float(D),
        covariance_prior=np.eye(D),
        random_state=0,
        **options,
    )


def theirs(size: Size) -> Callable:
    """So many sweeps of scikit-learn, from random responsibilities."""
    X = data(size)

    def work():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            sklearn_mixture(size, init_params="random", max_iter=size.sweeps, tol=0.0).fit(X)

    return work


def bayespy_sweeps(size: Size) -> Callable:
    """So many sweeps of BayesPy, from a model that is built."""
    from bayespy.inference import VB
    from bayespy.nodes import Categorical, Dirichlet, Gaussian, Mixture, Wishart

    D, K = size.columns, size.components
    weights = Dirichlet(CONCENTRATION * np.ones(K))
    z = Categorical(weights, plates=(size.rows,))
    mean = Gaussian(np.zeros(D), np.eye(D), plates=(K,))
    precision = Wishart(D, np.eye(D), plates=(K,))
    y = Mixture(z, Gaussian, mean, precision)
    z.initialize_from_random()
    y.observe(data(size))
    run = VB(y, mean, z, precision, weights)
    return lambda: run.update(repeat=size.sweeps, verbose=False, tol=0.0)


def _sweep(size: Size, name: str, peer: Callable, target: str) -> Row:
    a, b = seconds(ours(size), peer(size), repeats=size.repeats)
    each, value = 1e3 * np.median(a) / size.sweeps, ratio(b, a)
    return Row(
        f"MeanField, a sweep of {size.rows} x {size.columns} rows, {size.components} components, "
        f"against {name}",
        f"{each:.3g} ms, {value:.2g} x faster",
        target,
        value,
        "x faster",
    )


def _whole(size: Size) -> Row:
    X = data(size)
    method = pg.MeanField(num_draws=10, tol=1e-3)

    def ours():
        return pg.fit(mixture, method, 0, X, size.components, CONCENTRATION, throw=False).draws

    def theirs():
        sklearn_mixture(size, tol=1e-6, max_iter=1000).fit(X)

    a, b = seconds(ours, theirs, repeats=1)
    value = ratio(b, a)
    what = f"MeanField, a whole fit of them with its proofs, {size.components} components"
    return Row(
        f"{what}, against scikit-learn", f"{value:.2g} x faster", "at least 1 x", value, "x faster"
    )


_SCRIPT = """
import json
import jax
jax.config.update("jax_enable_x64", True)
import ppl_gp as pg
from models.mixture import mixture
from tests.benchmarks import mean_field as bench
size = bench.Size(*{size})
method = pg.MeanField(num_draws=10, max_steps=1)
fit = pg.fit(mixture, method, 0, bench.data(size), size.components, 0.1, throw=False)
print(json.dumps({{"compile": fit.stats["compile_seconds"]}}))
"""


def _compile(size: Size) -> Row:
    """A fit in a process of its own."""
    got = fresh(_SCRIPT.format(size=tuple(size)), size.cold)
    what = f"MeanField, compiling for {size.rows} x {size.columns} rows and its proofs"
    return Row(what, f"{got['compile']:.1f} s", "at most 4 s", got["compile"], "s")


def rows(size: Size = FULL) -> Iterator[Row]:
    """Each once."""
    yield _sweep(size, "scikit-learn", theirs, "reported")
    if importlib.util.find_spec("bayespy"):
        yield _sweep(size, "BayesPy", bayespy_sweeps, "at least 3 x")
    yield _whole(size)
    yield _compile(size)
