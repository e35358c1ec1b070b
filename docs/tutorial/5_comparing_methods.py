# %% [markdown]
# # 5. Comparing methods
#
# Goal: you fit one model by four inference methods, one of them twice, read the table that compares them, and learn
# when one value per hyperparameter is not enough.

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
# ## One model, four methods
#
# The model is the negative binomial of chapter 3. With counts the posterior has no formula, so each
# method approximates it in its own way:
#
# - `Laplace()` fits a Gaussian at the mode of the posterior. It is the fastest.
# - `EP()`, expectation propagation, matches the mean and variance of each row's contribution.
# - `VI()`, variational inference, maximises a lower bound of the evidence.
# - `NUTS()` draws function and hyperparameters together. It is slow, and serves as the reference.
#
# The first three take the best value of each hyperparameter (`hyper=MAP()`) unless you say
# otherwise.

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


def negative_binomial(X, doctors, y=None):
    rate = rate_per_doctor(X)
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    counts = dist.NegativeBinomial2(doctors * rate, concentration)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", counts, obs=y)


X = table[["hour", "clinic", "monday"]]
doctors, patients = table["doctors"], table["patients"]
print(pg.check(negative_binomial, X, doctors, y=patients).items[-1].message)

# %%
methods = {
    "Laplace": pg.Laplace(),
    "EP": pg.EP(),
    "VI": pg.VI(),
    "Grid": pg.Laplace(hyper=pg.Grid()),
    "NUTS": pg.NUTS(num_warmup=200, num_samples=250),
}
fits = {}
for name, method in methods.items():
    fit = pg.fit(negative_binomial, method, 0, X, doctors, y=patients, throw=False)
    print(f"{name}: {fit.result}")
    fits[name] = fit

# %% [markdown]
# The first output lists the methods that fit this model. Then each fit has a line, and only
# `method` changes from fit to fit. The line `Grid` is Laplace again, with hyperparameters that are
# integrated. We come back to it below. `throw=False` returns a fit also if it did not succeed, so
# that you can look at its `result`. A short chain may end as `not_mixed`. Then do not judge the
# other methods by it: fit again with more warm-up and samples.

# %% [markdown]
# ## The table
#
# `pg.compare` scores all fits on the same test rows. Here these are 40 new rows of the same truth.

# %%
fresh = pd.DataFrame(
    {
        "hour": rng.uniform(7.0, 19.0, 40).round(2),
        "clinic": rng.choice(list(busy), 40),
        "monday": rng.binomial(1, 0.3, 40),
        "doctors": rng.integers(1, 5, 40),
    }
)
effect = fresh["clinic"].map(busy)
log_rate = 1.3 + 0.5 * curve(fresh["hour"]) + 0.4 * effect + 0.3 * fresh["monday"]
mean_count = fresh["doctors"] * np.exp(log_rate)
fresh["patients"] = rng.negative_binomial(8.0, 8.0 / (8.0 + mean_count))

X_new = fresh[["hour", "clinic", "monday"]]
comparison = pg.compare(fits, X_new, fresh["patients"], doctors=fresh["doctors"])
print(comparison)

# %% [markdown]
# Read it from top to bottom. The importance-sampled truth is an estimate of the exact log evidence
# at the hyperparameters of that fit, with a standard error. EP and VI agree with it, and Laplace is
# off by a few hundredths of a nat, which has no practical consequence. Fits that integrate the
# hyperparameters have a dash in this row, because they have no single evidence.
#
# The *k-hat* of q(f) judges the Gaussian approximation q by its weights against the model. It is
# far below 0.7, so q is close to the posterior at these hyperparameters. The test log densities are
# equal within their standard errors. The last rows give the largest distance to NUTS in posterior
# standard deviations. It is about half for the three methods with `MAP()`, and smaller for
# `Grid()`.
#
# A warning may name a row for which NUTS has few useful draws. More draws cure that.

# %% [markdown]
# ## The verdicts
#
# The same in words, for each method: on its evidence, its latent values (the function at the
# training rows), and its predictions.

# %%
for verdict in comparison.verdicts:
    print(verdict, end="\n\n")

# %% [markdown]
# Each sentence names a difference, its size relative to its error, and what it matters for.
# Evidences and predictions are right for all methods. What differs are the latent values of the
# `MAP()` fits: this matters if you report intervals of the function, not if you predict counts.

# %% [markdown]
# ## When a point is not enough
#
# The methods with `MAP()` agree with each other, but NUTS has another length scale. That is not an
# error of Laplace, EP or VI. It is what one value per hyperparameter leaves out.

# %%
for name in ("Laplace", "Grid", "NUTS"):
    row = fits[name].summary().loc["lengthscale"]
    print(f"{name:7s} mean {row['mean']:.2f}, sd {row['sd']:.2f} ({row['kind']})")

# %%
pg.plot_forest({name: fits[name] for name in ("Laplace", "Grid", "NUTS")})
plt.show()

# %% [markdown]
# The posterior of the length scale is wide and skewed, and its highest point is far below its mean.
# `MAP()` keeps that point. `hyper=pg.Grid()` integrates instead: it evaluates the fit at a few
# dozen settings of the hyperparameters and weighs them by their posterior density. Its mean and
# standard deviation are near those of NUTS, at a fraction of the time.

# %%
hours = pd.DataFrame({"hour": np.linspace(7, 19, 60), "clinic": "C", "monday": 0})
for name in ("Laplace", "Grid"):
    found = fits[name].predict(hours, doctors=np.ones(60))
    plt.plot(hours["hour"], np.exp(np.asarray(found.f_mean)), label=name)
truth = np.exp(1.3 + 0.5 * curve(hours["hour"]) + 0.4 * busy["C"])
plt.plot(hours["hour"], truth, "k--", label="truth")
plt.title("Clinic C, not a Monday")
plt.gca().set(xlabel="hour", ylabel="patients per doctor")
plt.legend()
plt.show()

# %% [markdown]
# With its short length scale the `MAP()` curve follows accidents of the sample. The average over
# the grid is smoother, like the truth. Neither knows the height exactly, as clinic C has few rows.
#
# Use `Grid()` or `Sample()` instead of `MAP()` if there are few rows or few groups, if the fit
# warns about a hyperparameter, or if you report intervals of effects. With many rows and few
# hyperparameters the difference vanishes.

# %% [markdown]
# ## What you learnt
#
# - A method is one argument of `pg.fit`. `pg.compare` puts fits of one model into one table.
# - Differences between methods matter only relative to their errors, and the verdicts say so.
# - `MAP()` takes hyperparameters as known. `Grid()` and `Sample()` integrate them.
#
# More about this: [Choosing a method](../methods.md), [Hyperparameters and
# priors](../hyperparameters.md). Next: [6. A report](6_report.py).
