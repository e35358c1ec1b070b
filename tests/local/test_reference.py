"""Numbers computed by other software or independent code (tests/reference/*.json, which name their
sources).
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from data_sets import BINARY, five_points, reference
from scipy.stats import norm
from toy_models import evidence, hyper, padded, solve, switched

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import Result
from ppl_gp.kept import FromPseudo
from ppl_gp.local.method import LocalMethod
from ppl_gp.observations import BernoulliProbit
from ppl_gp.reading.factors import read

ROWS = reference("evidence")["binary"]
SMALL = reference("small")
LOG = ("variance", "lengthscale")
METHODS = {"laplace": pg.Laplace(), "ep": pg.EP(), "vi": pg.VI()}


def _row_id(row):
    return f"{row['data']}-{row['link']}-{row['variance']:g}"


@pytest.fixture(scope="module")
def solved():
    """(row, method) -> what `solve` gives, each computed once."""
    cache = {}

    def get(row, method):
        key = (_row_id(row), method)
        if key not in cache:
            X, y = BINARY[row["data"]]()
            values = hyper(row["variance"], row["lengthscale"])
            cache[key] = solve(switched, METHODS[method], values, *padded(X, y, row["link"]))
            assert Result.from_code(cache[key].solution.code) == "converged"
        return cache[key]

    return get


def _log_gradient(at, row):
    return np.array([at.gradient[k] * row[k] for k in LOG])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=_row_id)
def test_laplace_on_binary_data(row, solved):
    at, want = solved(row, "laplace"), row["laplace"]
    np.testing.assert_allclose(at.log_z, want["log_evidence"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        at.solution.marginals.mean[:3], want["mode_first3"], rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
        _log_gradient(at, row), want["grad_log_variance_log_lengthscale"], rtol=0, atol=1e-5
    )


@jax.jit
def _explicit_gradient(values, X, data, solution):
    """The evidence gradient with the sites held, which is what the base class gives."""

    def factors(values):
        return read(switched, X, data, hyper=values)

    prior = factors(values).prior
    bars = LocalMethod.pull_back(
        pg.Laplace(), prior.covariance_matrix, prior.mean, factors(values).log_lik, solution
    )
    return jax.vjp(lambda values: factors(values).prior.covariance_matrix, values)[1](bars[0])[0]


@pytest.mark.parametrize("row", ROWS, ids=_row_id)
def test_laplace_gradient_holds_the_implicit_term(row, solved):
    at = solved(row, "laplace")
    without = np.array(row["laplace"]["grad_if_the_implicit_term_is_missing"])
    assert np.max(np.abs(_log_gradient(at, row) - without)) > 0.05
    X, y = BINARY[row["data"]]()
    values = hyper(row["variance"], row["lengthscale"])
    explicit = _explicit_gradient(values, *padded(X, y, row["link"]), at.solution)
    np.testing.assert_allclose([explicit[k] * row[k] for k in LOG], without, rtol=0, atol=1e-5)


@pytest.mark.parametrize("row", ROWS, ids=_row_id)
def test_ep_on_binary_data(row, solved):
    at, want = solved(row, "ep"), row["ep"]
    q = at.solution.marginals
    np.testing.assert_allclose(at.log_z, want["log_evidence"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(q.mean[:3], want["mean_first3"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(q.variance[:3], want["variance_first3"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        _log_gradient(at, row), want["grad_log_variance_log_lengthscale"], rtol=0, atol=1e-5
    )
    point = jnp.zeros((1, 2)).at[0, : 2 if row["data"] == "ring100" else 1].set(0.1)
    new = FromPseudo(q.mean, q.mean, q.alpha, at.solution.sites).process(at.prior)(point)
    mean, variance = (
        want[f"predictive_f_{k}"]
        for k in ("mean_at_point_with_all_coordinates_0p1", "variance_there")
    )
    np.testing.assert_allclose(new.mean[0], mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(new.variance[0], variance, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=_row_id)
def test_ep_is_closest_to_the_truth_and_vi_lies_below_it(row, solved):
    truth, error = (row["importance_sampling"][k] for k in ("log_evidence", "standard_error"))
    laplace, ep, vi = (float(solved(row, m).log_z) for m in METHODS)
    assert abs(ep - truth) < abs(laplace - truth) - 3 * error
    assert abs(ep - truth) < abs(vi - truth)
    assert vi < truth + 3 * error
    want = np.array(row["importance_sampling"]["mean_first3"])
    off = {m: np.max(np.abs(solved(row, m).solution.marginals.mean[:3] - want)) for m in METHODS}
    assert off["ep"] < 0.5 * off["laplace"]


def binary(X, y=None):
    """A probit classifier that EP recognises: moments in closed form."""
    variance, lengthscale = (
        numpyro.param(k, jnp.ones(()), constraint=dist.constraints.positive) for k in LOG
    )
    f = numpyro.sample("f", pg.GP(kernels.RBF(variance, lengthscale), X, jitter=1e-8))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", BernoulliProbit(f), obs=y)


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["data"] == "ring100" and r["link"] == "probit"], ids=_row_id
)
def test_ep_with_closed_form_moments(row):
    X, y = BINARY[row["data"]]()
    log_z, solution = evidence(
        binary, pg.EP(), {k: jnp.asarray(row[k]) for k in LOG}, jnp.asarray(X), y=jnp.asarray(y)
    )
    np.testing.assert_allclose(log_z, row["ep"]["log_evidence"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        solution.marginals.variance[:3], row["ep"]["variance_first3"], rtol=0, atol=1e-6
    )


def _five(point, method=None):
    X, y = five_points(point["set"])
    likelihood = point.get("link") or (
        "gaussian" if point["likelihood"] == "Gaussian" else "student_t"
    )
    values = hyper(point.get("sf", 1.0) ** 2, point.get("ell", 1.0))
    name = method or {"EP": "ep", "Laplace": "laplace", "VI, full Gaussian": "vi"}[point["method"]]
    return solve(switched, METHODS[name], values, *padded(X, y, likelihood)), values


def _tolerance(value):
    """A unit of the last digit that the source prints, at least 1e-6: where its iterations
    stopped.
    """
    return max(10.0 ** -len(repr(value).split(".")[1]), 1e-6)


STORED = SMALL["five_points"]["stored"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    "point",
    [p for p in STORED if p["set"] != "R"],
    ids=lambda p: f"{p['set']}-{p['method']}-{p['sf']}",
)
def test_five_points_against_gpml(point):
    at, values = _five(point)
    # The source stopped EP when log Z, which is stationary, had settled: its moments and gradient
    # had not.
    atol = 1e-3 if point["method"] == "EP" else 1e-6
    for key in ("minus_log_z", "our_minus_log_z", "minus_elbo"):
        if key in point:
            np.testing.assert_allclose(-at.log_z, point[key], rtol=0, atol=_tolerance(point[key]))
    for key in ("mean", "variance"):
        if key in point:
            np.testing.assert_allclose(
                getattr(at.solution.marginals, key)[:5], point[key], rtol=0, atol=atol
            )
    for key in ("grad_minus_log_z_log_ell_log_sf", "grad_minus_elbo_log_ell_log_sf"):
        if key in point:
            ours = (
                -at.gradient["lengthscale"] * values["lengthscale"],
                -2 * at.gradient["variance"] * values["variance"],
            )
            np.testing.assert_allclose(ours, point[key], rtol=0, atol=atol)


def _textbook_ep(K, sign, sweeps=100):
    """Mean and variance by R&W algorithm 3.5 for the probit, one site after another, with plain
    inverses.
    """
    nu, tau, mean, cov = np.zeros(len(K)), np.zeros(len(K)), np.zeros(len(K)), K
    for i in list(range(len(K))) * sweeps:
        precision = 1 / cov[i, i] - tau[i]
        m, v = (mean[i] / cov[i, i] - nu[i]) / precision, 1 / precision
        z = sign[i] * m / np.sqrt(1 + v)
        ratio = norm.pdf(z) / norm.cdf(z)
        new_mean = m + sign[i] * v * ratio / np.sqrt(1 + v)
        new_variance = v - v**2 * ratio / (1 + v) * (z + ratio)
        nu[i], tau[i] = new_mean / new_variance - m * precision, 1 / new_variance - precision
        cov = np.linalg.inv(np.linalg.inv(K) + np.diag(tau))
        mean = cov @ nu
    return mean, np.diag(cov)


def test_five_points_against_textbook_ep():
    point = STORED[0]
    at, _ = _five(point)
    X, y = five_points("A")
    K = 1.5**2 * np.exp(-np.sum((X[:, None] - X) ** 2, -1) / (2 * 2.0**2)) + 1e-9 * np.eye(5)
    mean, variance = _textbook_ep(K, 2.0 * y - 1)
    np.testing.assert_allclose(at.solution.marginals.mean[:5], mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(at.solution.marginals.variance[:5], variance, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_five_points_against_importance_sampling():
    truth = dict(SMALL["five_points"]["truth_by_importance_sampling_minus_log_z"])
    error = truth.pop("standard_error")
    for name, want in truth.items():
        which, _, ell, _, sf, link = name.split()
        point = {"set": which, "ell": float(ell), "sf": float(sf), "link": link}
        laplace, ep, vi = (-float(_five(point, m)[0].log_z) for m in METHODS)
        assert abs(ep - want) < abs(laplace - want), name
        assert vi > want - 3 * error, name


@pytest.mark.parametrize("point", [p for p in STORED if p["set"] == "R"], ids=lambda p: p["method"])
def test_five_points_of_regression(point):
    want = point.get("minus_log_z", point.get("minus_elbo"))
    for method in METHODS if point["method"] == "exact" else [None]:
        np.testing.assert_allclose(
            -_five(point, method)[0].log_z, want, rtol=0, atol=_tolerance(want)
        )


def test_clutter_needs_negative_precisions():
    # One unknown theta ~ N(0, 100) is a GP whose inputs are all the same.
    x, want = np.array(SMALL["clutter"]["x"]), SMALL["clutter"]
    X, data = padded(np.zeros((x.size, 1)), x, "clutter")
    log_z, solution, *_ = solve(switched, METHODS["ep"], hyper(100.0), X, data)
    assert Result.from_code(solution.code) == "converged"
    assert (
        int(jnp.sum(solution.sites.nat2[: x.size] < 0))
        == want["ep"]["factors_with_negative_precision"]
    )
    np.testing.assert_allclose(log_z, want["ep"]["log_z"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        solution.marginals.mean[: x.size], want["ep"]["mean"], rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
        solution.marginals.variance[: x.size], want["ep"]["variance"], rtol=0, atol=1e-6
    )
    log_z, solution, *_ = solve(switched, METHODS["laplace"], hyper(100.0), X, data)
    np.testing.assert_allclose(log_z, want["laplace"]["log_z"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        solution.marginals.mean[: x.size], want["laplace"]["mean"], rtol=0, atol=1e-6
    )


def linear_logistic(X, y=None):
    """w ~ N(0, 10 I) on (1, x): the GP with kernel 10 + 10 x x'."""
    f = numpyro.sample("f", pg.GP(kernels.Constant(10.0) + kernels.Linear(10.0), X, jitter=1e-9))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def test_logistic_regression_is_a_gp_with_a_linear_kernel():
    want = SMALL["logistic_regression"]
    X, y = jnp.asarray(want["x"])[:, None], (jnp.asarray(want["y"]) > 0).astype(int)
    bound, at = evidence(linear_logistic, pg.LocalBound(), {}, X, y=y)
    np.testing.assert_allclose(bound, want["jaakkola_jordan"]["bound"], rtol=0, atol=1e-6)
    intercept, slope = want["jaakkola_jordan"]["mean"]
    np.testing.assert_allclose(at.marginals.mean, intercept + slope * X[:, 0], rtol=0, atol=2e-6)
    log_z, at = evidence(linear_logistic, pg.Laplace(), {}, X, y=y)
    np.testing.assert_allclose(log_z, want["laplace"]["log_z"], rtol=0, atol=1e-6)
    intercept, slope = want["laplace"]["mode"]
    np.testing.assert_allclose(at.marginals.mean, intercept + slope * X[:, 0], rtol=0, atol=2e-6)
    assert bound < want["exact"]["log_z"] and abs(log_z - want["exact"]["log_z"]) < 0.05


def test_two_poisson_counts():
    want = reference("evidence")["poisson2"]
    X = [[0.05100797, 0.16086164], [-0.59823393, 0.98701425]]
    args = hyper(1.6**2, 0.45), *padded(X, [1.0, 0.0], "poisson")
    laplace = solve(switched, METHODS["laplace"], *args)
    np.testing.assert_allclose(laplace.log_z, want["laplace_log_evidence"], rtol=0, atol=1e-7)
    # what Stan's own test expects
    np.testing.assert_allclose(laplace.log_z, -2.53056, rtol=0, atol=1e-4)
    np.testing.assert_allclose(laplace.solution.marginals.mean[:2], want["mode"], rtol=0, atol=1e-7)
    ep = solve(switched, METHODS["ep"], *args)
    np.testing.assert_allclose(ep.log_z, want["exact_by_grid"], rtol=0, atol=1e-3)
