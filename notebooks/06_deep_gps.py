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
# # Deep Gaussian processes: what layers add, and what they take away
#
# **Claim.**
#
# 1. Draws from a deep prior with zero means forget their inputs as depth grows: at depth 8 most of a function's variation happens on a
#    small share of the x axis, and it is flat elsewhere. Inner layers that bend the identity a little do not do that; those that bend
#    it as much as its own slope do.
# 2. A step that a GP with a stationary kernel can only fit by a short length scale everywhere is fitted by two layers: better test
#    log density, no ringing, and narrower bands away from the step.
# 3. The inner layer does what one would draw by hand: it stretches the x axis at the step and flattens it elsewhere.
# 4. For a smooth function the second layer costs next to nothing.
# 5. NUTS on the same function (inducing variables and hyperparameters of both layers) predicts as well as the variational fit.
#
# The last cell asserts all five.

# %%
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from jax import random

import ppl_gp as pg

sys.path.insert(0, str(Path.cwd().parent))  # the folder `models` stands beside `notebooks`
from models.deep import deep  # noqa: E402
from models.regression import regression  # noqa: E402

jax.config.update("jax_enable_x64", True)
SMALL = os.environ.get("PPL_GP_NOTEBOOK_SIZE") == "small"
STEPS = 1000 if SMALL else 3000
NUM_PRIOR = 40 if SMALL else 200
NUTS_DRAWS = 150 if SMALL else 400

# %% [markdown]
# ## Draws from the prior, by depth
#
# A deep GP is declared by feeding one GP site to the next. Each draw below is one function, f_depth(... f_1(x)), of RBF layers. Three
# kinds: zero means, with a length scale at which a layer's mean absolute slope is 1; and identity means inside, with inner variances
# of 0.05 and 0.4.

# %%
x_prior = np.linspace(-3.0, 3.0, 200 if SMALL else 400)
DEPTHS = (1, 2, 4, 8)


def prior(X, depth, inner_variance):
    """A composition of `depth` functions; inner ones bend the identity by this variance, or start from nothing (`None`)."""
    g, zero = X, inner_variance is None
    for layer in range(depth):
        last = layer + 1 == depth
        kernel = pg.kernels.RBF(1.0 if last or zero else inner_variance, np.sqrt(2 / np.pi) if zero else 1.0)
        mean = None if last or zero else pg.means.Linear(1.0)
        g = numpyro.sample(f"f_{layer}", pg.GP(kernel, g, mean=mean, jitter=1e-10))[:, None]
    return numpyro.deterministic("f", g[:, 0])


def prior_draws(depth, inner_variance):
    """(NUM_PRIOR, N)."""
    predictive = numpyro.infer.Predictive(prior, num_samples=NUM_PRIOR, return_sites=["f"])
    return np.asarray(predictive(random.key(depth), x_prior[:, None], depth, inner_variance)["f"])


KINDS = {None: "zero means", 0.05: "identity, variance 0.05", 0.4: "identity, variance 0.4"}
draws = {(depth, kind): prior_draws(depth, kind) for depth in DEPTHS for kind in KINDS}

# %% [markdown]
# How much of the x axis a function uses: sort the steps |f(x + dx) - f(x)|, and take the smallest share of the axis that carries 90%
# of the function's whole up and down. A straight line uses 90%, a single jump next to nothing.


# %%
def used_share(f):
    """Median over draws of the share of the axis that carries 90% of the total variation."""
    steps = np.sort(np.abs(np.diff(f, axis=1)), 1)[:, ::-1]
    carried = np.cumsum(steps, 1) / np.sum(steps, 1, keepdims=True)
    return float(np.median(np.mean(carried < 0.9, 1)))


used = {key: used_share(f) for key, f in draws.items()}
print("share of the x axis that carries 90% of the variation\ndepth   " + "   ".join(KINDS.values()))
for depth in DEPTHS:
    print(f"{depth:5d}   " + "   ".join(f"{used[depth, kind]:{len(name)}.2f}" for kind, name in KINDS.items()))

# %%
BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
fig, axes = plt.subplots(3, 4, figsize=(12, 7), sharex=True, layout="constrained")
for row, (kind, name) in zip(axes, KINDS.items(), strict=True):
    for ax, depth in zip(row, DEPTHS, strict=True):
        for f, color in zip(draws[depth, kind], (BLUE, ORANGE, GREEN, RED), strict=False):
            ax.plot(x_prior, f, color=color, linewidth=1.2)
        ax.set_title(f"depth {depth}: {100 * used[depth, kind]:.0f}% of the axis used", fontsize=10)
    row[0].set_ylabel(f"{name}\nf(x) (no unit)")
fig.supxlabel("x (no unit)", fontsize=10)
fig.suptitle("Four draws of a deep GP prior at each depth", fontsize=11)
plt.show()

# %% [markdown]
# The chain rule multiplies the slope by a random factor at every layer, and a product of many such factors is near zero almost
# everywhere and huge in a few places (Duvenaud et al. 2014). Near the identity each factor is near 1. So `models.deep` has identity
# means inside; their variance is drawn (median 0.37), and data that need no bending bring it down.
#
# ## A step
#
# y = sign(x) plus noise of standard deviation 0.05. The GP is exact (its likelihood is Gaussian), so what it misses is the model's
# fault and not the approximation's. Test points between the two training points nearest to 0 are left out: the data do not say on
# which side of the step those lie.

# %%
NOISE, NUM = 0.05, 80


def step_data(rng, num):
    """(X, y)."""
    x = rng.uniform(-2.0, 2.0, num)
    return x[:, None], np.sign(x) + NOISE * rng.standard_normal(num)


def smooth_data(rng, num):
    """(X, y)."""
    x = rng.uniform(-2.0, 2.0, num)
    return x[:, None], np.sin(2.0 * x) + NOISE * rng.standard_normal(num)


def fit_both(data, depths=(2,)):
    """{name: fit}, and the test data."""
    rng = np.random.default_rng(0)
    (X, y), test = data(rng, NUM), data(rng, 1000)
    fits = {"GP": pg.fit(regression, pg.VI(), 0, X, y=y)}
    for depth in depths:
        method = pg.SVGP(num_inducing=30, max_steps=STEPS)
        fits[f"{depth} layers"] = pg.fit(deep, method, 0, X, y=y, depth=depth)
    return fits, (X, y), test


fits, (X, y), (X_test, y_test) = fit_both(step_data, (2,) if SMALL else (2, 3))
left, right = X[X < 0].max(), X[X > 0].min()
known = (X_test[:, 0] <= left) | (X_test[:, 0] >= right)
X_test, y_test = X_test[known], y_test[known]
print(f"{np.sum(~known)} of {len(known)} test points left out, between {left:.3f} and {right:.3f}")
scores = {name: np.asarray(fit.log_density(X_test, y_test)) for name, fit in fits.items()}
truth = -0.5 * ((y_test - np.sign(X_test[:, 0])) / NOISE) ** 2 - np.log(NOISE * np.sqrt(2 * np.pi))
print(f"density that drew the data: {truth.mean():.3f} nats a test point")
for name, values in scores.items():
    print(f"{name:8s}: {values.mean():6.3f} +- {values.std() / np.sqrt(len(values)):.3f} nats a test point")

# %%
grid = np.linspace(-2.0, 2.0, 401)[:, None]
bands = {}
fig, axes = plt.subplots(1, len(fits), figsize=(4.2 * len(fits), 3.8), sharex=True, sharey=True, layout="constrained")
for ax, (name, fit) in zip(axes, fits.items(), strict=True):
    drawn = np.asarray(fit.sample(0, grid, 1000).y)
    low, middle, high = np.percentile(drawn, [2.5, 50, 97.5], axis=0)
    bands[name] = high - low
    ax.fill_between(grid[:, 0], low, high, color=SKY, alpha=0.5, label="95% of new y")
    ax.plot(grid[:, 0], middle, color=BLUE, label="median")
    ax.plot(X[:, 0], y, ".", color="black", markersize=4, label=f"data, N = {NUM}")
    ax.set(title=f"{name}: {scores[name].mean():.2f} nats a test point", xlabel="x (no unit)")
axes[0].set_ylabel("y (no unit)")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()
away = np.abs(grid[:, 0]) > 0.5
widths = {name: float(np.mean(band[away])) for name, band in bands.items()}
print(
    "mean width of the band away from the step:",
    {k: round(v, 3) for k, v in widths.items()},
    f"of {2 * 1.96 * NOISE:.3f}",
)

# %% [markdown]
# ## What the inner layer does
#
# `fit.posterior` holds one process a layer. Left, the first layer's posterior: h(x) with two standard deviations. Right, the second
# layer, as a function of h. The step has become a ramp that a smooth function can follow.

# %%
two = fits["2 layers"]
inner = two.posterior["f_1"](jnp.asarray(grid))
h_mean, h_scale = np.asarray(inner.mean)[0], np.sqrt(np.asarray(inner.variance))[0]
h_axis = np.linspace(h_mean.min() - 0.5, h_mean.max() + 0.5, 300)
outer = two.posterior["f"](jnp.asarray(h_axis)[:, None])
f_mean, f_scale = np.asarray(outer.mean), np.sqrt(np.asarray(outer.variance))
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
axes[0].plot(grid[:, 0], grid[:, 0], ":", color="0.5", label="identity, the prior's mean")
axes[0].fill_between(grid[:, 0], h_mean - 2 * h_scale, h_mean + 2 * h_scale, color=SKY, alpha=0.5)
axes[0].plot(grid[:, 0], h_mean, color=BLUE, label="posterior mean, two s.d.")
axes[0].set(xlabel="x (no unit)", ylabel="h (no unit)", title="First layer: from x to h")
axes[0].legend(fontsize=9)
axes[1].fill_between(h_axis, f_mean - 2 * f_scale, f_mean + 2 * f_scale, color=SKY, alpha=0.5)
axes[1].plot(h_axis, f_mean, color=BLUE, label="posterior mean, two s.d.")
axes[1].plot(h_mean, np.full_like(h_mean, -1.6), "|", color="black", markersize=8, label="where evenly spaced x lie")
axes[1].set(xlabel="h (no unit)", ylabel="f (no unit)", title="Second layer: from h to f")
axes[1].legend(fontsize=9)
plt.show()
slope = np.gradient(h_mean, grid[:, 0])
stretch = float(np.abs(slope[np.abs(grid[:, 0]) < 0.1]).max() / np.median(np.abs(slope[away])))
print(f"the first layer is {stretch:.1f} times as steep at the step as elsewhere")

# %% [markdown]
# ## A smooth function
#
# y = sin(2x) with the same noise. Nothing here needs a second layer.

# %%
smooth, _, (X_smooth, y_smooth) = fit_both(smooth_data)
smooth_scores = {name: np.asarray(fit.log_density(X_smooth, y_smooth)) for name, fit in smooth.items()}
for name, values in smooth_scores.items():
    print(f"{name:8s}: {values.mean():6.3f} +- {values.std() / np.sqrt(len(values)):.3f} nats a test point")

# %% [markdown]
# ## NUTS on the same function
#
# `pg.SparseNUTS` samples the hyperparameters and the whitened inducing variables of both layers jointly; no form of q(u) is assumed.
# Agreement of two such fits is one of predictions: their inner layers may differ by a sign or a shift.

# %%
few = slice(0, 40)
variational = pg.fit(deep, pg.SVGP(num_inducing=12, max_steps=STEPS), 0, X[few], y=y[few])
nuts = pg.fit(
    deep,
    pg.SparseNUTS(num_inducing=12, num_warmup=NUTS_DRAWS, num_samples=NUTS_DRAWS, num_chains=1),
    0,
    X[few],
    y=y[few],
    throw=False,
)
few_scores = {
    name: float(np.mean(fit.log_density(X_test, y_test))) for name, fit in {"SVGP": variational, "NUTS": nuts}.items()
}
print(nuts.result, {k: round(v, 3) for k, v in few_scores.items()})

# %% [markdown]
# ## The claim, tested

# %%
collapse, kept, bent = (used[8, kind] / used[1, kind] for kind in KINDS)
print(f"1. at depth 8 {collapse:.2f}, {kept:.2f} and {bent:.2f} of the share at depth 1")
assert collapse < 0.7 and bent < 0.7 and kept > 0.85

difference = scores["2 layers"] - scores["GP"]
gained, error = difference.mean(), difference.std() / np.sqrt(len(difference))
print(
    f"2. two layers gain {gained:.3f} +- {error:.3f} nats a test point; bands {widths['2 layers'] / widths['GP']:.2f} as wide"
)
assert gained > 2 * error and gained > 0.3
assert widths["2 layers"] < 0.7 * widths["GP"]

print(f"3. stretched {stretch:.1f} times")
assert stretch > 5

lost = float(np.mean(smooth_scores["GP"] - smooth_scores["2 layers"]))
print(f"4. on a smooth function two layers lose {lost:.4f} nats a test point")
assert lost < 0.05

apart = abs(few_scores["SVGP"] - few_scores["NUTS"])
print(f"5. SVGP and NUTS differ by {apart:.3f} nats a test point")
assert apart < 0.15 and nuts.result in ("converged", "not_mixed")
