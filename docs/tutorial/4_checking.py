# %% [markdown]
# # 4. Checking a model
#
# Goal: you see what a wrong model looks like, and which check shows it. You learn to read posterior
# predictive checks, calibration, leave-one-out scores, k-hat and warnings.

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
# ## Three models, two of them wrong
#
# We fit three models to the counts. The first has all that the truth has. The second leaves out the
# clinics. The third has a Poisson likelihood, although the counts scatter more than that.

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


def poisson(X, doctors, y=None):
    rate = rate_per_doctor(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(doctors * rate), obs=y)


def no_clinics(X, doctors, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior)
    variance = numpyro.sample("variance", dist.HalfNormal(1.0))
    monday = numpyro.sample("monday", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X[:, 0]))
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    rate = jnp.exp(level + f + monday * X[:, 2])
    counts = dist.NegativeBinomial2(doctors * rate, concentration)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", counts, obs=y)


X = table[["hour", "clinic", "monday"]]
doctors, patients = table["doctors"], table["patients"]
models = {"full": negative_binomial, "no clinics": no_clinics, "Poisson": poisson}
fits = {
    name: pg.fit(model, pg.Laplace(), 0, X, doctors, y=patients) for name, model in models.items()
}
for name, fit in fits.items():
    print(name, fit.result)

# %% [markdown]
# All three say `converged`. That means that the computation succeeded. It does not mean that the
# model is right, and no fit can tell you that by itself.

# %% [markdown]
# ## Posterior predictive checks
#
# A model that fits should be able to produce data like yours. Draw many data sets from the fitted
# model at the training rows, and compare a feature of them with the same feature of the data.
# Choose a feature that matters to you. Here it is the number of patients per doctor in each clinic.


# %%
def per_doctor(y):  # patients per doctor in each clinic, (..., 6)
    rows = [(table["clinic"] == name).to_numpy() for name in busy]
    return np.stack([y[..., at].sum(-1) / doctors[at].sum() for at in rows], axis=-1)


figure, axes = plt.subplots(1, 3, figsize=(11, 3), sharey=True, layout="constrained")
for ax, (name, fit) in zip(axes, fits.items()):
    drawn = per_doctor(np.asarray(fit.sample(1, X, 500, doctors=doctors).y))
    low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
    ax.vlines(list(busy), low, high, linewidth=6, alpha=0.4, label="90 % of draws")
    ax.plot(list(busy), per_doctor(patients.to_numpy()), "ko", label="data")
    ax.set(title=name, xlabel="clinic")
axes[0].set_ylabel("patients per doctor")
axes[1].legend(loc="upper left", fontsize="small")
plt.show()

# %% [markdown]
# In the first and the third panel the data lie inside the bars. In the second the bars of all
# clinics are at about the same height, and the data of clinics D and E are outside. The model
# without clinics cannot produce such differences. The Poisson model passes this check: a check can
# only find errors that its feature depends on.

# %% [markdown]
# ## Calibration on new data
#
# Intervals of 90 % should contain nine of ten new observations. Test that on rows that no fit has
# used. Here we simulate 120 more. With real data you would set some aside before the fit.

# %%
fresh = pd.DataFrame(
    {
        "hour": rng.uniform(7.0, 19.0, 120).round(2),
        "clinic": rng.choice(list(busy), 120),
        "monday": rng.binomial(1, 0.3, 120),
        "doctors": rng.integers(1, 5, 120),
    }
)
effect = fresh["clinic"].map(busy)
log_rate = 1.3 + 0.5 * curve(fresh["hour"]) + 0.4 * effect + 0.3 * fresh["monday"]
mean_count = fresh["doctors"] * np.exp(log_rate)
fresh["patients"] = rng.negative_binomial(8.0, 8.0 / (8.0 + mean_count))

X_new = fresh[["hour", "clinic", "monday"]]
for name, fit in fits.items():
    prediction = fit.predict(X_new, doctors=fresh["doctors"])
    low, high = prediction.interval(0.9)
    inside = np.mean((fresh["patients"] >= low) & (fresh["patients"] <= high))
    density = fit.log_density(X_new, fresh["patients"], doctors=fresh["doctors"])
    print(f"{name:10s}: {inside:.0%} inside, mean log density {np.mean(density):.2f}")

# %%
pg.plot_calibration(fits, X_new, fresh["patients"], doctors=fresh["doctors"])
plt.show()

# %% [markdown]
# The *log density* of a new observation is the logarithm of the probability that the prediction
# gave to it. Larger is better, and it rewards intervals that are both honest and narrow. The full
# model is best. The model without clinics is calibrated too: it predicts wide intervals, which are
# honest but less useful. So calibration alone does not prove a model. In the picture, a line on the
# diagonal is calibrated. A line below it, as that of the Poisson model at high levels, has
# intervals that are too narrow.

# %% [markdown]
# ## Leave one out, and k-hat
#
# Often you cannot spare any data. Leave-one-out cross-validation scores each training row by a
# prediction that did not use it. `fit.loo()` returns the sum of these log densities, `elpd`, with
# its standard error.

# %%
scores = {name: fit.loo() for name, fit in fits.items()}
for name, loo in scores.items():
    bad = np.mean(np.asarray(loo.pareto_k) > 0.7)
    print(f"{name:10s}: elpd {loo.elpd:.0f}, p {loo.p:.0f}, k-hat > 0.7 in {bad:.0%}")

# %% [markdown]
# The full model is best again, although these scores used training rows only. The other two are far
# behind it, in either order. The effective number of parameters `p` is near a hundred for the
# Poisson model, nearly one per row. Such a model memorises its data.
#
# *k-hat* says whether weighted draws of the fit can represent the posterior without that row. Below
# 0.7 they can. Above 0.7 they cannot, because the row has much influence or the Gaussian
# approximation is poor. For the Poisson model it is large in many rows, which is the same
# message again: each row determines its own value of the function.

# %%
difference = np.asarray(scores["full"].elpd_i - scores["no clinics"].elpd_i)
error = np.sqrt(len(difference)) * difference.std()
print(f"full minus no clinics: {difference.sum():.0f} nats, standard error {error:.0f}")

# %% [markdown]
# Compare two models row by row, because hard rows are hard for both. The difference is several
# times its standard error, so the clinics matter.

# %% [markdown]
# ## Warnings read aloud
#
# ppl_gp warns before a fit, during it, and by errors. Suppose that someone thinks in minutes and
# writes a prior about 120, while the column is in hours. `pg.check` compares the two.


# %%
def wrong_units(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(120.0), 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(25.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(25.0 + f, 5.0), obs=y)


checklist = pg.check(wrong_units, table["hour"], y=table["minutes"])
for item in checklist.items:
    if item.name == "length scales":
        print("ok" if item.ok else "NO", item.message)

# %% [markdown]
# The message gives the range of the prior and the distances of the rows, both in the unit of the
# column. The prior lies far above the largest distance, so the function would be nearly a straight
# line. Fix the unit, or take `pg.priors.lengthscale`.
#
# The next fit uses clinics B and F alone, whose true effects are almost equal. Two clinics say very
# little about how much clinics differ.

# %%
two = table[table["clinic"].isin(["B", "F"])]
fit = pg.fit(
    negative_binomial,
    pg.Laplace(),
    0,
    two[["hour", "clinic", "monday"]],
    two["doctors"],
    y=two["patients"],
)
print(f"spread {float(fit.hyper['spread']):.2f}")

# %% [markdown]
# The warning names a hyperparameter, says what is wrong, how much, and what to do. The best value
# of the spread is close to zero, but much larger values are almost as probable. A single value
# cannot express that, and the effects would look better known than they are. [Chapter
# 5](5_comparing_methods.py) integrates the spread by `hyper=pg.Grid()`.
#
# Errors are typed, and their messages name the argument. Here the exposure is missing:

# %%
try:
    fits["full"].predict(X_new)
except pg.DataError as error:
    print(error)

# %% [markdown]
# ## What you learnt
#
# - `converged` is about the computation. Predictive checks, calibration and `loo` are about the
#   model.
# - A check finds only what its feature depends on. Use several, and compare log densities.
# - Many rows with a large k-hat and a large `p` are signs of a model that memorises its data.
#
# More about this: [Checking a model, comparing fits](../comparing.md),
# [Troubleshooting](../troubleshooting.md). Next: [5. Comparing methods](5_comparing_methods.py).
