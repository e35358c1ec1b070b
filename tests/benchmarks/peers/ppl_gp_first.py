"""This project's first answer, by the method that the settings name."""

import jax

jax.config.update("jax_enable_x64", True)

import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
from first import main  # noqa: E402

import ppl_gp as pg  # noqa: E402


def classifier(X, y=None):
    """GP classification with an RBF kernel, logit."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def _method(settings):
    """Local methods and SVGP find the hyperparameters' mode, NUTS draws them."""
    name, draws = settings["method"], settings["draws"]
    if name == "NUTS":
        return pg.NUTS(draws, draws, 1)
    if name == "SVGP":
        return pg.SVGP(num_inducing=settings["inducing"], max_steps=settings["steps"])
    return {"Laplace": pg.Laplace, "EP": pg.EP, "VI": pg.VI}[name]()


def fit(problem, settings):
    """A fit, whatever its result says: what is timed is an answer of this many draws or steps."""
    if settings["cache"]:
        pg.cache(settings["cache"])
    return pg.fit(classifier, _method(settings), 0, problem.X, y=problem.y.astype(int), throw=False)


def predict(fit, X_new):
    """p(y = 1)."""
    return fit.predict(X_new).probs


if __name__ == "__main__":
    main("ppl_gp", pg.__version__, fit, predict)
