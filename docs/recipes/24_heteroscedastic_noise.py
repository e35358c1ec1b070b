# %% [markdown]
# # Noise that varies (heteroscedastic noise)
#
# The scatter of your data changes along x, so one noise for all rows gives wrong intervals. They
# are too wide where the data are precise, and too narrow where they are not. Give the logarithm of
# the noise a GP of its own. Both functions are inferred together.
#
# The truth here is a sensor whose error grows with the temperature. The standard deviation of its
# noise is 0.05 V at 0 °C and 0.6 V at 100 °C.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)


def true_noise(x):
    return 0.05 * 12.0 ** (x / 100.0)


x = np.sort(rng.uniform(0.0, 100.0, 320))
y = np.sin(x / 15.0) + true_noise(x) * rng.normal(size=320)
train = np.arange(320) % 2 == 0  # every other row is held out


def varying(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.7))
    level = numpyro.sample("level", dist.Normal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    g = numpyro.sample("g", pg.GP(pg.kernels.RBF(1.0, 50.0), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def constant(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(3.0, 0.7))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


fit = pg.fit(varying, pg.VI(), 0, x[train], y=y[train])
same = pg.fit(constant, pg.Laplace(), 0, x[train], y=y[train])
new = np.linspace(0.0, 100.0, 200)
found, flat = fit.predict(new), same.predict(new)
# a row per function, named by the terms that it adds up: the log noise is the GP g plus its level
noise = np.exp(np.asarray(found.f_mean)[fit.functions.index("g + level")])
print("noise at 0 and at 100 °C:", noise[[0, -1]].round(2), "truth", true_noise(new[[0, -1]]))
print(f"one noise for all: {float(same.hyper['noise']):.2f}")

# %% [markdown]
# The first line compares the inferred noise, in volts, with the truth. A single noise lies between
# the two. `VI()` is a good choice for this likelihood, because Laplace's method can fail on it.

# %%
plt.fill_between(new, *found.interval(0.9), alpha=0.25, label="90 % of new values")
plt.plot(new, found.mean, label="prediction")
for bound, label in zip(flat.interval(0.9), ("90 % with one noise for all", None), strict=True):
    plt.plot(new, bound, "k--", linewidth=1, label=label)
plt.plot(x[train], y[train], "k.", markersize=4, label="data")
plt.plot(x[~train], y[~train], "C3x", markersize=4, label="held-out data")
plt.gca().set(
    title="A band that widens with the noise", xlabel="temperature (°C)", ylabel="signal (V)"
)
plt.legend(loc="lower left", fontsize="small")
plt.show()

# %%
held = {"constant": same.predict(x[~train]), "varying": fit.predict(x[~train])}
for name, prediction in held.items():
    lower, upper = prediction.interval(0.9)
    hit = (y[~train] >= lower) & (y[~train] <= upper)
    thirds = np.array([part.mean() for part in np.array_split(hit, 3)]).round(2)
    print(f"{name}: held-out data in the 90 % interval, cold, mild and hot third:", thirds)
assert thirds.min() > 0.75  # of the varying noise, the last of the loop
assert np.abs(np.log(noise / true_noise(new))).max() < 0.5
