# %% [markdown]
# # Mixture of normals: clusters and their number
#
# Your rows come from a few groups, and you do not know which row belongs to which. A mixture of
# normals finds the groups, their centres, and the probability of each label. `MeanField()` fits it
# without a GP, because all its densities are conjugate.
#
# The truth is three clusters with weights 0.5, 0.3 and 0.2. Six components are offered. A small
# concentration of the Dirichlet prior empties those that the data do not need. The site `z` has one
# discrete label per row, so samplers such as NUTS cannot draw it.
# [Models without a GP](../without-gp.md) explains the method.

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
weights, centres = np.array([0.5, 0.3, 0.2]), np.array([[-2.0, 0.0], [2.0, 0.0], [0.0, 2.5]])
label = rng.choice(3, 200, p=weights)
points = centres[label] + 0.6 * rng.normal(size=(200, 2))


def mixture(X, num_components=6):
    N, D = X.shape
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(num_components, 0.01)))
    with numpyro.plate("components", num_components):
        precision = numpyro.sample("precision", dist.Wishart(D, rate_matrix=jnp.eye(D)))
        prior = dist.MultivariateNormal(jnp.zeros(D), precision_matrix=0.05 * precision)
        mean = numpyro.sample("mean", prior)
    with numpyro.plate("data", N):
        z = numpyro.sample("z", dist.Categorical(weights))
        rows = dist.MultivariateNormal(mean[z], precision_matrix=precision[z])
        numpyro.sample("x", rows, obs=X)


fit = pg.fit(mixture, pg.MeanField(restarts=10), 0, points)
share, mean = np.asarray(fit.sites["weights"].mean), np.asarray(fit.sites["mean"].mean)
probs = np.asarray(fit.sites["z"].probs)
used = np.flatnonzero(share > 0.01)
print("factors:", fit.factors)
for k in used:
    print(f"component {k}: weight {share[k]:.2f}, centre {mean[k].round(2)}")

# %% [markdown]
# The first line lists the factors, which are independent of each other in the approximation. Each
# other line is a component with more than 1 % of the weight. The numbers of the components have no
# meaning, because they may exchange their places. Compare the weights and centres with the truth.

# %%
found = probs.argmax(1)
certainty = probs.max(1)
for colour, k in enumerate(used):
    mine = found == k
    plt.scatter(*points[mine].T, s=12 + 40 * (1.0 - certainty[mine]), c=f"C{colour}", alpha=0.6)
    plt.plot(*mean[k], "*", ms=16, mfc=f"C{colour}", mec="k")
plt.plot([], [], "*", ms=12, mfc="w", mec="k", label="found centres")
plt.plot(*centres.T, "k+", ms=14, mew=2, label="true centres")
plt.gca().set(title="Three clusters out of six components", xlabel="x1", ylabel="x2")
plt.legend()
plt.show()

# %%
# Match each true cluster with its nearest component, then compare centres, weights and labels.
nearest = np.array([used[np.argmin(np.abs(mean[used] - c).sum(1))] for c in centres])
right = np.mean(found == nearest[label])
print(f"{right:.1%} of the rows have the right label")
assert len(used) == 3 and len(set(nearest)) == 3 and right > 0.95
assert np.abs(mean[nearest] - centres).max() < 0.3
assert np.abs(share[nearest] - np.bincount(label) / 200).max() < 0.03
