# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Importance weighting: what K draws of a latent buy, and what they cost
#
# **Claim.** With K draws of each datum's latent inside the logarithm,
#
# 1. at fixed parameters the bound rises with K up to the evidence, which for a small model is a known one-dimensional
#    integral a datum; one logarithm over draws of all latents together is looser than one for each datum at the same K;
# 2. training by K = 10 in place of K = 1 gives a GP with a latent input a better test log density, if of several seeds the one with
#    the highest bound is kept: a single run with K = 10 may also end in a worse optimum;
# 3. the signal-to-noise ratio of the gradient of q(h) falls as $K^{-1/2}$ (Rainforth et al. 2018); in its doubly reparameterised
#    form (Tucker et al. 2019) it rises as $K^{1/2}$;
# 4. the same bounds serve weight space: a Bayesian network with a latent input, a Bayesian conditional variational autoencoder, scores
#    better trained by K = 10 than by K = 1, if both begin with a small weight on the KL. Without that its latent stays unused.
#
# The last cell asserts all four.

# %%
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from jax.scipy.special import logsumexp
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoNormal

import ppl_gp as pg

sys.path.insert(0, str(Path.cwd().parent))  # the folder `models` stands beside `notebooks`
from models.bayesian_network import bayesian_network  # noqa: E402
from models.latent import latent  # noqa: E402

jax.config.update("jax_enable_x64", True)
SMALL = os.environ.get("PPL_GP_NOTEBOOK_SIZE") == "small"
REPEATS = 300 if SMALL else 2000  # independent estimates behind each error bar
SIZES = [1, 10, 100] if SMALL else [1, 3, 10, 30, 100, 300, 1000]  # K
SEEDS = range(1) if SMALL else range(4)
STEPS = 800 if SMALL else 2000

# %% [markdown]
# ## Part 1: the bound against K, where the evidence is known
#
# A model without a GP and with nothing but latents: $h_n \sim N(0, 1)$, $y_n \sim N(e^{h_n}, 0.5^2)$. The posterior of h given a
# small y is skewed and q(h | y) is not. The evidence of each datum is an integral over one number, done here on a grid.

# %%
NUM, SCALE = 60, 0.5
rng = np.random.default_rng(0)
y = np.exp(rng.standard_normal(NUM)) + SCALE * rng.standard_normal(NUM)


def exponential(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(jnp.exp(h), SCALE), obs=y)


X = jnp.arange(NUM)  # a model without inputs: row numbers stand for the data
grid = np.linspace(-8.0, 8.0, 8001)
log_joint = dist.Normal(0.0, 1.0).log_prob(grid) + dist.Normal(np.exp(grid), SCALE).log_prob(y[:, None])
evidence = float(jnp.sum(logsumexp(log_joint, axis=1) + np.log(grid[1] - grid[0])))
print(f"log evidence {evidence:.4f} nats")

guide = pg.guide(exponential, {}, latents=pg.Amortised(sees="y", width=8, depth=1))
trained = SVI(exponential, guide, optax.adam(0.01), pg.ELBO()).run(random.key(0), 2000, X, y=y, progress_bar=False)
params = trained.params


# %% [markdown]
# `pg.ELBO`, `pg.ImportanceWeightedELBO(K)` and `pg.GlobalImportanceWeightedELBO(K)` are NumPyro ELBO objects; minus their loss is
# one estimate of the bound. The parameters stay as the ELBO has trained them.


# %%
def estimates(elbo, params, model, guide, num, *args, seed=1, batch_size=20, **kwargs):
    """(mean, standard error) of `num` independent estimates of a bound, nats."""

    def one(key):
        return -elbo.loss(key, params, model, guide, *args, **kwargs)

    values = np.asarray(
        jax.jit(lambda keys: lax.map(one, keys, batch_size=batch_size))(random.split(random.key(seed), num))
    )
    return values.mean(), values.std() / np.sqrt(num)


BOUNDS = {"by datum": pg.ImportanceWeightedELBO, "global": pg.GlobalImportanceWeightedELBO}
elbo = estimates(pg.ELBO(), params, exponential, guide, REPEATS, X, y=y)
bounds = {
    (name, K): estimates(make(K), params, exponential, guide, REPEATS, X, y=y)
    for name, make in BOUNDS.items()
    for K in SIZES
}
print(f"ELBO {elbo[0]:.3f} +- {elbo[1]:.3f} nats")
print("    K   by datum              global")
for K in SIZES:
    print(f"{K:5d}   " + "   ".join("{:8.3f} +- {:.3f} nats".format(*bounds[name, K]) for name in BOUNDS))

# %%
BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
STYLE = {"by datum": ("o", BLUE, "one logarithm a datum"), "global": ("s", ORANGE, "one logarithm for all data")}
fig, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
for name, (marker, color, label) in STYLE.items():
    mean, error = np.array([bounds[name, K] for K in SIZES]).T
    ax.errorbar(SIZES, mean, 2 * error, marker=marker, color=color, capsize=3, label=label)
ax.axhline(evidence, color="black", linewidth=1, label="log evidence, by quadrature")
ax.axhline(elbo[0], color="0.5", linestyle=":", label="ELBO")
ax.set(xscale="log", xlabel="number of draws K", ylabel="bound (nats)")
ax.set(title=f"Bounds at fixed parameters, {NUM} data; bars: two standard errors")
ax.legend(fontsize=9, loc="lower right")
plt.show()

# %% [markdown]
# ## Part 2: training by K = 1 and by K = 10
#
# The data: y = s sin(2x) + noise with an unrecorded sign s. The model: a GP on [x, h]. Everything but K is the same. Either
# bound has local optima, so all seeds are shown; the run that one would keep is the one whose own bound is highest.


# %%
def two_branches(rng, num):
    x = rng.uniform(-1.5, 1.5, 3 * num)
    x = x[~((x > 0.4) & (x < 1.0))][:num]
    return x[:, None], rng.choice([-1, 1], num) * np.sin(2 * x) + 0.1 * rng.standard_normal(num)


rng = np.random.default_rng(1)
(X_train, y_train), (X_test, y_test) = two_branches(rng, 120), two_branches(rng, 300)
runs = {}
for K in (1, 10):
    for seed in SEEDS:
        layers = pg.Layers(latents=pg.Amortised(), num_importance=K)
        method = pg.SVGP(num_inducing=30, layers=layers, learning_rate=0.03, max_steps=STEPS)
        fit = pg.fit(latent, method, seed, X_train, y=y_train)
        runs[K, seed] = np.mean(fit.stats["bounds"][-200:]), float(np.mean(fit.log_density(X_test, y_test)))
kept = {K: max((runs[K, seed] for seed in SEEDS), key=lambda run: run[0]) for K in (1, 10)}
for K in (1, 10):
    each = " ".join(f"{runs[K, seed][1]:6.3f}" for seed in SEEDS)
    print(f"K = {K:2d}: test log density of each seed {each}; kept {kept[K][1]:.3f} nats a datum")

# %%
fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
for K, color, marker in ((1, ORANGE, "s"), (10, BLUE, "o")):
    at = np.array([runs[K, seed] for seed in SEEDS])
    ax.plot(*at.T, marker, color=color, label=f"trained with K = {K}")
    ax.plot(*kept[K], "o", markersize=15, markerfacecolor="none", markeredgecolor=color)
ax.plot([], [], "o", markersize=12, markerfacecolor="none", markeredgecolor="0.4", label="kept: highest bound of its K")
ax.set(xlabel="bound at the end of training (nats; each K has its own)", ylabel="test log density (nats a datum)")
ax.set(title="One point a seed")
ax.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## Part 3: signal and noise in the gradient of q(h)
#
# As K grows the bound depends ever less on q(h): the mean of its gradient falls as 1/K, and the noise of the plain estimate only
# as $K^{-1/2}$. The doubly reparameterised estimate writes one term of mean zero in another way, and its noise falls as
# $K^{-3/2}$. These are laws for weights of finite variance, so the model here is the one of Rainforth et al.:
# $h_n \sim N(0, 1)$, $y_n \sim N(h_n, 1)$, $q(h_n) = N(a y_n + b, s^2)$ with parameters near their optimum
# (a = 1/2, b = 0, s^2 = 1/2). The guide is an ordinary NumPyro function.

# %%
NUM_LINEAR = 20
y_linear = np.sqrt(2.0) * np.random.default_rng(0).standard_normal(NUM_LINEAR)
NEAR = {"slope": 0.6, "intercept": 0.1, "log_scale": 0.5 * np.log(2 / 3)}
GRADIENT_SIZES = [1, 10, 100] if SMALL else [1, 3, 10, 30, 100]
GRADIENTS = 1000 if SMALL else 10000


def linear(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(h, 1.0), obs=y)


def linear_guide(X, y=None):
    slope, intercept, log_scale = (numpyro.param(name, value) for name, value in NEAR.items())
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("h", dist.Normal(slope * y + intercept, jnp.exp(log_scale)))


def signal_to_noise(K, doubly):
    """|mean| / standard deviation of the gradient in each parameter."""
    elbo = pg.ImportanceWeightedELBO(K, doubly_reparameterised=doubly)

    def one(key):
        return jax.grad(lambda p: elbo.loss(key, p, linear, linear_guide, X[:NUM_LINEAR], y=y_linear))(
            {name: jnp.asarray(value) for name, value in NEAR.items()}
        )

    keys = random.split(random.key(3), GRADIENTS)
    drawn = jax.jit(lambda keys: lax.map(one, keys, batch_size=50))(keys)
    values = np.stack([np.asarray(drawn[name]) for name in NEAR], 1)
    return np.abs(values.mean(0)) / values.std(0)


ratios = {(K, doubly): signal_to_noise(K, doubly) for K in GRADIENT_SIZES for doubly in (False, True)}
print("signal-to-noise ratio of the gradient in (slope, intercept, log scale)")
for K in GRADIENT_SIZES:
    told = [", ".join(f"{r:.3f}" for r in ratios[K, doubly]) for doubly in (False, True)]
    print(f"K = {K:4d}: plain {told[0]}; doubly reparameterised {told[1]}")

# %%
mean_ratio = {key: float(np.mean(value)) for key, value in ratios.items()}
fig, ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
kinds = {False: ("plain", ORANGE, "s", -0.5), True: ("doubly reparameterised", BLUE, "o", 0.5)}
for doubly, (label, color, marker, power) in kinds.items():
    ax.loglog(GRADIENT_SIZES, [mean_ratio[K, doubly] for K in GRADIENT_SIZES], marker=marker, color=color, label=label)
    theory = [mean_ratio[10, doubly] * (K / 10) ** power for K in GRADIENT_SIZES[1:]]
    ax.loglog(
        GRADIENT_SIZES[1:],
        theory,
        ":",
        color="black",
        label=None if doubly else "theory: slopes -1/2, 1/2",
    )
ax.axhline(np.sqrt(2 / np.pi / GRADIENTS), color="0.5", linestyle="--", label=f"pure noise, {GRADIENTS} estimates")
ax.set(xlabel="number of draws K", ylabel="signal-to-noise ratio (no unit)")
ax.set(title="Gradient of q(h), mean over its three parameters")
ax.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## Part 4: weight space
#
# `models.bayesian_network` with `latent_dim=1`: priors on all weights, a latent input for each datum. The guide is a Gaussian with
# a mean and a scale for each weight, and an encoder for h. The same objects, in NumPyro's SVI; the KL of the weights stands once,
# outside the logarithm that is taken for each datum. A Gaussian of independent weights pays some nats for each weight that it pins
# down, and its bound is highest where the network ignores h. So training begins with the KL weighted by `beta=0.02`, and ends with
# the bound proper; beside it, a run without that beginning. There are 500 data here: weights cost more than inducing variables.

# %%
NETWORK_DATA, WARM_UP, NETWORK_STEPS = (500, 1000, 1500) if SMALL else (500, 2000, 4000)
X_network, y_network = (jnp.asarray(v) for v in two_branches(np.random.default_rng(2), NETWORK_DATA))


def network(X, y=None):
    return bayesian_network(X, y, width=20, latent_dim=1)


def train_network(K, beta):
    """(guide, parameters) after a beginning with the KL weighted by `beta`, if there is one."""
    guide = pg.guide(network, {}, hyper=lambda model: AutoNormal(model, init_scale=0.02), latents=pg.Amortised())
    params = None
    if beta is not None:
        svi = SVI(network, guide, optax.adam(0.01), pg.ImportanceWeightedELBO(K, beta=beta))
        params = svi.run(random.key(0), WARM_UP, X_network, y=y_network, progress_bar=False).params
    svi = SVI(
        network, guide, optax.adam(optax.cosine_decay_schedule(0.01, NETWORK_STEPS, 0.01)), pg.ImportanceWeightedELBO(K)
    )
    done = svi.run(random.key(0), NETWORK_STEPS, X_network, y=y_network, progress_bar=False, init_params=params)
    return guide, done.params


def network_draws(guide, params, num, X, key=5):
    """(mean of y, noise scale) at X for draws of the weights and, as X is new, of h from its prior."""
    drawn = Predictive(guide, params=params, num_samples=num)(random.key(key), X_network, y=y_network)
    weights = {name: value for name, value in drawn.items() if name != "h"}

    def one(weights, key):
        seeded = numpyro.handlers.seed(numpyro.handlers.substitute(network, data=weights), key)
        fn = numpyro.handlers.trace(seeded).get_trace(jnp.asarray(X))["y"]["fn"]
        return fn.mean, jnp.broadcast_to(jnp.sqrt(fn.variance), fn.mean.shape)

    return jax.vmap(one)(weights, random.split(random.key(key + 1), num))


def network_score(guide, params, num=2000):
    """Mean test log density, nats a datum."""
    loc, scale = network_draws(guide, params, num, X_test)
    return float(jnp.mean(logsumexp(dist.Normal(loc, scale).log_prob(y_test), 0) - np.log(num)))


RUNS = {"K = 1": (1, 0.02), "K = 10": (10, 0.02)} | ({} if SMALL else {"K = 10, no warm-up": (10, None)})
networks = {name: train_network(*settings) for name, settings in RUNS.items()}
network_scores = {name: network_score(*trained) for name, trained in networks.items()}
few = REPEATS // 10
network_bounds = {
    (name, size): estimates(
        pg.ImportanceWeightedELBO(size), params, network, guide, few, X_network, y=y_network, batch_size=5
    )
    for name, (guide, params) in networks.items()
    for size in (1, 10, 100)
}
for name in networks:
    told = [f"{network_bounds[name, k][0]:.1f} +- {network_bounds[name, k][1]:.1f}" for k in (1, 10, 100)]
    print(
        f"{name:19s} test {network_scores[name]:6.3f} nats a datum; bounds with 1, 10, 100 draws: {', '.join(told)} nats"
    )

# %%
x_axis = np.linspace(-1.5, 1.5, 200)[:, None]
fig, axes = plt.subplots(
    1, len(networks), figsize=(4 * len(networks), 4.0), sharex=True, sharey=True, layout="constrained"
)
for ax, (name, trained) in zip(axes, networks.items(), strict=True):
    loc, scale = network_draws(*trained, 30, x_axis)
    drawn = np.asarray(loc + scale * random.normal(random.key(9), loc.shape))
    ax.plot(np.tile(x_axis[:, 0], 30), drawn.ravel(), ".", color=SKY, markersize=2, alpha=0.6, label="draws of y")
    ax.plot(X_network[:, 0], y_network, ".", color="black", markersize=3, label=f"data, N = {NETWORK_DATA}")
    ax.axvspan(0.4, 1.0, color="0.5", alpha=0.15, label="gap: no data")
    ax.set(title=f"{name}: {network_scores[name]:.2f} nats a test datum", xlabel="x (no unit)", ylim=(-2, 2))
axes[0].set_ylabel("y (no unit)")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, markerscale=2)
plt.show()

# %% [markdown]
# The network that ignores h has the highest bound and the worst score: what its bound gains is KL of weights. A bound compares
# posteriors of one model at one kind of q; it need not order predictions.
#
# ## The claim, tested

# %%
most = SIZES[-1]
for name in BOUNDS:
    for fewer, more in zip(SIZES[:-1], SIZES[1:], strict=True):
        (a, error_a), (b, error_b) = bounds[name, fewer], bounds[name, more]
        assert b > a - 3 * np.hypot(error_a, error_b)
    assert bounds[name, most][0] < evidence + 4 * bounds[name, most][1]
    assert abs(bounds[name, 1][0] - elbo[0]) < 4 * np.hypot(bounds[name, 1][1], elbo[1])
gap = {name: evidence - bounds[name, most][0] for name in BOUNDS}
print(f"1. K = {most}: " + ", ".join(f"{name} {g:.3f}" for name, g in gap.items()) + " nats below the evidence")
assert gap["by datum"] < 0.1 * (evidence - elbo[0])
for K in SIZES[1:]:
    (by_datum, error_a), (together, error_b) = bounds["by datum", K], bounds["global", K]
    assert by_datum - together > 3 * np.hypot(error_a, error_b)

print(f"2. test log density {kept[10][1]:.3f} with K = 10, {kept[1][1]:.3f} with K = 1, nats a datum")
assert kept[10][1] > kept[1][1] + 0.05

most = GRADIENT_SIZES[-1]
slopes = {d: np.log(mean_ratio[most, d] / mean_ratio[10, d]) / np.log(most / 10) for d in (False, True)}
print(f"3. from K = 10 to {most} the ratio goes as K to the {slopes[False]:.2f} (plain), {slopes[True]:.2f} (doubly)")
assert slopes[False] < -0.2 and abs(slopes[True] - 0.5) < 0.1

for name in networks:
    for few_draws, many_draws in ((1, 10), (10, 100)):
        (a, error_a), (b, error_b) = (network_bounds[name, k] for k in (few_draws, many_draws))
        assert b > a - 3 * np.hypot(error_a, error_b)
print("4. test log density", {name: round(value, 3) for name, value in network_scores.items()}, "nats a datum")
assert network_scores["K = 10"] > network_scores["K = 1"] + 0.05
if not SMALL:
    assert network_scores["K = 10"] > network_scores["K = 10, no warm-up"] + 0.2
