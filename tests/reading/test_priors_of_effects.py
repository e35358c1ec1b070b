"""Every prior of NumPyro that a latent in a plate can have, under MAP(): integrated exactly, or
refused unless `maximise=` names it; never maximised in silence.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints, transforms
from scipy.stats import multivariate_normal

import ppl_gp as pg
import ppl_gp.infer.local as local
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.predictor.predictor import mean_of, root_of

N, GROUPS = 9, 4
X, GROUP = np.linspace(0.0, 4.0, N), np.arange(N) % GROUPS
Y = np.sin(X) + 0.3 * GROUP
NOISE, JITTER = 0.3, 1e-10
GRAPH = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], float)
LOWER = np.tril(np.full((GROUPS, GROUPS), 0.2)) + 0.5 * np.eye(GROUPS)
C = LOWER @ LOWER.T
CIRCULANT = np.array([0.5, 0.2, 0.1, 0.2])
LOC = np.array([0.3, -0.2, 0.1, 0.5])
MOVES = np.array([[0.9, 0.2], [0.0, 0.5]])


def each(fn):
    """Of one value, for each group."""
    return fn.expand([GROUPS]).to_event(1)


def _states():
    """Covariance of two states at two times, z_t = A z_{t-1} + e_t."""
    A, Q = MOVES, 0.3 * np.eye(2)
    return np.block([[Q, Q @ A.T], [A @ Q, A @ Q @ A.T + Q]])


def _zero_sum(*sizes):
    """Of the projections that take the mean away, 0.49 (I - J / n) on each axis."""
    whole = np.eye(1)
    for n in sizes:
        whole = np.kron(whole, np.eye(n) - 1.0 / n)
    return 0.49 * whole


# name -> (prior, its mean, its covariance), in the order of the entries of u
GAUSSIAN = {
    "Normal": lambda: (each(dist.Normal(0.2, 0.7)), 0.2, 0.49 * np.eye(GROUPS)),
    "MultivariateNormal": lambda: (dist.MultivariateNormal(LOC, C), LOC, C),
    "MultivariateNormal by precision": lambda: (
        dist.MultivariateNormal(LOC, precision_matrix=np.linalg.inv(C)),
        LOC,
        C,
    ),
    "MultivariateNormal by factor": lambda: (
        dist.MultivariateNormal(LOC, scale_tril=LOWER),
        LOC,
        C,
    ),
    "LowRankMultivariateNormal": lambda: (
        dist.LowRankMultivariateNormal(LOC, LOWER[:, :2], 0.3 * np.ones(GROUPS)),
        LOC,
        LOWER[:, :2] @ LOWER[:, :2].T + 0.3 * np.eye(GROUPS),
    ),
    "MatrixNormal": lambda: (
        dist.MatrixNormal(LOC.reshape(2, 2), LOWER[:2, :2], 2.0 * LOWER[:2, :2]),
        LOC,
        np.kron(C[:2, :2], 4.0 * C[:2, :2]),
    ),
    "GaussianRandomWalk": lambda: (
        dist.GaussianRandomWalk(0.7, GROUPS),
        0.0,
        0.49 * np.minimum.outer(np.arange(1, 5), np.arange(1, 5)),
    ),
    "CAR": lambda: (
        dist.CAR(LOC, 0.8, 0.6, GRAPH),
        LOC,
        np.linalg.inv(0.6 * (np.diag(GRAPH.sum(1)) - 0.8 * GRAPH)),
    ),
    "ZeroSumNormal": lambda: (dist.ZeroSumNormal(0.7, (GROUPS,)), 0.0, _zero_sum(GROUPS)),
    "ZeroSumNormal of two axes": lambda: (dist.ZeroSumNormal(0.7, (2, 2)), 0.0, _zero_sum(2, 2)),
    "CirculantNormal": lambda: (
        dist.CirculantNormal(LOC, CIRCULANT),
        LOC,
        CIRCULANT[(np.arange(4)[:, None] - np.arange(4)) % 4],
    ),
    "GaussianStateSpace": lambda: (
        dist.GaussianStateSpace(2, MOVES, covariance_matrix=0.3 * np.eye(2)),
        0.0,
        _states(),
    ),
    "TransformedDistribution": lambda: (
        dist.TransformedDistribution(
            each(dist.Normal(1.0, 2.0)),
            [transforms.AffineTransform(0.3, 0.5), transforms.LowerCholeskyAffine(LOC, LOWER)],
        ),
        LOC + 0.8 * LOWER.sum(1),
        C,
    ),
    "ExpandedDistribution": lambda: (
        dist.ZeroSumNormal(0.7, (2,)).expand([2]),
        0.0,
        np.kron(np.eye(2), _zero_sum(2)),
    ),
    "Independent": lambda: (dist.Normal(LOC, 0.7).to_event(1), LOC, 0.49 * np.eye(GROUPS)),
}
_POSITIVE = np.array([1.0, 2.0, 1.5, 1.0])
# name -> a prior that is not Gaussian, of known scale: it is named as a point
POINT = {
    "AsymmetricLaplace": lambda: each(dist.AsymmetricLaplace(0.0, 1.0, 0.7)),
    "AsymmetricLaplaceQuantile": lambda: each(dist.AsymmetricLaplaceQuantile(0.0, 0.7, 0.4)),
    "Beta": lambda: each(dist.Beta(2.0, 2.0)),
    "BetaProportion": lambda: each(dist.BetaProportion(0.4, 3.0)),
    "Cauchy": lambda: each(dist.Cauchy(0.0, 0.7)),
    "Chi2": lambda: each(dist.Chi2(3.0)),
    "Dagum": lambda: each(dist.Dagum(2.0, 2.0, 1.0)),
    "Dirichlet": lambda: dist.Dirichlet(_POSITIVE),
    "DoublyTruncatedPowerLaw": lambda: each(dist.DoublyTruncatedPowerLaw(-1.5, 0.5, 2.0)),
    "EulerMaruyama": lambda: dist.EulerMaruyama(
        np.arange(4.0), lambda x, t: (-(x**3), 0.5), dist.Normal(0.0, 1.0)
    ),
    "Exponential": lambda: each(dist.Exponential(1.0)),
    "FoldedDistribution": lambda: each(dist.FoldedDistribution(dist.Normal(0.0, 0.7))),
    "Gamma": lambda: each(dist.Gamma(2.0, 1.0)),
    "Gompertz": lambda: each(dist.Gompertz(1.0, 1.0)),
    "Gumbel": lambda: each(dist.Gumbel(0.0, 0.7)),
    "HalfCauchy": lambda: each(dist.HalfCauchy(0.7)),
    "HalfNormal": lambda: each(dist.HalfNormal(0.7)),
    "ImproperUniform": lambda: dist.ImproperUniform(constraints.real_vector, (), (GROUPS,)),
    "InverseGamma": lambda: each(dist.InverseGamma(3.0, 1.0)),
    "InverseWishart": lambda: dist.InverseWishart(4.0, scale_tril=np.eye(2)),
    "InverseWishartCholesky": lambda: dist.InverseWishartCholesky(4.0, scale_tril=np.eye(2)),
    "Kumaraswamy": lambda: each(dist.Kumaraswamy(2.0, 2.0)),
    "LKJ": lambda: dist.LKJ(2, 1.0),
    "LKJCholesky": lambda: dist.LKJCholesky(2, 1.0),
    "Laplace": lambda: each(dist.Laplace(0.0, 0.7)),
    "LeftTruncatedDistribution": lambda: each(
        dist.LeftTruncatedDistribution(dist.Normal(0.0, 0.7), -0.5)
    ),
    "LeftTruncatedGamma": lambda: each(dist.LeftTruncatedGamma(dist.Gamma(2.0, 1.0), 0.1)),
    "Levy": lambda: each(dist.Levy(0.0, 0.7)),
    "LogNormal": lambda: each(dist.LogNormal(0.0, 0.7)),
    "LogUniform": lambda: each(dist.LogUniform(0.1, 2.0)),
    "Logistic": lambda: each(dist.Logistic(0.0, 0.7)),
    "LowerTruncatedPowerLaw": lambda: each(dist.LowerTruncatedPowerLaw(-2.5, 0.5)),
    "MaskedDistribution": lambda: each(dist.StudentT(4.0, 0.0, 0.7).mask(False)),
    "MixtureGeneral": lambda: each(
        dist.MixtureGeneral(
            dist.Categorical(np.array([0.4, 0.6])),
            [dist.Normal(-0.5, 0.5), dist.Normal(0.5, 0.5)],
        )
    ),
    "MixtureSameFamily": lambda: each(
        dist.MixtureSameFamily(
            dist.Categorical(np.array([0.4, 0.6])), dist.Normal(np.array([-0.5, 0.5]), 0.5)
        )
    ),
    "MultivariateStudentT": lambda: dist.MultivariateStudentT(4.0, LOC, LOWER),
    "Pareto": lambda: each(dist.Pareto(0.5, 2.0)),
    "RelaxedBernoulliLogits": lambda: each(dist.RelaxedBernoulliLogits(1.0, 0.0)),
    "RightTruncatedDistribution": lambda: each(
        dist.RightTruncatedDistribution(dist.Normal(0.0, 0.7), 0.5)
    ),
    "RightTruncatedGamma": lambda: each(dist.RightTruncatedGamma(dist.Gamma(2.0, 1.0), 3.0)),
    "SineBivariateVonMises": lambda: dist.SineBivariateVonMises(0.0, 0.0, 1.0, 1.0, 0.5).expand(
        [2]
    ),
    "SineSkewed": lambda: dist.SineSkewed(
        dist.VonMises(np.zeros(GROUPS), 1.0).to_event(1), np.full(GROUPS, 0.1)
    ),
    "SoftLaplace": lambda: each(dist.SoftLaplace(0.0, 0.7)),
    "StudentT": lambda: each(dist.StudentT(4.0, 0.0, 0.7)),
    "TruncatedCauchy": lambda: each(dist.TruncatedCauchy(0.0, 0.7, low=-1.0)),
    "TruncatedDistribution": lambda: each(
        dist.TruncatedDistribution(dist.Laplace(0.0, 0.7), low=-1.0)
    ),
    "TruncatedGamma": lambda: each(dist.TruncatedGamma(2.0, 1.0, low=0.1)),
    "TruncatedNormal": lambda: each(dist.TruncatedNormal(0.0, 0.7, low=-1.0)),
    "TruncatedPolyaGamma": lambda: each(dist.TruncatedPolyaGamma()),
    "TwoSidedTruncatedDistribution": lambda: each(
        dist.TwoSidedTruncatedDistribution(dist.Normal(0.0, 0.7), -1.0, 1.0)
    ),
    "TwoSidedTruncatedGamma": lambda: each(
        dist.TwoSidedTruncatedGamma(dist.Gamma(2.0, 1.0), 0.1, 3.0)
    ),
    "Uniform": lambda: each(dist.Uniform(-1.0, 1.0)),
    "VonMises": lambda: each(dist.VonMises(0.0, 1.0)),
    "Weibull": lambda: each(dist.Weibull(1.0, 2.0)),
    "Wishart": lambda: dist.Wishart(4.0, scale_tril=np.eye(2)),
    "WishartCholesky": lambda: dist.WishartCholesky(4.0, scale_tril=np.eye(2)),
}
# name -> why no latent in a plate has it, or what refuses it
_DISCRETE, _OF_DATA = "discrete", "of observations: mixed, or of a sum over cases"
_SHORT = "a function that gives one of the others"
OTHERS = {
    "Bernoulli BernoulliLogits BernoulliProbs BetaBinomial BetaNegativeBinomial Binomial "
    "BinomialLogits BinomialProbs Categorical CategoricalLogits CategoricalProbs "
    "DirichletMultinomial DiscreteUniform GammaPoisson Geometric GeometricLogits GeometricProbs "
    "Multinomial MultinomialLogits MultinomialProbs NegativeBinomial NegativeBinomial2 "
    "NegativeBinomialLogits NegativeBinomialProbs OrderedLogistic Poisson": _DISCRETE,
    "HurdleDistribution HurdleGamma HurdleLogNormal HurdleLogits HurdleNegativeBinomial2 "
    "HurdlePoisson HurdleProbs IntervalCensoredDistribution LeftCensoredDistribution "
    "RightCensoredDistribution ZeroInflatedDistribution ZeroInflatedLogits "
    "ZeroInflatedNegativeBinomial2 ZeroInflatedPoisson ZeroInflatedProbs": _OF_DATA,
    "Mixture RelaxedBernoulli": _SHORT,
    "GaussianCopula GaussianCopulaBeta": "draws need TensorFlow Probability",
    "Delta": "a constant",
    "ProjectedNormal": "NumPyro has its density in two and three dimensions alone",
    "Unit": "a numpyro.factor",
    "Distribution biject_to constraints kl_divergence transforms": "no distribution",
}
DISCRETE = {
    "BernoulliProbs": lambda: each(dist.BernoulliProbs(0.5)),
    "Poisson": lambda: each(dist.Poisson(2.0)),
    "CategoricalProbs": lambda: each(dist.CategoricalProbs(np.array([0.4, 0.6]))),
}


class Stopped(Exception):
    """Where the fit would begin."""


def model(X, group, prior, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X, jitter=JITTER))
    u = jnp.reshape(numpyro.sample("u", prior), -1)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group], NOISE), obs=y)


def said(monkeypatch, model, *args, method=None) -> tuple[bool, list[str]]:
    """(whether u is integrated, what is said) before the work of a fit begins."""

    def stopped(hyper, problem):
        raise Stopped("u" in getattr(getattr(problem.model, "plan", None), "sites", ()))

    monkeypatch.setattr(local, "infer_hyper", stopped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Stopped) as end:
            pg.fit(model, method or pg.Laplace(), 0, X, GROUP, *args, y=Y)
    return end.value.args[0], [str(w.message) for w in caught]


def refused(monkeypatch, model, *args, beside="the hyperparameters"):
    """Unless the user says that u is to be maximised."""
    told = rf"maximise 'u' \(4 values\) together with {re.escape(beside)}.*maximise=\('u',\)"
    with pytest.raises(pg.ModelError, match=told):
        pg.fit(model, pg.Laplace(), 0, X, GROUP, *args, y=Y)
    known = pg.Laplace(hyper=pg.MAP(maximise=("u",)))
    assert said(monkeypatch, model, *args, method=known) == (False, [])


def test_every_distribution_of_numpyro_is_in_a_table():
    first = {k.partition(" ")[0] for k in GAUSSIAN}
    others = {k for names in OTHERS for k in names.split()}
    assert first | set(POINT) | others == set(dist.__all__)
    assert not first & set(POINT) and not others & (first | set(POINT))


@pytest.mark.parametrize("name", GAUSSIAN)
def test_mean_and_root_are_those_of_the_distribution(name):
    prior, mean, covariance = GAUSSIAN[name]()
    shape = prior.shape()
    root = jax.vmap(root_of(prior))(jnp.eye(GROUPS).reshape(GROUPS, *shape)).reshape(GROUPS, -1)
    np.testing.assert_allclose(root.T @ root, covariance, atol=1e-12)
    found = np.broadcast_to(mean_of(prior), shape).ravel()
    np.testing.assert_allclose(found, np.broadcast_to(mean, GROUPS), atol=1e-12)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["ZeroSumNormal", *(k for k in GAUSSIAN if k != "ZeroSumNormal")])
def test_gaussian_priors_are_integrated_as_dense_algebra_has_it(name):
    prior, mean, covariance = GAUSSIAN[name]()
    fit = pg.fit(model, pg.Laplace(), 0, X, GROUP, prior, y=Y)
    A, m = np.eye(GROUPS)[GROUP], np.broadcast_to(mean, GROUPS)
    K = np.exp(-0.5 * (X[:, None] - X) ** 2) + JITTER * np.eye(N)
    S = K + A @ covariance @ A.T + NOISE**2 * np.eye(N)
    evidence = multivariate_normal(A @ m, S).logpdf(Y)
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-8)
    gain = covariance @ A.T @ np.linalg.inv(S)
    found = fit.sites["u"]
    np.testing.assert_allclose(np.ravel(found.mean), m + gain @ (Y - A @ m), atol=1e-8)
    within = np.diag(covariance - gain @ A @ covariance)
    np.testing.assert_allclose(np.ravel(found.variance), within, atol=1e-8)
    assert not fit.hyper


def in_a_mean(X, group, prior, y=None):
    """The effects enter the mean of the function's prior."""
    u = numpyro.sample("u", prior)
    mean = lambda Z: u[Z[:, 1].astype(int)]  # noqa: E731
    kernel = pg.kernels.RBF(1.0, 1.0, active_dims=(0,))
    f = numpyro.sample("f", pg.GP(kernel, jnp.column_stack([X, group]), mean=mean))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def test_effects_in_the_mean_of_a_function_are_named_too(monkeypatch):
    refused(monkeypatch, in_a_mean, POINT["StudentT"]())


_FEW = ("StudentT", "Laplace", "HalfNormal", "Dirichlet")


@pytest.mark.parametrize(
    "name", [k if k in _FEW else pytest.param(k, marks=pytest.mark.slow) for k in POINT]
)
def test_every_other_prior_is_refused_unless_it_is_named(monkeypatch, name):
    refused(monkeypatch, model, POINT[name]())


def test_one_without_a_density_is_refused():
    with pytest.raises(pg.ModelError, match="ProjectedNormal.*has no `log_prob`"):
        pg.fit(model, pg.Laplace(), 0, X, GROUP, dist.ProjectedNormal(LOC), y=Y)


@pytest.mark.one_case
@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_ones_are_refused(name):
    with pytest.raises(pg.ModelError, match="discrete"):
        pg.fit(model, pg.Laplace(), 0, X, GROUP, DISCRETE[name](), y=Y)


def scaled(X, group, prior, y=None, noise=False):
    """Effects times an unknown scale, which may be that of the noise as well."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    fn, times = prior(tau)
    u = numpyro.sample("u", fn)
    with numpyro.plate("data", X.shape[0]):
        y = numpyro.sample("y", dist.Normal(f + times * u[group], tau if noise else NOISE), obs=y)


UNKNOWN = {
    "StudentT times tau": lambda tau: (each(dist.StudentT(4.0, 0.0, 1.0)), tau),
    "Laplace times tau": lambda tau: (each(dist.Laplace(0.0, 1.0)), tau),
    "HalfNormal times tau": lambda tau: (each(dist.HalfNormal(1.0)), tau),
    "StudentT of tau": lambda tau: (each(dist.StudentT(4.0, 0.0, tau)), 1.0),
    "Gamma of tau": lambda tau: (each(dist.Gamma(tau, tau)), 1.0),
}


@pytest.mark.parametrize("method", [pg.Laplace, pg.EP])
@pytest.mark.parametrize("name", UNKNOWN)
def test_with_an_unknown_scale_they_are_refused(name, method):
    why = r"'u' (.4 values. together with|has a spread that is computed from) \['tau'\]"
    if name == "Gamma of tau":
        why = "'u' .4 values. .* the prior of 'u', Gamma, is not Gaussian"
    with pytest.raises(pg.ModelError, match=why):
        pg.fit(scaled, method(), 0, X, GROUP, UNKNOWN[name], y=Y)


def test_a_scale_that_acts_elsewhere_too_is_found():
    prior = UNKNOWN["StudentT times tau"]
    with pytest.raises(pg.ModelError, match=r"'u' .4 values. together with \['tau'\]"):
        pg.fit(scaled, pg.Laplace(), 0, X, GROUP, prior, y=Y, noise=True)


def network(X, group, y=None):
    """Of one layer: the outer weights are integrated given the inner ones, which are points."""
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([GROUPS]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([GROUPS]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + jnp.tanh(X[:, None] * u) @ v, NOISE), obs=y)


def test_what_is_integrated_is_no_unknown_scale(monkeypatch):
    refused(monkeypatch, network)


def test_maximise_says_that_they_are_known_to_be_points(monkeypatch):
    known = pg.Laplace(hyper=pg.MAP(maximise=("u",)))
    for name in ("StudentT times tau", "StudentT of tau"):
        inside, told = said(monkeypatch, scaled, UNKNOWN[name], method=known)
        assert not inside and not told
    inside, told = said(monkeypatch, model, GAUSSIAN["Normal"]()[0], method=known)
    assert not inside and not told
    with pytest.raises(pg.ModelError, match=r"\['v'\] are not among .*'u'"):
        pg.fit(model, pg.Laplace(hyper=pg.MAP(maximise=("v",))), 0, X, GROUP, POINT["Levy"](), y=Y)
    with pytest.raises(pg.DataError, match=r"maximise=\('u',\)"):
        pg.MAP(maximise="u")


@pytest.mark.slow
def test_a_known_point_is_the_mode_of_the_joint_density():
    """Of u alone, f integrated: its slope there vanishes."""
    known = pg.Laplace(hyper=pg.MAP(maximise=("u",)))
    fit = pg.fit(model, known, 0, X, GROUP, POINT["StudentT"](), y=Y)
    K = np.exp(-0.5 * (X[:, None] - X) ** 2) + (JITTER + NOISE**2) * np.eye(N)

    def density(u):
        off = Y - u[GROUP]
        return -0.5 * off @ jnp.linalg.solve(K, off) + POINT["StudentT"]().log_prob(u)

    np.testing.assert_allclose(jax.grad(density)(fit.hyper["u"]), 0.0, atol=1e-3)


FORMS = {
    "added": lambda a, f, t, u: a + u,
    "times an effect": lambda a, f, t, u: a * u,
    "times a function": lambda a, f, t, u: a + f * u,
    "times a difference": lambda a, f, t, u: u * (f - a),
    "in a power": lambda a, f, t, u: a + f * jnp.exp(u),
    "with an unknown factor": lambda a, f, t, u: a + t * u,
    "times an effect and an unknown factor": lambda a, f, t, u: a * t * u,
    "in a relative change": lambda a, f, t, u: a * (1.0 + t * u),
    "times a function and an unknown factor": lambda a, f, t, u: a + f * t * u,
}
CELLS = ("LogNormal", "Gamma", "HalfNormal", "StudentT", "Dirichlet")


def formed(X, group, prior, form, level, function, y=None):
    """Effects that act through what is integrated: a level, or a function."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0)) if level else 0.0
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X)) if function else 0.0
    t = numpyro.sample("t", dist.HalfNormal(1.0)) if "unknown" in form or "change" in form else 1.0
    u = numpyro.sample("u", prior)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(FORMS[form](a, f, t, u[group]), NOISE), obs=y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name", [k if k == CELLS[0] else pytest.param(k, marks=pytest.mark.slow) for k in CELLS]
)
def test_effects_that_multiply_are_refused(monkeypatch, name, form):
    """They were maximised in silence, as they move nothing where what they multiply is zero."""
    function = "function" in form or form in ("times a difference", "in a power")
    beside = ["t"] if "unknown" in form or "change" in form else "the hyperparameters"
    refused(monkeypatch, formed, POINT[name](), form, True, function, beside=str(beside))


def hyperparameters(X, group, role, y=None):
    """Vectors that are no effects, by what they do."""
    u = numpyro.sample("u", each(dist.LogNormal(0.0, 0.5)))
    scale = u if role == "length scales" else 1.0
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, scale), X[:, None] * jnp.ones(GROUPS)))
    with numpyro.plate("data", X.shape[0]):
        fn = {
            "length scales": lambda: dist.Normal(f, NOISE),
            "noise of a group": lambda: dist.Normal(f, u[group]),
            "noise of a function": lambda: dist.StudentT(u[group] + 2.0, f, u[group]),
            "cut points": lambda: dist.OrderedLogistic(f, jnp.cumsum(u) - 2.0),
            "dispersion": lambda: dist.NegativeBinomial2(jnp.exp(f), u[group]),
        }[role]()
        numpyro.sample("y", fn, obs=y)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "role",
    ["noise of a group", "length scales", "noise of a function", "cut points", "dispersion"],
)
def test_vectors_of_hyperparameters_are_maximised_as_before(monkeypatch, role):
    monkeypatch.setitem(globals(), "Y", np.arange(N) % 5)
    assert said(monkeypatch, hyperparameters, role) == (False, [])


def test_the_mean_of_a_negative_binomial_is_not_computed_from_its_dispersion():
    def arrays(at):
        fn = dist.NegativeBinomial2(jnp.exp(at["f"]), at["u"])
        return fn.mean, fn.concentration, at["u"] / (at["f"] / at["u"])

    mean, dispersion, other = sources(arrays, {"f": jnp.ones(3), "u": jnp.ones(3)})
    assert (mean, dispersion, other) == ({"f"}, {"u"}, {"f", "u"})
