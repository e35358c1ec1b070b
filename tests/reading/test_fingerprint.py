"""What compiled code is keyed by: a changed value that the model reads changes the key, and nothing
else does.
"""

import dataclasses
import functools
import inspect
import subprocess
import sys
import types
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from constants_read import BY_IDENTITY, WAYS

import ppl_gp as pg
from ppl_gp import priors
from ppl_gp.priors import lengthscale
from ppl_gp.reading.arguments import as_arrays
from ppl_gp.reading.fingerprint import (
    changed,
    digest,
    fingerprint,
    keyed,
    reads,
    settle,
)

TEXT = """
import functools
import numpy as np
import jax.numpy as jnp
import numpyro.distributions as dist
import settings

SCALE, TABLE, OPTIONS, PRIOR, UNREAD = 1.0, np.arange(4.0), {"a": [1, 2]}, dist.Normal(0.0, 1.0), 1
INNER = 2.0

def helper(x):
    return x * INNER

class Link:
    power = 2
    def __init__(self, shift):
        self.shift = shift
    def __call__(self, x):
        return self.shift + x**self.power

class Meta(type):
    depth = 0.3

class Settings(metaclass=Meta):
    pass

MISSING = 0.2

class Defaults(dict):
    def __missing__(self, key):
        return MISSING

defaults = Defaults()
link = Link(0.5)

def make(slope):
    def model(x, y=3.0, *, z=4.0):
        inner = lambda t: t * slope
        own = helper(x) + inner(x) + y + z + settings.DEPTH + link(x)
        own = own + Settings.depth + defaults["q"]
        return SCALE * jnp.sum(TABLE) + own + sum(OPTIONS["a"]) + PRIOR.loc
    return model

model = make(7.0)
"""


@pytest.fixture
def cell(monkeypatch):
    """text -> the namespace that running a notebook's cell with that text leaves."""
    settings = types.ModuleType("settings")
    settings.DEPTH, settings.UNREAD, settings.C = 1, 1, 1.0
    settings.inner = types.ModuleType("settings.inner")
    settings.inner.C = 1.0
    monkeypatch.setitem(sys.modules, "settings", settings)

    def run(text=TEXT):
        scope = {"__name__": "__main__"}
        exec(compile(text, "<cell>", "exec"), scope)
        return types.SimpleNamespace(**{"scope": scope, "settings": settings})

    return run


def _set(scope, name, value):
    scope[name] = value


CHANGES = {
    "global 'SCALE'": lambda c: _set(c.scope, "SCALE", 2.0),
    "global 'TABLE'": lambda c: _set(c.scope["TABLE"], 2, 9.0),
    "global 'OPTIONS'": lambda c: c.scope["OPTIONS"]["a"].append(3),
    "global 'PRIOR'": lambda c: _set(c.scope, "PRIOR", dist.Normal(0.5, 1.0)),
    "global 'INNER'": lambda c: _set(c.scope, "INNER", 3.0),
    "global 'link'": lambda c: setattr(c.scope["link"], "shift", 0.7),
    "class 'Meta'": lambda c: setattr(c.scope["Meta"], "depth", 0.4),
    "global 'MISSING'": lambda c: _set(c.scope, "MISSING", 0.9),
    "class 'Link'": lambda c: setattr(c.scope["Link"], "power", 3),
    "attribute 'settings.DEPTH'": lambda c: setattr(c.settings, "DEPTH", 2),
    "closure 'slope'": lambda c: _set_cell(c.scope["model"], "slope", 8.0),
    "default 'y'": lambda c: setattr(c.scope["model"], "__defaults__", (3.5,)),
    "default 'z'": lambda c: c.scope["model"].__kwdefaults__.update(z=4.5),
    "code of 'helper'": lambda c: setattr(
        c.scope["helper"], "__code__", (lambda x: x - 1).__code__
    ),
}


def _set_cell(function, name, value):
    function.__closure__[function.__code__.co_freevars.index(name)].cell_contents = value


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_named(cell, name):
    made = cell()
    model = made.scope["model"]
    before, key, same = model(2.0), keyed(model), keyed(model)
    assert key == same and hash(key) == hash(same) and not changed(key)
    CHANGES[name](made)
    assert model(2.0) != before, "the change is one that the model sees"
    assert changed(key) == [name]
    assert key == same and keyed(key) != key, "the key is of the time when it was made"


def test_what_is_not_read_changes_nothing(cell):
    made = cell()
    key = keyed(made.scope["model"])
    made.scope["UNREAD"], made.settings.UNREAD, made.scope["shape"] = 2, 2, 3
    assert keyed(key) == key and not changed(key)


def test_a_function_of_the_package_counts_by_its_name(monkeypatch):
    """Also from a checkout, outside of site-packages: what it reads itself is no value of the
    user's.
    """
    plain = inspect.unwrap(lengthscale)  # the suite's checks of types stand around it
    assert Path(plain.__code__.co_filename).name == "priors.py"

    def model(X, y=None):
        return plain(X)

    before = reads(model)
    told = [name for name in before if name.startswith("code of ")]
    assert told == [f"code of '{model.__qualname__}'"]
    monkeypatch.setattr(priors, "_ROWS", 7)
    assert reads(model) == before


def test_a_cell_that_is_run_again_finds_its_compiled_code(cell):
    """And one with another constant, another operator or another length of a loop does not."""
    first = keyed(cell().scope["model"])
    assert keyed(cell("\n# a comment\n" + TEXT).scope["model"]) == first
    for old, new in (
        ("INNER = 2.0", "INNER = 2.5"),
        ("x * INNER", "x + INNER"),
        ("t * slope", "t - slope"),
        ("y=3.0", "y=3"),
    ):
        assert keyed(cell(TEXT.replace(old, new)).scope["model"]) != first, new


def test_partials_methods_and_callable_objects():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return x * self.scale

        def method(self, x):
            return x + self.scale

    @dataclasses.dataclass
    class Configured:
        scale: float

        def __call__(self, x):
            return x * self.scale

    class Module(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return x * self.scale

    def options(x, link="logit", scale=1.0):
        return x * scale if link == "logit" else x

    for make in (
        Model,
        Configured,
        lambda s: Model(s).method,
        lambda s: Module(jnp.asarray(s)),
        lambda s: functools.partial(options, scale=s),
        lambda s: functools.partial(options, 2.0, "logit", s),
        lambda s: functools.partial(Model(s).method),
        lambda s: functools.lru_cache(functools.partial(options, scale=s)),
        lambda s: jax.jit(lambda x: x * s),
        lambda s: jax.vmap(lambda x: x * s),
        lambda s: numpyro.handlers.scale(options, s),
    ):
        assert keyed(make(1.0)) == keyed(make(1.0))
        assert keyed(make(1.0)) != keyed(make(2.0))
    model = Model(1.0)
    key = keyed(model)
    model.scale = 2.0
    assert changed(key) == ["attribute 'scale'"]


def test_cycles_and_values_of_every_kind():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    loop = [1.0]
    loop.append(loop)
    values = [
        loop,
        {"a": loop},
        (1, True),
        (1, 1.0),
        (1,),
        "1",
        b"1",
        None,
        {1, 2},
        {1, 3},
        1j,
        slice(1),
        slice(2),
        range(3),
        float("nan"),
        np.float32(1.0),
        np.float64(1.0),
        np.ones(2),
        np.ones((2, 1)),
        np.ones(2, int),
        np.array(["a", "b"]),
        jnp.ones(2),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        jax.random.key(0),
        jax.random.key(1),
        dist.Normal(0.0, 1.0),
        dist.Normal(0.0, 2.0),
        np.datetime64("2020-01-01"),
        np.array([None, 1], object),
    ]
    digests = [digest(v) for v in values]
    assert len(set(digests)) == len(values)
    assert [digest(v) for v in values] == digests
    assert fingerprint(even) == fingerprint(even) != fingerprint(odd)


def test_what_using_a_distribution_caches_in_it_is_no_change():
    prior = dist.Categorical(logits=jnp.array([0.1, 0.2]))
    before = digest(prior)
    _ = prior.probs, prior.mean
    assert digest(prior) == before
    prior = lengthscale(np.arange(4.0))  # of a transform, which keeps its inverse once it is used
    before = digest(prior)
    prior.log_prob(2.0)
    assert digest(prior) == before
    assert digest(dist.InverseGamma(2.0, 1.0)) != digest(dist.InverseGamma(2.0, 1.5))


def test_objects_that_cannot_be_read_have_to_be_the_same():
    def make(lock):
        return lambda x: (lock, x)[1]

    lock = (x for x in ())
    assert keyed(make(lock)) == keyed(make(lock)) != keyed(make(x for x in ()))
    assert fingerprint(make(lock)) == fingerprint(make(x for x in ())), (
        "no address enters the fingerprint"
    )


def test_what_a_model_writes_itself_is_no_change_once_settled():
    calls = []
    scale = {"value": 1.0}

    def model(x):
        calls.append(x)
        return x * scale["value"]

    key = keyed(model)
    key(1.0)
    assert changed(key) == ["closure 'calls'"]
    settle(key)
    key(2.0)
    assert not changed(key)
    scale["value"] = 2.0
    assert changed(key) == ["closure 'scale'"]


def test_a_keyed_model_passes_for_the_function():
    def model(X, y=None, *, link="logit"):
        """Docstring."""
        return X, y, link

    model.note = "attribute"
    key = keyed(model)
    assert key(1, y=2) == (1, 2, "logit") and key.note == "attribute"
    assert (key.__name__, key.__qualname__, key.__module__) == (
        model.__name__,
        model.__qualname__,
        model.__module__,
    )
    assert inspect.signature(key) == inspect.signature(model) and key.__wrapped__ is model
    assert keyed(key).__wrapped__ is model and keyed(key) == key
    partial = functools.partial(model, link="probit")
    assert list(inspect.signature(keyed(partial)).parameters) == ["X", "y", "link"]
    assert not hasattr(keyed(partial), "__qualname__")


def test_compiled_code_follows_the_key(cell):
    made, traces = cell(), []

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, x):
        traces.append(x)
        return model(x)

    model = made.scope["model"]
    first = run(keyed(model), 2.0)
    assert run(keyed(cell().scope["model"]), 2.0) == first and len(traces) == 1
    made.scope["SCALE"] = 10.0
    assert run(keyed(model), 2.0) == model(2.0) != first and len(traces) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_constant_is_followed_however_it_is_read(cell, way):
    text, change = WAYS[way]
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, x):
        traces.append(x)
        return model(x)

    scope, again = cell(text).scope, cell("\n# run again\n" + text).scope
    old = keyed(scope["model"])
    first = run(old, 3.0)
    assert run(keyed(again["model"]), 3.0) == first
    assert len(traces) == 1 + (way in BY_IDENTITY), "the same cell finds its compiled code"
    exec(change, scope)
    model = scope["model"]
    assert run(keyed(model), 3.0) == model(3.0) != first
    assert changed(old) or model is not old.__wrapped__


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS)[::4])
def test_a_fit_follows_a_constant_or_refuses(cell, way):
    X, y = np.linspace(-1.0, 1.0, 3)[:, None], np.array([0.2, -0.4, 0.9])
    text, change = WAYS[way]

    def model_of(constant):
        def model(X, y=None):
            f = numpyro.sample("f", pg.GP(constant(3.0) * pg.kernels.RBF(1.0, 1.0), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

        return model

    scope = cell(text).scope
    fit = lambda model: pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y)  # noqa: E731
    before = fit(model_of(scope["model"]))
    mean = before.predict(X).mean
    again = fit(model_of(cell(text).scope["model"]))
    np.testing.assert_array_equal(again.predict(X).mean, mean)
    assert again.stats["compilations"] == 0 or way in BY_IDENTITY
    read = scope["model"]
    exec(change, scope)
    after = fit(model_of(scope["model"]))
    K = scope["model"](3.0) * np.exp(-0.5 * (X - X.T) ** 2)
    exact = dist.MultivariateNormal(np.zeros(3), K + 0.09 * np.eye(3)).log_prob(y)
    assert after.log_evidence == pytest.approx(float(exact), abs=1e-5)
    if scope["model"] is read:
        with pytest.raises(pg.ModelError, match="has changed since the fit"):
            before.predict(X)


def test_digest_of_large_arrays_sees_one_entry():
    big = np.zeros((3_000_000, 1))
    before = digest({"y": big, "link": "logit"})
    assert digest({"y": big, "link": "probit"}) != before
    big[1_234_567] = 1.0
    assert digest({"y": big, "link": "logit"}) != before


_OTHER = """
import sys, types
settings = types.ModuleType("settings"); settings.DEPTH = 1; sys.modules["settings"] = settings
from ppl_gp.reading.fingerprint import fingerprint
scope = {"__name__": "__main__"}
exec(compile(sys.argv[1], "<cell>", "exec"), scope)
print(fingerprint(scope["model"]))
"""


def test_processes_agree(cell):
    text = (
        TEXT
        + "\nHELD = {'a', 'b', 'c'}\ninner = model\ndef model(x):\n    return inner(x) if 'a' in "
        "HELD else x in {'x', 'y', 'z'}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", _OTHER, text],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == fingerprint(cell(text).scope["model"])
    assert "class 'Link'" in reads(cell(text).scope["model"])


class Power:
    def __init__(self, power):
        self.power = power

    def of(self, x):
        return jnp.exp(x) ** self.power


@dataclasses.dataclass
class Linked:
    link: types.FunctionType = jnp.exp  # compiled: it may be bound, as a method is
    level: float = 0.0

    def __call__(self, X, y=None):
        f = numpyro.sample("f", pg.GP(1e-12 * pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(self.link(self.level + f)), obs=y)


def test_a_field_whose_default_is_compiled_counts():
    """It was taken for a descriptor's cache, and the second fit had the first one's link."""
    x, fixed = np.arange(3.0), pg.Laplace(hyper=pg.Fixed({}))
    zeros = np.zeros(3, int)
    for link, rate in ((jnp.exp, 1.0), (jax.nn.softplus, np.log(2.0)), (Power(2.0).of, 1.0)):
        fit = pg.fit(Linked(link=link), fixed, 0, x, y=zeros)
        assert abs(fit.log_evidence + 3.0 * rate) < 1e-6


class Noisy:
    noise = 1.0


def test_an_object_among_the_arguments_is_read_anew():
    """It counted by identity, and a second fit had the first one's noise."""

    def model(X, config, y=None):
        f = numpyro.sample("f", pg.GP(1e-12 * pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, config.noise), obs=y)

    config, fixed = Noisy(), pg.Laplace(hyper=pg.Fixed({}))
    for noise in (1.0, 2.0):
        config.noise = noise
        fit = pg.fit(model, fixed, 0, np.arange(3.0), config, y=np.zeros(3))
        assert abs(fit.log_evidence + 3.0 * np.log(noise * np.sqrt(2.0 * np.pi))) < 1e-6


def test_arguments_are_copied():
    """On a CPU JAX shares the memory of aligned arrays: X *= 2 after a fit moved its inputs."""
    memory = np.zeros(8 * 1000 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    x = memory[start : start + 8000].view(float)
    (kept,), _ = as_arrays((x,), {})
    x[:] = 1.0
    assert float(jnp.sum(kept)) == 0.0
