"""Files of saved fits: one of this version predicts as it did; a damaged one raises `StoreError`,
whatever changed.
"""

import copy
import dataclasses
import functools
import io
import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from often import some
from small_fits import NUM_NEW, OK, classification, classifier, made_fit

import ppl_gp as pg
from models.classification import binary
from ppl_gp.deep.latents import Encoded, mlp_encoder
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, StoreError
from ppl_gp.kept import FromInducing
from ppl_gp.results.fit import Fit
from ppl_gp.results.store.archive import digest_of
from ppl_gp.results.store.save import decode, encode

FIRST, THIS = (Path(__file__).parents[1] / "reference" / f"fit_v{n}.fit" for n in (1, 7))
X, Y, X_NEW = classification()


def test_a_file_without_digests_is_refused_by_its_version():
    """A file of version 1, as ppl-gp 0.1.0 wrote it at commit 9261fc4."""
    with pytest.raises(StoreError, match="fit_v1.fit has format version 1 .*fit again"):
        pg.load(FIRST, binary)


def test_a_file_of_this_version_predicts_as_its_writer_did():
    """Laplace with MAP for `binary(link="probit")` (float64): a field that is renamed in a class
    that files name changes the format, whose number must then rise.
    """
    fit, new = pg.load(THIS, binary), np.array([[0.0, 0.0], [1.0, -0.5], [-1.5, 0.75]])
    p = fit.predict(new)
    np.testing.assert_allclose(
        p.f_mean, [0.4307029428772185, 0.5378090140129028, -0.9706888196213609], rtol=1e-8
    )
    np.testing.assert_allclose(
        p.f_variance, [0.6574098845470627, 1.134002359332507, 0.7701737617160801], rtol=1e-8
    )
    np.testing.assert_allclose(
        p.probs, [0.6310182516748655, 0.6436211455753507, 0.23282390807252867], rtol=1e-8
    )
    scores = fit.log_density(new, np.array([0, 1, 1]))
    np.testing.assert_allclose(
        scores, [-0.9970080986984318, -0.4406450092523677, -1.4574728704918716], rtol=1e-8
    )
    assert (fit.log_evidence, fit.result, fit.kwargs) == (
        -7.331251305065486,
        OK,
        {"link": "probit"},
    )


def latent_classifier(X, y=None):
    """A latent beside each row's inputs."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
    f = numpyro.sample(
        "f", pg.GP(pg.kernels.RBF(variance, 1.0), jnp.concatenate([X, h[:, None]], 1))
    )
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def sparse(model, hyper, columns, **more):
    """A fit with inducing points as `SVGP` leaves one, made by hand."""
    rng = np.random.default_rng(1)
    # one draw
    points = jax.tree.map(lambda Z: Z[None], pg.Points(jnp.asarray(rng.normal(size=(5, columns)))))
    latent = FromInducing(
        inducing=points, mean=jnp.asarray(rng.normal(size=(1, 5))), reduction=jnp.full((1, 5), 0.7)
    )
    hyper = {k: jnp.asarray(v, float) for k, v in hyper.items()}
    return Fit(
        model=model,
        method=pg.SVGP(),
        args=(jnp.asarray(X),),
        kwargs={"y": jnp.asarray(Y)},
        draws=Draws.one(hyper, {"f": latent}),
        log_evidence=-9.0,
        result=OK,
        stats={},
        **more,
    )


def encoded(sees="x"):
    columns = jnp.concatenate([X] * ("x" in sees) + [Y[:, None]] * ("y" in sees), 1)
    encoder = mlp_encoder(1.0 * columns, 1, 3, 1, jax.random.key(0))
    return sparse(latent_classifier, {"variance": 1.5}, 3, local={"h": Encoded(encoder, sees)})


@pytest.mark.parametrize("sees", ["xy", "y", "x"])
@pytest.mark.one_case
def test_latents_of_new_data_are_inferred_alike_by_a_file(tmp_path, sees):
    """An encoder proposes them: another one, or none, gives other draws."""
    fit = encoded(sees)
    again = pg.load(fit.save(tmp_path / "a.fit"), latent_classifier)
    found, same = (f.infer_latents(1, X_NEW, np.ones(NUM_NEW, int)) for f in (fit, again))
    np.testing.assert_array_equal(found.draws["h"], same.draws["h"])
    np.testing.assert_array_equal(found.ess, same.ess)
    assert again.local["h"].sees == sees


def test_an_encoder_of_ones_own_that_sees_y_is_refused_by_save(tmp_path):
    fit = encoded("y")
    fit = dataclasses.replace(fit, local={"h": Encoded(lambda row: jnp.zeros(2), "y")})
    with pytest.raises(pg.DataError, match="encoder of latent 'h' is a function"):
        fit.save(tmp_path / "a.fit")


KINDS = {
    "laplace": lambda: made_fit(classifier, {"lengthscale": 1.2, "variance": 2.0}, X, y=Y),
    "nuts": lambda: made_fit(
        classifier, {"lengthscale": 1.2, "variance": 2.0}, X, num_draws=3, y=Y
    ),
    "svgp": lambda: sparse(classifier, {"lengthscale": 1.2, "variance": 2.0}, 2),
    "svgp with latents": encoded,
    "svgp with an encoder of y": lambda: encoded("xy"),
}
VALUES = [
    None,
    True,
    -1,
    7,
    float("nan"),
    "9",
    [],
    {},
    [[]],
    {"a": 1},
    {"$array": "nope"},
    {"$tuple": 3},
    {"$module": "Points"},
    {"$module": "Points", "Z": 1, "__class__": 2},
]


def places(node, path=()):
    """Every key and index of a header, outermost first."""
    for k, v in (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    ):
        yield (*path, k)
        yield from places(v, (*path, k))


LATENTS = ("local", "draws")


def changed_headers(header):
    """Each place left out, and replaced by values of every kind in turn (all of them at the
    outermost places).

    A file with q(h) differs from the others in `LATENTS` only.
    """
    for i, path in enumerate(p for p in places(header) if not header["local"] or p[0] in LATENTS):
        values = VALUES if len(path) == 1 else [VALUES[i % len(VALUES)]]
        for value in [..., *values]:
            new = copy.deepcopy(header)
            inner = functools.reduce(lambda node, k: node[k], path[:-1], new)
            if value is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield f"{path} = {value}", new


def written(path, header, arrays):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps(header))
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", content.getvalue())
    return path


def contents(path):
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))
        return header, {n: np.load(archive.open(f"{n}.npy")) for n in header["arrays"]}


def with_digest(header):
    """As somebody would write it on purpose."""
    rest = {k: v for k, v in header.items() if k != "digest"}
    return {**rest, "digest": digest_of(rest)}


def changed_arrays(arrays):
    """Each array with NaN, of another shape or type; `None` for one that is missing."""
    for name, a in arrays.items():
        changes = {
            "NaN": a * np.nan,
            "wrapped": a[None],
            "a word": np.array("a"),
            "objects": a.astype(object),
        }
        changes |= (
            {"short": a[:-1], "flat": a.ravel()[:-1], "empty": a[:0]}
            if a.ndim
            else {"vector": a[None]}
        )
        for what, change in changes.items():
            yield f"{name}: {what}", {**arrays, name: change}
        yield f"{name}: missing", {k: v for k, v in arrays.items() if k != name}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", some(KINDS, "laplace", "svgp"))
def test_nothing_but_store_error_or_the_same_predictions(kind, tmp_path):
    """Every field of the header changed in turn, and every array. On purpose, with a digest that
    is right, it may become another fit, and no other error.
    """
    fit = KINDS[kind]()
    path = fit.save(tmp_path / "good.fit")
    header, arrays = contents(path)
    cases = [(what, new, arrays) for what, new in changed_headers(header)]
    cases += [(what, header, new) for what, new in changed_arrays(arrays)]
    cases += [(f"{what}, on purpose", with_digest(new), arrays) for what, new, _ in cases]
    want = fit.predict(X_NEW)
    for what, new, stored in cases:
        try:
            again = pg.load(written(tmp_path / "bad.fit", new, stored), fit.model)
        except StoreError as error:
            assert "bad.fit" in str(error), what
            continue
        if "on purpose" not in what:
            found = again.predict(X_NEW)
            for name in ("f_mean", "f_variance", "mean", "probs"):
                np.testing.assert_array_equal(getattr(found, name), getattr(want, name), what)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, a: h.update(version="9"), "format version '9'"),
        (lambda h, a: h.pop("method"), "header is not the one that was written"),
        (lambda h, a: h["draws"]["hyper"].update(variance=7.0), "header is not the one"),
        (lambda h, a: h["reading"].update(grows=False), "header is not the one"),
        (
            lambda h, a: a.update({"draws/hyper/variance": np.array([2.5])}),
            "array 'draws/hyper/variance' is .*and should be",
        ),
        (
            lambda h, a: a.update({"args/X": X.astype(np.float32)}),
            "array 'args/X' is .*<f4.*<f8",
        ),
        (lambda h, a: a.pop("args/X"), r"\['args/X.npy'\] are extra or absent"),
    ],
)
def test_what_is_wrong_is_said(change, words, tmp_path):
    header, arrays = contents(KINDS["laplace"]().save(tmp_path / "fit.gp"))
    change(header, arrays)
    with pytest.raises(StoreError, match=f"fit.gp.*{words}"):
        pg.load(written(tmp_path / "fit.gp", header, arrays), classifier)


def test_bytes_that_are_not_there(tmp_path):
    """80 TB of an array's own header are not reserved; no recursion without end."""
    header, arrays = contents(KINDS["nuts"]().save(tmp_path / "fit.gp"))
    others = {k: v for k, v in arrays.items() if k != "args/X"}
    path = written(tmp_path / "huge.fit", header, others)
    with zipfile.ZipFile(path, "a") as archive, archive.open("args/X.npy", "w") as member:
        claim = {"descr": "<f8", "fortran_order": False, "shape": (10**13,)}
        np.lib.format.write_array_header_1_0(member, claim)
        member.write(b"\0" * 80)
    with pytest.raises(StoreError, match="huge.fit is damaged: array 'args/X' claims"):
        pg.load(path, classifier)
    with zipfile.ZipFile(tmp_path / "deep.fit", "w") as archive:
        archive.writestr("header.json", '{"args":' + 100_000 * "[" + 100_000 * "]" + "}")
    with pytest.raises(StoreError, match="deep.fit"):
        pg.load(tmp_path / "deep.fit", classifier)


def bounded(X, y=None, share=1.0):
    """A support that depends on another hyperparameter, and a simplex."""
    top = numpyro.sample("top", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.Uniform(0.0, share * top))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(weights[0], lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def test_supports_are_those_of_each_draw_and_bear_rounding(tmp_path):
    """A length scale of 8 below a top of 9 in the second draw, though the first one's top is 1; a
    simplex to 1e-5.
    """
    hyper = {
        "top": [1.0, 9.0],
        "lengthscale": [0.5, 8.0],
        "weights": [[0.2, 0.3, 0.5 + 1e-5], [0.3, 0.3, 0.4]],
    }
    fit = made_fit(
        bounded, {"top": 1.0, "lengthscale": 0.5, "weights": np.ones(3) / 3}, X, num_draws=2, y=Y
    )
    hyper = {k: jnp.asarray(v) for k, v in hyper.items()}
    fit = dataclasses.replace(fit, draws=Draws.equal(hyper, fit.latent))
    path = fit.save(tmp_path / "fit.gp")
    np.testing.assert_array_equal(pg.load(path, bounded).hyper["lengthscale"], [0.5, 8.0])
    narrow = lambda X, y=None: bounded(X, y, share=0.6)  # noqa: E731 - less than the second draw's
    narrow.__name__ = narrow.__qualname__ = "bounded"
    with pytest.raises(StoreError, match=r"\['lengthscale'\] lie outside"):
        pg.load(path, narrow)


def two_outputs(X, y=None, tables=None, options=None):
    """Observations and covariates in dictionaries, lists and tuples."""
    assert options == {"kinds": ["a", "b"], "size": (1, None), "flag": True}
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    y = {"u": None, "v": (None, None)} if y is None else y
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("u", dist.Normal(f + tables["offset"][0], tables["scale"]), obs=y["u"])
        numpyro.sample("v", dist.Poisson(jnp.exp(f)).mask(tables["seen"]), obs=y["v"][0])


@pytest.mark.slow
def test_observations_in_containers_are_not_saved(tmp_path):
    """Leaves that no distribution and no mask is computed from stay out of the file, and prediction
    is as before.
    """
    num, secret = len(X), 7.25 + np.arange(len(X))
    tables = {
        "offset": [np.arange(num) / 9.0],
        "scale": np.array(0.5),
        "seen": np.arange(num) > 2,
        "unused": secret,
    }
    options = {"kinds": ["a", "b"], "size": (1, None), "flag": True}
    y = {"u": secret, "v": (secret.astype(int), secret + 1)}
    fit = made_fit(two_outputs, {}, X, num_draws=2, y=y, tables=tables, options=options)
    path = fit.save(tmp_path / "fit.gp")
    header, arrays = contents(path)
    for name, array in arrays.items():
        hidden = (secret, np.floor(secret), secret + 1)
        assert not any(array.shape == s.shape and np.allclose(array, s) for s in hidden), name
    assert header["kwargs"]["y"] == {"u": None, "v": {"$tuple": [None, None]}}
    loaded = pg.load(path, two_outputs)
    assert loaded.kwargs["options"] == options and type(loaded.kwargs["options"]["size"]) is tuple
    np.testing.assert_array_equal(loaded.kwargs["tables"]["seen"], tables["seen"])
    assert (
        loaded.kwargs["tables"]["unused"] is None and loaded.kwargs["tables"]["scale"].shape == ()
    )
    assert loaded.save(tmp_path / "again.gp").exists()
    new = {k: (v[:7] if np.ndim(v) else v) for k, v in tables.items()} | {"offset": [np.zeros(7)]}
    fit.kwargs["y"] = loaded.kwargs["y"]
    a, b = (g.predict(X_NEW, tables=new) for g in (fit, loaded))
    for name in ("f_mean", "f_variance", "mean"):
        for x, z in zip(
            jax.tree.leaves(getattr(a, name)), jax.tree.leaves(getattr(b, name)), strict=True
        ):
            np.testing.assert_array_equal(x, z)


def test_values_come_back_as_they_went():
    value = {
        "words": ["a", None],
        "pair": (1, (2.5, float("inf"))),
        "none": None,
        "empty": [{}, ()],
        "flag": False,
    }
    arrays = {}
    code = json.loads(
        json.dumps(
            encode({**value, "scalar": np.float64(2.5), "zero-d": np.array(3)}, arrays, "w", "n")
        )
    )
    again = decode(code, arrays)
    scalar, array = again.pop("scalar"), again.pop("zero-d")
    assert again == value and (type(scalar), scalar) == (float, 2.5)
    assert isinstance(array, jax.Array) and array.shape == () and int(array) == 3


def test_what_the_header_has_no_word_for_is_refused(tmp_path):
    def takes_anything(X, y=None, more=None):
        numpyro.sample(
            "z", dist.Normal(jax.random.normal(more) if isinstance(more, jax.Array) else 0.0, 1.0)
        )
        classifier(X, y)

    for more, words in [
        ({"$array": "x"}, "keys are strings that do not begin"),
        ({"a": np.array(["b"])}, r"argument 'more'\['a'\] is an array of <U1"),
        (jax.random.key(0), "argument 'more' is an array of key"),
    ]:
        fit = made_fit(takes_anything, {"lengthscale": 1.2, "variance": 2.0, "z": 0.0}, X, y=Y)
        fit.kwargs["more"] = more
        with pytest.raises(DataError, match=words):
            fit.save(tmp_path / "fit.gp")
