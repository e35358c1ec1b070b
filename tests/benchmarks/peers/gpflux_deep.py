"""GPflux's deep GP: one tf.function loops over the minibatches; Adam trains everything, q too."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow  # noqa: E402
import gpflux  # noqa: E402
import numpy as np  # noqa: E402
import tasks  # noqa: E402
import tensorflow as tf  # noqa: E402
from gpflow.inducing_variables import InducingPoints, SharedIndependentInducingVariables  # noqa: E402
from gpflow.mean_functions import Identity, Zero  # noqa: E402


def _layer(problem, i, units, mean, root, **options):
    """Layer i: whitened, its units sharing one kernel and inducing inputs. q's mean is (units, M),
    as ours.
    """
    kernel = gpflow.kernels.SquaredExponential(
        variance=problem.variance[i], lengthscales=problem.lengthscale[i]
    )
    layer = gpflux.layers.GPLayer(
        gpflow.kernels.SharedIndependent(kernel, units),
        SharedIndependentInducingVariables(InducingPoints(problem.Z[i].copy())),
        num_data=len(problem.y),
        name=f"layer_{i}",
        **options,
    )
    layer.q_mu.assign(mean.T)
    layer.q_sqrt.assign(root)
    return layer


def _model(problem, settings):
    """Two layers and Gaussian noise. Leading axis of draws: GPflux carries it through the last
    layer.
    """
    gpflow.config.set_default_float(np.dtype(settings["dtype"]).type)
    gpflow.config.set_default_jitter(settings["jitter"])
    q, draws = (problem.inner_mean, problem.inner_root), settings["num_draws"]
    inner = _layer(problem, 0, len(q[0]), *q, mean_function=Identity(), num_samples=draws)
    last = _layer(problem, 1, 1, problem.mean[None], problem.root[None], mean_function=Zero())
    likelihood = gpflux.layers.LikelihoodLayer(gpflow.likelihoods.Gaussian(problem.noise))
    return gpflux.models.DeepGP(
        [inner, last], likelihood, input_dim=problem.X.shape[1], target_dim=1
    )


class Engine:
    """See `protocol`."""

    def __init__(self, problem, settings, method, learning_rate, gamma):
        if method != "adam":
            raise ValueError(f"not run here: {method}")
        tf.random.set_seed(settings["seed"])
        self.model, self.chunk = _model(problem, settings), settings["chunk"]
        self.X, self.y = tf.constant(problem.X), tf.constant(problem.y[:, None])
        # builds the layers, which makes their variables known
        self.model.elbo((self.X[:2], self.y[:2]))
        self.adam, self.trained = tf.optimizers.Adam(learning_rate), self.model.trainable_variables
        self.adam.build(self.trained)
        # (XLA, jit_compile, was slower; so was a loop of Keras's own, `as_training_model().fit`.)
        self._loop = tf.function(
            self._train, input_signature=[tf.TensorSpec([None, None], tf.int32)]
        )
        self._elbo = tf.function(lambda X, y: self.model.elbo((X, y)), reduce_retracing=True)
        self.variables = [*self.model.variables, *self.adam.variables]
        self.start = [np.array(v) for v in self.variables]

    def _step(self, X, y):
        """One step on a minibatch; the bound before it."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.trained)
            bound = self.model.elbo((X, y))
            loss = -bound / len(self.y)
        self.adam.apply_gradients(zip(tape.gradient(loss, self.trained), self.trained, strict=True))
        return bound

    def _train(self, rows):
        out = tf.TensorArray(self.X.dtype, size=tf.shape(rows)[0])
        for i in tf.range(tf.shape(rows)[0]):
            out = out.write(i, self._step(tf.gather(self.X, rows[i]), tf.gather(self.y, rows[i])))
        return out.stack()

    def run(self, rows):
        """Steps; see `protocol`."""
        everything = np.broadcast_to(
            np.arange(len(self.y), dtype=np.int32), (len(rows), len(self.y))
        )
        return self._loop(tf.constant(rows if rows.shape[1] else everything)).numpy()

    def bound(self):
        """The bound on all data: the mean of the chunks' bounds, weighted by their sizes."""
        chunks = [slice(i, i + self.chunk) for i in range(0, len(self.y), self.chunk)]
        total = sum(float(self._elbo(self.X[c], self.y[c])) * len(self.y[c]) for c in chunks)
        return total / len(self.y)

    def reset(self):
        """Every variable back to its start."""
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)


if __name__ == "__main__":
    tasks.main("GPflux", gpflux.__version__, Engine)
