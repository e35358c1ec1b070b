# %% [markdown]
# # Bayesian optimisation of an expensive function
#
# Each evaluation of your function costs hours, and you look for its minimum. Fit a Gaussian process
# to the few values that you have. Evaluate next at the place with the largest expected improvement.
# Use this for one to about ten inputs and some dozens of evaluations.
#
# The function is $f(x) = \sin(3x) + 0.5 x - 0.1 x^2$ on $[0, 5]$. It has two minima, and the global
# one is found on a fine grid for comparison. The search starts with four evaluations and adds five.
#
# All arrays have nine rows from the start. `obs_mask` says which rows have been evaluated, so the
# shapes never change and JAX compiles the fit only once.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.stats import norm

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
grid = np.linspace(0.0, 5.0, 251)


def expensive(x):
    return np.sin(3.0 * x) + 0.5 * x - 0.1 * x**2


def surrogate(X, done, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern52(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + f, 0.01), obs=y, obs_mask=done)


def improvement(mean, sd, best):
    """The expected improvement over the best value, for a minimum."""
    z = (best - mean) / sd
    return (best - mean) * norm.cdf(z) + sd * norm.pdf(z)


START, TOTAL = 4, 9
x = np.linspace(0.3, 4.9, TOTAL)  # rows that are not evaluated are placeholders
x[:START] = [0.3, 1.0, 2.8, 4.9]
done = np.arange(TOTAL) < START
y = np.where(done, expensive(x), 0.0)
for k in range(START, TOTAL):
    fit = pg.fit(surrogate, pg.Laplace(), 0, x, done, y=y)
    p = fit.predict(grid, np.ones(len(grid), dtype=bool))
    gain = improvement(np.asarray(p.f_mean), np.asarray(p.f_sd), y[done].min())
    x[k] = grid[np.argmax(gain)]
    y[k], done[k] = expensive(x[k]), True
    print(f"x = {x[k]:.2f}: y = {y[k]:6.3f}, best so far {y[done].min():.3f}")

# %% [markdown]
# Each line is one evaluation: its place, its value, and the lowest value so far. Places with a low
# mean or a large standard deviation have a high expected improvement. The search therefore tries
# both unknown regions and the neighbourhood of the best value.

# %%
fit = pg.fit(surrogate, pg.Laplace(), 0, x, done, y=y)
p = fit.predict(grid, np.ones(len(grid), dtype=bool))
plt.fill_between(grid, *p.f_interval(0.95), alpha=0.2, label="95 % band of f")
plt.plot(grid, p.f_mean, label="mean of f")
plt.plot(grid, expensive(grid), "k--", lw=1, label="truth")
plt.plot(x[:START], y[:START], "ko", label="start")
plt.scatter(x[START:], y[START:], c="C3", zorder=3, label="chosen, in this order")
for k in range(START, TOTAL):
    plt.annotate(str(k - START + 1), (x[k], y[k]), (4, 6), textcoords="offset points", color="C3")
plt.gca().set(title="Five evaluations by expected improvement", xlabel="x", ylabel="f(x)")
plt.legend(fontsize="small", ncols=2)
plt.show()

# %%
truth = expensive(grid).min()
print(f"lowest value found {y.min():.4f}, of the grid {truth:.4f}")
assert y.min() - truth < 0.01 < y[:START].min() - truth
