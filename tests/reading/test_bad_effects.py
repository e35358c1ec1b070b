"""Effects as they should not be, and are: a group that the model does not have, a design of rank
below its columns, a level with one row, a scale of zero, one class. A right answer, or a typed
error.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import expit
from scipy.stats import norm

import ppl_gp as pg

N, GROUPS = 12, 4
METHODS = {"laplace": pg.Laplace, "ep": pg.EP}
every_method = pytest.mark.parametrize("method", METHODS)
RNG = np.random.default_rng(1)
X, Y = np.sort(RNG.uniform(-2.0, 2.0, N)), RNG.integers(0, 2, N)
GROUP = np.array([0] * 4 + [1] * 4 + [2] * 3 + [3])  # the last level has one row
HALF = RNG.normal(size=(N, 2))
MIX = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, -2.0]])


def _fit(method, model, *args, y=Y, **kwargs):
    return pg.fit(model, METHODS[method](hyper=pg.Fixed({})), 0, *args, y=y, **kwargs)


def groups(X, group, y=None, smooth=True, scale=0.8, checked=None):
    """A group effect, beside a GP or alone; `checked`: whether its scale is."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X)) if smooth else 0.0 * X
    if scale is not None:
        with numpyro.plate("groups", GROUPS):
            prior = dist.Normal(0.0, scale, validate_args=checked)
            f = f + numpyro.sample("u", prior)[group]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@every_method
@pytest.mark.parametrize("entry", [GROUPS, -GROUPS - 1])
def test_a_group_that_the_model_does_not_have(method, entry):
    wrong = np.where(np.arange(N) == 5, entry, GROUP)
    with pytest.raises(pg.DataError, match="a level that the model does not have"):
        _fit(method, groups, X, wrong)


def design(W, y=None, of=None):
    """Coefficients of the columns of W, or others beta with W beta = HALF gamma."""
    if of is None:
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.5).expand([3]).to_event(1))
    else:
        beta = numpyro.sample("beta", dist.MultivariateNormal(jnp.zeros(2), 2.25 * of @ of.T))
    with numpyro.plate("data", W.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=W @ beta), obs=y)


@pytest.mark.slow
@every_method
def test_a_design_of_rank_below_its_columns_is_that_of_its_rank(method):
    """Three coefficients of three columns that span two dimensions are two, gamma = MIX beta."""
    three = _fit(method, design, HALF @ MIX)
    two = _fit(method, design, HALF, of=jnp.asarray(MIX))
    assert three.result == two.result == "converged"
    np.testing.assert_allclose(three.log_evidence, two.log_evidence, atol=1e-8)
    gamma = two.sites["beta"]
    np.testing.assert_allclose(MIX @ three.sites["beta"].mean, gamma.mean, atol=1e-7)
    new = RNG.normal(size=(3, 2))
    found, wanted = three.predict(new @ MIX), two.predict(new)
    np.testing.assert_allclose(found.f_mean, wanted.f_mean, atol=1e-7)
    np.testing.assert_allclose(found.f_variance, wanted.f_variance, atol=1e-7)


@pytest.mark.slow
@pytest.mark.one_case
@every_method
def test_a_level_with_one_row_has_the_posterior_of_that_row(method):
    """Without anything shared the levels are independent: EP of one factor is exact, by
    quadrature; Laplace's method has that factor's mode and curvature.
    """
    y = Y.copy()
    y[-1] = 1
    fit = _fit(method, groups, X, GROUP, y=y, smooth=False)
    assert fit.result == "converged"
    found = np.array([fit.sites["u"].mean[3], fit.sites["u"].variance[3]])
    density = lambda u: expit(u) * norm(0.0, 0.8).pdf(u)  # noqa: E731
    if method == "ep":
        moments = [quad(lambda u, k=k: u**k * density(u), -8.0, 8.0)[0] for k in range(3)]
        mean = moments[1] / moments[0]
        wanted, atol = [mean, moments[2] / moments[0] - mean**2], 1e-6
    else:
        mode = minimize_scalar(lambda u: -np.log(density(u)), bounds=(0.0, 2.0), method="bounded")
        p = expit(mode.x)
        wanted, atol = [mode.x, 1.0 / (p * (1.0 - p) + 1.0 / 0.64)], 1e-5
    np.testing.assert_allclose(found, wanted, atol=atol)


@pytest.mark.slow
@every_method
def test_an_effect_of_scale_zero_is_none_where_it_is_not_checked(method):
    zero, without = (_fit(method, groups, X, GROUP, scale=s, checked=False) for s in (0.0, None))
    assert zero.result == "converged"
    np.testing.assert_allclose(zero.log_evidence, without.log_evidence, atol=1e-7)
    np.testing.assert_allclose(zero.sites["u"].mean, np.zeros(GROUPS), atol=1e-12)
    np.testing.assert_allclose(zero.sites["u"].variance, np.zeros(GROUPS), atol=1e-12)
    found, wanted = (f.predict(X[:3], GROUP[:3]) for f in (zero, without))
    np.testing.assert_allclose(found.f_mean, wanted.f_mean, atol=1e-7)
    np.testing.assert_allclose(found.f_variance, wanted.f_variance, atol=1e-7)


def unknown_scale(X, group, y=None):
    groups(X, group, y, scale=numpyro.sample("sd", dist.HalfNormal(1.0)))


@every_method
def test_an_effect_of_scale_zero_is_refused(method):
    """By NumPyro, with the line of the model; as a hyperparameter by its support."""
    with pytest.raises(pg.DataError, match="invalid scale parameter.*groups, line"):
        _fit(method, groups, X, GROUP, scale=0.0)
    with pytest.raises(pg.DataError, match="'sd'"):
        pg.fit(unknown_scale, METHODS[method](hyper=pg.Fixed({"sd": 0.0})), 0, X, GROUP, y=Y)


def one_class(X, y=None, probit=False):
    with numpyro.plate("classes", 1):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    shown = pg.observations.MultinomialProbit(f.T) if probit else dist.Categorical(logits=f.T)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", shown, obs=y)


@pytest.mark.one_case
@every_method
def test_one_class_is_certain_and_tells_nothing(method):
    fit = _fit(method, one_class, X, y=np.zeros(N, int))
    assert fit.result == "converged"
    np.testing.assert_allclose(fit.log_evidence, 0.0, atol=1e-7)
    new = np.array([-1.0, 0.5, 3.0])
    found = fit.predict(new)
    np.testing.assert_allclose(np.ravel(found.f_mean), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(np.ravel(found.f_variance), np.ones(3), atol=1e-6)
    np.testing.assert_allclose(found.probs, np.ones((3, 1)), atol=1e-9)


@every_method
def test_one_class_of_noisy_functions_is_refused(method):
    with pytest.raises(pg.DataError, match="C >= 2 classes"):
        _fit(method, one_class, X, y=np.zeros(N, int), probit=True)


def _grouped(X, group, num_groups, y=None, link=lambda eta: eta):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Normal(0.0, 0.7))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Gamma(2.5, 2.5 * jnp.exp(link(f + u[group]))), obs=y)


def _rows(num=9):
    rng = np.random.default_rng(4)
    return np.linspace(0.0, 3.0, num), np.arange(num) % 3, rng.gamma(2.0, size=num)


@pytest.mark.slow
def test_terms_have_the_sign_of_the_sum_that_declares_them():
    """A rate exp(-eta) is declared as a mean exp(eta)."""
    X, group, y = _rows()
    fit = pg.fit(_grouped, pg.Laplace(), 0, X, group, 3, y=y, link=lambda eta: -eta)
    found = fit.components(X, group, 3)
    np.testing.assert_allclose(found["u"].mean, fit.sites["u"].mean[group], atol=1e-8)
    np.testing.assert_allclose(found["f"].mean, fit.posterior(X).mean, atol=1e-6)
    np.testing.assert_allclose(found["total"].mean, fit.latent["eta"].mean[0], atol=1e-6)


@pytest.mark.slow
def test_a_number_of_groups_may_be_a_numpy_integer():
    X, group, y = _rows()
    small = group.astype(np.int8)
    fits = [pg.fit(_grouped, pg.Laplace(), 0, X, small, n, y=y) for n in (3, small.max() + 1)]
    assert fits[0].log_evidence == fits[1].log_evidence

    def of_its_own(X, group, y=None):
        _grouped(X, group, np.int64(3), y=y)

    assert pg.fit(of_its_own, pg.Laplace(), 0, X, small, y=y).log_evidence == fits[0].log_evidence
    with pytest.raises(pg.DataError, match="plate 'groups' has the size.*Python integer"):
        pg.fit(_grouped, pg.Laplace(), 0, X, small, np.array(3), y=y)


@pytest.mark.parametrize("index", [-4, 3, 9])
def test_an_index_that_is_out_of_range_is_told_as_it_was_given(index):
    X, group, y = _rows()
    group[2] = index
    with pytest.raises(pg.DataError, match=rf"'group'\] leads to the index \[{index}\]"):
        pg.fit(_grouped, pg.Laplace(), 0, X, group, 3, y=y)
    found = pg.check(_grouped, X, group, 3, y=y)
    assert not found.ok and f"leads to the index [{index}]" in str(found)


@pytest.mark.filterwarnings("error:argument")
def test_a_computed_index_is_told_as_the_model_has_it():
    """group - 1 of group 0 took the last level in silence; `%` and a choice of the user's do not
    count from the end."""

    def computed(X, group, y=None, how=None):
        with numpyro.plate("groups", 4):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(u[how(group)], 0.3), obs=y)

    y = RNG.normal(size=N)
    fit = pg.fit(computed, pg.Laplace(), 0, X, GROUP + 1, y=y, how=lambda g: g - 1)
    for how in (lambda g: (g - 3) % 4, lambda g: jnp.where(g < 0, 3, g)):
        odd = np.where(np.arange(N) == 5, -1, GROUP)
        pg.fit(computed, pg.Laplace(), 0, X, odd, y=y, how=how)
    with pytest.warns(UserWarning, match=r"'group'\] leads to negative indices \(-1\)"):
        low = fit.predict(X[:2], np.array([0, 1])).mean
    np.testing.assert_allclose(low, fit.predict(X[:2], np.array([4, 1])).mean)
    with pytest.raises(pg.DataError, match=r"'group'\] leads to the index \[8\]"):
        fit.predict(X[:2], np.array([9, 1]))
