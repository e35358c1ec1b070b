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
# # Laplace, EP, VI and the truth: where the evidence goes wrong
#
# **Claim.** For a GP classifier the three Gaussian approximations agree where the latent function is small, and part
# ways as its standard deviation grows and its length scale shrinks:
#
# 1. Laplace's evidence lies below EP's everywhere on the square of hyperparameters, and below the truth wherever the
#    truth can be told from it;
# 2. VI's evidence is a lower bound: never above the truth. EP's lies between VI's and the truth, the closest of the
#    three;
# 3. the same shows in the latents. Laplace puts its mean at the mode, too near zero, while EP's and VI's means are
#    right. All three are too sure of themselves: their standard deviations are too small, EP's the least.
#
# The truth is importance-sampled evidence and long NUTS, never another approximation. The last cell asserts all
# three.

# %%
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

import ppl_gp as pg
from ppl_gp.results.compare.truth import importance_sampling

jax.config.update("jax_enable_x64", True)
numpyro.set_host_device_count(2)
SMALL = os.environ.get("PPL_GP_NOTEBOOK_SIZE") == "small"
CELLS = 3 if SMALL else 13  # of the grid, each way
TRUTH_EVERY = 2 if SMALL else 4
DRAWS = 4_000 if SMALL else 20_000
CHAIN = dict(num_warmup=300, num_samples=500) if SMALL else dict(num_warmup=1000, num_samples=4000)

# %% [markdown]
# ## One model, one small data set
#
# Forty points on a line whose class follows a wave. The model has two hyperparameters and no trace of any method.


# %%
def classifier(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


rng = np.random.default_rng(0)
X = np.sort(rng.uniform(-4.0, 4.0, 40))[:, None]
y = rng.binomial(1, 1.0 / (1.0 + np.exp(-4.0 * np.sin(1.2 * X[:, 0]))))

fig, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
grid = np.linspace(-4, 4, 200)
ax.plot(grid, 1.0 / (1.0 + np.exp(-4.0 * np.sin(1.2 * grid))), color="0.5", label="p(y = 1 | x) that drew the data")
ax.plot(X[:, 0], y, "|", color="black", markersize=12, label="data")
ax.set(xlabel="x", ylabel="y", title="Forty binary observations", yticks=[0, 1])
fig.legend(loc="outside right center", fontsize=8)
plt.show()

# %% [markdown]
# ## The evidence as a surface
#
# `pg.read` turns the model into a prior and a log-likelihood at given hyperparameters, `pg.log_evidence` applies a
# method. Both are plain JAX, so `lax.map` evaluates the whole grid in one compiled call.


# %%
@eqx.filter_jit
def surface(method, X, y, log_lengthscales, log_scales):
    """(log evidence, status code) on the grid, nats: rows are length scales, columns standard deviations of f."""

    def cell(h):
        hyper = {"lengthscale": jnp.exp(h[0]), "variance": jnp.exp(2.0 * h[1])}
        factors = pg.read(classifier, X, y=y, hyper=hyper)
        value, solution = pg.log_evidence(method, factors)
        return value, solution.code

    cells = jnp.stack(jnp.meshgrid(log_lengthscales, log_scales, indexing="ij"), -1)
    return jax.tree.map(lambda v: v.reshape(cells.shape[:2]), jax.lax.map(cell, cells.reshape(-1, 2)))


log_lengthscales, log_scales = jnp.linspace(-1.5, 2.0, CELLS), jnp.linspace(-1.0, 2.5, CELLS)
methods = {"Laplace": pg.Laplace(), "EP": pg.EP(), "VI": pg.VI()}
evidence = {}
for name, method in methods.items():
    values, codes = surface(method, jnp.asarray(X), jnp.asarray(y), log_lengthscales, log_scales)
    assert not np.any(codes), f"{name} did not converge in every cell"
    evidence[name] = np.asarray(values)

# %%
top = max(v.max() for v in evidence.values())
levels = top - np.array([20, 15, 12, 10, 8, 6, 5, 4, 3, 2, 1, 0.5, 0.2])
fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharex=True, sharey=True, layout="constrained")
for ax, (name, values) in zip(axes, evidence.items(), strict=True):
    filled = ax.contourf(log_lengthscales, log_scales, values.T, levels=levels, cmap="viridis", extend="both")
    best = np.unravel_index(values.argmax(), values.shape)
    ax.plot(log_lengthscales[best[0]], log_scales[best[1]], "r*", markersize=12)
    ax.set(title=f"{name}: best cell {values.max():.2f} nats", xlabel="log lengthscale")
axes[0].set_ylabel("log standard deviation of f")
fig.colorbar(filled, ax=axes, label="log evidence (nats)")
plt.show()

# %% [markdown]
# ## The truth at a few cells
#
# Importance sampling from a widened copy of EP's posterior. A cell whose Pareto k-hat exceeds 0.7 has no truth and is
# left out.

# %%
truths = {}
for i in range(0, CELLS, TRUTH_EVERY):
    for j in range(0, CELLS, TRUTH_EVERY):
        at = {"lengthscale": jnp.exp(log_lengthscales[i]), "variance": jnp.exp(2.0 * log_scales[j])}
        fit = pg.fit(classifier, pg.EP(hyper=pg.Fixed(at)), 0, X, y=y)
        truth = importance_sampling(fit, rng_key=1, num_samples=DRAWS)
        if truth.log_evidence is not None:
            truths[i, j] = truth

print("log ell  log sd      truth +- s.e.     " + "  ".join(f"{name:>8}" for name in methods) + "  minus truth, nats")
for (i, j), truth in truths.items():
    errors = "  ".join(f"{evidence[name][i, j] - truth.log_evidence:8.3f}" for name in methods)
    here = f"{log_lengthscales[i]:7.2f} {log_scales[j]:7.2f}"
    print(f"{here} {truth.log_evidence:10.3f} +- {truth.standard_error:.3f}     {errors}")

# %% [markdown]
# ## Where Laplace underestimates
#
# The difference of surfaces against EP, with the exact errors written where the truth is known. Laplace and VI go
# wrong in different places: Laplace already where f is moderate, because the posterior of a logit is skewed away from
# its mode; VI only where f is large, because one Gaussian must then fit a posterior that is nearly a truncated one.

# %%
fig, axes = plt.subplots(1, 2, figsize=(12, 4.4), sharex=True, sharey=True, layout="constrained")
for ax, name in zip(axes, ("Laplace", "VI"), strict=True):
    gap = evidence[name] - evidence["EP"]
    filled = ax.contourf(
        log_lengthscales,
        log_scales,
        gap.T,
        levels=[-8, -4, -2, -1, -0.5, -0.2, -0.1, -0.05, 0.0],
        norm=plt.matplotlib.colors.SymLogNorm(0.05, vmin=-8, vmax=0),
        cmap="magma",
    )
    for (i, j), truth in truths.items():
        error = evidence[name][i, j] - truth.log_evidence
        ax.annotate(
            f"{error:.2f}",
            (log_lengthscales[i], log_scales[j]),
            ha="center",
            va="center",
            fontsize=7.5,
            bbox=dict(boxstyle="round,pad=0.15", facecolor="white", edgecolor="none", alpha=0.85),
        )
    ax.set(title=f"{name} minus EP (colour), minus the truth (numbers)", xlabel="log lengthscale")
    ax.set(xlim=(-1.8, 2.3), ylim=(-1.2, 2.7))  # room for the numbers at the edge
axes[0].set_ylabel("log standard deviation of f")
fig.colorbar(filled, ax=axes, label="difference of log evidence (nats)", format="%g")
plt.show()

# %% [markdown]
# ## The latents
#
# At one setting of the hyperparameters, away from the maximum, where the methods differ. `handlers.condition` fixes
# the hyperparameters of the same model, and NUTS then samples f alone.

# %%
at = {"lengthscale": jnp.exp(-0.5), "variance": jnp.exp(2.0 * 1.5)}
nuts = pg.fit(handlers.condition(classifier, data=at), pg.NUTS(**CHAIN, num_chains=2), 0, X, y=y)
draws = np.asarray(nuts.latent["f"].mean)
reference_mean, reference_sd = draws.mean(0), draws.std(0)
print("NUTS: smallest effective sample size", round(float(nuts.stats["ess"])))

latents = {}
for name, method in methods.items():
    fit = pg.fit(classifier, type(method)(hyper=pg.Fixed(at)), 0, X, y=y)
    latents[name] = np.asarray(fit.latent["f"].mean[0]), np.sqrt(fit.latent["f"].variance[0])

fig, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
for k, (ax, reference, what) in enumerate(
    zip(axes, (reference_mean, reference_sd), ("mean", "standard deviation"), strict=True)
):
    for name, marker in zip(methods, "ovs", strict=True):
        ax.plot(reference, latents[name][k], marker, markersize=5, alpha=0.75, label=name)
    ends = [reference.min(), reference.max()]
    ax.plot(ends, ends, color="black", linewidth=0.8, label="equal to NUTS")
    ax.set(xlabel=f"NUTS: {what} of f", ylabel=f"approximation: {what} of f", title=f"Posterior {what} of each latent")
    ax.legend()
plt.show()

# %% [markdown]
# ## The claim, tested
#
# Margins are four standard errors of the importance-sampled truth.

# %%
assert truths, "no cell had a usable truth"
errors = {name: np.array([evidence[name][c] - t.log_evidence for c, t in truths.items()]) for name in methods}
margin = 4.0 * np.array([t.standard_error for t in truths.values()])

# 1. Laplace: below EP everywhere, below the truth, and the farther the larger f is.
assert np.all(evidence["Laplace"] < evidence["EP"])
assert np.all(errors["Laplace"] < margin)
assert np.all(np.diff((evidence["Laplace"] - evidence["EP"])[0]) < 0)

# 2. VI: a lower bound, below EP; EP closest to the truth of the three.
assert np.all(errors["VI"] < margin)
assert np.all(evidence["VI"] <= evidence["EP"] + 1e-6)
for other in ("Laplace", "VI"):
    assert np.all(np.abs(errors["EP"]) < np.abs(errors[other]) + margin)
    assert np.abs(errors[other]).max() > 2.0 * np.abs(errors["EP"]).max()

# 3. The latents: root-mean-square distance to NUTS.
distance = {
    name: [np.sqrt(np.mean((ours - truth) ** 2)) for ours, truth in zip(q, (reference_mean, reference_sd), strict=True)]
    for name, q in latents.items()
}
assert np.abs(latents["Laplace"][0]).mean() < 0.9 * np.abs(reference_mean).mean()
assert all(3.0 * distance[name][0] < distance["Laplace"][0] for name in ("EP", "VI"))
assert all(sd.mean() < reference_sd.mean() for _, sd in latents.values())
assert all(distance["EP"][1] < distance[other][1] for other in ("Laplace", "VI"))
for name in methods:
    mean, sd = distance[name]
    worst = np.abs(errors[name]).max()
    print(f"{name:8} evidence off by at most {worst:.3f} nats, means by {mean:.3f}, sds by {sd:.3f} (rms)")
