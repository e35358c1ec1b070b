"""Bounds as NumPyro ELBO objects: against TraceMeanField_ELBO, against SVGP's bound, with
minibatches, without any GP.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from often import some

import ppl_gp as pg
from ppl_gp.deep.bound import terms
from ppl_gp.deep.latents import FreeGaussian
from ppl_gp.deep.structure import structure_of
from ppl_gp.infer.hyper.space import log_prior
from ppl_gp.reading.roles import roles
from ppl_gp.reading.tracing import run
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import FullGaussian
from ppl_gp.sparse.inducing import Points

N = 12
RNG = np.random.default_rng(0)
X, Y = jnp.asarray(RNG.normal(size=(N, 1))), jnp.asarray(RNG.normal(size=N))
Z1, Z2 = jnp.linspace(-1.5, 1.5, 4)[:, None], jnp.asarray(RNG.normal(size=(4, 2)))
HIDDEN = np.stack([0.5 * RNG.normal(size=N), RNG.normal(-0.3, 0.2, size=N)], 1)


def flat(X, y=None, size=None):
    """Regression with one hyperparameter; `size` of a batch."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    data = numpyro.plate("data", N, subsample_size=size)
    with data as rows:
        X, y = X[rows], None if y is None else y[rows]
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.8), X))
    with data:
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def hidden(X, y=None, size=None):
    """A latent input."""
    data = numpyro.plate("data", N, subsample_size=size)
    with data as rows:
        X, y = X[rows], None if y is None else y[rows]
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.8), jnp.concatenate([X, h], -1)))
    with data:
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def layered(X, y=None):
    """Two layers and a latent."""
    with numpyro.plate("data", N):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    inputs = jnp.concatenate([X, h], -1)
    with numpyro.plate("units", 2):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(0.5, 1.0), inputs, pg.means.Identity()))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.8), g.T))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def reopened(X, y=None, size=None):
    """`hidden`, whose plate is made again for the observations."""
    with numpyro.plate("data", N, subsample_size=size) as rows:
        X = X[rows]
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.8), jnp.concatenate([X, h], -1)))
    with numpyro.plate("data", N, subsample_size=size) as rows:
        numpyro.sample("y", dist.Normal(f, 0.5), obs=None if y is None else y[rows])


@pytest.mark.parametrize("loss", [pg.ELBO(), pg.ImportanceWeightedELBO(2), TraceMeanField_ELBO()])
def test_a_plate_that_is_opened_twice_draws_one_batch(loss):
    """The guide's, whose second draw the model would be given."""
    Z = {"f": pg.SparsePosterior(Z2)}
    bounds = []
    for model in (hidden, reopened):
        guide = pg.guide(model, Z)
        svi = SVI(model, guide, optax.adam(0.01), loss)
        params = svi.get_params(svi.init(random.key(1), X, y=Y, size=5))
        with numpyro.handlers.seed(rng_seed=2), numpyro.handlers.substitute(data=params):
            drawn = numpyro.handlers.trace(guide).get_trace(X, y=Y, size=5)
        rows = drawn["data"]["value"]
        np.testing.assert_allclose(drawn["f"]["fn"].prior.X[:, 0], X[rows, 0])
        bounds.append(float(loss.loss(random.key(0), params, model, guide, X, y=Y, size=5)))
    assert bounds[0] == pytest.approx(bounds[1], abs=1e-10)


def network(X, y=None, size=None, latent=False):
    """A Bayesian neural network, with a latent input if told."""
    first = numpyro.sample("first", dist.Normal(0.0, 1.0).expand([1 + latent, 3]).to_event(2))
    second = numpyro.sample("second", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", N, subsample_size=size) as rows:
        X, y = X[rows], None if y is None else y[rows]
        if latent:
            h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
            X = jnp.concatenate([X, h], -1)
        numpyro.sample("y", dist.Normal(jnp.tanh(X @ first) @ second, 0.5), obs=y)


def q_of(seed, *shape):
    rng = np.random.default_rng(seed)
    scale = np.tril(0.2 * rng.normal(size=(*shape, shape[-1]))) + 0.5 * np.eye(shape[-1])
    return jnp.asarray(rng.normal(size=shape)), jnp.asarray(scale)


PARAMS = {
    "flat": dict(zip(("f_loc", "f_scale_tril"), q_of(1, 4), strict=True)),
    "hidden": dict(zip(("f_loc", "f_scale_tril"), q_of(1, 4), strict=True))
    | {"h_packed": jnp.asarray(HIDDEN)},
}
PARAMS["layered"] = PARAMS["hidden"] | dict(
    zip(("g_loc", "g_scale_tril"), q_of(2, 2, 4), strict=True)
)
MODELS = {
    "flat": (flat, {"f": Z1}),
    "hidden": (hidden, {"f": Z2}),
    "layered": (layered, {"g": Z2, "f": Z2}),
}


@functools.cache
def guide_of(name, **options):
    model, points = MODELS[name]
    posteriors = {k: pg.SparsePosterior(Z, train_inducing=False) for k, Z in points.items()}
    return pg.guide(functools.partial(model, **options), posteriors, latents=pg.Free())


def params_of(name):
    """The chosen ones, and the others as they start."""
    svi = SVI(MODELS[name][0], guide_of(name), optax.adam(0.01), pg.ELBO())
    return svi.get_params(svi.init(random.key(0), X, y=Y)) | PARAMS[name]


def bounds(elbo, name, num=2000, params=None, model=None, guide=None, **kwargs):
    """Estimates for `num` keys."""
    model, guide = model or MODELS[name][0], guide or guide_of(name, **kwargs)
    params = params_of(name) if params is None else params
    one = lambda key, p: -elbo.loss(key, p, model, guide, X, y=Y, **kwargs)  # noqa: E731
    return np.asarray(jax.jit(jax.vmap(one, (0, None)))(random.split(random.key(1), num), params))


@functools.cache
def elbos(name):
    """Estimates of the ELBO."""
    return bounds(pg.ELBO(), name)


def svgp(name, sampling, num=2000):
    """The bound of `ppl_gp.deep.bound` at the same parameters."""
    model, points = MODELS[name]
    params = params_of(name)
    hyper = {k.removesuffix("_auto_loc"): v for k, v in params.items() if k.endswith("_auto_loc")}
    q = {k: FullGaussian(params[f"{k}_loc"], params[f"{k}_scale_tril"]) for k in points}
    latents = {"h": FreeGaussian(params["h_packed"])} if "h_packed" in params else {}
    variational = Variational({k: Points(Z) for k, Z in points.items()}, q, latents)
    trace = run(model, (X,), {"y": Y}, hyper)
    of = structure_of(
        roles(trace), trace, lambda values: run(model, (X,), {"y": Y}, {**hyper, **values})
    )
    batch = Batch((X,), {"y": Y}, jnp.ones(N), random.key(0))
    log_p = sum(float(trace[k]["fn"].log_prob(v)) for k, v in hyper.items())

    def one(key):
        return terms(
            model, Expectation(), sampling, of, hyper, variational, batch._replace(key=key)
        ).bound

    return log_p + np.asarray(jax.jit(jax.vmap(one))(random.split(random.key(2), num)))


def same_mean(a, b, slack=0.0):
    return abs(a.mean() - b.mean()) < 4 * np.sqrt(a.var() / len(a) + b.var() / len(b)) + slack


@pytest.mark.slow
def test_a_shallow_bound_is_svgps():
    """With the log prior of the hyperparameter, a point here."""
    ours, theirs = elbos("flat"), svgp("flat", pg.Layers(), 1)
    assert abs(ours[0] - theirs[0]) < 1e-9 and np.ptp(ours) < 1e-9
    assert same_mean(bounds(TraceMeanField_ELBO(), "flat"), ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hidden", "layered"])
def test_the_elbo_is_numpyros_and_svgps_on_average(name):
    ours, numpyros = elbos(name), bounds(TraceMeanField_ELBO(), name)
    assert same_mean(ours, numpyros) and same_mean(ours, svgp(name, pg.Layers()))
    assert ours.std() < numpyros.std()  # f of the last layer is integrated
    assert same_mean(bounds(pg.ELBO(expected_last=False), name), ours)


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "expected_last"), [("hidden", True), ("hidden", False), ("layered", True)]
)
def test_importance_weighted_bounds_are_svgps_on_average(name, expected_last):
    elbo = pg.ImportanceWeightedELBO(5, expected_last=expected_last)
    assert same_mean(
        bounds(elbo, name), svgp(name, pg.Layers(num_importance=5, expected_last=expected_last))
    )


@pytest.mark.slow
def test_a_joint_draw_of_the_last_layer_is_the_tighter_bound():
    """log-mean-exp is convex: E log mean_k exp(l_k(f)) is at least log mean_k exp(E l_k(f))."""
    explicit, joint = (
        bounds(pg.ImportanceWeightedELBO(10, expected_last=e), "hidden", 4000)
        for e in (True, False)
    )
    assert joint.mean() - explicit.mean() > 4 * np.sqrt((joint.var() + explicit.var()) / 4000)
    assert explicit.mean() > elbos("hidden").mean() + 0.5


@pytest.mark.slow
def test_one_copy_is_the_elbo_and_options_that_leave_the_value_alone():
    np.testing.assert_allclose(
        bounds(pg.ImportanceWeightedELBO(1), "hidden"), elbos("hidden"), rtol=1e-12
    )
    plain, doubly = (
        bounds(pg.ImportanceWeightedELBO(4, doubly_reparameterised=d), "hidden", 5)
        for d in (False, True)
    )
    np.testing.assert_allclose(plain, doubly, rtol=1e-12)
    by_beta = [
        bounds(pg.ELBO(beta=0.0), "hidden"),
        elbos("hidden"),
        bounds(pg.ELBO(beta=2.0), "hidden"),
    ]
    np.testing.assert_allclose(by_beta[2] - by_beta[1], by_beta[1] - by_beta[0], rtol=1e-9)
    many = bounds(pg.ELBO(num_particles=8), "hidden", 500)
    assert same_mean(many, elbos("hidden"))
    np.testing.assert_allclose(many.std(), elbos("hidden").std() / np.sqrt(8), rtol=0.25)


def chained(X, y=None):
    """Two latents a datum."""
    with numpyro.plate("data", N):
        a = numpyro.sample("a", dist.Normal())
        b = numpyro.sample("b", dist.Normal(a, 1.0))
        numpyro.sample("y", dist.Normal(a + jnp.exp(b), 0.5), obs=y)


def chain_guide(X, y=None):
    """A user's own: q(b) depends on a."""
    loc = numpyro.param("loc", 0.3 * jnp.ones(3))
    with numpyro.plate("data", N):
        a = numpyro.sample("a", dist.Normal(loc[0] + 0.2 * y, 0.8))
        numpyro.sample("b", dist.Normal(loc[1] + loc[2] * a, 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["hidden", "network", "chained"], "chained"))
def test_the_doubly_reparameterised_gradient_has_the_same_mean(name):
    """Through a GP's inputs, through a network, and from one latent to another that depends on
    it.
    """
    model = {
        "hidden": hidden,
        "network": functools.partial(network, latent=True),
        "chained": chained,
    }[name]
    guide = {
        "hidden": guide_of("hidden"),
        "network": pg.guide(model, {}, AutoNormal),
        "chained": chain_guide,
    }[name]
    params = (
        params_of(name)
        if name == "hidden"
        else SVI(model, guide, optax.adam(0.1), pg.ELBO())
        .run(random.key(0), 50, X, y=Y, progress_bar=False)
        .params
    )

    def gradients(doubly):
        elbo = pg.ImportanceWeightedELBO(20, doubly_reparameterised=doubly)

        def one(key):
            return ravel_pytree(
                jax.grad(lambda p: elbo.loss(key, p, model, guide, X, y=Y))(params)
            )[0]

        return np.asarray(
            jax.jit(lambda keys: lax.map(one, keys, batch_size=50))(
                random.split(random.key(2), 1500)
            )
        )

    plain, doubly = gradients(False), gradients(True)
    error = np.sqrt((plain.var(0) + doubly.var(0)) / len(plain))
    assert np.all(np.abs(plain.mean(0) - doubly.mean(0)) <= 4.5 * error + 1e-10)
    latent = plain.std(0) > 1.5 * doubly.std(0)
    signal = np.abs(doubly.mean(0)) > 10 * doubly.std(0) / np.sqrt(len(doubly))
    assert np.any(latent & signal)  # something became less noisy, and is not zero


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flat", "hidden"])
def test_a_plate_that_subsamples_is_unbiased(name):
    """With q(h) nearly points only the batch is random."""
    params = params_of(name)
    if name == "hidden":
        params |= {"h_packed": params["h_packed"].at[:, 1].set(-20.0)}
    whole = bounds(pg.ELBO(), name, 2, params)
    batches = bounds(pg.ELBO(), name, 4000, params, size=4)
    assert np.ptp(whole) < 1e-5 and batches.std() > 1.0
    assert abs(batches.mean() - whole[0]) < 4 * batches.std() / np.sqrt(4000)


@pytest.mark.slow
def test_a_model_may_call_subsample():
    """`numpyro.subsample` in place of an index: the same bound on the same rows."""

    def subsampled(X, y=None, size=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        data = numpyro.plate("data", N, subsample_size=size)
        with data:
            X, y = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.8), X))
        with data:
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = pg.guide(subsampled, {"f": pg.SparsePosterior(Z1, train_inducing=False)})
    batches = bounds(pg.ELBO(), "", 4000, params_of("flat"), subsampled, guide, size=4)
    assert same_mean(batches, bounds(pg.ELBO(), "flat", 2000, size=4))


@pytest.mark.slow
@pytest.mark.parametrize("latents", [pg.Free(), pg.Amortised()], ids=["free", "encoder"])
def test_svgp_takes_latents_in_a_plate_that_subsamples(latents):
    method = pg.SVGP(inducing=Z2, max_steps=3, layers=pg.Layers(latents=latents))
    fit = pg.fit(functools.partial(hidden, size=4), method, 0, X, y=Y, throw=False)
    assert fit.result == "completed" and np.isfinite(fit.log_evidence)


@pytest.mark.slow
def test_an_encoder_in_a_plate_that_subsamples_is_unbiased():
    points = {"f": pg.SparsePosterior(Z2, train_inducing=False)}
    whole = pg.guide(hidden, points)
    params = trained(whole, pg.ELBO(), hidden)[0]
    batches = bounds(pg.ELBO(), "", 4000, params, hidden, pg.guide(hidden, points), size=4)
    assert same_mean(bounds(pg.ELBO(), "", 2000, params, hidden, whole), batches)


@pytest.mark.slow
def test_rows_outside_the_batch_get_no_gradient():
    guide, params = guide_of("hidden", size=4), params_of("hidden")
    loss = lambda p: pg.ELBO().loss(random.key(3), p, hidden, guide, X, y=Y, size=4)  # noqa: E731
    gradient = np.asarray(jax.jit(jax.grad(loss))(params)["h_packed"])
    assert np.sum(np.abs(gradient).sum(1) > 0) == 4


def trained(guide, elbo, model, **kwargs):
    svi = SVI(model, guide, optax.adam(0.02), elbo)
    result = svi.run(random.key(0), 200, X, y=Y, progress_bar=False, **kwargs)
    return result.params, np.asarray(result.losses)


@pytest.mark.slow
def test_a_neural_network_has_the_same_bound():
    plain, guide = AutoNormal(network), pg.guide(network, {}, AutoNormal)
    params, losses = trained(plain, pg.ELBO(), network)
    assert losses[-50:].mean() < losses[:10].mean() - 1.0
    ours = bounds(pg.ELBO(), "", 2000, params, network, guide)  # the parameters have the same names
    assert same_mean(ours, bounds(TraceMeanField_ELBO(), "", 2000, params, network, plain))
    weighted = bounds(pg.ImportanceWeightedELBO(5), "", 2000, params, network, guide)
    assert same_mean(ours, weighted)  # weights of the network are shared: nothing to average
    batches = bounds(pg.ELBO(), "", 4000, params, network, guide, size=4)
    assert same_mean(batches, ours) and batches.std() > ours.std()


@pytest.mark.slow
def test_a_neural_network_with_a_latent_input_gains_from_copies():
    model = functools.partial(network, latent=True)
    guide = pg.guide(model, {}, AutoNormal)
    params, losses = trained(guide, pg.ImportanceWeightedELBO(5), model)
    assert losses[-50:].mean() < losses[:10].mean() - 1.0
    one, many = (
        bounds(pg.ImportanceWeightedELBO(K), "", 4000, params, model, guide) for K in (1, 20)
    )
    assert many.mean() - one.mean() > 4 * np.sqrt((one.var() + many.var()) / 4000)
    assert same_mean(one, bounds(TraceMeanField_ELBO(), "", 4000, params, model, guide))


def annealed(X, y=None, scale=0.1):
    """A latent, a hyperparameter and the GP, the divergence of each with a weight of its own."""
    with numpyro.handlers.scale(scale=3.0 * scale):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    with numpyro.plate("data", N), numpyro.handlers.scale(scale=scale):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.handlers.scale(scale=2.0 * scale):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.2, 0.8), jnp.concatenate([X, h], -1)))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
def test_a_scale_around_a_site_weighs_its_divergence():
    """As NumPyro's bound has it but for the point, and as SVGP has it."""
    points = {"f": pg.SparsePosterior(Z2, train_inducing=False)}
    guide = pg.guide(annealed, points, latents=pg.Free())
    svi = SVI(annealed, guide, optax.adam(0.01), pg.ELBO())
    params = svi.get_params(svi.init(random.key(0), X, y=Y)) | PARAMS["hidden"]
    ours, numpyros, plain = (
        bounds(
            elbo,
            "",
            2000,
            params,
            functools.partial(annealed, scale=s),
            functools.partial(guide, scale=s),
        )
        for elbo, s in ((pg.ELBO(), 0.1), (TraceMeanField_ELBO(), 0.1), (pg.ELBO(), 1.0))
    )
    assert ours.mean() > plain.mean() + 1.0
    q = FullGaussian(*(params[f"f_{k}"] for k in ("loc", "scale_tril")))
    variational = Variational({"f": Points(Z2)}, {"f": q}, {"h": FreeGaussian(params["h_packed"])})
    hyper = {"noise": params["noise_auto_loc"]}
    trace = run(annealed, (X,), {"y": Y}, hyper)
    of = structure_of(
        roles(trace), trace, lambda values: run(annealed, (X,), {"y": Y}, {**hyper, **values})
    )
    batch = Batch((X,), {"y": Y}, jnp.ones(N), random.key(0))

    def one(key):
        return terms(
            annealed, Expectation(), pg.Layers(), of, hyper, variational, batch._replace(key=key)
        ).bound

    svgp = np.asarray(jax.jit(jax.vmap(one))(random.split(random.key(2), 2000)))
    log_p = float(dist.LogNormal(-1.0, 1.0).log_prob(hyper["noise"]))
    assert same_mean(ours, svgp + 0.3 * log_p)
    # NumPyro's KL of a point has the guide's scale, which is 1
    assert same_mean(ours, numpyros - 0.7 * log_p)
    np.testing.assert_allclose(log_prior(annealed, (X,), {"y": Y}, hyper), 0.3 * log_p, rtol=1e-12)


def test_a_scale_of_a_prior_alone_weighs_that():
    """And not q: the value had the KL at q's scale, 1, and the gradient the prior at its own."""
    at, width = jnp.linspace(-1.0, 1.0, N), 1e-6

    def model(X, y=None):
        with numpyro.handlers.scale(scale=0.1):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0))
            with numpyro.plate("data", len(X)):
                h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(X[:, 0] * w + h, 0.5), obs=y)

    def guide(X, y=None):
        numpyro.sample("w", dist.Normal(2.0, width))
        with numpyro.plate("data", N):
            numpyro.sample("h", dist.Normal(at, width))

    log_prior = dist.Normal(0.0, 1.0).log_prob(jnp.append(at, 2.0)).sum()
    entropy = (N + 1) * dist.Normal(0.0, width).entropy()
    log_lik = dist.Normal(2.0 * X[:, 0] + at, 0.5).log_prob(Y).sum()
    found = -pg.ELBO().loss(random.key(0), {}, model, guide, X, y=Y)
    assert found == pytest.approx(float(log_lik + 0.1 * log_prior + entropy), abs=1e-3)


def outputs(X, y=None, as_vector=False):
    """A linear model of three outputs with a noise each."""
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    plate = numpyro.plate("outputs", 3, dim=-2)
    if as_vector:
        s = numpyro.sample("s", dist.LogNormal(-1.0, 1.0).expand([3, 1]).to_event(2))
    else:
        with plate:
            s = numpyro.sample("s", dist.LogNormal(-1.0, 1.0))
    with plate, numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal((X @ weights).T, s), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "elbo", [pg.ELBO(400), pg.ImportanceWeightedELBO(5, 400)], ids=["elbo", "copies"]
)
def test_a_hyperparameter_of_an_output_enters_once(elbo):
    """Whether it stands in a plate of outputs or is a vector: 29 divergences of 20 nats were
    added.
    """
    found = {}
    for as_vector in (False, True):
        model = functools.partial(outputs, as_vector=as_vector)
        guide = AutoNormal(model, init_scale=1e-3)
        svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
        y = jnp.stack([Y, 2 * Y, -Y])
        params = svi.get_params(svi.init(random.key(0), X, y=y))
        start = {k: jnp.zeros_like(v) if k.endswith("loc") else v for k, v in params.items()}
        losses = (
            e.loss(random.key(1), start, model, guide, X, y=y)
            for e in (elbo, TraceMeanField_ELBO(400))
        )
        found[as_vector] = tuple(map(float, losses))
    (plate, numpyros), (vector, _) = found[False], found[True]
    assert abs(plate - numpyros) < 0.5 and abs(plate - vector) < 0.5


@pytest.mark.slow
def test_an_outputs_plate_of_as_many_members_as_data_is_not_the_datas():
    """Its latents are shared by all data: copies of them have nothing to average."""
    model = functools.partial(outputs, as_vector=False)
    guide = AutoNormal(model)
    x, y = X[:3], jnp.stack([Y, 2 * Y, -Y])[:, :3]
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(random.key(0), x, y=y))
    ours, numpyros = (
        e.loss(random.key(1), params, model, guide, x, y=y)
        for e in (pg.ELBO(), TraceMeanField_ELBO())
    )
    assert np.isfinite(ours) and np.isfinite(numpyros)
    copies = pg.ImportanceWeightedELBO(3).loss(random.key(1), params, model, guide, x, y=y)
    assert abs(copies - ours) < 1e-6 * abs(ours)
    whole = pg.guide(model, {}, AutoNormal)
    params = (
        SVI(model, whole, optax.adam(0.01), pg.ELBO())
        .run(random.key(0), 1, x, y=y, progress_bar=False)
        .params
    )
    assert np.isfinite(pg.ELBO().loss(random.key(1), params, model, whole, x, y=y))


@pytest.mark.slow
def test_what_a_guide_alone_draws_counts():
    """`AutoMultivariateNormal` draws one joint vector: the bound has its density, as NumPyro's
    has.
    """
    guide = AutoMultivariateNormal(network)
    svi = SVI(network, guide, optax.adam(0.01), pg.ELBO())
    params = svi.get_params(svi.init(random.key(0), X, y=Y))
    ours, numpyros = (
        bounds(e, "", 2000, params, network, guide) for e in (pg.ELBO(), TraceMeanField_ELBO())
    )
    assert same_mean(ours, numpyros) and ours.std() < 3 * numpyros.std()


def test_the_default_encoder_of_a_guide_is_svgps():
    """A model that does not use its first argument's values has nothing to tell an encoder but
    y.
    """

    def gplvm(X, y=None):
        with numpyro.plate("data", N):
            h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    def sees(model, points):
        guide = pg.guide(model, {"f": pg.SparsePosterior(points)})
        SVI(model, guide, optax.adam(0.01), pg.ELBO()).init(random.key(0), X, y=Y)
        return guide.local["h"].sees

    assert sees(gplvm, Z1) == "y" and sees(hidden, Z2) == "xy"
    with pytest.raises(
        pg.DataError, match=r"latents=.*entries for \['z'\], and none for the latent 'h'"
    ):
        pg.fit(gplvm, pg.SVGP(inducing=Z1, layers=pg.Layers(latents={"z": pg.Free()})), 0, X, y=Y)


def test_what_does_not_fit_is_a_typed_error():
    for make in (lambda: pg.ImportanceWeightedELBO(0), lambda: pg.ELBO(0)):
        with pytest.raises(pg.DataError, match="at least 1"):
            make()
    joint = pg.ImportanceWeightedELBO(3, doubly_reparameterised=True, expected_last=False)
    with pytest.raises(pg.ModelError, match="drawn jointly"):
        bounds(joint, "hidden", 1)
    with pytest.raises(pg.ModelError, match="drawn jointly"):
        bounds(pg.ImportanceWeightedELBO(3, doubly_reparameterised=True), "layered", 1)


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("is_factor", [False, True])
def test_observations_without_rows_count_once(K, is_factor):
    """`check` lists SVI for such models, which was refused. q is the posterior."""

    def model(X, y=None):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        q = dist.MultivariateNormal(a * jnp.ones(N), jnp.eye(N))
        if is_factor:
            numpyro.factor("y", q.log_prob(y))
        else:
            numpyro.sample("y", q, obs=y)

    def guide(X, y=None):
        numpyro.sample("a", dist.Normal(y.sum() / (1 + N), (1 + N) ** -0.5))

    evidence = dist.MultivariateNormal(jnp.zeros(N), jnp.eye(N) + 1.0).log_prob(Y)
    found = bounds(pg.ImportanceWeightedELBO(K), "", 2000, {}, model, guide)
    assert abs(found.mean() - evidence) < 4 * found.std() / np.sqrt(len(found))


def straight(X, y=None, size=None):
    """Weights that no plate is around."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N, subsample_size=size) as rows:
        numpyro.sample("y", dist.Normal(X[rows, 0] * w, 0.5), obs=y[rows])


def nearly_a_point(X, y=None, size=None):
    numpyro.sample("w", dist.Normal(0.3, 1e-4))


@pytest.mark.parametrize("K", [1, 3])
def test_a_plate_that_the_guide_leaves_out_draws_a_batch_per_step(K):
    """It drew rows by a fixed key: the same ones at every step. q is nearly a point, so the
    bound on all rows is known, and its gradient in y is the average of those of batches.
    """
    elbo, keys = pg.ImportanceWeightedELBO(K), random.split(random.key(1), 4000)

    def bound(key, y):
        return -elbo.loss(key, {}, straight, nearly_a_point, X, y=y, size=4)

    found, slopes = jax.jit(jax.vmap(jax.value_and_grad(bound, 1), (0, None)))(keys, Y)
    log_lik = dist.Normal(X[:, 0] * 0.3, 0.5).log_prob(Y).sum()
    kl = dist.kl_divergence(dist.Normal(0.3, 1e-4), dist.Normal(0.0, 1.0))
    found, slopes = np.asarray(found), np.asarray(slopes)
    assert abs(found.mean() - (log_lik - kl)) < 4 * found.std() / np.sqrt(len(keys)) + 0.01
    whole = -(Y - X[:, 0] * 0.3) / 0.25
    error = slopes.std(0) / np.sqrt(len(keys))
    assert np.all(np.abs(slopes.mean(0) - whole) < 4.5 * error + 0.01)


def latents_of_rows(X, y=None, event=0):
    h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(event))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(X[:, 0] + h, 0.5), obs=y)


@pytest.mark.parametrize("event", [0, 1])
def test_latents_of_the_rows_have_their_divergence_once(event):
    """Its sum was added for each of the rows where `to_event` took their axis: 12 times."""
    model = functools.partial(latents_of_rows, event=event)

    def guide(X, y=None):
        numpyro.sample("h", dist.Normal(at, 1e-6).to_event(event))

    at = jnp.linspace(-1.0, 1.0, N)
    kl = dist.kl_divergence(dist.Normal(at, 1e-6), dist.Normal(0.0, 1.0)).sum()
    bound = dist.Normal(X[:, 0] + at, 0.5).log_prob(Y).sum() - kl
    found = -pg.ELBO().loss(random.key(0), {}, model, guide, X, y=Y)
    assert found == pytest.approx(float(bound), abs=1e-3)


def test_copies_of_latents_outside_a_plate_are_draws_of_their_own():
    """All were the same draw: the bound of 50 copies was that of one, 1.3 nats below log p(y)."""

    def guide(X, y=None):
        numpyro.sample("h", dist.Normal(0.8 * (y - X[:, 0]), 0.6))

    evidence = float(dist.Normal(X[:, 0], np.sqrt(1.25)).log_prob(Y).sum())
    found = bounds(pg.ImportanceWeightedELBO(50), "", 50, {}, latents_of_rows, guide)
    assert abs(found.mean() - evidence) < 0.3


@pytest.mark.parametrize(("make", "event"), [(AutoNormal, 1), (AutoMultivariateNormal, 0)])
def test_copies_of_what_all_rows_have_at_once_are_refused(make, event):
    model = functools.partial(latents_of_rows, event=event)
    svi = SVI(model, make(model), optax.adam(0.01), pg.ImportanceWeightedELBO(5))
    with pytest.raises(pg.ModelError, match=r"\['h'\] are drawn for all rows at once"):
        svi.run(random.key(0), 1, X, y=Y, progress_bar=False)


MISSING = jnp.arange(N) % 3 == 1
NOISE, KERNEL = 0.3, pg.kernels.Matern12(1.2, 0.8)


def with_missing(X, y=None):
    """A function, a weight and latents, each with a third of its observations missing."""
    with numpyro.plate("data", N):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", N):
        for name, mean in {"a": f, "b": X[:, 0] * w, "c": h}.items():
            numpyro.sample(name, dist.Normal(mean, NOISE), obs=y, obs_mask=~MISSING)


def exact_guide(X, y=None):
    """The posterior."""
    x, noise = jnp.where(MISSING, 0.0, X[:, 0]), NOISE**2
    prior = pg.GP(KERNEL, X)
    numpyro.sample("f", pg.SparsePosterior(X, train_inducing=False).at_site("f", prior, prior))
    spread = 1.0 / (1.0 + x @ x / noise)
    numpyro.sample("w", dist.Normal(spread * (x @ y) / noise, jnp.sqrt(spread)))
    share = jnp.where(MISSING, 0.0, 1.0 / (1.0 + noise))
    with numpyro.plate("data", N):
        numpyro.sample("h", dist.Normal(share * y, jnp.sqrt(1.0 - share)))


def exact_params():
    """The whitened posterior of f at all rows: (I + L^T D L)^-1, D the precisions of the noise."""
    L = jnp.linalg.cholesky(KERNEL(X, X))
    precision = jnp.where(MISSING, 0.0, 1.0 / NOISE**2)
    S = jnp.linalg.inv(jnp.eye(N) + L.T @ (precision[:, None] * L))
    return {"f_loc": S @ L.T @ (precision * Y), "f_scale_tril": jnp.linalg.cholesky(S)}


@pytest.mark.parametrize(
    "elbo",
    [
        pg.ELBO(),
        pg.ImportanceWeightedELBO(3),
        pg.GlobalImportanceWeightedELBO(1),
        pg.GlobalImportanceWeightedELBO(5),
    ],
    ids=["elbo", "copies", "one", "global"],
)
def test_missing_observations_leave_the_evidence(elbo):
    """At the posterior each bound is log p(y) of what is there. Four missing rows of each site
    added up to 17 nats. The slack is for the jitter of a GP.
    """
    y, x = Y[~MISSING], X[~MISSING]
    eye = jnp.eye(len(y))
    covariances = [KERNEL(x, x), x @ x.T, eye]
    evidence = sum(
        dist.MultivariateNormal(jnp.zeros(len(y)), C + NOISE**2 * eye).log_prob(y)
        for C in covariances
    )
    found = bounds(elbo, "", 2000, exact_params(), with_missing, exact_guide)
    assert abs(found.mean() - evidence) < 4 * found.std() / np.sqrt(len(found)) + 0.01


def differences(X, y=None):
    """Rows that see the function at the row before."""
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f - jnp.roll(f, 1), 0.3), obs=y)


def steps(X, y=None):
    """Rows that see the latent of the row before."""
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(h - jnp.roll(h, 1), 0.3), obs=y)


def centred(X, y=None, size=None):
    """Inputs less the mean of their batch."""
    data = numpyro.plate("data", X.shape[0], subsample_size=size)
    with data as rows:
        X, y = X[rows], y[rows]
    f = numpyro.sample("f", pg.GP(KERNEL, X - X.mean()))
    with data:
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def test_rows_that_see_each_other_have_no_bound_of_each_row_alone():
    """Moments of a function at each row gave 2.6 nats, and 50 copies of each row's latents 1.8
    nats, more than log p(y); batches of 4 a mean bound 1.5 nats off. One draw of all latents is
    right.
    """
    points = {"f": pg.SparsePosterior(Z1)}
    for model, elbo, options in (
        (differences, pg.ELBO(), {}),
        (differences, pg.ELBO(expected_last=False), {}),
        (steps, pg.ImportanceWeightedELBO(50), {}),
        (centred, pg.ELBO(), {"size": 4}),
    ):
        guide = AutoNormal(steps) if model is steps else pg.guide(model, points)
        svi = SVI(model, guide, optax.adam(0.01), elbo)
        with pytest.raises(pg.NotPointwiseError, match="other rows"):
            svi.run(random.key(0), 1, X, y=Y, progress_bar=False, **options)
    for model in (steps, differences):
        guide = AutoNormal(model)
        svi = SVI(model, guide, optax.adam(0.01), pg.ELBO())
        params = svi.get_params(svi.init(random.key(0), X, y=Y))
        ours, numpyros = (
            bounds(e, "", 2000, params, model, guide) for e in (pg.ELBO(), TraceMeanField_ELBO())
        )
        assert same_mean(ours, numpyros)


def grouped(X, y=None, size=None, few=None):
    """Rows with latents, and groups in a plate of their own."""
    with numpyro.plate("groups", 6, subsample_size=few) as group:
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("t", dist.Normal(level, 0.5), obs=jnp.arange(6)[group] / 3.0)
    with numpyro.plate("data", N, subsample_size=size) as rows:
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(h, 0.5), obs=y[rows])


def grouped_guide(X, y=None, size=None, few=None):
    with numpyro.plate("groups", 6, subsample_size=few) as group:
        numpyro.sample("level", dist.Normal(0.8 * jnp.arange(6)[group] / 3.0, 0.45))
    with numpyro.plate("data", N, subsample_size=size) as rows:
        numpyro.sample("h", dist.Normal(0.6 * y[rows], 0.6))


@pytest.mark.parametrize("K", [1, 5])
def test_a_site_is_scaled_by_its_own_plates(K):
    """The rows' divergences were also scaled by the groups, and log weights divided by them."""
    whole, *batches = (
        bounds(pg.ImportanceWeightedELBO(K), "", 4000, {}, grouped, grouped_guide, **sizes)
        for sizes in ({}, {"few": 2}, {"size": 4}, {"size": 4, "few": 2})
    )
    assert all(same_mean(whole, found) for found in batches)
