"""The comparison: every column against its definition, the errors, the renderings."""

import csv
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import gamma, nbinom, norm, poisson
from small_fits import HYPER, classification, classifier, made_fit, methods

import ppl_gp as pg
from ppl_gp.cli import demo
from ppl_gp.cli.run import NAMES
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError
from ppl_gp.results.compare import table
from ppl_gp.results.compare.compare import _require_same_problem, _standard_error, compare
from ppl_gp.results.compare.table import verdict
from ppl_gp.results.compare.truth import importance_sampling
from ppl_gp.results.predict import scores
from ppl_gp.results.predict.prediction import Prediction
from ppl_gp.results.predict.scores import Pit

X, y, X_test = classification()
y_test = np.array([0, 1, 1, 0, 1, 0, 1])


@pytest.fixture(scope="module")
def comparison(small_fit):
    fits = {name: small_fit(name) for name in ("laplace", "ep", "nuts")}
    # So few draws may have no estimate of their effective number.
    fits["nuts"] = dataclasses.replace(fits["nuts"], stats=fits["nuts"].stats | {"ess": 25.0})
    return compare(fits, X_test, y_test, num_importance_samples=4000)


def row(comparison, name):
    return next(row for row in comparison.table if row["method"] == name)


@pytest.mark.slow
def test_columns_are_what_the_fits_say(comparison, small_fit):
    ep, fit = row(comparison, "ep"), small_fit("ep")
    log_density = np.asarray(fit.log_density(X_test, y_test))
    np.testing.assert_allclose(ep["log_density"], log_density.mean(), rtol=1e-12)
    np.testing.assert_allclose(
        ep["log_density_se"], log_density.std(ddof=1) / np.sqrt(7), rtol=1e-12
    )
    assert ep["error"] == np.mean((np.asarray(fit.predict(X_test).probs) > 0.5) != y_test)
    assert ep["error_name"] == "misclassified" and ep["calibration_name"] == "ECE"
    assert ep["log_evidence"] == fit.log_evidence and ep["result"] == "converged"
    np.testing.assert_allclose(ep["elpd_loo"], fit.loo().elpd, rtol=1e-12)
    truth = importance_sampling(fit, num_samples=4000)
    assert (ep["truth"], ep["truth_se"]) == (truth.log_evidence, truth.standard_error)
    assert (ep["khat"], ep["khat_datum"]) == (truth.khat_q, np.max(truth.khat_loo))
    assert ep["compile_seconds"] + ep["run_seconds"] == pytest.approx(fit.stats["seconds"])


def test_sampled_fits_have_no_evidence(comparison):
    nuts = row(comparison, "nuts")
    assert nuts["log_evidence"] is nuts["truth"] is nuts["khat"] is None
    assert nuts["khat_datum"] is not None and nuts["elpd_loo"] is not None
    assert "sampled" in comparison.notes["nuts"][0] and comparison.notes["ep"] == []


def test_distances_to_the_reference(comparison, small_fit):
    """By default to the first fit by draws; the reference itself has none."""
    f, latent = np.asarray(small_fit("nuts").latent["f"].mean), small_fit("ep").latent["f"]
    sd = f.std(0)
    want = np.max(np.abs(np.asarray(latent.mean)[0] - f.mean(0)) / sd)
    assert comparison.reference_name == "nuts" and row(comparison, "nuts")["mean_distance"] is None
    np.testing.assert_allclose(row(comparison, "ep")["mean_distance"], want, rtol=1e-12)
    want = np.max(np.abs(np.sqrt(np.asarray(latent.variance)[0]) - sd) / sd)
    np.testing.assert_allclose(row(comparison, "ep")["sd_distance"], want, rtol=1e-12)
    np.testing.assert_allclose(comparison.reference_error, 0.2, rtol=1e-12)


def test_a_reference_without_an_effective_number_of_draws_has_no_error(comparison):
    nuts = comparison.fits["nuts"]
    blank = dataclasses.replace(
        comparison, fits={"nuts": dataclasses.replace(nuts, stats={"ess": float("nan")})}
    )
    assert blank.reference_error is None and "Monte Carlo error" not in blank._caption


def test_another_reference(small_fit):
    fits = {name: small_fit(name) for name in ("laplace", "ep")}
    other = compare(fits, X_test, y_test, reference="ep", num_importance_samples=4000)
    assert row(other, "ep")["mean_distance"] is None and row(other, "laplace")["mean_distance"] > 0
    none = compare({"ep": small_fit("ep")}, X_test, y_test, num_importance_samples=4000)
    assert none.reference_name is None and row(none, "ep")["mean_distance"] is None
    assert "distance" not in str(none)


def test_renderings(comparison, tmp_path):
    text, html = str(comparison), comparison._repr_html_()
    for words in ("laplace", "importance-sampled truth", "k-hat", "LOO ELPD", "Monte Carlo error"):
        assert words in text and words in html
    comparison.to_csv(tmp_path / "table.csv")
    with open(tmp_path / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert [r["method"] for r in rows] == ["laplace", "ep", "nuts"]
    assert float(rows[1]["truth"]) == row(comparison, "ep")["truth"] and rows[2]["truth"] == ""
    assert list(rows[0]) == list(comparison.table[0])


def filled(name, result="not_mixed"):
    """A row of the table with every quantity, as wide as they get."""
    names = {
        "method": name,
        "result": result,
        "error_name": "misclassified",
        "calibration_name": "coverage gap",
    }
    numbers = (
        "compile_seconds run_seconds log_evidence log_evidence_se truth truth_se log_density "
        "log_density_se error calibration khat efficiency share khat_datum elpd_loo elpd_loo_se "
        "mean_distance log_density_gap log_density_gap_se sd_distance"
    )
    return names | dict.fromkeys(numbers.split(), -1234.56789)


@pytest.mark.parametrize("names", [demo.METHODS, NAMES, tuple(reversed(NAMES))])
def test_the_table_fits_a_terminal(names):
    """100 columns for any methods of the command line, each of which is there; the demo's stand
    side by side.
    """
    rows = [filled(name) for name in names]
    text = table.printed(*table.rich_tables(rows, "sparse-nuts", "word " * 50))
    assert max(map(len, text.splitlines())) <= table.WIDTH == 100
    heads = [line.split() for line in text.splitlines() if line.startswith("┃")]
    assert [word for head in heads for word in head if word != "┃"] == list(names)
    assert text.count("log evidence or bound") == len(heads) == (1 if names == demo.METHODS else 2)
    assert text.count("word") == 50 and text.count("-1234.568") >= 8 * len(names)


def test_a_long_name_gets_the_room_that_it_needs():
    text = table.printed(*table.rich_tables([filled("ep"), filled("x" * 90)], "ep", ""))
    assert "x" * 90 in text and "…" not in text


def test_errors(small_fit):
    ep = small_fit("ep")
    with pytest.raises(DataError, match="nothing to compare"):
        compare({}, X_test, y_test)
    with pytest.raises(DataError, match="reference='nuts'.*'ep'"):
        compare({"ep": ep}, X_test, y_test, reference="nuts")
    with pytest.raises(DataError, match=r"\(6,\).* 7 row"):
        compare({"ep": ep}, X_test, y_test[:6])


def test_the_error_of_a_mean_over_rows_has_their_scatter_and_their_own_noise():
    x = np.array([1.0, 2.0, 4.0, 9.0])
    rows = x.std(ddof=1) / 2.0
    assert _standard_error(x, 0.0) == pytest.approx(rows)
    assert _standard_error(x, 3.0) == pytest.approx(np.sqrt(rows**2 + 9.0))
    assert _standard_error(x[:1], 0.0) is None


def test_mixed_problems(small_fit):
    ep = small_fit("ep")
    comparison = compare({"ep": ep}, X_test, y_test, num_importance_samples=4000)

    def other(X, y=None):
        return classifier(X, y)

    with pytest.raises(ModelError, match="'b' fits other and 'ep' fits classifier"):
        comparison.add("b", made_fit(other, HYPER, X, y=y))
    with pytest.raises(DataError, match=r"\['y'\] differ"):
        comparison.add("b", made_fit(classifier, HYPER, X, y=1 - y))
    with pytest.raises(DataError, match=r"\['X', 'y'\] differ"):
        comparison.add("b", made_fit(classifier, HYPER, X[:-1], y=y[:-1]))
    assert list(comparison.fits) == ["ep"]


def scaled(X, lengthscale=1.0, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def test_arguments_are_compared_by_name_with_their_defaults(tmp_path):
    """Of every pair of calls those alone are one problem whose arguments have the same values."""
    x, how = np.linspace(0.0, 3.0, 12), pg.Laplace(hyper=pg.Fixed())
    calls = [((), {}), ((1.0,), {}), ((), {"lengthscale": 1.0})]
    calls += [((0.2,), {}), ((), {"lengthscale": 0.2})]
    fits = [pg.fit(scaled, how, 0, x, *args, y=np.sin(x), **named) for args, named in calls]
    fits += [pg.load(fits[i].save(tmp_path / f"{i}.zip"), scaled) for i in (0, 3)]
    short = [i in (3, 4, 6) for i in range(7)]
    for (i, a), (j, b) in itertools.combinations(enumerate(fits), 2):
        if short[i] == short[j]:
            _require_same_problem({"a": a}, "b", b)
            continue
        with pytest.raises(DataError, match=r"\['lengthscale'\] differ"):
            _require_same_problem({"a": a}, "b", b)


def test_a_loaded_fit_is_scored_without_its_data(small_fit, tmp_path):
    """Predictions and distances are there; what needs the observations is not, and the note says
    so.
    """
    from ppl_gp.results.load import load

    path = tmp_path / "ep.fit"
    small_fit("ep").save(path)
    comparison = compare(
        {"ep": small_fit("ep"), "again": load(path, classifier)},
        X_test,
        y_test,
        num_importance_samples=4000,
    )
    again, ep = row(comparison, "again"), row(comparison, "ep")
    np.testing.assert_allclose(again["log_density"], ep["log_density"], rtol=1e-10)
    assert again["truth"] is None and again["elpd_loo"] is None
    assert len(comparison.notes["again"]) == 2 and all(
        "observations" in note for note in comparison.notes["again"]
    )


def prediction(mean=None, variance=None, probs=None):
    return Prediction(np.zeros(4), np.ones(4), mean, variance, probs)


def test_scores_of_classification():
    """Ten bins: 0.15 and 0.12 share one (one of two happened), 0.95 and 0.65 stand alone."""
    p = prediction(probs=np.array([0.15, 0.12, 0.95, 0.65]))
    seen = np.array([0, 1, 1, 0])
    assert scores.error(p, seen) == (0.5, "misclassified")
    want = (2 * abs(0.135 - 0.5) + abs(0.95 - 1.0) + abs(0.65 - 0.0)) / 4
    np.testing.assert_allclose(scores.calibration(p, seen).value, want, rtol=1e-12)
    three = prediction(probs=np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3]]))
    assert scores.error(three, np.array([0, 2, 0])).value == 1 / 3
    np.testing.assert_allclose(
        scores.calibration(three, np.array([0, 2, 0])).value, (2 * 0.3 + 0.5) / 3, rtol=1e-12
    )


def test_scores_of_regression():
    rng = np.random.default_rng(0)
    z = rng.normal(size=20_000)
    true = prediction(0 * z, 4.0 + 0 * z)
    np.testing.assert_allclose(
        scores.error(true, 2 * z).value, 2 * np.sqrt(np.mean(z**2)), rtol=1e-12
    )
    assert scores.error(true, z).name == "RMSE"
    sound, wide = (Pit(*[norm.cdf(z / scale)] * 2) for scale in (1.0, 0.5))
    assert scores.calibration(true, 2 * z, sound).value < 0.01
    assert scores.calibration(true, 2 * z).value is None
    # Half the true scale: level 0.5 covers P(|z| < 0.674 / 2) = 0.264.
    np.testing.assert_allclose(scores.coverage(wide)[9], 0.264, atol=0.015)
    counts = rng.poisson(2.0, 20_000)
    of_counts = Pit(poisson.cdf(counts - 1, 2.0), poisson.cdf(counts, 2.0))
    np.testing.assert_allclose(scores.coverage(of_counts), scores.LEVELS, atol=0.01)


def test_verdicts():
    sound = {
        "method": "ep",
        "result": "converged",
        "log_evidence": -10.02,
        "truth": -10.0,
        "truth_se": 0.01,
        "khat": 0.4,
        "efficiency": 0.95,
        "mean_distance": 0.1,
        "sd_distance": 0.1,
    }
    sound |= {"log_density_gap": 0.004, "log_density_gap_se": 0.003}
    say = lambda **other: verdict({**sound, **other}, "nuts", 0.05)  # noqa: E731
    text = say()
    assert text.count("within 2 standard errors") == 2 and "k-hat 0.40" in text
    for part in (
        "Evidence: right",
        "0.02 nats below",
        "Latents:",
        "which is small",
        "Predictions:",
    ):
        assert part in text
    # each verdict by itself: the others are as they were
    wrong = {
        "log_evidence": (-10.52, "0.52 nats below the importance-sampled truth", "factor of 1.68"),
        "khat": (0.8, "usable but not exact (k-hat 0.80", "Latents"),
        "mean_distance": (0.4, "by up to 0.40 sd", "intervals of single latents"),
        "log_density_gap": (-0.1, "worse than those of nuts by 0.100", "on these test rows"),
    }
    for key, (value, *told) in wrong.items():
        found = say(**{key: value})
        same = [s for s in text.split(". ") if s in found]
        assert all(part in found for part in told) and len(same) >= 1
        moved = key in ("log_evidence", "log_density_gap")
        assert found.count("within 2 standard errors") == 2 - moved
    assert "too far off" in say(khat=0.8, efficiency=0.2)
    assert "ended as 'max_steps'; do not use" in say(result="max_steps")
    nuts = {"method": "nuts", "truth": None, "khat": None, "mean_distance": None}
    assert "their own error is about 0.05" in say(**nuts)


RATIOS = (0.0, 0.3, 0.99, 1.01, 1.9, 2.1, 2.9, 3.1, 11.0, 40.0)  # standard errors


def test_words_are_true_of_the_ratio_of_a_difference_to_its_error():
    """Of any size, zero errors included: "within n standard errors" for n up to three where that
    is so; above three a small difference of evidences is called small, and never equal.
    """
    row = {"method": "a", "result": "converged", "khat": None, "mean_distance": None}
    for error, ratio, sign in itertools.product((0.0, 1e-3, 0.01, 0.2, 5.0), RATIOS, (-1.0, 1.0)):
        size = ratio * (error or 0.005)
        gap = {"log_density_gap": sign * size, "log_density_gap_se": error}
        evidence = {"log_evidence": sign * size, "truth": 0.0, "truth_se": error}
        said = verdict({**row, **gap, **evidence}, "nuts", None)
        evidence, predictions = said.split("Evidence: ")[1].split("Predictions: ")
        whole = np.ceil(ratio) if error or not ratio else np.inf
        words = f"within {max(1, whole):.0f} standard error{'s' * int(whole > 1)} ("
        for text, equal in ((evidence, "right "), (predictions, "equal to those of nuts ")):
            assert text.startswith(equal + words) if whole <= 3 else "within" not in text
        assert ("more than its error, but small" in evidence) == (whole > 3 and size <= 0.1)
        assert ("off by a factor" in evidence) == (whole > 3 and size > 0.1)
        assert predictions.startswith(("worse", "better")[sign > 0]) == (whole > 3)


@pytest.mark.slow
def test_every_method(small_fit):
    """All six in one table, ten scores each."""
    comparison = pg.compare({name: small_fit(name) for name in methods()}, X_test, y_test)
    assert len(comparison.table) == 6
    assert all(
        np.isfinite(row["log_density"]) and np.isfinite(row["elpd_loo"]) for row in comparison.table
    )


def with_groups(X, group, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.7), X))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, 0.8))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group], 0.5), obs=y)


@pytest.mark.slow
def test_a_predictor_is_compared_with_draws_of_its_sites():
    """Of a Gaussian likelihood: Laplace is exact, and NUTS as near as its draws."""
    rng = np.random.default_rng(4)
    X, group, y = np.sort(rng.normal(size=10)), np.arange(10) % 3, rng.normal(size=10)
    laplace = pg.fit(with_groups, pg.Laplace(hyper=pg.Fixed({})), 0, X, group, y=y)
    nuts = pg.fit(with_groups, pg.NUTS(300, 1000, 1), 0, X, group, y=y)
    found = row(pg.compare({"laplace": laplace, "nuts": nuts}, X, y, group), "laplace")
    u, f = np.asarray(nuts.hyper["u"]), laplace.posterior(X)
    drawn = np.asarray(nuts.latent["f"].mean)
    off = [
        np.abs(laplace.sites["u"].mean - u.mean(0)) / u.std(0),
        np.abs(f.mean - drawn.mean(0)) / drawn.std(0),
    ]
    assert found["mean_distance"] == pytest.approx(np.max(np.concatenate(off)), abs=0.08)
    assert found["mean_distance"] < 0.3 and found["sd_distance"] < 0.2


def rate_model(exposure, y=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", exposure.shape[0]):
        numpyro.sample("y", dist.Poisson(rate * exposure), obs=y)


def chain(seed, factor=1.0, num=400, stick=0.8):
    """A fit by draws from the exact posterior, Gamma(2 + 12, 1 + 4), as a chain would give them."""
    rng, exposure = np.random.default_rng(seed), np.full(4, 1.0)
    z = [rng.normal()]
    for step in rng.normal(size=num - 1):
        z.append(stick * z[-1] + np.sqrt(1.0 - stick**2) * step)
    rate = factor * gamma.ppf(norm.cdf(z), 14.0, scale=0.2)
    made = made_fit(rate_model, {"rate": 1.0}, exposure, y=np.full(4, 3), num_draws=num)
    draws = Draws.equal({"rate": jnp.asarray(rate)}, {})
    ess = num * (1.0 - stick) / (1.0 + stick)
    return dataclasses.replace(made, draws=draws, stats={"ess": ess})


@pytest.mark.parametrize("num", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_draws_of_one_posterior_are_equal_and_of_others_are_not(num):
    """Rows that are alike have no scatter of their own, so that all differences are Monte Carlo
    errors: of the exact log density each fit is within its error too.
    """
    X_test, y_test = np.full(3, 1.0), np.array([4, 5, 5])
    fits = {str(seed): chain(seed) for seed in range(num + 1)} | {"other": chain(99, factor=1.5)}
    result = compare(fits, X_test, y_test)
    rows = [row(result, name) for name in fits]
    z = np.array([r["log_density_gap"] / r["log_density_gap_se"] for r in rows[1:-1]])
    assert len([v for v in result.verdicts if "equal to those" in v]) == num
    assert np.mean(np.abs(z) < 2.0) >= 0.9 and np.std(z) > 0.3
    assert any(v.startswith("other: ") and "better than those" in v for v in result.verdicts)
    truth = np.mean(nbinom.logpmf(y_test, 14.0, 5.0 / 6.0))
    off = [(r["log_density"] - truth) / r["log_density_se"] for r in rows[:-1]]
    assert np.mean(np.abs(off) < 2.0) >= 0.9
