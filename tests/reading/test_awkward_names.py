"""Sites and plates may have any name: trees, leave-one-out, predictions, comparison and files give
the numbers of the same model under plain names. Random keys go by the order of the names: the plain
names of a comparison have the order of those that it tests.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import ppl_gp as pg
from ppl_gp.results.tree_groups import dots

N = 14
X = np.linspace(-2.0, 2.0, N)
Y = np.random.default_rng(2).poisson(np.exp(0.5 + np.sin(X)))
PLAIN = {True: ("f", "level", "data", "y"), False: ("z", "level", "data", "y")}  # f is first or not
NAMES = {
    "observations": ("f", "level", "observations", "y"),
    "chain": ("f", "level", "chain", "y"),
    "draw": ("f", "level", "draw", "y"),
    "sites": ("draw", "chain", "data", "observations"),
    "slashes": ("a/f", "a/level", "a/data", "a/y"),
    "mixed": ("posterior", "log_likelihood", "y", "observed data"),
    "clash": ("f", "level", "X", "X_dim_0"),
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
            names = NAMES[name] if name in NAMES else PLAIN[name]
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
        "tree": sums(posterior, names),
        "densities": float(np.sum(list(tree["log_likelihood"].data_vars.values())[0])),
        "new": sums(new, names),
        "loo": np.append(loo.elpd_i.values, loo.elpd),
        "khat": loo.pareto_k.values,
        "compare": [compared["log_density"], compared["elpd_loo"]],
        "summary": fit.summary()["mean"].to_numpy(float),
        "loaded": again.predict(X[:3] + 0.1).mean,
        "loaded tree": float(np.sum(list(again.to_datatree(num_draws=30).posterior.values())[-1])),
    }


def sums(group, names):
    """Of each variable, f, level and y first, each under its own name; 0 where it is not there."""
    own = [dots(k) for k in (names[0], names[1], names[3])]
    others = sorted(set(group.data_vars) - set(own))
    assert set(others) <= {"eta", "rate"}
    return [float(np.sum(group[k])) if k in group.data_vars else 0.0 for k in (*own, *others)]


CASES = [(n, m) for m in METHODS for n in NAMES]
QUICK = [("observations", "laplace"), ("slashes", "laplace")]


@pytest.mark.parametrize(
    ("name", "method"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_names_do_not_matter(answers, tmp_path, name, method):
    plain = NAMES[name][0] < NAMES[name][1]
    want, found = answers(plain, method, tmp_path), answers(name, method, tmp_path)
    for what in want:
        np.testing.assert_allclose(found[what], want[what], rtol=1e-4, atol=1e-4, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["laplace", "svgp"])
def test_the_order_of_names_moves_draws_alone(answers, tmp_path, method):
    """What is computed without random keys is the same number under names of either order."""
    want, found = answers(True, method, tmp_path), answers(False, method, tmp_path)
    for what in ("summary", "loo", "loaded"):
        np.testing.assert_allclose(found[what], want[what], rtol=1e-6, atol=1e-6, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "sites", "mixed", "words"])
def test_each_draw_stands_under_its_own_name(name):
    """The rate of each draw is that of its level and f, by their names; the level's mean and sd are
    those under the plain names within the error of 400 draws.
    """
    moments = []
    for names in (PLAIN[True], NAMES.get(name, PLAIN[False])):
        fit = pg.fit(model_of(names), pg.NUTS(200, 400, num_chains=1), 0, X, y=Y, throw=False)
        posterior = fit.to_datatree()["posterior"]
        f, level = (posterior[dots(k)].values for k in names[:2])
        np.testing.assert_allclose(posterior["rate"], np.exp(level[..., None] + f), rtol=1e-9)
        moments.append((level.mean(), level.std(), f.mean((0, 1))))
    (want, sd, want_f), (mean, other_sd, f) = moments
    assert abs(mean - want) < 6 * sd * np.sqrt(2 / 40)  # of 40 effective draws at least
    assert 0.5 < other_sd / sd < 2.0
    assert np.all(np.abs(f - want_f) < 6 * np.sqrt(2 / 40))  # the prior's sd of f is 1


def clashing(first, second):
    """A model in which the plate "data" and a site have one name, and which is opened first."""

    def model(X, y=None):
        named = {"site": lambda: numpyro.sample("data", dist.Normal(0.0, 1.0))}
        named["rate"] = lambda: numpyro.deterministic("data", 2.0 * X)
        named["parameter"] = lambda: numpyro.param("data", 1.0)
        named["plate"] = lambda: numpyro.plate("data", X.shape[0])
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        made = {first: named[first](), second: named[second]()}
        with made["plate"] if "plate" in made else numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return model


@pytest.mark.parametrize(
    ("first", "second"),
    [("site", "plate"), ("plate", "site"), ("rate", "plate"), ("parameter", "plate")]
    + [("plate", "parameter"), ("site", "parameter"), ("site", "rate")],
)
def test_a_name_of_two_is_refused(first, second):
    """NumPyro forgets a site whose name a later plate has: its prior counts nowhere."""
    with pytest.raises(pg.ModelError, match="two sites named 'data', .* rename one"):
        pg.fit(clashing(first, second), METHODS["laplace"], 0, X, y=np.sin(X))


def test_a_plate_may_be_opened_twice():
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            loc = numpyro.deterministic("loc", 2.0 * f)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(loc, numpyro.param("noise", 0.3)), obs=y)

    found = pg.fit(model, pg.Laplace(hyper=pg.Fixed({"noise": 0.3})), 0, X, y=np.sin(X))
    K = 4.0 * np.exp(-0.5 * (X[:, None] - X) ** 2) + 0.09 * np.eye(N)
    want = float(dist.MultivariateNormal(np.zeros(N), K).log_prob(np.sin(X)))
    np.testing.assert_allclose(found.log_evidence, want, atol=1e-3)  # the jitter of K


def test_two_names_that_are_one_in_a_tree_are_named():
    model = model_of(("a/f", "a.f", "data", "y"))
    fit = pg.fit(model, METHODS["laplace"], 0, X, y=Y)
    with pytest.raises(pg.DataError, match="one name in a tree; rename"):
        fit.to_datatree(num_draws=3)


ROLES = ("f", "effect", "spread", "y", "twice")
ROWS = [f"row {i}" for i in range(N)]
TABLE = pd.DataFrame({"a": X, "b": X**2}, index=ROWS)
GROUP = pd.Series(np.random.default_rng(3).permutation(N), index=ROWS)  # as many levels as rows


def tree_of(names):
    """Of a model whose sites have these names, and whose arguments are table, group and e."""
    f, effect, spread, y, twice = names

    def model(table, group, e, obs=None):
        spreads = numpyro.sample(spread, dist.HalfNormal(1.0).expand([2]).to_event(1))
        numpyro.deterministic(twice, 2.0 * spreads)
        with numpyro.plate("level", N):
            effects = numpyro.sample(effect, dist.Normal(0.0, spreads[0]))
        values = numpyro.sample(f, pg.GP(pg.kernels.RBF(spreads[1], 1.0), table))
        with numpyro.plate("data", table.shape[0]):
            numpyro.sample(y, dist.Normal(values + effects[group] + e, 0.5), obs=obs)

    known = pg.Fixed({spread: np.array([0.5, 0.8])})
    fit = pg.fit(model, pg.Laplace(hyper=known), 0, TABLE, GROUP, np.zeros(N), obs=np.sin(X))
    new = {"table": TABLE[:3], "group": GROUP[:3], "e": np.zeros(3)}
    return fit.to_datatree(num_draws=5, whole=True, predictions=new)


def told(tree, names):
    """{(group, variable): (dimensions, their labels, values)}, of sites by their roles."""
    role = dict(zip(names, ROLES, strict=True))
    found = {}
    for group, data in tree.children.items():
        known = {} if group.endswith("constant_data") else role
        plain = lambda d: d.replace(d.split("_dim_")[0], known.get(*[d.split("_dim_")[0]] * 2))  # noqa: B023, E731
        for k, v in data.data_vars.items():
            labels = [v[d].values.tolist() for d in v.dims]
            found[group, known.get(k, k)] = ([plain(d) for d in v.dims], labels, v.values)
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("table", "group", "e", "obs", "twice"),
        pytest.param(("group", "e", "table", "a", "obs"), marks=pytest.mark.slow),
        pytest.param(("e", "table", "group", "b", "a"), marks=pytest.mark.slow),
    ],
)
def test_a_site_called_as_an_argument_keeps_its_dimensions(names):
    """So does the argument: in each group what a tree of other names has."""
    want, found = told(tree_of(ROLES), ROLES), told(tree_of(names), names)
    assert want.keys() == found.keys()
    assert want["posterior", "effect"][0] == ["chain", "draw", "level"]
    assert want["posterior", "f"][1][2] == ROWS
    for key, (dims, labels, values) in want.items():
        assert [d.removesuffix("_") for d in found[key][0]] == dims, key
        assert found[key][1] == labels, key
        if key[0] in ("constant_data", "observed_data", "point_estimates", "log_likelihood"):
            np.testing.assert_allclose(found[key][2], values, atol=1e-6)
