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
# # Four models of points inside letters
#
# **Claim.** Points are drawn evenly inside the letters D, G and P. Given x, y is uniform on one, two or three intervals whose number
# and ends jump with x: a conditional density that is no Gaussian, and known exactly. Four declared models under the same call
# `pg.fit(model, pg.SVGP(num_inducing=100), ...)`, with default settings (figure 7 of Leibfried et al. 2022):
#
# 1. depth alone gains next to nothing: a deep GP still puts one Gaussian on y at each x;
# 2. one latent input a datum gains far more than depth: LV-GP above deep GP;
# 3. ten draws of the latent inside the logarithm gain again: K = 10 above K = 1;
# 4. both together, LV-DGP with K = 10, has the best test log density of all. It is still well below the exact density:
#    a smooth function of h cannot leave a hole of exactly zero density.
#
# The last cell asserts all four, each difference against its own standard error.

# %%
import os
import sys
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import ppl_gp as pg

sys.path.insert(0, str(Path.cwd().parent))  # the folder `models` stands beside `notebooks`
from models.deep import deep  # noqa: E402
from models.latent import latent  # noqa: E402
from models.latent_deep import latent_deep  # noqa: E402
from models.letters import letters  # noqa: E402
from models.regression import regression  # noqa: E402

jax.config.update("jax_enable_x64", True)
SMALL = os.environ.get("PPL_GP_NOTEBOOK_SIZE") == "small"
NUM, NUM_TEST, NUM_INDUCING = (300, 300, 40) if SMALL else (1000, 2000, 100)
STEPS = {"max_steps": 400} if SMALL else {}

# %% [markdown]
# ## The data
#
# `models.letters` draws the word by matplotlib's own font, and knows log p(y | x) = -log(height of the letters at x). That is the
# score which no model can beat on average.

# %%
word = letters(NUM + NUM_TEST)
X, y = word.X[:NUM], word.y[:NUM]
X_test, y_test = word.X[NUM:], word.y[NUM:]
exact = word.log_density(X_test, y_test)
print(f"{NUM} points to train on, {NUM_TEST} to test; exact density {exact.mean():.3f} nats a test point")

# %% [markdown]
# ## Four models, one call
#
# K is the number of draws of each datum's latent inside the logarithm. A model without latents has none to draw.

# %%
runs = {
    "GP": (regression, 1),
    "deep GP": (deep, 1),
    "LV-GP, K = 1": (latent, 1),
    "LV-GP, K = 10": (latent, 10),
    "LV-DGP, K = 10": (latent_deep, 10),
}
fits, seconds, scores = {}, {}, {}
for name, (model, K) in runs.items():
    begun = time.perf_counter()
    method = pg.SVGP(num_inducing=NUM_INDUCING, layers=pg.Layers(num_importance=K), **STEPS)
    fits[name] = pg.fit(model, method, 0, X, y=y)
    seconds[name] = time.perf_counter() - begun
    scores[name] = np.asarray(fits[name].log_density(X_test, y_test))


def mean_and_error(x):
    """Mean over test points and its standard error, nats a point."""
    return float(np.mean(x)), float(np.std(x) / np.sqrt(len(x)))


print("model             test log density      below the exact density   fitted in")
for name, values in scores.items():
    (mean, error), (distance, distance_error) = mean_and_error(values), mean_and_error(exact - values)
    print(
        f"{name:15s}   {mean:7.3f} +- {error:.3f} nats   {distance:6.3f} +- {distance_error:.3f} nats   {seconds[name]:5.0f} s"
    )

# %% [markdown]
# ## The panels
#
# Draws of y from each fit, at as many new x as there are data. Grey: the letters.

# %%
BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
extent = [
    word.origin[0],
    word.origin[0] + word.mask.shape[1] * word.pixel[0],
    word.origin[1],
    word.origin[1] + word.mask.shape[0] * word.pixel[1],
]
NUM_DRAWN = NUM if SMALL else 3 * NUM
x_new = word.X[np.random.default_rng(1).integers(0, NUM + NUM_TEST, NUM_DRAWN)]  # x as the data have it
shown = ["GP", "deep GP", "LV-GP, K = 1", "LV-GP, K = 10", "LV-DGP, K = 10"]


def draw_letters(ax):
    """The letters themselves, pale."""
    ax.imshow(np.where(word.mask, 0.82, 1.0), cmap="gray", vmin=0, vmax=1, origin="lower", extent=extent, aspect="auto")


fig, axes = plt.subplots(2, 3, figsize=(12, 6.4), sharex=True, sharey=True, layout="constrained")
for ax in axes.flat:
    draw_letters(ax)
axes.flat[0].plot(X[:, 0], y, ".", color="black", markersize=2)
axes.flat[0].set_title(f"the data: {NUM} points; exact {exact.mean():.2f}", fontsize=10)
for ax, name in zip(axes.flat[1:], shown, strict=True):
    drawn = np.asarray(fits[name].sample(2, x_new, 1).y)[0]
    ax.plot(x_new[:, 0], drawn, ".", color=BLUE, markersize=1.5, alpha=0.6)
    ax.set_title(f"draws of the {name}: {scores[name].mean():.2f}", fontsize=10)
for ax in axes.flat:
    ax.set(xlim=(extent[0] - 0.1, extent[1] + 0.1), ylim=(-3.2, 3.2))
fig.supxlabel("x (standard deviations)", fontsize=10)
fig.supylabel("y (standard deviations)", fontsize=10)
fig.suptitle("In the titles: test log density, nats a point", fontsize=10)
plt.show()

# %% [markdown]
# ## Slices
#
# The density of y at one x in each letter. The exact one is a box or several; a GP's and a deep GP's is one bump, a
# latent input makes bumps of any number, and layers make their sides steeper. (The curves are uneven because each of their points is a
# Monte Carlo average over its own draws of h.)

# %%
columns = np.linspace(0, word.mask.shape[1] - 1, 3 * 2 + 1).astype(int)[1::2]  # the middle of each letter, about
slices = word.origin[0] + (columns + 0.5) * word.pixel[0]
y_axis = np.linspace(-3.0, 3.0, 31 if SMALL else 241)
STYLE = {"GP": ("0.45", "--"), "LV-GP, K = 10": (ORANGE, "-"), "LV-DGP, K = 10": (BLUE, "-")}
fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True, layout="constrained")
for ax, x in zip(axes, slices, strict=True):
    at = np.full((len(y_axis), 1), x)
    truth = np.exp(word.log_density(at, y_axis))
    ax.fill_between(y_axis, truth, color="0.85", step="mid", label="exact")
    for name, (color, line) in STYLE.items():
        ax.plot(y_axis, np.exp(np.asarray(fits[name].log_density(at, y_axis))), line, color=color, label=name)
    ax.set(title=f"x = {x:.2f}", xlabel="y (standard deviations)")
axes[0].set_ylabel("density of y given x")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# ## Where the points go
#
# A density that leaks out of the letters is what the missing nats are made of: of the draws in the panels, the share that fell inside.

# %%
inside = {}
for name in shown:
    drawn = np.asarray(fits[name].sample(2, x_new, 1).y)[0]
    inside[name] = float(np.mean(np.isfinite(word.log_density(x_new, drawn))))
    print(f"{name:15s} {100 * inside[name]:5.1f}% of the draws fell inside a letter")

# %% [markdown]
# ## The claim, tested


# %%
def gain(better, worse):
    """Difference of two mean test log densities on the same points, and its standard error, nats a point."""
    return mean_and_error(scores[better] - scores[worse])


steps = [
    ("deep GP", "GP"),
    ("LV-GP, K = 1", "deep GP"),
    ("LV-GP, K = 10", "LV-GP, K = 1"),
    ("LV-DGP, K = 10", "LV-GP, K = 10"),
]
for better, worse in steps:
    print("{} above {}: {:.4f} +- {:.4f} nats".format(better, worse, *gain(better, worse)))
assert abs(gain("deep GP", "GP")[0]) < 0.05
for better, worse in steps[1:] if not SMALL else steps[1:2]:
    difference, error = gain(better, worse)
    assert difference > 2 * error
assert all(values.mean() < exact.mean() for values in scores.values())
assert inside["LV-DGP, K = 10"] > inside["GP"]
