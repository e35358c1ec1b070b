# %% [markdown]
# # 2. Regression: waiting times
#
# Goal: you fit waiting times as a smooth function of the hour plus one effect per clinic. You check
# the model before the fit, read the fit, and predict with intervals.

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
# ## Priors in the units of the data
#
# Chapter 1 fixed the length scale, the variance and the noise. Now they are unknown and need
# priors. If you know the subject, write the prior down: a daily curve changes over hours, not
# minutes. If you do not, `pg.priors` makes priors from the spacing and the spread of the training
# data.

# %%
lengthscale_prior = pg.priors.lengthscale(table["hour"])
variance_prior = pg.priors.variance(table["minutes"])
for name, prior in [("length scale", lengthscale_prior), ("variance", variance_prior)]:
    draws = np.asarray(prior.sample(jax.random.key(0), (20_000,)))
    low, middle, high = np.quantile(draws, [0.01, 0.5, 0.99])
    print(f"{name}: 1 % {low:.2f}, median {middle:.2f}, 99 % {high:.2f}")

# %% [markdown]
# The prior of the length scale is an inverse gamma distribution. One per cent of it lies below the
# typical distance to the nearest other row, because at that scale the data say nothing. One per
# cent lies above the range of the hours, where the function would be nearly a parabola. The prior of
# the variance is centred at the variance of the minutes and spans a factor of ten to each side.
# Many rows are close together, so half of the first prior is below a quarter of an hour. The data
# can overrule that, as you will see.

# %% [markdown]
# ## Declare a first model, and check it
#
# The first model ignores the clinics. It has a level, a GP `f` over the hour, and normal noise.
# `pg.check` reads the model and the data and says what a fit would find, before it costs anything.


# %%
def hour_only(X, y=None):
    level = numpyro.sample("level", dist.Normal(25.0, 10.0))
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior)
    variance = numpyro.sample("variance", variance_prior)
    noise = numpyro.sample("noise", dist.HalfNormal(10.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + f, noise), obs=y)


print(pg.check(hour_only, table["hour"], y=table["minutes"]))

# %% [markdown]
# A line starts with `ok`, or with `NO` if something needs your attention. The line "length scales"
# compares your prior with the distances of the rows. The line "predictor" says which sites are
# integrated exactly, here `level` and `f`, and which are hyperparameters. The predictor is the sum
# that enters the likelihood. The last line lists methods that fit this model.

# %% [markdown]
# ## Fit and read the fit
#
# `pg.fit` takes the model, a method, a seed, and the arguments of the model. Columns of a data
# frame serve as arrays.

# %%
fit = pg.fit(hour_only, pg.Laplace(), 0, table["hour"], y=table["minutes"])
print(fit.result)
print(f"log evidence {fit.log_evidence:.1f}")
fit.summary().round(2)

# %% [markdown]
# `converged` means that the search reached its tolerance. The hyperparameters are points: by
# default `fit` keeps the values with the largest posterior density (`hyper=MAP()`), so they have no
# standard deviation. `level` is integrated and has a distribution. The noise is well above its true
# value of 2.5 minutes, because this model must call the differences between clinics noise.

# %%
fit.plot()
plt.show()

# %% [markdown]
# The picture shows the mean and the interval of 95 % for new observations, with the data. The two
# peaks are there. The points scatter widely, and the picture does not say why.

# %% [markdown]
# ## Add one effect per clinic
#
# Rows of one clinic share something. A plate of six effects `u` expresses it: each clinic has its
# own effect, and the effects have a common spread that is learnt too. Now `X` has two columns.
# ppl_gp turns the labels into the integers 0 to 5 in alphabetical order, so that the model can
# index `u`.


# %%
def waiting(X, y=None):
    level = numpyro.sample("level", dist.Normal(25.0, 10.0))
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior)
    variance = numpyro.sample("variance", variance_prior)
    spread = numpyro.sample("spread", dist.HalfNormal(10.0))
    noise = numpyro.sample("noise", dist.HalfNormal(10.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X[:, 0]))
    with numpyro.plate("clinics", 6):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    mean = level + f + u[X[:, 1].astype(int)]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


X = table[["hour", "clinic"]]
fit = pg.fit(waiting, pg.Laplace(), 0, X, y=table["minutes"])
print(f"log evidence {fit.log_evidence:.1f}")
fit.summary().round(2)

# %% [markdown]
# The log evidence is higher by dozens of nats, so the data clearly prefer the model with clinics.
# The noise is now close to the truth of 2.5. The effects `u[0]` to `u[5]` are those of A to F.
# Their standard deviations are dominated by a common shift: raise the level by one minute and lower
# all effects by one, and the data hardly notice. Differences between clinics are known better.

# %%
u = np.asarray(fit.sites["u"].mean)
truth = 4.0 * np.array(list(busy.values()))
for name, estimate, true in zip(busy, u - u.mean(), truth - truth.mean()):
    print(f"clinic {name}: {estimate:+.1f} minutes (truth {true:+.1f})")

# %% [markdown]
# Both columns are distances to the mean of the six clinics. The estimates are slightly closer to
# zero than plain means of the clinics would be. This is *shrinkage*: the model learns from all
# clinics how large effects are, and pulls each towards their common mean.

# %% [markdown]
# ## Predict: means, intervals, a table
#
# `fit.predict` takes new rows with the same columns. The prediction has the mean and the standard
# deviation of new observations, `interval` for their central interval, and `to_frame` for a table.

# %%
new = pd.DataFrame({"hour": [8.0, 10.0, 13.0, 10.0], "clinic": ["A", "A", "A", "E"]})
prediction = fit.predict(new)
low, high = prediction.interval(0.9)
print("width of the 90 % intervals:", np.round(np.asarray(high - low), 1))
new.join(prediction.to_frame(0.9).round(1))

# %% [markdown]
# `mean` and `sd` describe a new waiting time. `f_mean` and `f_sd` describe the expected waiting
# time, without noise. In chapter 1 you added 24 to `f_mean`, because that model had one GP and a
# known number. Here several terms are integrated together, so `f_mean` is their sum, with the level.
#
# At 10 o'clock you wait longer than at 13 o'clock in clinic A, and longer than
# at the same hour in clinic E. All intervals have about the same width, because the noise dominates
# them.

# %% [markdown]
# ## Compare with the truth
#
# The truth of these data is known, so you can see whether the intervals deserve their name.
# `f_interval` is the interval of the expected waiting time.

# %%
grid = np.linspace(7.0, 19.0, 60)
for i, name in enumerate("DCE"):
    found = fit.predict(pd.DataFrame({"hour": grid, "clinic": name}))
    plt.fill_between(grid, *found.f_interval(0.9), color=f"C{i}", alpha=0.2)
    plt.plot(grid, found.f_mean, color=f"C{i}", label=f"clinic {name}")
    plt.plot(grid, 20.0 + 6.0 * curve(grid) + 4.0 * busy[name], color=f"C{i}", ls="--")
    seen = table[table["clinic"] == name]
    plt.plot(seen["hour"], seen["minutes"], ".", color=f"C{i}")
plt.title("Estimate (solid) and truth (dashed)")
plt.gca().set(xlabel="hour", ylabel="minutes")
plt.legend()
plt.show()

# %% [markdown]
# The three curves are parallel, because the model adds an effect to one common curve. Each clinic
# has only about twenty rows, yet its band is narrow, as all 120 rows inform the curve. The dashed
# truth stays inside or near the bands, which contain it with a probability of 90 % at each hour.

# %% [markdown]
# ## What you learnt
#
# - `pg.check` tells you whether the model can be fitted, and `fit.result` whether the computation
#   finished. Whether the model is right is a question of chapter 4.
# - Effects in a plate are integrated together with the function. Without them their differences are
#   counted as noise.
# - `mean`, `sd` and `interval` are of new observations. The names with `f_` are of the function.
#
# More about this: [Hyperparameters and priors](../hyperparameters.md), [Effects and
# groups](../effects.md), [Predictions and intervals](../predictions.md). Next: [3.
# Counts](3_counts.py).
