# %% [markdown]
# # 1. What is a Gaussian process?
#
# Goal: you know what a Gaussian process is, and what kernel, length scale, variance, noise and
# evidence mean. You compute a posterior by hand, then by `ppl_gp`, and get the same numbers.

# %% [markdown]
# ## Set-up and data
#
# Every chapter makes the same data, so that each page runs alone. The data are
# simulated: six clinics, A to F, and 120 rows. Each row is one hour of one clinic's day.
#
# - `hour`: the middle of that hour, between 7 and 19 o'clock
# - `clinic`: a label
# - `monday`: 1 on Mondays, else 0
# - `doctors`: how many doctors were on duty
# - `minutes`: the mean waiting time
# - `patients`: how many patients came
#
# The truth is known: a daily curve with peaks at 10 and 16 o'clock, and one effect per clinic.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)

# %%
rng = np.random.default_rng(0)
# the true effects of the clinics, and the true daily curve
busy = {"A": 0.9, "B": -0.6, "C": 0.1, "D": 1.3, "E": -1.2, "F": -0.5}


def curve(hour):
    morning, afternoon = (hour - 10.0) / 1.8, (hour - 16.0) / 1.8
    return 2.0 * np.exp(-(morning**2)) + 1.2 * np.exp(-(afternoon**2))


table = pd.DataFrame(
    {
        "hour": rng.uniform(7.0, 19.0, 120).round(2),
        "clinic": rng.choice(list(busy), 120),
        "monday": rng.binomial(1, 0.3, 120),
        "doctors": rng.integers(1, 5, 120),
    }
)
peak, effect = curve(table["hour"]), table["clinic"].map(busy)
minutes = 20.0 + 6.0 * peak + 4.0 * effect + rng.normal(0.0, 2.5, 120)
table["minutes"] = minutes.round(2)
rate = np.exp(1.3 + 0.5 * peak + 0.4 * effect + 0.3 * table["monday"])
mean_count = table["doctors"] * rate
table["patients"] = rng.negative_binomial(8.0, 8.0 / (8.0 + mean_count))
table.head()

# %% [markdown]
# ## A prior over functions
#
# You want to learn a function, such as the waiting time over the day, without choosing a formula
# for it. A Gaussian process (GP) is a probability distribution over functions. Its rule is short:
# the values of the function at any finite set of inputs have a joint normal distribution.
#
# The covariance of that distribution comes from a *kernel* $k(s, t)$, a function of two inputs. The
# most common one is the squared exponential kernel, which is called `RBF` here:
#
# $$k(s, t) = \sigma^2 \exp\left(-\frac{(s - t)^2}{2 \ell^2}\right)$$
#
# It has two parameters. The *variance* $\sigma^2$ says how far the function strays from its mean.
# The *length scale* $\ell$ says how far one must move along the input until the function forgets
# where it was. Draws of the prior show both.

# %%
grid = np.linspace(7.0, 19.0, 121)
settings = [(36, 0.5), (36, 2.0), (36, 8.0), (4, 2.0)]
figure, axes = plt.subplots(1, 4, figsize=(12, 3), sharey=True, layout="constrained")
for ax, (variance, lengthscale) in zip(axes, settings):
    prior = pg.GP(pg.kernels.RBF(variance, lengthscale), grid)
    draws = prior.sample(jax.random.key(1), (4,))
    ax.plot(grid, np.asarray(draws).T)
    ax.set_title(f"variance {variance}, length scale {lengthscale} h", fontsize=10)
    ax.set(xlabel="hour", xticks=[8, 12, 16])
axes[0].set_ylabel("f (minutes)")
plt.show()

# %% [markdown]
# Each line is one draw of a whole function. In the first three panels the variance is the same, so
# the lines cover about the same height: mostly within 12 minutes, two standard deviations. With a
# length scale of half an hour the function turns many times a day. With eight hours it is almost a
# parabola. The last panel has the length scale of the second and a ninth of its variance. Its lines
# have the same shape and a third of the height.

# %% [markdown]
# ## Condition on three rows by hand
#
# Learning from data means: keep the functions that pass near the data. For a GP with normal noise
# this is a formula. Take three rows of clinic D, and 24 minutes as a known mean. We assume a
# variance of 36, a length scale of 2 hours, and a *noise* with a standard deviation of 2.5 minutes.
# Noise is the scatter of an observation around the function.

# %%
rows = table[table["clinic"] == "D"].sort_values("hour").iloc[[1, 8, 15]]
x, y = rows["hour"].to_numpy(), rows["minutes"].to_numpy()


def k(s, t):
    return 36.0 * np.exp(-0.5 * ((s[:, None] - t[None, :]) / 2.0) ** 2)


C = k(x, x) + 2.5**2 * np.eye(3)  # covariance of the three observations
weights = np.linalg.solve(C, y - 24.0)
mean = 24.0 + k(grid, x) @ weights
covariance = k(grid, grid) - k(grid, x) @ np.linalg.solve(C, k(x, grid))
log_evidence = -0.5 * ((y - 24.0) @ weights + np.linalg.slogdet(2.0 * np.pi * C)[1])
print(f"log evidence {log_evidence:.3f}")

# %%
sd = np.sqrt(np.diag(covariance))
paths = rng.multivariate_normal(mean, covariance, 5, check_valid="ignore")
plt.fill_between(grid, mean - 2 * sd, mean + 2 * sd, alpha=0.2, label="mean ± 2 sd")
plt.plot(grid, paths.T, color="grey", linewidth=0.8)
plt.plot(grid, mean, label="posterior mean")
plt.plot(x, y, "ko", label="data")
plt.gca().set(xlabel="hour", ylabel="minutes", title="Posterior after three rows")
plt.legend()
plt.show()

# %% [markdown]
# The grey lines are draws of the posterior. They pass near the three points, but not through them,
# because the model knows that observations have noise. Between the points and beyond them the band
# widens. Many length scales away from all data it would be as wide as before the fit.

# %% [markdown]
# ## The same with ppl_gp
#
# You write down the model instead of the algebra. A model is a NumPyro function. Its first argument
# holds the inputs and the keyword `y` the observations. The last line says how `y` scatters.


# %%
def three_rows(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(36.0, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(24.0 + f, 2.5), obs=y)


fit = pg.fit(three_rows, pg.Laplace(), 0, x, y=y)
found = fit.predict(grid)
print(f"log evidence {fit.log_evidence:.3f}")
print("mean equal:", np.allclose(24.0 + found.f_mean, mean, atol=1e-4))
print("sd equal:  ", np.allclose(found.f_sd, sd, atol=1e-4))

# %% [markdown]
# The numbers agree. `pg.Laplace()` is the inference method. With normal noise it is exact, and for
# other likelihoods it is an approximation. [Chapter 5](5_comparing_methods.py) compares methods.
#
# `f_mean` and `f_sd` belong to the function $f$ itself. For a new *observation* you need the noise
# too, and a prediction has both.

# %%
noon = fit.predict(np.array([12.0]))
f_low, f_high = 24.0 + noon.f_interval(0.9)[:, 0]
low, high = noon.interval(0.9)[:, 0]
print(f"90 % interval at noon: function {f_low:.1f} to {f_high:.1f} minutes")
print(f"                    new value {low:.1f} to {high:.1f} minutes")

# %% [markdown]
# The second interval is wider, because it adds the noise of 2.5 minutes. More data would narrow the
# first one towards zero. They would not narrow the second one below the noise.

# %% [markdown]
# ## Evidence: which length scale do the data support?
#
# So far the length scale was a guess. The *evidence* $p(y \mid \ell, \sigma^2)$ is the probability
# density of the data under the prior, with the function integrated out. A large evidence means that
# functions of this kind often look like the data. You can compute it for many length scales. Here
# we take all 120 rows, and subtract the mean of each clinic.

# %%
x = table["hour"].to_numpy()
clinic_means = table.groupby("clinic")["minutes"].transform("mean")
y = (table["minutes"] - clinic_means).to_numpy()


def evidence(lengthscale):
    K = 36.0 * np.exp(-0.5 * ((x[:, None] - x) / lengthscale) ** 2)
    C = K + 2.5**2 * np.eye(len(x))
    return -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2.0 * np.pi * C)[1])


lengthscales = np.geomspace(0.1, 20.0, 60)
values = np.array([evidence(ell) for ell in lengthscales])
best = lengthscales[values.argmax()]
plt.semilogx(lengthscales, values)
plt.axvline(best, color="grey", linestyle="--")
plt.gca().set(xlabel="length scale (hours)", ylabel="log evidence (nats)")
plt.title(f"The evidence is largest at a length scale of {best:.1f} hours")
plt.show()

# %% [markdown]
# The curve falls on both sides. Functions with a very short length scale can pass through any data,
# so these particular data are only one of many outcomes, each with a small probability. Functions
# with a very long one are too stiff for two peaks a day. The evidence balances fit and flexibility
# by itself. Its unit is the *nat*: a difference of 3 nats is a factor of about 20 in probability.

# %% [markdown]
# ## Look at the prior before you fit
#
# Length scale, variance and noise are *hyperparameters*. In a real model they are unknown and get
# priors of their own. `pg.sample_prior` draws data sets from the whole model, before it has seen
# any observation. That tells you whether your priors allow what you know to be impossible.


# %%
def declare(variance_prior):
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(25.0, 5.0))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(2.0), 0.5))
        variance = numpyro.sample("variance", variance_prior)
        noise = numpyro.sample("noise", dist.HalfNormal(5.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + f, noise), obs=y)

    return model


priors = {
    "narrow": dist.LogNormal(jnp.log(30.0), 0.5),
    "wide": dist.LogNormal(jnp.log(3000.0), 1.0),
}
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for ax, (name, prior) in zip(axes, priors.items()):
    tree = pg.sample_prior(declare(prior), 0, grid[::4], num_samples=500)
    y_prior = tree["prior_predictive"]["y"].to_numpy()[0]
    negative = np.mean(y_prior < 0.0)
    ax.plot(grid[::4], y_prior[:15].T, linewidth=0.8)
    ax.axhline(0.0, color="black", linewidth=1.0)
    ax.set_title(f"{name} prior: {negative:.0%} of waiting times negative")
    ax.set_xlabel("hour")
axes[0].set_ylabel("minutes")
plt.show()

# %% [markdown]
# Each line is one possible day, noise included. The narrow prior gives days that a clinic could
# have. The wide prior believes in waiting times of hours, and in many negative ones. A prior need
# not exclude every impossible value, but its draws should look like data that would not surprise
# you. `tree` is an ArviZ tree with the groups `prior` and `prior_predictive`.

# %% [markdown]
# ## What you learnt
#
# - A GP is a joint normal distribution of function values. The kernel gives their covariance, the
#   length scale the speed of change, the variance the height, and the noise the scatter around it.
# - Conditioning on data is five lines of algebra. `pg.fit` and `predict` do the same for any model.
# - The evidence says how well a kind of function explains the data. `pg.sample_prior` shows what
#   your priors mean before you fit.
#
# The [glossary](../glossary.md) collects these words. Next: [2. Regression](2_regression.py), where
# the hyperparameters are estimated and the clinics come in.
