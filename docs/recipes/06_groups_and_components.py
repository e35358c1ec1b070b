# %% [markdown]
# # Group effects, fixed effects and a smooth function
#
# Counts depend on a smooth function of time, on a covariate, and on the group that a row belongs to. Add the three in the logarithm of the
# rate. `fit` integrates all Gaussian parts of such a sum together, and sets the spread of the groups to its most probable value.
#
# `fit.sites` has the posterior of each effect. `fit.components` has what each part adds at new rows, and `plot_components` draws it.

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
N, G = 150, 8
x, w, group = rng.uniform(0.0, 6.0, N), rng.normal(size=(N, 1)), rng.integers(0, G, N)
effects = 0.5 * rng.normal(size=G)
y = rng.poisson(np.exp(1.0 + np.sin(x) + 0.4 * w[:, 0] + effects[group]))


def mixed(X, W, group, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([W.shape[1]]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("groups", G):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + f + W @ beta + u[group])), obs=y)


fit = pg.fit(mixed, pg.Laplace(), 0, x, w, group, y=y)
print("beta", fit.sites["beta"].mean, "truth 0.4")
print("spread", float(fit.hyper["spread"]), "truth 0.5")

# %%
figure = pg.plot_components(
    fit,
    x,
    w,
    group,
    along={"f": x, "beta": w[:, 0], "u": group},
    labels={"f": "x", "beta": "w", "u": "group"},
)
plt.show()

# %%
z = (np.asarray(fit.sites["u"].mean) - effects) / np.sqrt(np.asarray(fit.sites["u"].variance))
print("group effects: largest distance to the truth in posterior sds", np.abs(z).max().round(2))
assert np.abs(z).max() < 4.0
