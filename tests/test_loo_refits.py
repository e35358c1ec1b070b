"""Leave-one-out of local methods and of draws against the truth: fits to the other rows, at the
same hyperparameters, and the density of the row under them.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

N = 12
X = np.linspace(-2.0, 2.0, N)
rng = np.random.default_rng(6)
F = 1.5 * np.sin(2.0 * X)
DATA = {
    "gaussian": F + 0.9 * rng.normal(size=N),
    "counts": rng.poisson(np.exp(0.5 * F)),
    "binary": (rng.uniform(size=N) < 1.0 / (1.0 + np.exp(-F))).astype(int),
}
LIKELIHOODS = {
    "gaussian": lambda f: dist.Normal(f, 0.9),
    "counts": lambda f: dist.Poisson(jnp.exp(f)),
    "binary": lambda f: dist.Bernoulli(logits=f),
}


def model_of(kind):
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.8), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[kind](f), obs=y)

    return model


FIXED = pg.Fixed({})
METHODS = {
    "laplace": pg.Laplace(hyper=FIXED),
    "ep": pg.EP(hyper=FIXED),
    "vi": pg.VI(hyper=FIXED),
    "bound": pg.LocalBound(hyper=FIXED),
    "nuts": pg.NUTS(num_warmup=300, num_samples=2000, num_chains=1),
}
# Nats in a row. A Gaussian likelihood is exact; else a cavity leaves out how the other rows' sites
# would follow, which is of second order in what the row says of f. Draws have Monte Carlo errors.
TOLERANCE = {"gaussian": 2e-5, "counts": 0.03, "binary": 0.03}
DRAWS = 0.06
CASES = [(kind, name) for name in METHODS for kind in DATA if kind == "binary" or name != "bound"]
QUICK = [("counts", "laplace")]


def refits(model, method, y):
    """log p(y_n | y_-n) by the fit to the other rows."""
    left_out = []
    for n in range(N):
        rest = np.arange(N) != n
        fit = pg.fit(model, method, 0, X[rest], y=y[rest], throw=False)
        left_out.append(fit.log_density(X[n : n + 1], y[n : n + 1])[0])
    return np.array(left_out)


@pytest.mark.parametrize(
    ("kind", "name"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_leave_one_out_is_that_of_refits(kind, name):
    model, y = model_of(kind), DATA[kind]
    loo = pg.fit(model, METHODS[name], 0, X, y=y, throw=False).loo()
    want = refits(model, METHODS[name], y)
    tolerance = DRAWS if name == "nuts" else TOLERANCE[kind]
    assert loo.pareto_k.shape == (N,)
    # where the weights of draws claim something; cavities need none
    good = loo.pareto_k.values < (0.7 if name == "nuts" else np.inf)
    assert good.sum() > 0.8 * N
    np.testing.assert_allclose(loo.elpd_i.values[good], want[good], atol=tolerance)
    # the tolerance tells leave-one-out from the density of a row that was seen
    seen = pg.fit(model, METHODS[name], 0, X, y=y, throw=False).log_density(X, y)
    assert np.max(np.abs(seen - want)) > 3.0 * tolerance


def test_a_datum_that_q_does_not_fit_has_a_large_khat():
    """Laplace of binary rows under a wide prior is far from the posterior, EP's posterior is not;
    of Gaussian noise q is the posterior.
    """

    def wide(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(100.0, 0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    khat = {
        k: pg.fit(wide, METHODS[k], 0, X, y=DATA["binary"]).loo().pareto_k.values
        for k in ("laplace", "ep")
    }
    assert np.max(khat["laplace"]) > 0.7 and np.median(khat["laplace"]) > np.median(khat["ep"])
