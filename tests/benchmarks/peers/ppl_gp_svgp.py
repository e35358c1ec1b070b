"""This project's own engine for the same tasks, on the same clock: `python ppl_gp_svgp.py
problem.npz out.json`.
"""

import functools

import equinox as eqx
import jax
import numpy as np
import tasks
from protocol import read

jax.config.update("jax_enable_x64", read(__import__("sys").argv[1])[1]["dtype"] == "float64")

import jax.numpy as jnp  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
from jax import random  # noqa: E402

import ppl_gp as pg  # noqa: E402
from ppl_gp.infer.batches import repeated  # noqa: E402
from ppl_gp.infer.svgp.final_bound import total_bound  # noqa: E402
from ppl_gp.infer.svgp.look import look_at  # noqa: E402
from ppl_gp.infer.svgp.prepare import prepare  # noqa: E402
from ppl_gp.infer.svgp.problem import hyper_at  # noqa: E402
from ppl_gp.infer.svgp.step import advance, begin  # noqa: E402
from ppl_gp.runtime import one_blas_thread  # noqa: E402
from ppl_gp.sparse.bound import Batch, Variational, priors_at  # noqa: E402
from ppl_gp.sparse.families import FullGaussian  # noqa: E402
from ppl_gp.sparse.process import sparse_process  # noqa: E402


def model(X, y=None, *, jitter, columns):
    """GP classification, logit, with hyperparameters that have no prior."""
    positive = dist.constraints.positive
    variance = numpyro.param("variance", 1.0, constraint=positive)
    lengthscale = numpyro.param("lengthscale", jnp.ones(columns), constraint=positive)
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X, jitter=jitter))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@functools.lru_cache
def constant(rate):
    """A schedule that stays; one object a rate, so that compiled code is found again."""
    return lambda step: jnp.asarray(rate, jnp.result_type(float))


class Engine:
    """See `protocol`."""

    def __init__(self, problem, settings, method, learning_rate, gamma):
        self.problem, self.batch = problem, min(settings["batch"], len(problem.y))
        X, y = jnp.asarray(problem.X), jnp.asarray(problem.y, int)
        options = {"jitter": settings["jitter"], "columns": problem.X.shape[1]}
        config = pg.SVGP(
            inducing=problem.Z,
            training=pg.Training(natural=method == "natgrad", natural_rate=constant(gamma)),
            batch_size=self.batch,
            hyper=pg.MAP(init={"variance": problem.variance, "lengthscale": problem.lengthscale}),
            learning_rate=constant(learning_rate),
        )
        self.subject = look_at(config, model, (X,), {"y": y, **options}, 0)
        self.start = prepare(config, self.subject, random.key(0), 0)
        self.reset()

    def reset(self):
        """Back to the start."""
        self.tree, self.state, *_ = self.start
        q = self.state.variational.q["f"]
        if isinstance(q, FullGaussian):
            q = FullGaussian(jnp.asarray(self.problem.mean), jnp.asarray(self.problem.root))
            inducing = Variational(self.state.variational.variables, {"f": q})
            self.state = begin(self.tree, self.state.free, inducing)

    def run(self, indices):
        """As many steps as rows."""
        whole, source = self.batch == len(self.problem.y), self.subject.source
        rows = (
            np.broadcast_to(np.arange(self.batch), (len(indices), self.batch)) if whole else indices
        )
        keys = random.split(random.key(1), len(rows))
        options = {k: v for k, v in source.kwargs.items() if k != "y"}
        with one_blas_thread():
            return self._advance(whole, rows, keys, options)

    def _advance(self, whole, rows, keys, options):
        source = self.subject.source
        if whole:
            batch = Batch(
                (jnp.asarray(source.args[0]),), {**source.kwargs}, jnp.ones(self.batch), keys[0]
            )
            batch = jax.tree.map(
                lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, batch
            )
            self.state, bounds = advance(self.tree, self.state, *repeated(batch, keys))
        else:
            weights = jnp.full(rows.shape, len(self.problem.y) / self.batch, self.problem.X.dtype)
            data = jnp.asarray(source.args[0][rows]), jnp.asarray(source.kwargs["y"][rows])
            none = dict.fromkeys(options)
            varying = Batch((data[0],), {"y": data[1], **none}, weights, keys)
            constant_part = Batch((None,), {"y": None, **options}, None, None)
            self.state, bounds = advance(self.tree, self.state, constant_part, varying)
        return np.asarray(bounds)

    def bound(self):
        """On all data."""
        return total_bound(self.start, self.state, random.key(0))

    def predict(self, X):
        """Mean and variance of f."""
        return tuple(np.asarray(x) for x in _predict(self.tree, self.state, jnp.asarray(X)))


@eqx.filter_jit
def _predict(problem, state, X):
    options = {"y": jnp.zeros(X.shape[0], int), "jitter": 1e-6, "columns": X.shape[1]}
    batch = Batch((X,), options, jnp.ones(X.shape[0]), random.key(0))
    hyper, _ = hyper_at(problem, state.free, batch)
    prior, variables = priors_at(model, batch, hyper)["f"], state.variational.variables["f"]
    q = state.variational.q["f"].whitened()
    return sparse_process(prior, variables, q).marginals(prior)


if __name__ == "__main__":
    tasks.main("ppl_gp", pg.__version__, Engine)
