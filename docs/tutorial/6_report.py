# %% [markdown]
# # 6. A report with predictions
#
# Goal: you turn a fit into what others read: a table of predictions for each clinic, pictures, a
# saved file, an ArviZ tree, and the sentences of a methods section.

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
# ## The fit to report
#
# We report waiting times, with the model of chapter 2. A report states uncertainty, so the
# hyperparameters are integrated by `Grid()`. See [chapter 5](5_comparing_methods.py) for the
# reason. Half-normal priors keep the grid from following a long tail.

# %%
lengthscale_prior = dist.LogNormal(np.log(2.0), 0.5)


def waiting(X, y=None):
    level = numpyro.sample("level", dist.Normal(25.0, 10.0))
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior)
    scale = numpyro.sample("scale", dist.HalfNormal(10.0))
    spread = numpyro.sample("spread", dist.HalfNormal(10.0))
    noise = numpyro.sample("noise", dist.HalfNormal(10.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(scale**2, lengthscale), X[:, 0]))
    with numpyro.plate("clinics", 6):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    mean = level + f + u[X[:, 1].astype(int)]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


X, minutes = table[["hour", "clinic"]], table["minutes"]
method = pg.Laplace(hyper=pg.Grid())
fit = pg.fit(waiting, method, 0, X, y=minutes)
print(fit.result)
fit.summary().round(2)

# %% [markdown]
# Here the prior of the length scale states what we know: a daily curve changes over one to several
# hours. All hyperparameters now have a standard deviation, because they are integrated. The true
# noise of 2.5 and the true spread of about 3.5 are both within two standard deviations.

# %% [markdown]
# ## A table of new hours for each clinic
#
# Build the rows that you want, and join the prediction to them.

# %%
hours = [8.0, 10.0, 13.0, 16.0]
new = pd.DataFrame([(c, h) for c in busy for h in hours], columns=["clinic", "hour"])
prediction = fit.predict(new)
report = new.join(prediction.to_frame(0.9))
report["text"] = [
    f"{m:.0f} ({a:.0f} to {b:.0f})"
    for m, a, b in zip(report["mean"], report["5 %"], report["95 %"])
]
report.pivot(index="clinic", columns="hour", values="text")

# %% [markdown]
# Each cell has the expected waiting time in minutes and the interval that contains a new value with
# a probability of 90 %. The columns of `new` may come in any order, because a fit selects them by name. The longest
# waits are at 10 o'clock in clinic D.

# %% [markdown]
# ## Pictures
#
# `pg.plot_predictions` draws along one column and keeps the others fixed at the values in `at`.

# %%
pg.plot_predictions(fit, X, minutes, along="hour", at={"clinic": ["C", "D", "E"]})
plt.show()

# %% [markdown]
# Each line is a clinic and each band its interval of 95 % for new values. The points are all rows,
# of every clinic. `pg.plot_effects` draws the effects with their intervals of 90 %.

# %%
pg.plot_effects(fit, ["u"])
plt.show()

# %% [markdown]
# The rows `u[0]` to `u[5]` are clinics A to F. The intervals contain the uncertainty of the common
# level, so compare their centres first. For the difference of two clinics, use joint draws.

# %%
tree = fit.to_datatree(num_draws=2000)
u = tree["posterior"]["u"].to_numpy().reshape(-1, 6)
low, high = np.quantile(u[:, 3] - u[:, 4], [0.05, 0.95])
truth = 4.0 * (busy["D"] - busy["E"])
print(f"D minus E: {low:.1f} to {high:.1f} minutes (truth {truth:.1f})")

# %% [markdown]
# The common level cancels in a difference, so this interval is much narrower than those of the
# picture.

# %% [markdown]
# ## The ArviZ tree
#
# `tree` above is an ArviZ tree: an xarray object that every ArviZ function reads. Its groups and
# dimensions are the same for every method.

# %%
print("groups:", ", ".join(tree.children))
print("posterior:", dict(tree["posterior"].sizes))

# %% [markdown]
# You can store the tree with `tree.to_netcdf("waiting.nc", engine="h5netcdf")`. The library is
# installed with ppl_gp. See [ArviZ](../with-arviz.py) for plots and checks.

# %% [markdown]
# ## Save and load
#
# `fit.save` writes one file with everything that predictions need. It contains no code and no
# observations. So you give the model again when you load.

# %%
import tempfile
from pathlib import Path

path = Path(tempfile.mkdtemp()) / "waiting.fit"
fit.save(path)
loaded = pg.load(path, waiting)
same = np.allclose(loaded.predict(new).mean, prediction.mean)
print(f"{path.stat().st_size / 1024:.0f} KiB, same predictions: {same}")

# %% [markdown]
# A loaded fit predicts, but it has no `loo()`, because that needs the observations. If the model
# has changed since, `pg.load` raises `StoreError` or warns. See [Saving and loading
# fits](../saving.md).

# %% [markdown]
# ## What to write in a methods section
#
# A reader must be able to repeat the analysis: the likelihood, the kernel, every prior, the method,
# what happened to the hyperparameters, the checks, and the versions. Print the numbers instead of
# copying them.

# %%
from importlib.metadata import version

row = fit.summary()
loo = fit.loo()
versions = ", ".join(f"{k} {version(k)}" for k in ("ppl_gp", "numpyro", "jax"))
noise, lengthscale = row.loc["noise"], row.loc["lengthscale"]
print(f"""
We modelled {len(table)} hourly mean waiting times of {len(busy)} clinics as normal.
Their mean is the sum of a level, a Gaussian process of the hour (squared exponential
kernel) and one effect per clinic. Priors: level N(25, 10), length scale
LogNormal(log 2, 0.5), half-normal with scale 10 for the standard deviations of
the process, the effects and the noise. Level, function and effects were
integrated exactly, and the hyperparameters over a weighted grid.
Software: {versions}.
The noise was {noise["mean"]:.1f} minutes (sd {noise["sd"]:.1f}), the length scale \
{lengthscale["mean"]:.1f} hours (sd {lengthscale["sd"]:.1f}).
The leave-one-out log density was {loo.elpd:.0f} (standard error {loo.se:.0f}).
""")

# %% [markdown]
# ## What you learnt
#
# - `predict`, `join` and `to_frame` make a table of any rows. Pictures take the same fit.
# - Compare effects by joint draws from the tree, because their common level is uncertain.
# - A saved fit predicts without its data. A methods section names priors, method and versions.
#
# You have finished the tutorial. Where next: [Kernels](../kernels.py) for other shapes of
# functions, [Large data](../large-data.md) for thousands of rows, [Gallery](../gallery.md) for
# examples.
