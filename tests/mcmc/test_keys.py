"""Keys: an integer seed, a typed key and a raw key of the same seed give the same answers from
every public call that takes one, which takes keys of other kinds too, and draws of two hidden
dimensions are the exact posterior's.
"""

import functools
import inspect

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits
from jax import random
from numpyro.infer.autoguide import AutoNormal
from scipy.special import logsumexp

import ppl_gp as pg
from ppl_gp.results import fit as verbs
from ppl_gp.settings import as_key

X, y, X_new = small_fits.classification()
SEED = 3
KEYS = {"integer": SEED, "typed": random.key(SEED), "raw": random.PRNGKey(SEED)}
N = 14
rng = np.random.default_rng(1)
X_hidden = np.linspace(-2.0, 2.0, N)[:, None]
Y_hidden = np.stack([np.sin(2 * X_hidden[:, 0]), np.cos(3 * X_hidden[:, 0])], 1)
Y_hidden = Y_hidden + 0.3 * rng.normal(size=(N, 2))


def hidden(X, y=None):
    """Two hidden dimensions per row."""
    plate = numpyro.plate("data", X.shape[0])
    with plate:
        h = numpyro.sample("h", dist.Normal(np.zeros(2), 1.0).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), jax.numpy.concatenate([X, h], 1)))
    with plate:
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)


@pytest.fixture(scope="module")
def hidden_fit():
    method = pg.SVGP(num_inducing=10, max_steps=60, layers=pg.Layers(latents=pg.Free()))
    return pg.fit(hidden, method, 0, X_hidden, y=Y_hidden[:, 0])


def normal(X, y=None):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def loss_of(loss):
    guide, data = AutoNormal(normal), np.linspace(-1.0, 1.0, 5)
    params = {"loc_auto_loc": 0.3, "loc_auto_scale": 0.5}
    with numpyro.handlers.seed(rng_seed=0):
        guide(data, y=data)
    return lambda key: loss(key, params, normal, guide, data, y=data)


GAUSSIAN = pg.GP(pg.kernels.RBF(1.0, 1.0), np.linspace(0.0, 1.0, 4)[:, None])
ALL = pg.GlobalImportanceWeightedELBO(3)
# {call: (its answer for a key, the kinds of keys that it takes)}; NumPyro's own interfaces take
# keys alone
OURS, NUMPYROS = ("integer", "typed", "raw"), ("typed", "raw")
CALLS = {
    "fit": (None, OURS),  # by method, below
    "compare": (lambda key, fit: compared(key, fit), OURS),
    "sample_prior": (lambda key, fit: prior(key), OURS),
    "Fit.sample": (lambda key, fit: fit.sample(key, X_new, 5), OURS),
    "Fit.to_datatree": (lambda key, fit: tree(key, fit), OURS),
    "Fit.infer_latents": (None, OURS),  # of another fit, below
    "GP.sample": (lambda key, fit: GAUSSIAN.sample(key, (2,)), NUMPYROS),
    "GP.rsample": (lambda key, fit: GAUSSIAN.rsample(key, (2,)), NUMPYROS),
    "GP.sample_with_intermediates": (
        lambda key, fit: GAUSSIAN.sample_with_intermediates(key)[0],
        NUMPYROS,
    ),
    "GlobalImportanceWeightedELBO.log_weights": (
        lambda key, fit: loss_of(ALL.log_weights)(key),
        NUMPYROS,
    ),
} | {
    f"{type(loss).__name__}.{name}": (
        lambda key, fit, loss=loss, name=name: loss_of(getattr(loss, name))(key),
        NUMPYROS,
    )
    for loss in (pg.ELBO(2), pg.ImportanceWeightedELBO(2), ALL)
    for name in ("loss", "loss_with_mutable_state")
}


def compared(key, fit):
    found = pg.compare({"a": fit}, X_new, y[:7], rng_key=key, num_importance_samples=200)
    return [found.table[0][k] for k in ("truth", "truth_se", "khat")]


def tree(key, fit):
    found = fit.to_datatree(num_draws=4, whole=True, rng_key=key, predictions=X_new)
    return {f"{g}/{k}": v.values for g in found.children for k, v in found[g].data_vars.items()}


def prior(key):
    found = pg.sample_prior(normal, key, np.linspace(-1.0, 1.0, 5), num_samples=4)
    return [found["prior"]["loc"].values, found["prior_predictive"]["y"].values]


def found_by_introspection() -> set[str]:
    """Every public callable of `pg`, of its classes and of fits, that takes a key."""
    public = {name: getattr(pg, name) for name in pg.__all__}
    for name, owner in list(public.items()):
        if inspect.isclass(owner):
            members = inspect.getmembers(owner, callable)
            public |= {f"{name}.{k}": v for k, v in members if not k.startswith("_")}
    # a method of `Fit` has the signature of the function that it calls
    public |= {k: getattr(verbs, k.split(".")[1], v) for k, v in public.items() if "Fit." in k}
    return {k for k, v in public.items() if {"key", "rng_key"} & set(parameters(v))}


def parameters(call) -> list[str]:
    try:
        return list(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return []


def require_equal(answers: list) -> None:
    first, *others = (jax.tree.leaves(a) for a in answers)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_table_has_every_call_that_takes_a_key():
    assert found_by_introspection() == set(CALLS)


QUICK = (
    "sample_prior",
    "Fit.sample",
    "Fit.to_datatree",
    "GP.sample",
    "GlobalImportanceWeightedELBO.log_weights",
)


@pytest.mark.parametrize(
    "call",
    [
        k if k in QUICK else pytest.param(k, marks=pytest.mark.slow)
        for k, (ask, _) in CALLS.items()
        if ask
    ],
)
def test_every_kind_of_key_gives_the_same_answer(call, small_fit):
    ask, kinds = CALLS[call]
    require_equal([ask(KEYS[kind], small_fit("laplace")) for kind in kinds])


OTHERS = ("rbg", "unsafe_rbg")


def require_a_key_of_another_kind(ask, impl="rbg"):
    """Equal keys give equal answers, and other keys others."""
    answers = [ask(random.key(seed, impl=impl)) for seed in (SEED, SEED, SEED + 1)]
    require_equal(answers[:2])
    leaves = (jax.tree.leaves(a) for a in answers[1:])
    assert any(not np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        k if k in QUICK[:3] else pytest.param(k, marks=pytest.mark.slow)
        for k, (ask, _) in CALLS.items()
        if ask
    ],
)
def test_keys_of_other_kinds_are_taken(call, small_fit):
    for impl in OTHERS:
        require_a_key_of_another_kind(lambda key: CALLS[call][0](key, small_fit("laplace")), impl)


def test_a_key_of_another_kind_is_one_of_the_default_kind():
    """Keys of other seeds stay other keys."""
    made = [as_key(random.key(s, impl=i), "") for s in range(3) for i in OTHERS]
    made += [as_key(s, "") for s in range(3)]
    assert {key.dtype for key in made} == {random.key(0).dtype}
    kept = {tuple(np.asarray(random.key_data(key)).tolist()) for key in made}
    assert len(kept) >= 6  # two of the kinds may make the same data of a seed


METHODS = {
    "svgp": pg.SVGP(num_inducing=4, max_steps=3, batch_size=8),
    "map": pg.Laplace(hyper=pg.MAP(restarts=3)),
    "sample": pg.Laplace(hyper=pg.Sample(num_warmup=3, num_samples=3, num_chains=2)),
    "nuts": pg.NUTS(num_warmup=3, num_samples=3, num_chains=2),
    "slices": pg.EllipticalSlice(num_warmup=3, num_samples=3, num_chains=1),
    "sparse_nuts": pg.SparseNUTS(num_inducing=4, num_warmup=3, num_samples=3, num_chains=1),
    "guide": pg.SVGP(num_inducing=4, max_steps=3, hyper=AutoNormal),
    "svi": pg.SVI(AutoNormal, num_steps=3),
}
MODELS = {"svi": normal}


@pytest.mark.parametrize(
    "name", [k if k == "svgp" else pytest.param(k, marks=pytest.mark.slow) for k in METHODS]
)
def test_every_kind_of_key_gives_the_same_fit(name):
    fits = [
        pg.fit(MODELS.get(name, small_fits.classifier), METHODS[name], key, X, y=y, throw=False)
        for key in KEYS.values()
    ]
    require_equal([(fit.hyper, dict(fit.latent)) for fit in fits])


@pytest.mark.parametrize(
    "name", [k if k == "nuts" else pytest.param(k, marks=pytest.mark.slow) for k in METHODS]
)
def test_fits_take_keys_of_other_kinds(name):
    """MAP's restarts may end in one mode whatever the key."""

    def ask(key):
        model = MODELS.get(name, small_fits.classifier)
        fit = pg.fit(model, METHODS[name], key, X, y=y, throw=False)
        return fit.hyper, dict(fit.latent)

    if name == "map":
        require_equal([ask(random.key(SEED, impl="rbg")) for _ in range(2)])
    else:
        require_a_key_of_another_kind(ask)


def test_latents_of_two_dimensions_are_the_posterior_under_every_kind_of_key(hidden_fit):
    """Against p(h) N(y; mean([x, h]), variance([x, h]) + noise) on a grid of h."""
    new, seen, num = X_hidden[:3] + 0.05, Y_hidden[:3, 0], 1000
    ask = functools.partial(hidden_fit.infer_latents, num_samples=num, num_proposals=num)
    answers = {"typed": ask(KEYS["typed"], new, seen), "raw": ask(KEYS["raw"], new, y=seen)}
    require_equal(list(answers.values()))
    require_a_key_of_another_kind(lambda key: ask(key, new, seen).draws)
    side = np.linspace(-4.0, 4.0, 81)
    grid = np.stack([g.ravel() for g in np.meshgrid(side, side)], 1)
    for n in range(3):
        q = hidden_fit.posterior(np.column_stack([np.full(len(grid), new[n, 0]), grid]))
        variance = np.asarray(q.variance) + 0.4**2
        log_p = -0.5 * (np.log(variance) + (seen[n] - np.asarray(q.mean)) ** 2 / variance)
        log_p -= 0.5 * np.sum(grid**2, 1)
        p = np.exp(log_p - logsumexp(log_p))
        mean = p @ grid
        sd = np.sqrt(p @ (grid - mean) ** 2)
        draws, ess = np.asarray(answers["raw"].draws["h"])[:, n], float(answers["raw"].ess[n])
        error = sd * np.sqrt(1.0 / ess + 1.0 / num)
        assert np.all(np.abs(draws.mean(0) - mean) < 4.0 * error)
        assert np.all(np.abs(draws.std(0) - sd) < 4.0 * error)


@pytest.mark.parametrize(
    "key", [None, "a", 0.5, X, random.split(random.key(0)), np.zeros(3), 2**70]
)
def test_what_is_not_a_key_is_named(key, small_fit):
    for call in (CALLS["Fit.sample"][0], CALLS["Fit.to_datatree"][0]):
        with pytest.raises(pg.DataError, match=r"rng_key must be .*; got .*For example"):
            call(key, small_fit("laplace"))
