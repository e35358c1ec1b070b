# %% [markdown]
# # Time series: trend, season and forecast
#
# You have a monthly series and want a forecast with an interval. You also want to know how much of
# the series is trend and how much is season. Declare one GP for each and add them.
#
# `Linear + RBF` is a trend that can bend. `Periodic * RBF` is a season that repeats every year but
# drifts over the years. Use this if the season may change, or if you need honest intervals.
#
# The truth here is a demand for electricity in GWh. It grows by about 1.5 per year. Its season
# doubles in ten years and moves by a month. The noise has sd 1. The fit does not use the last two
# years.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
k, rng = pg.kernels, np.random.default_rng(0)
t = np.arange(120) / 12.0  # in years
truth = {
    "trend": 1.5 * t + np.sin(0.9 * t),
    "season": (3.0 + 0.3 * t) * np.cos(2.0 * np.pi * (t - t / 120.0)),
}
demand = 50.0 + truth["trend"] + truth["season"] + rng.normal(size=120)
past, last = t < 8.0, t >= 8.0


def monthly(t, y=None):
    level = numpyro.sample("level", dist.Normal(50.0, 10.0))
    noise = numpyro.sample("noise", dist.HalfNormal(3.0))
    bend = numpyro.sample("bend", dist.LogNormal(1.0, 0.5))  # length scale of the trend, in years
    size = numpyro.sample("size", dist.LogNormal(2.0, 1.0))  # variance of the season
    drift = numpyro.sample("drift", dist.LogNormal(2.0, 0.5))  # years until the season has changed
    trend = numpyro.sample("trend", pg.GP(k.Linear(4.0) + k.RBF(4.0, bend), t))
    season = k.Periodic(size, 1.5, 1.0) * k.RBF(1.0, drift)
    season = numpyro.sample("season", pg.GP(season, t))
    with numpyro.plate("months", t.shape[0]):
        numpyro.sample("y", dist.Normal(level + trend + season, noise), obs=y)


fit = pg.fit(monthly, pg.Laplace(), 0, t[past], y=demand[past])  # exact: Gaussian noise
print({name: round(float(value), 2) for name, value in fit.hyper.items()})
forecast, parts = fit.predict(t), fit.components(t)
lower, upper = forecast.interval(0.9)

# %% [markdown]
# `noise` is close to its true value of 1. `drift` is the length scale of the season's change, in
# years. It is long, so next year's season is much like this year's.
#
# `fit.components` returns the posterior of each part. Its bands are wide, because a constant can
# move between level, trend and season. The data determine their sum, so its band is narrow.

# %%
figure, axes = plt.subplots(3, 1, figsize=(7.5, 7.0), sharex=True, layout="constrained")
axes[0].fill_between(t, lower, upper, alpha=0.2, label="90 % of new values")
axes[0].plot(t, forecast.mean, label="prediction")
axes[0].plot(t[past], demand[past], "k.", label="data")
axes[0].plot(t[last], demand[last], "C3x", label="held-out data")
axes[0].set(title="A forecast of two years, and its parts", ylabel="demand (GWh)")
for ax, (name, true_part) in zip(axes[1:], truth.items(), strict=True):
    mean, sd = np.asarray(parts[name].mean), np.sqrt(np.asarray(parts[name].variance))
    ax.fill_between(t, mean - 1.64 * sd, mean + 1.64 * sd, color="C1", alpha=0.2)
    ax.plot(t, mean, "C1", label=f"{name}, with its 90 % band")
    ax.plot(t, true_part, "k--", label="truth")
    ax.set(ylabel=f"{name} (GWh)")
axes[-1].set(xlabel="time (years)")
for ax in axes:
    ax.axvline(8.0, color="grey", linewidth=1)
    ax.legend(loc="upper left", fontsize="small")
plt.show()

# %%
inside = np.mean((demand >= lower) & (demand <= upper), where=last)
error = np.sqrt(np.mean((forecast.mean - demand)[last] ** 2))
naive = np.sqrt(np.mean((np.tile(demand[84:96], 2) - demand[last]) ** 2))  # the last year again
print(f"held-out data in the 90 % interval: {inside:.0%}")
print(f"error of the forecast: {error:.2f} GWh, of the last year repeated: {naive:.2f} GWh")
assert inside >= 0.75 and error < 0.7 * naive
