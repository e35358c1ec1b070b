"""This project's own deep GP for the same tasks, on the same clock: `python ppl_gp_deep.py
problem.npz out.json`.
"""

import numpy as np
import tasks
from ppl_gp_svgp import constant  # first: it sets the precision

import jax.numpy as jnp  # isort: skip
import numpyro  # isort: skip
import numpyro.distributions as dist  # isort: skip
from jax import random  # isort: skip

import ppl_gp as pg  # isort: skip
from ppl_gp.infer.svgp.final_bound import total_bound  # isort: skip
from ppl_gp.runtime import one_blas_thread  # isort: skip
from ppl_gp.infer.svgp.prepare import prepare  # isort: skip
from ppl_gp.infer.svgp.look import look_at  # isort: skip
from ppl_gp.infer.svgp.step import advance, begin  # isort: skip
from ppl_gp.sparse.bound import Batch, Variational  # isort: skip
from ppl_gp.sparse.families import FullGaussian  # isort: skip


def rbf(layer, columns):
    """A layer's kernel, its hyperparameters without priors."""
    positive = dist.constraints.positive
    variance = numpyro.param(f"variance_{layer}", 1.0, constraint=positive)
    return pg.kernels.RBF(
        variance, numpyro.param(f"lengthscale_{layer}", jnp.ones(columns), constraint=positive)
    )


def model(X, y=None, *, jitter, columns):
    """Two layers and Gaussian noise."""
    with numpyro.plate("units", columns):
        g = numpyro.sample("g", pg.GP(rbf(0, columns), X, mean=pg.means.Identity(), jitter=jitter))
    f = numpyro.sample("f", pg.GP(rbf(1, columns), g.T, jitter=jitter))
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.sqrt(noise)), obs=y)


class Engine:
    """See `protocol`."""

    def __init__(self, problem, settings, method, learning_rate, gamma):
        if method != "adam":
            raise ValueError(f"not run here: {method}")
        self.problem, self.batch = problem, min(settings["batch"], len(problem.y))
        options = {"jitter": settings["jitter"], "columns": problem.X.shape[1]}
        hyper = {
            f"{k}_{i}": getattr(problem, k)[i] for k in ("variance", "lengthscale") for i in (0, 1)
        }
        config = pg.SVGP(
            inducing={"g": problem.Z[0], "f": problem.Z[1]},
            training=pg.Training(natural=False),
            batch_size=self.batch,
            layers=pg.Layers(num_paths=settings["num_draws"]),
            # exact for a Gaussian likelihood, which the peers have in closed form
            expectation=pg.Expectation(num_nodes=3),
            hyper=pg.MAP(init=hyper | {"noise": problem.noise}),
            learning_rate=constant(learning_rate),
        )
        data = {"y": jnp.asarray(problem.y), **options}
        self.subject = look_at(config, model, (jnp.asarray(problem.X),), data, settings["seed"])
        self.start = prepare(config, self.subject, random.key(settings["seed"]), 0)
        self.key = random.key(settings["seed"])
        self.reset()

    def reset(self):
        """Back to the start."""
        problem, (self.tree, state, *_) = self.problem, self.start
        g, f = ((problem.inner_mean, problem.inner_root), (problem.mean, problem.root))
        q = {"g": FullGaussian(*map(jnp.asarray, g)), "f": FullGaussian(*map(jnp.asarray, f))}
        self.state = begin(self.tree, state.free, Variational(state.variational.variables, q))

    def run(self, rows):
        """As many steps as rows."""
        source, self.key = self.subject.source, random.fold_in(self.key, 1)
        rows = (
            rows
            if rows.shape[1]
            else np.broadcast_to(np.arange(self.batch), (len(rows), self.batch))
        )
        options = {k: v for k, v in source.kwargs.items() if k != "y"}
        weights = jnp.full(rows.shape, len(self.problem.y) / self.batch, self.problem.X.dtype)
        data = jnp.asarray(source.args[0][rows]), jnp.asarray(source.kwargs["y"][rows])
        varying = Batch(
            (data[0],),
            {"y": data[1], **dict.fromkeys(options)},
            weights,
            random.split(self.key, len(rows)),
        )
        with one_blas_thread():
            self.state, bounds = advance(
                self.tree, self.state, Batch((None,), {"y": None, **options}, None, None), varying
            )
        return np.asarray(bounds)

    def bound(self):
        """On all data."""
        self.key = random.fold_in(self.key, 2)
        return total_bound(self.start, self.state, self.key)


if __name__ == "__main__":
    tasks.main("ppl_gp", pg.__version__, Engine)
