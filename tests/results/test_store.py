"""Saved fits: what is loaded predicts as what was saved, with every draw; files that cannot be
loaded say why.
"""

import json
import os
import types
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.module import random_eqx_module
from small_fits import HYPER, NUM_NEW, classification, classifier, made_fit

import ppl_gp as pg
from ppl_gp.errors import DataError, Result, StoreError
from ppl_gp.results.store.archive import digest_of
from ppl_gp.results.store.save import FORMAT_VERSION

X, Y, X_NEW = classification()
ALL = ["laplace", "ep", "vi", "bound", "laplace_sample", "nuts"]


def leaves(prediction):
    return [
        np.asarray(getattr(prediction, a))
        for a in ("f_mean", "f_variance", "mean", "variance", "probs")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_loaded_fit_is_the_saved_one(small_fit, tmp_path, name):
    fit = small_fit(name)
    path = fit.save(tmp_path / "fit.gp")
    loaded = pg.load(path, classifier)
    for a, b in zip(leaves(fit.predict(X_NEW)), leaves(loaded.predict(X_NEW)), strict=True):
        np.testing.assert_array_equal(a, b)
    y = np.arange(NUM_NEW) % 2
    np.testing.assert_array_equal(fit.log_density(X_NEW, y), loaded.log_density(X_NEW, y))
    np.testing.assert_array_equal(fit.sample(3, X_NEW, 4).f, loaded.sample(3, X_NEW, 4).f)
    assert loaded.log_evidence == fit.log_evidence and loaded.result is fit.result
    assert (loaded.sampled, loaded.num_chains, repr(loaded.method)) == (
        fit.sampled,
        fit.num_chains,
        repr(fit.method),
    )
    for k, v in fit.hyper.items():
        np.testing.assert_array_equal(loaded.hyper[k], v)
    assert set(loaded.stats) == set(fit.stats) and loaded.stats["seconds"] == fit.stats["seconds"]
    assert "y" not in loaded.kwargs
    np.testing.assert_array_equal(
        loaded.to_datatree(num_draws=5)["posterior"]["f"],
        fit.to_datatree(num_draws=5)["posterior"]["f"],
    )
    with pytest.raises(DataError, match="does not hold its observations"):
        loaded.loo()


def test_every_draw_is_kept(small_fit, tmp_path):
    fit = small_fit("nuts")
    loaded = pg.load(fit.save(tmp_path / "fit.gp"), classifier)
    assert loaded.latent["f"].num_draws == loaded.hyper["variance"].shape[0] == 50
    assert len(np.unique(loaded.hyper["variance"])) > 10
    np.testing.assert_array_equal(loaded.latent["f"].mean, fit.latent["f"].mean)
    np.testing.assert_array_equal(
        loaded.stats["sample_stats"]["diverging"], fit.stats["sample_stats"]["diverging"]
    )


def test_a_loaded_fit_can_be_saved_again(small_fit, tmp_path):
    once = pg.load(small_fit("ep").save(tmp_path / "a"), classifier)
    twice = pg.load(once.save(tmp_path / "b"), classifier)
    np.testing.assert_array_equal(twice.predict(X_NEW).probs, once.predict(X_NEW).probs)
    assert repr(twice.method) == repr(small_fit("ep").method)


def options(X, offset, y=None, shape=(1.0, 2.0), names=None, mask=None, link="log"):
    """Arguments of many kinds, and several GP sites."""
    assert names == {"a": [1, None, "b"]} and isinstance(shape, tuple)
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(shape[0], shape[1]), X))
    with numpyro.plate("functions", 2):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample(
            "y",
            dist.Normal(f + g[0] * g[1] + offset, 0.5 if link == "log" else 5.0),
            obs=y,
            obs_mask=mask,
        )


@pytest.mark.slow
def test_arguments_of_every_kind_are_stored_but_not_the_observations(tmp_path):
    kwargs = {
        "y": X[:, 0] * 7,
        "names": {"a": [1, None, "b"]},
        "shape": (2.0, 1.5),
        "mask": np.arange(len(X)) > 2,
    }
    fit = made_fit(
        options, {}, X, num_draws=3, offset=np.arange(len(X)) / 10, **kwargs, link="other"
    )
    path = fit.save(tmp_path / "fit.gp")
    loaded = pg.load(path, options)
    new = {"offset": np.zeros(NUM_NEW)}
    p, q = fit.predict(X_NEW, **new), loaded.predict(X_NEW, **new)
    np.testing.assert_array_equal(p.mean, q.mean)
    np.testing.assert_array_equal(p.f_mean["g"], q.f_mean["g"])
    assert (
        loaded.kwargs["shape"] == (2.0, 1.5)
        and loaded.kwargs["link"] == "other"
        and "y" not in loaded.kwargs
    )
    with zipfile.ZipFile(path) as archive:
        stored = [np.load(archive.open(n)) for n in archive.namelist() if n.endswith(".npy")]
    assert not any(a.shape == (len(X),) and np.allclose(a, X[:, 0] * 7) for a in stored)
    with pytest.raises(DataError, match="predicting needs.*offset"):
        loaded.predict(X_NEW)


@pytest.mark.slow
def test_observations_that_only_a_factor_sees_are_drawn_by_a_loaded_model(tmp_path):
    def censored(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            times = dist.Weibull(jnp.exp(f), 1.5)
            if y is None:
                numpyro.sample("y", times)
            else:
                numpyro.factor(
                    "likelihood", jnp.where(y > 1.5, -((y / jnp.exp(f)) ** 1.5), times.log_prob(y))
                )

    y = np.linspace(0.5, 2.0, len(X))
    fit = pg.fit(censored, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y)
    loaded = pg.load(fit.save(tmp_path / "a.fit"), censored)
    again = pg.load(loaded.save(tmp_path / "b.fit"), censored)
    for other in (loaded, again):
        np.testing.assert_array_equal(other.predict(X_NEW).f_mean, fit.predict(X_NEW).f_mean)
        np.testing.assert_allclose(
            other.log_density(X[:3], y[:3]), fit.log_density(X[:3], y[:3]), rtol=1e-12
        )


def test_arguments_that_cannot_be_stored_are_named(tmp_path):
    def uses_an_object(X, y=None, setting=None):
        classifier(X, y)

    fit = made_fit(uses_an_object, HYPER, X, y=Y, setting={"inner": object()})
    with pytest.raises(DataError, match=r"argument 'setting'\['inner'\] is a object"):
        fit.save(tmp_path / "fit.gp")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_or_impossible_write_leaves_no_file_and_the_old_one_whole(
    small_fit, tmp_path, monkeypatch
):
    fit, path = small_fit("ep"), tmp_path / "fit.gp"
    fit.save(path)
    before = path.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["fit.gp"]
    monkeypatch.undo()
    with pytest.raises(StoreError, match="cannot write .*absent/fit.gp"):
        fit.save(tmp_path / "absent" / "fit.gp")


@pytest.fixture
def saved(small_fit, tmp_path):
    return small_fit("laplace").save(tmp_path / "fit.gp")


def rewritten(path, change):
    """The file with its header changed, and a digest that does not show it."""
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    header = json.loads(members["header.json"])
    del header["digest"]
    change(header)
    header["digest"] = digest_of(header)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, json.dumps(header) if name == "header.json" else content)
    return path


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_files(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(StoreError, match=f"{saved}.*truncated or damaged"):
        pg.load(saved, classifier)


def test_damaged_arrays(saved):
    content = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:
        info = archive.getinfo("draws/kept/f/mean.npy")
    content[info.header_offset + 30 + len(info.filename) + 200] ^= 0xFF  # in the array's numbers
    saved.write_bytes(bytes(content))
    with pytest.raises(StoreError, match="truncated or damaged"):
        pg.load(saved, classifier)


def test_foreign_files(tmp_path):
    text, archive, arrays = tmp_path / "notes.txt", tmp_path / "other.zip", tmp_path / "arrays.npz"
    text.write_text("not a fit")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("header.json", json.dumps({"format": "something else"}))
    np.savez(arrays, x=np.ones(3))
    for path in (text, archive, arrays):
        with pytest.raises(StoreError, match=f"{path} is not a fit that ppl_gp wrote"):
            pg.load(path, classifier)
    with pytest.raises(FileNotFoundError):
        pg.load(tmp_path / "absent", classifier)


def test_newer_formats(saved):
    rewritten(saved, lambda header: header.update(version=FORMAT_VERSION + 1))
    with pytest.raises(
        StoreError, match=f"has format version {FORMAT_VERSION + 1}.*upgrade ppl-gp"
    ):
        pg.load(saved, classifier)


def test_objects_are_refused(saved):
    """An array of objects would be unpickled: the loader refuses it."""
    with zipfile.ZipFile(saved, "a") as archive, archive.open("evil.npy", "w") as member:
        np.lib.format.write_array(member, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    claims = {"evil": ["|O", [1], ""]}
    rewritten(
        saved,
        lambda header: header.update(
            args=[{"$array": "evil"}], arrays={**header["arrays"], **claims}
        ),
    )
    with pytest.raises(StoreError, match="array 'evil' holds object"):
        pg.load(saved, classifier)


def renamed_gp(X, y=None):
    numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    h = numpyro.sample("h", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    numpyro.sample("y", dist.Bernoulli(logits=h).to_event(1), obs=y)


def another_hyperparameter(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, noise), X))
    numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


def wider_hyperparameter(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros(2), 1.0).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


def does_not_run(X, Z, y=None):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (renamed_gp, r"'f' is absent and was GP.*\[25\].*'h' is GP.*\[25\].*and was absent"),
        (another_hyperparameter, "'lengthscale' is absent .*'noise' is LogNormal"),
        (wider_hyperparameter, r"'lengthscale' is LogNormal.* \[2\] and was LogNormal.* \[\]"),
        (does_not_run, "does not run with the saved arguments"),
    ],
)
def test_other_models(saved, model, message):
    with pytest.raises(
        StoreError, match=f"{saved}.*small_fits.classifier.*{model.__name__}.*{message}"
    ):
        pg.load(saved, model)


def test_precision_is_not_lost_silently(saved):
    with jax.enable_x64(False), pytest.warns(UserWarning, match=f"{saved} holds float64"):
        pg.load(saved, classifier)
    assert pg.load(saved, classifier).result is Result.converged


X_LINE = np.linspace(-1.0, 1.0, 6)


def _line(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w * X, 1.0), obs=y)


def _line_of_wide_prior(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w * X, 1.0), obs=y)


def test_a_model_of_other_name_and_code_is_another(tmp_path):
    """Sites of the same names and shapes do not make it the model that q was fitted to."""
    fit = pg.fit(_line, pg.Laplace(integrate=()), 0, X_LINE, y=0.5 * X_LINE)
    path = fit.save(tmp_path / "line.fit")
    with pytest.raises(StoreError, match=r"_line'.*_line_of_wide_prior'.* other code"):
        pg.load(path, _line_of_wide_prior)
    renamed = types.FunctionType(_line.__code__, _line.__globals__, "renamed", _line.__defaults__)
    renamed.__qualname__ = "renamed"
    found = pg.load(path, renamed).predict(X_LINE).mean
    np.testing.assert_allclose(found, fit.predict(X_LINE).mean, rtol=1e-12)


def test_a_param_of_arrays_is_loaded(tmp_path):
    def model(X, y=None):
        w = numpyro.param("w", {"slope": jnp.ones(2), "level": jnp.zeros(())})
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f + X @ w["slope"] + w["level"]), obs=y)

    known = {"w": {"slope": jnp.array([0.5, -1.0]), "level": jnp.array(0.3)}}
    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed(known)), 0, X, y=Y)
    loaded = pg.load(fit.save(tmp_path / "fit.gp"), model)
    np.testing.assert_array_equal(loaded.hyper["w"]["slope"], fit.hyper["w"]["slope"])


@pytest.mark.slow
def test_a_networks_param_of_initial_values_is_no_part_of_a_file(tmp_path):
    def model(X, y=None):
        layer = eqx.nn.Linear(1, 1, key=jax.random.key(0))
        net = random_eqx_module("net", layer, prior=dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jax.vmap(net)(X[:, None])[:, 0], 1.0), obs=y)

    fit = pg.fit(model, pg.SVI(num_steps=60, num_draws=5), 0, X_LINE, y=X_LINE)
    loaded = pg.load(fit.save(tmp_path / "net.fit"), model)
    np.testing.assert_allclose(loaded.predict(X_LINE).mean, fit.predict(X_LINE).mean, rtol=1e-12)
