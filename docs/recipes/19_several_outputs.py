# %% [markdown]
# # Several outputs: one fills the gap of the other
#
# You measure two related quantities, and one of them has a gap. Model both together, and the first
# fills the gap of the second. Use this if outputs share a cause, and were not always measured at
# the same inputs.
#
# Stack the measurements: one row per measurement, with a label that says which output it is. Output
# 0 is `shared`, and output 1 is `ratio * shared`. Each output adds a small function of its own.
#
# The truth here is the water level at two gauges of a river, in metres. The second gauge rises 0.6
# times as much as the first, and failed between day 12 and day 20.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
k, rng = pg.kernels, np.random.default_rng(0)
t = np.sort(rng.uniform(0.0, 30.0, (2, 60)), axis=1)  # the gauges have different times
wave = np.sin(0.9 * t) + 0.7 * np.sin(0.37 * t + 1.0)
own = 0.15 * np.stack([np.cos(0.3 * t[0]), np.sin(0.25 * t[1])])
level = np.array([[3.0], [2.0]]) + np.array([[1.0], [0.6]]) * wave + own
y = level + 0.1 * rng.normal(size=(2, 60))
gap = (t[1] > 12.0) & (t[1] < 20.0)
kept = np.concatenate([np.full(60, True), ~gap])
day, gauge = t.ravel()[kept], np.repeat([0, 1], 60)[kept]


def gauges(day, gauge, y=None):
    base = numpyro.sample("base", dist.Normal(2.5, 2.0).expand([2]).to_event(1))
    ratio = numpyro.sample("ratio", dist.Normal(1.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.7))
    small = numpyro.sample("small", dist.HalfNormal(0.3))  # sd of a gauge's own function
    shared = numpyro.sample("shared", pg.GP(k.RBF(1.0, lengthscale), day))
    X = jnp.stack([day, gauge], 1)
    kernel = k.RBF(small**2, 6.0, active_dims=0) * k.White(1.0, active_dims=1)
    own = numpyro.sample("own", pg.GP(kernel, X))
    eta = base[gauge] + jnp.where(gauge == 1, ratio, 1.0) * shared + own
    with numpyro.plate("measurements", day.shape[0]):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


fit = pg.fit(gauges, pg.Laplace(), 0, day, gauge, y=y.ravel()[kept])  # exact: Gaussian noise
alone = pg.fit(gauges, pg.Laplace(), 0, t[1][~gap], np.ones(60 - gap.sum(), int), y=y[1][~gap])
print({name: round(float(value), 2) for name, value in fit.hyper.items()})
new = np.linspace(0.0, 30.0, 200)

# %% [markdown]
# `ratio` is close to its true value of 0.6, and `noise` to 0.1. `small` says how far a gauge
# deviates from the shared function. `alone` is the same model of the second gauge only, for
# comparison.

# %%
for code in (0, 1):
    found = fit.predict(new, np.full(200, code))
    plt.fill_between(new, *found.interval(0.9), color=f"C{code}", alpha=0.2)
    plt.plot(new, found.mean, f"C{code}", label=f"gauge {code}, with 90 % of new values")
plt.plot(new, alone.predict(new, np.ones(200, int)).mean, "k--", label="gauge 1 fitted alone")
plt.scatter(day, y.ravel()[kept], s=12, c=np.where(gauge == 1, "C1", "C0"), label="data")
plt.plot(t[1][gap], y[1][gap], "C3x", label="held-out data of gauge 1")
plt.gca().set(title="One gauge fills the gap of the other", xlabel="day", ylabel="level (m)")
plt.legend(fontsize="small", ncols=2)
plt.show()

# %%
both, single = (q.predict(t[1][gap], np.ones(gap.sum(), int)) for q in (fit, alone))
lower, upper = both.interval(0.9)
inside = np.mean((y[1][gap] >= lower) & (y[1][gap] <= upper))
error = [float(np.sqrt(np.mean((p.mean - y[1][gap]) ** 2))) for p in (both, single)]
print(f"error in the gap: {error[0]:.2f} m with both gauges, {error[1]:.2f} m with one")
print(f"held-out data in the 90 % interval: {inside:.0%}")
assert error[0] < 0.5 * error[1] and inside > 0.7
