"""Sites and plates may have any name: trees, leave-one-out, predictions, comparison and files give
the numbers of the same model under plain names.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

N = 14
X = np.linspace(-2.0, 2.0, N)
Y = np.random.default_rng(2).poisson(np.exp(0.5 + np.sin(X)))
PLAIN = ("f", "level", "data", "y")
NAMES = {
    "observations": ("f", "level", "observations", "y"),
    "chain": ("f", "level", "chain", "y"),
    "draw": ("f", "level", "draw", "y"),
    "sites": ("draw", "chain", "data", "observations"),
    "slashes": ("a/f", "a/level", "a/data", "a/y"),
    "mixed": ("posterior", "log_likelihood", "y", "observed data"),
    "clash": ("f", "data", "data", "data_dim_0"),
    "words": ("the function", "level (log)", "row nr.", "y*"),
}
METHODS = {
    "laplace": pg.Laplace(integrate=()),
    "svgp": pg.SVGP(num_inducing=6, max_steps=30),
    "nuts": pg.NUTS(num_warmup=40, num_samples=40, num_chains=1),
}


def model_of(names):
    f_name, level_name, plate, y_name = names

    def model(X, y=None):
        level = numpyro.sample(level_name, dist.Normal(0.0, 1.0))
        f = numpyro.sample(f_name, pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate(plate, X.shape[0]):
            numpyro.sample(
                y_name, dist.Poisson(numpyro.deterministic("rate", np.e ** (level + f))), obs=y
            )

    return model


@pytest.fixture(scope="module")
def answers():
    made = {}

    def answer(name, method, path):
        if (name, method) not in made:
            names = PLAIN if name == "plain" else NAMES[name]
            made[name, method] = asked(model_of(names), names, METHODS[method], path)
        return made[name, method]

    return answer


def asked(model, names, method, path):
    """Numbers of every verb, in one order."""
    fit = pg.fit(model, method, 0, X, y=Y, throw=False)
    tree = fit.to_datatree(num_draws=30, whole=True, predictions=X[:3] + 0.1)
    posterior, new = tree["posterior"], tree["predictions"]
    assert all(posterior[k].dims[:2] == ("chain", "draw") for k in posterior.data_vars)
    loo = fit.loo()
    again = pg.load(fit.save(path / "a.fit"), model)
    compared = pg.compare({"a": fit}, X[:3], Y[:3], num_importance_samples=100).table[0]
    return {
        "tree": sorted(float(np.sum(posterior[k])) for k in posterior.data_vars),
        "densities": float(np.sum(list(tree["log_likelihood"].data_vars.values())[0])),
        "new": sorted(float(np.sum(new[k])) for k in new.data_vars),
        "loo": np.append(loo.elpd_i.values, loo.elpd),
        "khat": loo.pareto_k.values,
        "compare": [compared["log_density"], compared["elpd_loo"]],
        "summary": fit.summary()["mean"].to_numpy(float),
        "loaded": again.predict(X[:3] + 0.1).mean,
        "loaded tree": float(np.sum(list(again.to_datatree(num_draws=30).posterior.values())[-1])),
    }


CASES = [(n, m) for m in METHODS for n in NAMES]
QUICK = [("observations", "laplace"), ("slashes", "laplace")]


@pytest.mark.parametrize(
    ("name", "method"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_names_do_not_matter(answers, tmp_path, name, method):
    want, found = answers("plain", method, tmp_path), answers(name, method, tmp_path)
    for what in want:
        np.testing.assert_allclose(found[what], want[what], rtol=1e-4, atol=1e-4, err_msg=what)


def test_two_names_that_are_one_in_a_tree_are_named():
    model = model_of(("a/f", "a.f", "data", "y"))
    fit = pg.fit(model, METHODS["laplace"], 0, X, y=Y)
    with pytest.raises(pg.DataError, match="one name in a tree; rename"):
        fit.to_datatree(num_draws=3)
