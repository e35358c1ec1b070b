# %% [markdown]
# # Map of counts
#
# You counted events in the cells of a map, and the cells contain different numbers of people. The expected count is the number of people
# times the exponential of a smooth function of two coordinates. A cell that nobody visited is a new row, so the same call predicts it.

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
side = np.arange(14.0)
cells = np.stack([a.ravel() for a in np.meshgrid(side, side)], 1)
truth = 0.8 * np.sin(cells[:, 0] / 3.0) * np.cos(cells[:, 1] / 4.0) - 1.0  # log events per person
people = rng.uniform(5.0, 60.0, len(cells))
visited = rng.uniform(size=len(cells)) < 0.7
S, exposure = cells[visited], people[visited]
y = rng.poisson(exposure * np.exp(truth[visited]))


def counts(S, exposure, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern52(variance, lengthscale), S))
    with numpyro.plate("cells", S.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(level + f)), obs=y)


fit = pg.fit(counts, pg.Laplace(), 0, S, exposure, y=y)
found = fit.predict(cells, np.ones(len(cells)), quantiles=(0.05, 0.95))  # one person: rates

# %%
raw = np.full(len(cells), np.nan)
raw[visited] = y / exposure
panels = {
    "counted, where anyone was": raw,
    "expected everywhere": found.mean,
    "truth": np.exp(truth),
}
figure, axes = plt.subplots(1, 3, figsize=(11, 4.0), sharey=True, layout="constrained")
for ax, (title, rate) in zip(axes, panels.items(), strict=True):
    image = ax.imshow(np.asarray(rate).reshape(14, 14), origin="lower", vmin=0.0, vmax=1.0)
    ax.set(title=title, xlabel="east")
axes[0].set_ylabel("north")
figure.colorbar(image, ax=axes, label="events per person")
plt.show()

# %% [markdown]
# At the mode, the derivative of the log posterior with respect to the level is zero. It is the number of events, less the expected number, less
# level / 9 from the prior. The last cell checks this, and counts the true log rates that are inside their 90 % band.

# %%
rate = exposure * np.exp(np.asarray(fit.latent["eta"].mean))
score = y.sum() - rate.sum() - float(fit.sites["level"].mean) / 3.0**2
inside = np.mean((truth > found.f_quantiles[0]) & (truth < found.f_quantiles[1]))
print(f"score of the level at the mode {score:.1e}; {inside:.0%} of true rates in their 90 % band")
assert abs(score) < 1e-3 and inside > 0.75
