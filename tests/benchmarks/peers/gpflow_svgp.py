"""GPflow's SVGP: one tf.function loops over the minibatches; Adam, or natural gradients for q and
Adam for the rest.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow  # noqa: E402
import numpy as np  # noqa: E402
import tasks  # noqa: E402
import tensorflow as tf  # noqa: E402


def _model(problem, settings):
    """SVGP with a whitened full covariance and 20-point quadrature of the logit likelihood."""
    gpflow.config.set_default_float(np.dtype(settings["dtype"]).type)
    gpflow.config.set_default_jitter(settings["jitter"])
    return gpflow.models.SVGP(
        gpflow.kernels.SquaredExponential(
            variance=problem.variance, lengthscales=problem.lengthscale
        ),
        gpflow.likelihoods.Bernoulli(invlink=tf.sigmoid),
        gpflow.inducing_variables.InducingPoints(problem.Z.copy()),
        q_mu=problem.mean[:, None],
        q_sqrt=problem.root[None],
        num_data=len(problem.y),
        whiten=True,
    )


class Engine:
    """See `protocol`."""

    def __init__(self, problem, settings, method, learning_rate, gamma):
        self.model, self.chunk = _model(problem, settings), settings["chunk"]
        self.X, self.y = tf.constant(problem.X), tf.constant(problem.y[:, None])
        self.adam, self.natural = tf.optimizers.Adam(learning_rate), None
        if method == "natgrad":
            self.natural = gpflow.optimizers.NaturalGradient(gamma)
            gpflow.set_trainable(self.model.q_mu, False)
            gpflow.set_trainable(self.model.q_sqrt, False)
        elif method != "adam":
            raise ValueError(f"GPflow has no method {method}")
        self.adam.build(self.model.trainable_variables)
        self._compile()
        self.variables = [*self.model.variables, *self.adam.variables]
        self.start = [np.array(v) for v in self.variables]

    def _compile(self):
        """tf.functions for training and evaluation, each traced once. (XLA, jit_compile, was
        slower.)
        """
        rows = tf.TensorSpec([None, None], tf.int32)
        self._loop = tf.function(self._train, input_signature=[rows])
        self._all = tf.function(
            lambda n: self._repeat(n), input_signature=[tf.TensorSpec([], tf.int32)]
        )
        self._terms, self._kl = (
            tf.function(self._expected, reduce_retracing=True),
            tf.function(self.model.prior_kl),
        )

    def _step(self, X, y):
        """One step on a minibatch; the bound before it (before Adam's half of it, with natural
        gradients).
        """
        if self.natural is not None:
            self.natural.minimize(
                lambda: -self.model.elbo((X, y)), [(self.model.q_mu, self.model.q_sqrt)]
            )
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.model.trainable_variables)
            loss = self.model.training_loss((X, y))
        grads = tape.gradient(loss, self.model.trainable_variables)
        self.adam.apply_gradients(zip(grads, self.model.trainable_variables, strict=True))
        return -loss

    def _train(self, rows):
        out = tf.TensorArray(self.X.dtype, size=tf.shape(rows)[0])
        for i in tf.range(tf.shape(rows)[0]):
            out = out.write(i, self._step(tf.gather(self.X, rows[i]), tf.gather(self.y, rows[i])))
        return out.stack()

    def _repeat(self, n):
        out = tf.TensorArray(self.X.dtype, size=n)
        for i in tf.range(n):
            out = out.write(i, self._step(self.X, self.y))
        return out.stack()

    def _expected(self, X, y):
        mean, variance = self.model.predict_f(X)
        return tf.reduce_sum(self.model.likelihood.variational_expectations(X, mean, variance, y))

    def run(self, rows):
        """Steps; see `protocol`."""
        return (
            self._loop(tf.constant(rows)) if rows.shape[1] else self._all(tf.constant(len(rows)))
        ).numpy()

    def bound(self):
        """The bound on all data, in chunks."""
        at = range(0, len(self.y), self.chunk)
        return sum(
            float(self._terms(self.X[i : i + self.chunk], self.y[i : i + self.chunk])) for i in at
        ) - float(self._kl())

    def predict(self, X):
        """Mean and variance of f, with what does not depend on X computed once."""
        posterior = self.model.posterior(gpflow.posteriors.PrecomputeCacheType.VARIABLE)
        if not hasattr(self, "_predict"):
            self._posterior = posterior
            self._predict = tf.function(posterior.predict_f, reduce_retracing=True)
        self._posterior.update_cache()
        parts = [
            self._predict(tf.constant(X[i : i + self.chunk])) for i in range(0, len(X), self.chunk)
        ]
        return tuple(np.concatenate([p[k].numpy()[:, 0] for p in parts]) for k in (0, 1))

    def reset(self):
        """Every variable back to its start."""
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)


if __name__ == "__main__":
    tasks.main("GPflow", gpflow.__version__, Engine)
