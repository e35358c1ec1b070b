# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Effects and components: one predictor of several parts
#
# **Claim.** A model whose predictor is a sum of smooth functions, a fixed effect and group effects is declared as
# such, and
#
# 1. the local methods integrate all of it together: what each part adds comes with its own uncertainty, and the
#    parts add up to the total;
# 2. those answers are those of NUTS on the same function;
# 3. a `Grid` over the hyperparameters, 15 evaluations, gives what sampling them gives to a fifth of a posterior
#    standard deviation, also for the decades' spread, whose posterior is far from a Gaussian.
#
# The data are scikit-learn's diabetes table: 442 patients, how far the disease has moved in a year against body
# mass index, blood pressure, sex and age. The last cell asserts all three.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.datasets import load_diabetes

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
numpyro.set_host_device_count(2)
SMALL = os.environ.get("PPL_GP_NOTEBOOK_SIZE") == "small"
ROWS = 60 if SMALL else 150
CHAIN = dict(num_warmup=200, num_samples=200) if SMALL else dict(num_warmup=500, num_samples=1000)

# %% [markdown]
# ## The data
#
# Age enters by decade, as seven groups: effects that share a spread, so that decades with few patients borrow from
# the others.

# %%
table, target = load_diabetes(return_X_y=True, scaled=False)
rows = np.random.default_rng(0).permutation(len(table))[:ROWS]
age, sex, bmi, pressure = table[rows, 0], table[rows, 1] - 1.0, table[rows, 2], table[rows, 3]
y = (target[rows] - target.mean()) / target.std()
standard = lambda v: (v - v.mean()) / v.std()  # noqa: E731
B, P, S = standard(bmi), standard(pressure), sex - 0.5
decade = np.clip(age // 10 - 1, 0, 6).astype(int)
NAMES = [f"{10 * (d + 1)}s" for d in range(7)]
print(dict(zip(NAMES, np.bincount(decade, minlength=7).tolist(), strict=True)))


# %% [markdown]
# ## The model


# %%
def progression(B, P, S, decade, y=None):
    smooth = numpyro.sample("smooth", dist.LogNormal(-1.0, 0.7))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("bmi", pg.GP(pg.kernels.RBF(smooth, 1.5), B))
    g = numpyro.sample("pressure", pg.GP(pg.kernels.RBF(smooth, 1.5), P))
    beta = numpyro.sample("sex", dist.Normal(0.0, 1.0))
    with numpyro.plate("decades", 7):
        u = numpyro.sample("age", dist.Normal(0.0, spread))
    with numpyro.plate("data", B.shape[0]):
        numpyro.sample("y", dist.Normal(level + f + g + beta * S + u[decade], noise), obs=y)


print(pg.check(progression, B, P, S, decade, y=y))

# %% [markdown]
# `check` says which sites are integrated: both functions, the level, the effect of sex and those of the decades.
# Only three numbers are hyperparameters.

# %%
grid = pg.fit(progression, pg.Laplace(hyper=pg.Grid()), 0, B, P, S, decade, y=y)
print(grid)
print({k: grid.stats[k] for k in ("grid_points", "grid_effective", "grid_missing_variance")})

# %% [markdown]
# ## Each part, with its band
#
# Along a line of each variable the others stay where they are; a part is what its site adds, about its own mean.

# %%
line = np.linspace(-2.0, 2.5, 70)
cycle = np.arange(70) % 7
figure = pg.plot_components(
    grid,
    line,
    line,
    (cycle % 2) - 0.5,
    cycle,
    along={"bmi": line * bmi.std() + bmi.mean(), "pressure": line * pressure.std() + pressure.mean(), "age": cycle},
    labels={"bmi": "body mass index", "pressure": "blood pressure", "age": "decade of age"},
)
figure.axes[2].set_xticks(range(7), NAMES)
plt.show()

# %% [markdown]
# The index carries most of it and bends little; blood pressure adds about half as much; the decades' bars are the
# posterior of effects whose spread is unknown, and wider where a decade has few patients.

# %% [markdown]
# ## The same by NUTS
#
# `NUTS()` samples all sites of the same function. Its draws give each part at new rows by hand; the local fit gives
# it as `fit.components`.

# %%
nuts = pg.fit(progression, pg.NUTS(**CHAIN, num_chains=2), 0, B, P, S, decade, y=y, throw=False)
print(nuts.result, {k: float(v) for k, v in nuts.stats.items() if k in ("rhat", "ess")})

effects = {"sex": nuts.hyper["sex"], "level": nuts.hyper["level"]}
effects |= {f"age {n}": nuts.hyper["age"][:, i] for i, n in enumerate(NAMES)}
local = {"sex": grid.sites["sex"], "level": grid.sites["level"]}
found = {k: (float(v.mean), float(jnp.sqrt(v.variance))) for k, v in local.items()}
found |= {
    f"age {n}": (float(grid.sites["age"].mean[i]), float(jnp.sqrt(grid.sites["age"].variance[i])))
    for i, n in enumerate(NAMES)
}
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
places = np.arange(len(effects))
for shift, colour, label, moments in (
    (-0.12, "black", "NUTS", {k: (float(v.mean()), float(v.std())) for k, v in effects.items()}),
    (0.12, "tab:orange", "Laplace, Grid", found),
):
    mean, sd = np.array([moments[k] for k in effects]).T
    ax.errorbar(mean, places + shift, xerr=2 * sd, fmt="o", color=colour, label=label, capsize=2)
ax.set_yticks(places, list(effects))
ax.set(xlabel="effect, in standard deviations of the outcome", title="Effects: mean and ±2 standard deviations")
ax.legend()
plt.show()

# %%
sampled = pg.fit(
    progression, pg.Laplace(hyper=pg.Sample(**CHAIN, num_chains=2)), 0, B, P, S, decade, y=y, throw=False
)
for name in ("smooth", "spread", "noise"):
    w = np.exp(np.asarray(grid.draws.log_weights))
    by_grid = float(w @ np.asarray(grid.hyper[name]))
    print(f"{name:8s} Grid {by_grid:.3f}   Sample {float(sampled.hyper[name].mean()):.3f}   "
          f"NUTS {float(nuts.hyper[name].mean()):.3f}")

# %% [markdown]
# ## What was claimed

# %%
parts = grid.components(B, P, S, decade)
total = sum(np.asarray(p.mean) for k, p in parts.items() if k != "total")
assert np.allclose(total, parts["total"].mean, atol=1e-8)
assert np.allclose(parts["total"].mean, grid.predict(B, P, S, decade).f_mean, atol=1e-8)
if not SMALL:
    for k, v in effects.items():
        mean, sd = found[k]
        assert abs(mean - float(v.mean())) < 0.15 * float(v.std()), k
        assert abs(np.log(sd / float(v.std()))) < 0.15, k
    for name in ("smooth", "spread", "noise"):
        w, values = np.exp(np.asarray(grid.draws.log_weights)), np.asarray(grid.hyper[name])
        gap = float(w @ values) - float(sampled.hyper[name].mean())
        assert abs(gap) < 0.2 * float(sampled.hyper[name].std()), name
print("as claimed")
