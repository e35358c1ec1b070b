"""GPflow's first answer: VGP, a full Gaussian over f at every datum, trained by its own wrapper of
L-BFGS.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow  # noqa: E402
import tensorflow as tf  # noqa: E402
from first import main  # noqa: E402


def fit(problem, settings):
    """The evidence's bound over the kernel and q."""
    kernel = gpflow.kernels.SquaredExponential()
    likelihood = gpflow.likelihoods.Bernoulli(invlink=tf.sigmoid)
    model = gpflow.models.VGP((problem.X, problem.y[:, None]), kernel, likelihood)
    options = {"maxiter": settings["iterations"]}
    gpflow.optimizers.Scipy().minimize(
        model.training_loss, model.trainable_variables, options=options
    )
    return model


def predict(model, X_new):
    """p(y = 1)."""
    return model.predict_y(X_new)[0].numpy()[:, 0]


if __name__ == "__main__":
    main("GPflow", gpflow.__version__, fit, predict)
