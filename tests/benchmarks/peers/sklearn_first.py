"""scikit-learn's first answer: its Laplace approximation, with the kernel chosen by L-BFGS."""

import sklearn
from first import main
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel


def fit(problem, settings):
    """The evidence's maximum over the kernel."""
    kernel = ConstantKernel(1.0, (1e-5, 1e5)) * RBF(1.0, (1e-5, 1e5))
    return GaussianProcessClassifier(kernel).fit(problem.X, problem.y)


def predict(model, X_new):
    """p(y = 1)."""
    return model.predict_proba(X_new)[:, 1]


if __name__ == "__main__":
    main("scikit-learn", sklearn.__version__, fit, predict)
