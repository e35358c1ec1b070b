# %% [markdown]
# # 3. Counts: patients per doctor
#
# Goal: you model counts with a known exposure, notice that they scatter more than a Poisson
# distribution allows, and report effects as rate ratios.

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
# ## A Poisson model with an exposure
#
# Counts of patients are not normal: they are whole, not negative, and scatter more when they are
# large. A Poisson distribution with a log link suits them. Twice as many doctors see about twice as
# many patients. So you model the rate *per doctor* and multiply it by the number of doctors. Such a
# known factor is called an *exposure*.
#
# The sum inside `exp` is the linear predictor. It contains a level, a function of the hour, an
# effect per clinic, and a coefficient for Mondays. We write it as a function of its own, because a
# second model will use it.

# %%
lengthscale_prior = pg.priors.lengthscale(table["hour"])


def rate_per_doctor(X):
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior)
    variance = numpyro.sample("variance", dist.HalfNormal(1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    monday = numpyro.sample("monday", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X[:, 0]))
    with numpyro.plate("clinics", 6):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    return jnp.exp(level + f + u[X[:, 1].astype(int)] + monday * X[:, 2])


def poisson(X, doctors, y=None):
    rate = rate_per_doctor(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(doctors * rate), obs=y)


X = table[["hour", "clinic", "monday"]]
doctors, patients = table["doctors"], table["patients"]
fits = {"Poisson": pg.fit(poisson, pg.Laplace(), 0, X, doctors, y=patients)}
fits["Poisson"].summary().round(2)

# %% [markdown]
# The call is that of chapter 2 with one more argument, the exposure. `pg.Laplace()` now is an
# approximation, because the likelihood is not normal. `monday` and `u` are on the log scale.
#
# Look at the length scale before you look at the effects.

# %%
minutes = 60.0 * float(fits["Poisson"].hyper["lengthscale"])
print(f"length scale {minutes:.1f} minutes")

# %% [markdown]
# No daily curve changes within so few minutes. A length scale near the shortest distance of the
# rows means that the function gives each row a value of its own. It does so because the counts
# scatter more than a Poisson allows, and the function is the only part that can explain it.

# %% [markdown]
# ## Overdispersion: the negative binomial
#
# For a Poisson count with mean $\mu$ the variance is $\mu$. For a negative binomial count it is
# $\mu + \mu^2 / c$ with a *concentration* $c$, which is learnt. The smaller $c$, the larger the
# scatter. Only the last lines of the model change.


# %%
def negative_binomial(X, doctors, y=None):
    rate = rate_per_doctor(X)
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    counts = dist.NegativeBinomial2(doctors * rate, concentration)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", counts, obs=y)


fit = pg.fit(negative_binomial, pg.Laplace(), 0, X, doctors, y=patients)
fits["negative binomial"] = fit
print(pg.compare_models(fits))
fits["negative binomial"].summary().round(2)

# %% [markdown]
# The log evidence of the negative binomial is higher by about ten nats, so the data clearly prefer
# it. The true concentration is 8, and the estimate is of that size. The length scale is now a good
# part of an hour or more, which is plausible for a day with two peaks. A note below the table says
# that both evidences are at the best hyperparameters, which favours models with more of them. Here
# it is one more, which cannot make up for ten nats.

# %% [markdown]
# ## Effects as rate ratios
#
# Effects on the log scale are hard to read. Their exponentials are *rate ratios*: factors by which
# the rate is multiplied. For the interval, exponentiate the ends of the interval on the log scale.


# %%
def ratio(distribution):
    quantiles = distribution.icdf(np.array([0.05, 0.5, 0.95]))
    low, middle, high = np.exp(np.asarray(quantiles))
    return f"{middle:.2f} (90 % interval {low:.2f} to {high:.2f})"


print(f"true ratio of Mondays: {np.exp(0.3):.2f}")
for name, each in fits.items():
    print(f"{name}: {ratio(each.sites['monday'])}")

# %% [markdown]
# A ratio of 1 means no effect. Mondays have about 1.35 times as many patients in truth. The Poisson
# model puts it too low, and its interval misses the truth. The interval of the negative binomial is
# wider and contains it. It also contains 1 or nearly so: these 120 rows alone do not settle the
# question.

# %%
pg.plot_components(
    fit,
    X,
    doctors=1.0,
    along={"f": "hour", "u": "clinic", "monday": "monday"},
    response=jnp.exp,
)
plt.show()

# %% [markdown]
# Each panel shows one term of the predictor as a factor of the rate. The first has the busy morning
# and the smaller peak of the afternoon. The second has the clinics: D is the busiest and E the
# quietest, as in the truth. Their bars are wide, because they contain the uncertainty of the common
# level. The third is the ratio of Mondays: read the point at 1. The point at 0, all
# other days, is 1 by definition.

# %% [markdown]
# ## Predict counts
#
# At new rows you give the exposure again, since the fit cannot know how many doctors will work.
# With `doctors=1` you would predict rates per doctor.

# %%
new = pd.DataFrame({"hour": [10.0, 10.0, 13.0], "clinic": ["D", "E", "D"], "monday": 0})
prediction = fit.predict(new, doctors=np.array([2.0, 2.0, 2.0]))
new.join(prediction.to_frame(0.9).round(1))

# %%
two = table[table["doctors"] == 2]
pg.plot_predictions(
    fit,
    two[["hour", "clinic", "monday"]],
    two["patients"],
    along="hour",
    at={"clinic": ["D", "E"], "monday": 0},
    doctors=2.0,
)
plt.show()

# %% [markdown]
# In the table, `mean` is the expected count and the last columns describe the linear predictor, on
# the log scale. The ends of the interval are whole numbers, because they are quantiles of counts. The
# picture has two clinics with two doctors, and as points all rows with two doctors, of any clinic.
# The intervals are wider where the mean is larger, as counts require.

# %% [markdown]
# ## What you learnt
#
# - A likelihood is the last line of the model. An exposure is an argument that multiplies the rate,
#   and you pass it again when you predict.
# - A very short length scale can be a symptom of overdispersion. A negative binomial cures it.
# - Exponentiated effects are rate ratios. A wrong likelihood also makes their intervals wrong.
#
# More about this: [Effects and groups](../effects.md), [Counts that
# scatter](../recipes/01_overdispersed_counts.py), [Exposure](../recipes/02_exposure.py). Next: [4.
# Checking](4_checking.py), where you find such errors on purpose.
