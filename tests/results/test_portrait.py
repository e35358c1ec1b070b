"""A file is loaded with the model that was fitted: another likelihood or kernel under the same name
is refused, another number is warned of, and an edit that changes no density is neither.
"""

import re

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from small_fits import made_fit

import ppl_gp as pg
from ppl_gp.errors import StoreError
from ppl_gp.kernels.base import Kernel
from ppl_gp.results.store.save import changed_numbers, portrait

X = np.linspace(-1.0, 1.0, 9)
KNOWN = {"scale": 0.7}
BEFORE = """
def model(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, scale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
"""
OTHERS = {
    "another likelihood": (
        "dist.Normal(f, 0.3)",
        "dist.Laplace(f, 0.3)",
        r"'y' is Laplace.*Normal",
    ),
    "a link": ("dist.Normal(f", "dist.Normal(jnp.exp(f)", "other formulas behind 'y'"),
    "another kernel": ("RBF(1.5, scale)", "Matern52(1.5, scale)", r"'f' is GP\(Matern52"),
    "one kernel more": ("scale), X", "scale) + pg.kernels.Constant(1.0), X", r"GP\(Sum\(RBF, Con"),
    "a column": ("(1.5, scale)", "(1.5, scale, active_dims=0)", r"RBF\(\[0\]\)"),
    "another prior": ("HalfNormal(1.0)", "HalfCauchy(1.0)", "'scale' is HalfCauchy"),
    "a mean": ("scale), X)", "scale), X, lambda X: 0 * X[..., 0] + 1)", "'f' is GP"),
    "an offset": ("scale), X)", "scale), X, 0.5)", r"GP\(RBF, Constant\)"),
    "an axis": ("X.shape[0])", "X.shape[0], dim=-2)", "'y' is"),
}
NUMBERS = {
    "noise": ("f, 0.3", "f, 0.4", "'y' .from"),
    "variance": ("1.5", "1.6", "'f' .from"),
    "prior": ("HalfNormal(1.0)", "HalfNormal(2.0)", "'scale' .from"),
}
SAME = {
    "words": ("f = ", "f: object = "),
    "a function": ("dist.Normal(f, 0.3)", "(lambda m: dist.Normal(loc=m, scale=0.3))(f)"),
    "a formula": ("dist.Normal(f, 0.3)", "dist.Normal(f + 0.0, 0.6 / 2)"),
}


def made(text, **scope):
    scope = {"numpyro": numpyro, "dist": dist, "pg": pg, "jnp": jnp, **scope}
    exec(text, scope)
    return scope["model"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    fit = made_fit(made(BEFORE), KNOWN, X, y=np.sin(X))
    return fit.save(tmp_path_factory.mktemp("fits") / "a.fit")


@pytest.mark.parametrize("change", OTHERS)
def test_another_model_of_the_same_name_is_refused(change, saved):
    old, new, words = OTHERS[change]
    assert old in BEFORE
    with pytest.raises(StoreError, match=f"a.fit was saved from another model.*{words}"):
        pg.load(saved, made(BEFORE.replace(old, new)))


def test_a_conditioned_model_is_another(tmp_path):
    """A file of a model with effects was called damaged; of others the condition was ignored."""
    text = BEFORE.replace("f, 0.3", "numpyro.sample('level', dist.Normal(0.0, 1.0)) + f, 0.3")
    model = made(text)
    path = made_fit(model, KNOWN, X, y=np.sin(X)).save(tmp_path / "a.fit")
    for site in ("scale", "level"):
        other = handlers.condition(model, {site: jnp.array(0.5)})
        with pytest.raises(StoreError, match=f"from another model.*'{site}' is observed"):
            pg.load(path, other)
        other = handlers.substitute(model, {site: jnp.array(0.5)})
        with pytest.raises(StoreError, match=f"does not run.*'{site}'.*handlers.substitute"):
            pg.load(path, other)
    broken = handlers.condition(model, {"f": "not an array"})
    with pytest.raises(StoreError, match="does not run with the saved arguments"):
        pg.load(path, broken)


def test_a_model_under_do_is_the_same_when_it_is_made_again(tmp_path):
    """NumPyro's handler keeps its own address."""
    made_anew = lambda: handlers.do(made(BEFORE), {"scale": 0.7})  # noqa: E731
    fit = pg.fit(made_anew(), pg.Laplace(), 0, X, y=np.sin(X))
    again = pg.load(fit.save(tmp_path / "a.fit"), made_anew())
    np.testing.assert_array_equal(again.predict(X).mean, fit.predict(X).mean)


@pytest.mark.parametrize("before, after", [("f + u", "f - u"), ("f + u", "jnp.sin(f) + u")])
def test_another_formula_that_is_the_same_at_zero_is_refused(before, after):
    """Sites that are integrated have no value in a file, and had their prior means here."""
    text = """
def model(X, y=None):
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))[jnp.zeros(X.shape[0], int)]
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + u)), obs=y)
"""
    now, then = (portrait(made(t), (X,), {}, {}, {}) for t in (text, text.replace(before, after)))
    assert then["formula"] != now["formula"]
    assert changed_numbers(then, now)


@pytest.mark.parametrize("change", NUMBERS)
def test_another_number_is_warned_of(change, saved):
    old, new, words = NUMBERS[change]
    assert old in BEFORE
    with pytest.warns(UserWarning, match=f"a.fit: a number in the model.*{words}"):
        pg.load(saved, made(BEFORE.replace(old, new)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_density_loads(change, saved):
    old, new = SAME[change]
    assert old in BEFORE
    assert pg.load(saved, made(BEFORE.replace(old, new))).predict(X).mean.shape == X.shape


@pytest.mark.filterwarnings("error")
def test_versions_may_write_jaxprs_in_their_way(saved, monkeypatch):
    """A formula is compared within one version; classes and numbers in all."""
    from ppl_gp.results import load as loading

    monkeypatch.setattr(loading, "package_versions", lambda: {"jax": "99"})
    with pytest.raises(StoreError, match="'y' is Laplace"):
        pg.load(saved, made(BEFORE.replace("dist.Normal", "dist.Laplace")))
    with pytest.raises(UserWarning, match="a number in the model"):
        pg.load(saved, made(BEFORE.replace("Normal(f", "Normal(jnp.exp(f)")))


class Own(Kernel):
    """A kernel of the user's, whose class has another formula in another session."""

    power: float

    def __call__(self, X1, X2):
        return jnp.exp(-(jnp.abs(X1[:, None] - X2[None]) ** self.power))

    def diag(self, X):
        return jnp.ones(len(X))


def test_the_values_of_ones_own_kernel_count():
    text = BEFORE.replace("pg.kernels.RBF(1.5, scale)", "Own(1.0)")
    first, _ = (made(text, Own=Own), Own)

    class Other(Own):
        def __call__(self, X1, X2):
            return 2.0 * super().__call__(X1, X2)

    Other.__name__ = "Own"
    arguments = ((X,), {}, {k: jnp.asarray(v) for k, v in KNOWN.items()}, {})
    now, then = (portrait(m, *arguments) for m in (made(text, Own=Other), first))
    assert now["classes"] == then["classes"] and now["numbers"]["y"] == then["numbers"]["y"]
    assert now["numbers"]["f"] != then["numbers"]["f"]


INTEGRATED = """
def model(X, group, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, scale))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(b * X + u[group])), obs=y)
"""


def test_sites_that_were_integrated_are_compared(tmp_path):
    """The whole model, without a random number: the same in every process."""
    group, y = np.arange(9) % 3, np.arange(9) // 2
    method = pg.Laplace(hyper=pg.Fixed({"scale": 0.5}))
    fit = pg.fit(made(INTEGRATED), method, 0, X, group, y=y)
    path = fit.save(tmp_path / "a.fit")
    loaded = pg.load(path, made(INTEGRATED))
    np.testing.assert_array_equal(loaded.predict(X, group).mean, fit.predict(X, group).mean)
    with pytest.warns(UserWarning, match="'b' .from"):
        pg.load(path, made(INTEGRATED.replace("2.0", "2.5")))
    with pytest.raises(StoreError, match="'u' is StudentT.*and was Normal"):
        pg.load(path, made(re.sub(r"Normal\(0.0, scale", "StudentT(4.0, 0.0, scale", INTEGRATED)))
