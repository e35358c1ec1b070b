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
# # Sparse GPs: how many inducing variables, and which
#
# **Claim.** A few well-chosen inducing variables give the full posterior. For one declared model, against the exact
# evidence,
#
# 1. the bound never exceeds the evidence, and for a smooth kernel the gap falls to less than 0.1 nats with a small
#    fraction of N; so the posterior mean and the 95% band become those of the exact fit;
# 2. it matters which points: where the inputs are unevenly spread, greedily chosen ones need far fewer than a random subset,
#    and training them lowers the gap further;
# 3. features close the gap as fast as theory says: that of Mercer features of an RBF falls geometrically, at the
#    rate of the eigenvalues left out; that of Fourier features of a Matern 3/2 about as the third power of their number;
# 4. a classifier, whose evidence has no closed form, behaves the same, and its class probabilities become those of VI
#    with all N points.
#
# The last cell asserts all four.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
SMALL = os.environ.get("PPL_GP_NOTEBOOK_SIZE") == "small"
NUM_REGRESSION, NUM_MOONS = (150, 120) if SMALL else (400, 400)
SIZES = [8, 24] if SMALL else [6, 12, 20, 28, 36]  # M for the RBF
TRAINED_SIZES = [] if SMALL else [12, 20, 28]
ROUGH_SIZES = [33] if SMALL else [33, 65, 129]  # M for the Matern
MOON_SIZES = [16] if SMALL else [8, 16, 32]
SEEDS = 2 if SMALL else 5  # draws of a random subset

# %% [markdown]
# ## The model, for everything below
#
# One function. Which kernel and which observations are its own arguments; inducing variables are not.


# %%
def model(X, y=None, kernel=pg.kernels.RBF, binary=False):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(kernel(variance, lengthscale), X))
    scale = None if binary else numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f) if binary else dist.Normal(f, scale), obs=y)


# %% [markdown]
# ## Part 1: a line, where the exact answer is known
#
# Inputs from a normal distribution, a function drawn from the prior, Gaussian noise. The hyperparameters are held at the
# values that drew the data, so that the inducing variables are all that differs between fits.

# %%
true = {"lengthscale": 0.5, "variance": 1.0, "scale": 0.2}
rng = np.random.default_rng(1)
SPREAD = 2.0  # standard deviation of the inputs
X = np.sort(SPREAD * rng.standard_normal(NUM_REGRESSION))[:, None]


def draw_and_evidence(kernel):
    """(y, exact log evidence): a data set drawn from the model with this kernel."""
    K = np.asarray(kernel(true["variance"], true["lengthscale"])(jnp.asarray(X), jnp.asarray(X)))
    covariance = K + true["scale"] ** 2 * np.eye(len(X))
    y = np.linalg.cholesky(covariance) @ np.random.default_rng(2).standard_normal(len(X))
    return y, stats.multivariate_normal(cov=covariance).logpdf(y)


y, evidence = draw_and_evidence(pg.kernels.RBF)
exact = pg.fit(model, pg.VI(hyper=pg.Fixed(true)), 0, X, y=y)  # exact for Gaussian noise
print(f"exact evidence {evidence:.4f} nats, VI with all {len(X)} points {exact.log_evidence:.4f} nats")

# %% [markdown]
# Every sparse fit is the same call. Gaussian noise allows `CollapsedSVGP()`: q(u) at its optimum, in closed form.


# %%
def sparse(inducing, num, key=0, kernel=pg.kernels.RBF, y=y, train=False):
    method = pg.CollapsedSVGP(
        inducing=inducing,
        num_inducing=num,
        train_inducing=train,
        hyper=pg.Fixed(true),
        max_steps=100,
    )
    return pg.fit(model, method, key, X, y=y, kernel=kernel)


edge = float(np.abs(X).max()) + 1.5  # three length scales beyond the data
fits = {}
for M in SIZES:
    for rule in ("greedy", "kmeans"):
        fits[rule, M] = [sparse(rule, M)]
    fits["subset", M] = [sparse("subset", M, key) for key in range(SEEDS)]
    if M in TRAINED_SIZES:
        fits["trained", M] = [sparse(fits["greedy", M][0].inducing.Z, M, train=True)]
    fits["Mercer", M] = [sparse(pg.features.MercerFeatures(M, mean=0.0, scale=SPREAD), M)]
    if not SMALL:
        fits["Laplacian", M] = [sparse(pg.features.LaplacianFeatures(M, low=-edge, high=edge), M)]
gaps = {k: np.array([evidence - fit.log_evidence for fit in v]) for k, v in fits.items()}
rules = ("subset", "kmeans", "greedy", "trained", "Mercer", "Laplacian")
print("  M  " + "".join(f"{rule:>12}" for rule in rules) + "   evidence minus bound, nats")
for M in SIZES:
    values = [f"{np.median(gaps[rule, M]):12.5f}" if (rule, M) in gaps else f"{'':12}" for rule in rules]
    print(f"{M:3d}  " + "".join(values))

# %% [markdown]
# ### What a too small M looks like
#
# Points chosen greedily. Where there are too few, the mean is too smooth, or returns to zero between them, and the band
# widens to the prior's: the sparse posterior says that it does not know.

# %%
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
grid = np.linspace(-5.0, 5.0, 300)[:, None]


def band(fit):
    """(mean, half width of the 95% band of f) on the grid."""
    f = fit.posterior(grid)
    return np.asarray(f.mean), 1.96 * np.sqrt(np.asarray(f.variance))


shown = SIZES[:2] if SMALL else [SIZES[0], SIZES[2], SIZES[4]]
fig, axes = plt.subplots(len(shown), 1, figsize=(9, 2.3 * len(shown)), sharex=True, sharey=True, layout="constrained")
exact_mean, exact_half = band(exact)
for ax, M in zip(axes, shown, strict=True):
    mean, half = band(fits["greedy", M][0])
    ax.plot(X[:, 0], y, ".", color="0.7", markersize=3, label="data")
    ax.fill_between(grid[:, 0], mean - half, mean + half, color=SKY, alpha=0.4, label="sparse, 95% band of f")
    ax.plot(grid[:, 0], mean, color=BLUE, label="sparse, mean")
    ax.plot(grid[:, 0], exact_mean, color="black", linewidth=0.9, label="exact, mean")
    for sign in (-1, 1):
        label = "exact, 95% band of f" if sign == 1 else None
        ax.plot(grid[:, 0], exact_mean + sign * exact_half, ":", color="black", linewidth=0.9, label=label)
    Z = np.asarray(fits["greedy", M][0].inducing.Z)[:, 0]
    ax.plot(
        Z,
        np.full(M, -3.6),
        "|",
        color=RED,
        markersize=9,
        markeredgewidth=1.5,
        label="inducing points\n(some lie outside)",
    )
    gap = gaps["greedy", M][0]
    ax.set(title=f"M = {M}: {gap:.{0 if gap > 10 else 3}f} nats below the evidence", ylabel="y and f (no unit)")
    ax.set(ylim=(-4.0, 4.0), xlim=(-5.0, 5.0))
axes[-1].set_xlabel("x (no unit; length scale 0.5)")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
plt.show()

# %% [markdown]
# ### How fast the bound closes, and with which inducing variables
#
# Left, an RBF. Under the Gaussian measure of these inputs the kernel's eigenvalues are known and fall as $B^m$ (Rasmussen
# and Williams, eq. 4.39). What M Mercer features leave unexplained is the sum of the rest, and the gap is about
# N / (2 scale²) times it: the dashed line, computed before any fit. Points chosen by k-means are the better ones while
# they are too few, greedy ones as soon as they suffice; in the end those beat the features, as they know where the finite
# data are. A random subset wastes its points where the data are dense.
#
# Right, a Matern 3/2, whose spectrum falls as the fourth power of the frequency, so that the part beyond the M-th
# frequency falls as $M^{-3}$. The bound closes slowly for all: a rough function needs many numbers.
#
# `LaplacianFeatures` are a reduced-rank kernel of their own, so their number is no bound on this model's evidence
# (`features.LaplacianFeatures` explains it); the picture shows the absolute difference.

# %%
rough = pg.kernels.Matern32
y_rough, evidence_rough = draw_and_evidence(rough)
rough_gaps = {}
for M in ROUGH_SIZES:
    choices = {
        "greedy": "greedy",
        "Fourier": pg.features.FourierFeatures((M - 1) // 2, low=-edge, high=edge),
        "Laplacian": pg.features.LaplacianFeatures(M, low=-edge, high=edge),
    }
    for name, inducing in choices.items():
        if not SMALL or name == "Fourier":
            fit = sparse(inducing, M, kernel=rough, y=y_rough)
            rough_gaps[name, M] = evidence_rough - fit.log_evidence


def mercer_theory(M):
    """N / (2 scale^2) times the sum of the eigenvalues left out, nats."""
    a, b = 0.25 / SPREAD**2, 0.5 / true["lengthscale"] ** 2
    c = np.sqrt(a**2 + 2 * a * b)
    first, ratio = np.sqrt(2 * a / (a + b + c)), b / (a + b + c)
    return 0.5 * len(X) / true["scale"] ** 2 * true["variance"] * first * ratio**M / (1 - ratio)


STYLE = {
    "subset": ("random subset", "x", "0.45"),
    "kmeans": ("k-means", "v", ORANGE),
    "greedy": ("greedy", "s", BLUE),
    "trained": ("trained", "*", RED),
    "Mercer": ("Mercer features", "o", GREEN),
    "Laplacian": ("Laplacian features (not a bound)", "d", PURPLE),
    "Fourier": ("Fourier features", "o", GREEN),
}
fig, axes = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
for rule in rules:
    label, marker, color = STYLE[rule]
    sizes = [M for M in SIZES if (rule, M) in gaps]
    values = [np.median(np.abs(gaps[rule, M])) for M in sizes]
    axes[0].semilogy(sizes, values, marker=marker, color=color, linewidth=1.2, markersize=6, label=label)
axes[0].semilogy(SIZES, [mercer_theory(M) for M in SIZES], "--", color="black", linewidth=1, label="theory, Mercer")
axes[0].axhline(0.1, color="0.8", linewidth=0.8, zorder=0)
axes[0].set(xlabel="number of inducing variables M", ylabel="evidence minus bound (nats)", title=f"RBF, N = {len(X)}")
for name in ("greedy", "Fourier", "Laplacian"):
    sizes = [M for M in ROUGH_SIZES if (name, M) in rough_gaps]
    label, marker, color = STYLE[name]
    values = [abs(rough_gaps[name, M]) for M in sizes]
    axes[1].loglog(sizes, values, marker=marker, color=color, linewidth=1.2, label=label)
slope = [rough_gaps["Fourier", ROUGH_SIZES[0]] * (M / ROUGH_SIZES[0]) ** -3.0 for M in ROUGH_SIZES]
axes[1].loglog(ROUGH_SIZES, slope, "--", color="black", linewidth=1, label="theory, Fourier: slope -3")
axes[1].set(
    xlabel="number of inducing variables M", ylabel="evidence minus bound (nats)", title=f"Matern 3/2, N = {len(X)}"
)
axes[1].set_xticks(ROUGH_SIZES, [str(M) for M in ROUGH_SIZES])
axes[1].set_xticks([], minor=True)
for ax in axes:
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
plt.show()

# %% [markdown]
# ## Part 2: a classifier of two moons
#
# The same function with `binary=True`. The evidence has no closed form now, so full VI is the reference: it has the
# same bound, with all N points as inducing points. Laplace's method chooses the hyperparameters once, for all.


# %%
def moons(rng, num, noise=0.25):
    """(X, y): two interleaved half circles of radius one, with normal noise."""
    y = np.arange(num) % 2
    angle = np.pi * rng.random(num)
    X = np.stack([np.cos(angle), np.sin(angle)], 1)
    X[y == 1] = np.array([1.0, 0.5]) - X[y == 1]
    return X + noise * rng.standard_normal((num, 2)), y


X_moons, y_moons = moons(np.random.default_rng(4), NUM_MOONS)
hyper = {"lengthscale": 0.9, "variance": 20.0}
if not SMALL:
    hyper = pg.fit(model, pg.Laplace(), 0, X_moons, y=y_moons, binary=True).hyper
full = pg.fit(model, pg.VI(hyper=pg.Fixed(hyper)), 0, X_moons, y=y_moons, binary=True)
print({k: round(float(v), 3) for k, v in hyper.items()}, f"VI: {full.log_evidence:.4f} nats")


def sparse_moons(inducing, num, key=0, train=False):
    method = pg.SVGP(
        inducing=inducing, num_inducing=num, train_inducing=train, hyper=pg.Fixed(hyper), max_steps=300 if train else 60
    )
    return pg.fit(model, method, key, X_moons, y=y_moons, binary=True)


moon_fits = {}
for M in MOON_SIZES:
    for rule in ("subset", "kmeans", "greedy"):
        moon_fits[rule, M] = sparse_moons(rule, M)
    moon_fits["trained", M] = sparse_moons(moon_fits["kmeans", M].inducing.Z, M, train=True)
moon_gaps = {k: full.log_evidence - fit.log_evidence for k, fit in moon_fits.items()}
for M in MOON_SIZES:
    print(f"M = {M:3d}: " + ", ".join(f"{r} {moon_gaps[r, M]:.4f}" for r in rules[:4]) + " nats below full VI")

# %% [markdown]
# ### Where each rule puts its points
#
# Greedy takes the point about which least is known, whatever its class, so it starts at the rim of the data and fills in
# evenly. K-means puts points in the middle of the data. A random subset may have points that say the same thing twice, or
# luck. None of the three looks at y. Trained points start from k-means and move to where the boundary needs them; with
# eight points no rule comes near them.

# %%
width = 20 if SMALL else 60
axis_0, axis_1 = np.linspace(-1.9, 2.9, width), np.linspace(-1.4, 1.9, width)
X_map = np.stack(np.meshgrid(axis_0, axis_1), -1).reshape(-1, 2)


def on_map(fit):
    return np.asarray(fit.predict(X_map).probs).reshape(width, width)


full_map = on_map(full)
M = MOON_SIZES[0] if SMALL else 8
fig, axes = plt.subplots(2, 2, figsize=(10, 7.4), sharex=True, sharey=True, layout="constrained")
for ax, rule in zip(axes.flat, ("subset", "kmeans", "greedy", "trained"), strict=True):
    for label, marker, color in ((0, "o", SKY), (1, "^", ORANGE)):
        at = X_moons[y_moons == label]
        ax.plot(*at.T, marker, color=color, markersize=3, alpha=0.7, linestyle="", label=f"class {label}")
    ax.contour(axis_0, axis_1, full_map, levels=[0.5], colors="black", linestyles="--", linewidths=1.2)
    ax.contour(axis_0, axis_1, on_map(moon_fits[rule, M]), levels=[0.5], colors=RED, linewidths=1.5)
    ax.plot([], [], "--", color="black", label=f"boundary, all {NUM_MOONS} points")
    ax.plot([], [], color=RED, label=f"boundary, {M} points")
    Z = np.asarray(moon_fits[rule, M].inducing.Z)
    ax.plot(*Z.T, "P", color=RED, markersize=10, markeredgecolor="white", linestyle="", label="inducing points")
    ax.set(title=f"{STYLE[rule][0]}: {moon_gaps[rule, M]:.2f} nats below full VI")
for ax in axes[1]:
    ax.set_xlabel("$x_1$ (no unit)")
for ax in axes[:, 0]:
    ax.set_ylabel("$x_2$ (no unit)")
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
plt.show()

# %% [markdown]
# ### How many

# %%
worst = {k: np.abs(on_map(fit) - full_map).max() for k, fit in moon_fits.items()}
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for rule in rules[:4]:
    label, marker, color = STYLE[rule]
    axes[0].loglog(MOON_SIZES, [moon_gaps[rule, M] for M in MOON_SIZES], marker=marker, color=color, label=label)
    axes[1].loglog(MOON_SIZES, [worst[rule, M] for M in MOON_SIZES], marker=marker, color=color, label=label)
axes[0].set(ylabel="bound of full VI minus bound (nats)", title=f"Evidence, two moons, N = {NUM_MOONS}")
axes[1].set(ylabel="largest |difference| of p(y = 1 | x)", title="Class probability, over the map")
for ax in axes:
    ax.set_xlabel("number of inducing points M")
    ax.set_xticks(MOON_SIZES, [str(M) for M in MOON_SIZES])
    ax.set_xticks([], minor=True)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
plt.show()

# %% [markdown]
# ## The claim, tested

# %%
strict = {k: g for k, g in gaps.items() if k[0] != "Laplacian"}
most = SIZES[-1]
mean, half = band(fits["greedy", most][0])
off = max(np.abs(mean - exact_mean).max(), np.abs(half - exact_half).max())
print(
    f"M = {most} of N = {len(X)}: gap {gaps['greedy', most][0]:.2g} nats; mean and half band off by at most {off:.2g}"
)

# 1. A bound, which closes; the posterior with it. (A small run stops at fewer points.)
assert abs(exact.log_evidence - evidence) < 1e-3
assert min(g.min() for g in strict.values()) > -1e-3
assert gaps["greedy", most][0] < (2.0 if SMALL else 0.1)
assert off < (0.2 if SMALL else 0.02)

# 2. Which points: at the largest M a random subset misses a hundred times as much; training halves the gap or better.
assert gaps["subset", most].min() > 100.0 * gaps["greedy", most][0]
assert all(gaps["trained", M][0] < 0.5 * gaps["greedy", M][0] for M in TRAINED_SIZES)

# 3. The rates of features.
first, last = SIZES[-2:]
ratio = (gaps["Mercer", last][0] / gaps["Mercer", first][0]) ** (1.0 / (last - first))
theory_ratio = (mercer_theory(last) / mercer_theory(first)) ** (1.0 / (last - first))
print(f"Mercer features: each one more multiplies the gap by {ratio:.3f}, theory {theory_ratio:.3f}")
assert 0.85 * theory_ratio < ratio < 1.02 * theory_ratio  # finite data lack the tails of the measure: somewhat faster
assert all(gaps["Mercer", M][0] < 2.0 * mercer_theory(M) for M in SIZES)
if not SMALL:
    slope = np.log(rough_gaps["Fourier", 129] / rough_gaps["Fourier", 33]) / np.log(129 / 33)
    print(f"Fourier features: the gap falls as M to the power {slope:.2f}, theory -3")
    assert -3.4 < slope < -2.5

# 4. The classifier.
assert min(moon_gaps.values()) > -1e-3
for M in MOON_SIZES:
    assert moon_gaps["trained", M] < 0.6 * min(moon_gaps[rule, M] for rule in ("subset", "kmeans", "greedy"))
assert moon_gaps["trained", MOON_SIZES[-1]] < 0.2
last = moon_fits["trained", MOON_SIZES[-1]]
difference = np.abs(on_map(last) - full_map)
print(
    f"{MOON_SIZES[-1]} of {NUM_MOONS} points: class probabilities differ from full VI's by {difference.mean():.4f} on average, "
    f"{difference.max():.4f} at most"
)
assert difference.mean() < 0.01 and difference.max() < 0.1
