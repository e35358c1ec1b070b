"""A user's own `Distribution` counts with all that its instance keeps, whatever its class declares
to NumPyro; what it keeps elsewhere is refused.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.special import log_ndtr
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.infer.elbo import held
from ppl_gp.reading.factors import read

N, GROUPS, NOISE, SPREAD = 18, 4, 0.3, 0.7
rng = np.random.default_rng(7)
x, group = np.sort(rng.uniform(0.0, 5.0, N)), np.arange(N) % GROUPS
y = np.sin(x) + SPREAD * rng.normal(size=GROUPS)[group] + NOISE * rng.normal(size=N)


class Own(dist.Distribution):
    """A normal that declares none of its parameters; `parameters` says where they are."""

    support = dist.constraints.real
    arg_constraints = {}

    def __init__(self, loc, scale):
        self.keep(loc, scale)
        super().__init__(batch_shape=jnp.shape(loc))

    def keep(self, loc, scale):
        self.loc, self.scale = loc, scale

    def parameters(self):
        return self.loc, self.scale

    def log_prob(self, value):
        loc, scale = self.parameters()
        return -0.5 * ((value - loc) / scale) ** 2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi)

    def sample(self, key, sample_shape=()):
        loc, scale = self.parameters()
        return loc + scale * random.normal(key, (*sample_shape, *self.batch_shape))

    def cdf(self, value):
        loc, scale = self.parameters()
        return jax.scipy.stats.norm.cdf(value, loc, scale)

    mean = property(lambda self: self.parameters()[0])
    variance = property(lambda self: self.parameters()[1] ** 2 * jnp.ones(self.batch_shape))


class OnlyScale(Own):
    arg_constraints = {"scale": dist.constraints.positive}


class Static(Own):
    pytree_aux_fields = ("loc", "scale")


class Flattening(Own):
    """With a tree of its own that leaves out the scale."""

    def tree_flatten(self):
        return (self.loc,), (NOISE,)

    @classmethod
    def tree_unflatten(cls, aux_data, params):
        return cls(*params, *aux_data)


class OtherNames(Own):
    def keep(self, loc, scale):
        self._centre, self.__precision = loc, scale**-2

    def parameters(self):
        return self._centre, self.__precision**-0.5


class InTrees(Own):
    def keep(self, loc, scale):
        self.all = [loc, {"scale": scale}]

    def parameters(self):
        return self.all[0], self.all[1]["scale"]


class InDistribution(Own):
    def keep(self, loc, scale):
        self.inner = OnlyScale(loc, scale)

    def parameters(self):
        return self.inner.loc, self.inner.scale


class InSlots(Own):
    __slots__ = ("_loc", "_scale")

    def keep(self, loc, scale):
        self._loc, self._scale = loc, scale

    def parameters(self):
        return self._loc, self._scale


@dataclasses.dataclass(eq=False)
class Fields(Own):
    first: object
    second: object

    def __post_init__(self):
        dist.Distribution.__init__(self, batch_shape=jnp.shape(self.first))

    def parameters(self):
        return self.first, self.second


class Caching(Own):
    @functools.cached_property
    def twice(self):
        return 2.0 * self.loc

    def parameters(self):
        return 0.5 * self.twice, self.scale


class OfNumPyro(dist.Normal):
    """A normal of NumPyro's with one parameter more."""

    def __init__(self, loc, scale):
        self.factor = scale / NOISE
        super().__init__(loc, NOISE)

    def log_prob(self, value):
        return dist.Normal(self.loc, self.scale * self.factor).log_prob(value)


class Shift(dist.transforms.Transform):
    """Whose tree is empty."""

    domain = codomain = dist.constraints.real

    def __init__(self, by):
        self.by = by

    def __call__(self, z):
        return z + self.by

    def _inverse(self, value):
        return value - self.by

    def log_abs_det_jacobian(self, z, value, intermediates=None):
        return jnp.zeros(jnp.shape(z))

    def tree_flatten(self):
        return (), ((), {})


def in_a_mixture(loc, scale):
    """Of which both components are the same."""
    both = Own(jnp.stack([loc, loc], -1), scale)
    return dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.3, 0.7])), both)


def among_others(loc, scale):
    """A mixture of a user's class and NumPyro's."""
    parts = [Own(loc, scale), dist.Normal(loc, scale)]
    return dist.MixtureGeneral(dist.Categorical(probs=jnp.array([0.3, 0.7])), parts)


KINDS = {
    "NumPyro": dist.Normal,
    "nothing declared": Own,
    "scale declared": OnlyScale,
    "static": Static,
    "own tree": Flattening,
    "other names": OtherNames,
    "lists": InTrees,
    "distribution": InDistribution,
    "slots": InSlots,
    "dataclass": Fields,
    "cached": Caching,
    "subclass": OfNumPyro,
    "masked": lambda loc, scale: Own(loc, scale).mask(loc < 1e9),
    "event": lambda loc, scale: Own(loc[:, None], scale).to_event(1),
    "transformed": lambda loc, scale: dist.TransformedDistribution(
        Own(loc, scale), dist.transforms.AffineTransform(0.0, 1.0)
    ),
    "own transform": lambda loc, scale: dist.TransformedDistribution(
        dist.Normal(jnp.zeros_like(loc), scale), Shift(loc)
    ),
    "mixture": in_a_mixture,
    "mixture of classes": among_others,
}


def mixed(make, spread=SPREAD):
    """A function, a level and group effects under the likelihood make(eta, scale)."""

    def model(X, group, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        with numpyro.plate("groups", GROUPS):
            u = numpyro.sample("u", dist.Normal(0.0, spread))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        fn = make(f + level + u[group], NOISE)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", fn, obs=y[:, None] if fn.event_dim and y is not None else y)

    return model


def prior_covariance(x, group):
    """Of f + level + u[group]."""
    same = group[:, None] == group
    return np.exp(-0.5 * (x[:, None] - x) ** 2) + 4.0 + SPREAD**2 * same


@pytest.mark.parametrize("kind", KINDS)
def test_prior_and_likelihood_are_exact_wherever_a_class_keeps_its_parameters(kind):
    """All Gaussian sites are integrated, and a datum's density is that of NumPyro's class."""
    model = mixed(KINDS[kind])
    factors = read(model, x, group, y=y)
    (prior,), f = factors.priors.values(), jnp.asarray(np.sin(3.0 * x))
    assert np.allclose(prior.kernel(prior.X, prior.X), prior_covariance(x, group))
    expected = dist.Normal(f, NOISE).log_prob(y)
    assert np.allclose(factors.log_lik(f), expected, rtol=1e-10)


@pytest.mark.slow
def test_effects_under_a_class_that_declares_nothing_are_integrated():
    """They were maximised in silence: an evidence of -10.2 for -25.8."""
    fit = pg.fit(mixed(Own), pg.Laplace(), 0, x, group, y=y)
    C = prior_covariance(x, group) + NOISE**2 * np.eye(N)
    assert not fit.hyper
    assert np.isclose(fit.log_evidence, multivariate_normal.logpdf(y, np.zeros(N), C), atol=1e-4)
    new, of = np.array([1.0, 4.0]), np.array([2, 0])
    whole = prior_covariance(np.append(x, new), np.append(group, of))
    cross, gain = whole[N:, :N], np.linalg.solve(C, whole[:N, N:]).T
    found = fit.predict(new, of)
    assert np.allclose(found.mean, gain @ y, atol=1e-4)
    variance = np.diag(whole[N:, N:] - gain @ cross.T) + NOISE**2
    assert np.allclose(found.variance, variance, atol=1e-4)


def in_a_function(loc, scale):
    """A class whose density is a closure that an instance keeps."""

    class Closed(Own):
        def keep(self, loc, scale):
            self.of = lambda: (loc, scale)

        def parameters(self):
            return self.of()

    return Closed(loc, scale)


def in_an_object(loc, scale):
    """A class that keeps its parameters in an object that JAX does not open."""

    class Boxed(Own):
        def keep(self, loc, scale):
            self.box = SimpleNamespace(loc=loc, scale=scale)

        def parameters(self):
            return self.box.loc, self.box.scale

    return Boxed(loc, scale)


def in_its_class(loc, scale):
    """A class that is made in the model and encloses its parameters."""

    class Inside(Own):
        def keep(self, *_):
            pass

        def parameters(self):
            return loc, scale

    return Inside(loc, scale)


@pytest.mark.parametrize("make", [in_a_function, in_an_object, in_its_class])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_class_encloses_elsewhere_is_refused_with_its_name(make, wrapped):
    """Never maximised, and never dropped; the remedy is `Own` as it is."""
    around = lambda loc, scale: make(loc, scale).mask(loc < 1e9) if wrapped else make(loc, scale)  # noqa: E731
    name = type(make(0.0, 1.0)).__name__
    with pytest.raises(pg.ModelError, match=rf"{name}.*'y'.*'u'.*self.loc = loc in {name}"):
        read(mixed(around), x, group, y=y)


def effects_of(make):
    """Group effects whose prior a user's class is."""

    def model(X, group, y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("groups", GROUPS):
            u = numpyro.sample("u", make(jnp.zeros(GROUPS), tau))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + u[group], NOISE), obs=y)

    return model


class Sharp(dist.Normal):
    """A Laplace distribution that inherits from a normal."""

    def log_prob(self, value):
        return dist.Laplace(self.loc, self.scale).log_prob(value)


class NoMoments(OtherNames):
    mean = variance = dist.Distribution.mean


class Moved(dist.TransformedDistribution):
    """A Laplace distribution that is written as a normal one, moved."""

    def __init__(self, loc, scale):
        base = dist.Normal(jnp.zeros_like(loc), scale)
        super().__init__(base, dist.transforms.AffineTransform(loc, 1.0))

    def log_prob(self, value):
        return dist.Laplace(self.transforms[0].loc, self.base_dist.scale).log_prob(value)


@pytest.mark.parametrize("make", [Own, Sharp, NoMoments, Moved])
def test_effects_whose_prior_is_a_class_of_the_user_are_not_taken_for_gaussian(make):
    """Of an unknown scale their joint mode is far from the posterior, so that they are refused."""
    with pytest.raises(pg.ModelError, match="'u'.*'tau'"):
        pg.fit(effects_of(make), pg.Laplace(), 0, x, group, y=y)


class Saturating(dist.Distribution):
    """The class of docs/recipes/05_censored.py, which declares two of its three parameters."""

    support = dist.constraints.real
    arg_constraints = {"loc": dist.constraints.real, "scale": dist.constraints.positive}

    def __init__(self, loc, scale, saturated):
        self.loc, self.scale, self.saturated = loc, scale, saturated
        super().__init__(batch_shape=jnp.shape(loc))

    def log_prob(self, value):
        density = dist.Normal(self.loc, self.scale).log_prob(value)
        return jnp.where(self.saturated > 0, log_ndtr((self.loc - value) / self.scale), density)


def sensor(X, group, saturated, y=None):
    """With a level, a slope and groups."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 0.5))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, SPREAD))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        eta = level + slope * X + u[group] + f
        numpyro.sample("y", Saturating(eta, NOISE, saturated), obs=y)


def test_the_censored_recipe_takes_levels_slopes_and_groups():
    """It ended in a bare AttributeError. The truth is a normal density times an orthant."""
    limit = np.sort(y)[-3]
    cut = y >= limit
    shown = np.where(cut, limit, y)
    C = prior_covariance(x, group) + 0.25 * np.outer(x, x) + NOISE**2 * np.eye(N)
    seen, gain = np.ix_(~cut, ~cut), np.linalg.solve(C[np.ix_(~cut, ~cut)], C[np.ix_(~cut, cut)]).T
    rest = C[np.ix_(cut, cut)] - gain @ C[np.ix_(~cut, cut)]
    above = multivariate_normal(gain @ y[~cut] - limit, rest, maxpts=10**6, seed=0)
    density = multivariate_normal.logpdf(y[~cut], np.zeros(len(gain.T)), C[seen])
    truth = density + np.log(above.cdf(np.full(3, np.inf), lower_limit=np.zeros(3)))
    fit = pg.fit(sensor, pg.EP(), 0, x, group, cut.astype(float), y=shown)
    assert not fit.hyper
    assert np.isclose(fit.log_evidence, truth, atol=0.02)


def test_an_array_of_equal_flags_has_one_entry_per_row():
    """Nothing but the density's shape says so: `check` ended in a bare ValueError."""
    checked = pg.check(sensor, x, group, np.zeros(N), y=y)
    assert checked.ok
    assert "['X', 'group', 'saturated', 'y']" in str(checked)


@pytest.mark.slow
def test_quantiles_of_sampled_parameters_go_by_the_distribution_function_of_an_own_class():
    """Its arrays got lost between draws: a bare ValueError."""

    def line(make):
        def model(X, y=None):
            slope = numpyro.sample("slope", dist.Cauchy(0.0, 1.0))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", make(slope * X, NOISE), obs=y)

        return model

    short = pg.NUTS(num_warmup=20, num_samples=20)
    fits = [pg.fit(line(make), short, 0, x, y=y, throw=False) for make in (Own, dist.Normal)]
    own, wanted = (fit.predict(x[:2], quantiles=(0.1, 0.9)).quantiles for fit in fits)
    np.testing.assert_allclose(own, wanted, atol=1e-6)


def test_a_guide_of_an_own_class_gets_no_gradient_and_keeps_its_parameters():
    """They got lost on the way: a bare TypeError out of SVI."""
    log_q, slope = jax.value_and_grad(lambda loc: held(Own(loc, NOISE)).log_prob(1.0))(0.8)
    assert np.isclose(log_q, dist.Normal(0.8, NOISE).log_prob(1.0))
    assert slope == 0.0


class Flipped(dist.BernoulliLogits):
    """Of failures in place of successes."""

    def log_prob(self, value):
        return super().log_prob(1 - value)


def test_a_class_that_inherits_from_a_bernoulli_is_not_taken_for_one():
    """Its local bound would be that of other data."""

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", Flipped(f), obs=y)

    with pytest.raises(pg.ModelError, match="Flipped"):
        pg.fit(model, pg.LocalBound(), 0, x, y=(y > 0).astype(int))


def test_events_whose_shape_a_class_does_not_declare_are_refused_and_not_a_crash():
    """Zeros of the shape that it declares are no value for its density."""

    class Pairs(Own):
        def log_prob(self, value):
            return super().log_prob(value[..., 0]) + super().log_prob(value[..., 1])

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", Pairs(f, NOISE), obs=y)

    with pytest.raises((pg.DataError, pg.ModelError), match="'y'"):
        pg.fit(model, pg.Laplace(), 0, x, y=np.stack([y, y], 1))


class Undrawn(Own):
    """A class without `sample`."""

    sample = dist.Distribution.sample


def of_class(make):
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", make(f, NOISE), obs=y)

    return model


def test_a_class_without_sample_answers_all_that_needs_no_draw(tmp_path):
    """All verbs ended in a NotImplementedError without a text, and no file could be loaded."""
    model = of_class(Undrawn)
    fit, wanted = (pg.fit(m, pg.Laplace(), 0, x, y=y) for m in (model, of_class(Own)))
    fit.save(tmp_path / "own.fit")
    for found in (fit, pg.load(tmp_path / "own.fit", model)):
        density = found.log_density(x[:3], y[:3])
        np.testing.assert_allclose(density, wanted.log_density(x[:3], y[:3]), rtol=1e-9)
        np.testing.assert_allclose(found.predict(x[:3]).mean, wanted.predict(x[:3]).mean)
        with pytest.raises(pg.ModelError, match="Undrawn.*has no `sample`"):
            found.sample(0, x[:3], 2)


class DrawnByNobody(Own):
    def sample(self, key, sample_shape=()):
        raise NotImplementedError


class Unscored(Own):
    log_prob = dist.Distribution.log_prob


def test_methods_that_a_class_leaves_out_are_named():
    """They ended in a NotImplementedError without a text."""
    fit = pg.fit(of_class(DrawnByNobody), pg.Laplace(), 0, x, y=y)
    with pytest.raises(pg.ModelError, match="DrawnByNobody.*no `sample`.*leave `sample` out"):
        fit.log_density(x[:3], y[:3])
    with pytest.raises(pg.ModelError, match="Unscored.*no `log_prob`"):
        pg.fit(of_class(Unscored), pg.Laplace(), 0, x, y=y)


class HoldsItself(Own):
    def keep(self, loc, scale):
        self.loc, self.scale, self.me = loc, scale, self


class Unsorted(Own):
    def keep(self, loc, scale):
        self.loc, self.scale, self.both = loc, scale, {1: loc, "scale": scale}


@pytest.mark.parametrize("kind", [HoldsItself, Unsorted])
def test_attributes_that_are_no_trees_are_named(kind):
    """A bare RecursionError, and a ValueError of JAX's."""
    with pytest.raises(pg.ModelError, match=f"{kind.__name__}.*holds itself, or is a dictionary"):
        pg.fit(of_class(kind), pg.Laplace(), 0, x, y=y)
    assert not pg.check(of_class(kind), x, y=y).ok


class WithoutSupport(Own):
    support = None


def test_a_class_without_a_support_is_told_so():
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", WithoutSupport(f, NOISE), obs=y)

    with pytest.raises(pg.ModelError, match="'y': WithoutSupport has no support; declare"):
        pg.fit(model, pg.Laplace(), 0, x, y=y)
