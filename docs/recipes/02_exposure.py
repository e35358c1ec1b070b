# %% [markdown]
# # Rates with an exposure or an offset
#
# You counted events, but some rows had more time, area or people than others. The exposure of a row multiplies its rate. Make it an
# argument of the model, with one value per row.
#
# At prediction, pass the exposure again for the new rows. With an exposure of one, the predictions are rates.

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
x = np.sort(rng.uniform(0.0, 10.0, 100))
exposure = rng.uniform(1.0, 50.0, 100)
y = rng.poisson(exposure * np.exp(-1.0 + np.cos(x)))


def rates(X, exposure, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Matern52(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(level + f)), obs=y)


fit = pg.fit(rates, pg.EP(), 0, x, exposure, y=y)
new = np.linspace(0.0, 10.0, 60)
eta = fit.predict(new, np.ones(60), quantiles=(0.025, 0.975))  # the predictor: the log of the rate

# %%
plt.fill_between(new, *np.exp(eta.f_quantiles), alpha=0.2, label="95 % of its posterior")
plt.plot(new, np.exp(np.asarray(eta.f_mean)), label="rate")
plt.plot(new, np.exp(-1.0 + np.cos(new)), "k--", label="truth")
plt.scatter(x, y / exposure, s=exposure, c="grey", alpha=0.4, label="count / exposure")
plt.gca().set(
    title="A rate from counts of different exposure (area of the dots)",
    xlabel="x",
    ylabel="events per unit",
)
plt.legend()
plt.show()

# %%
truth = -1.0 + np.cos(new)
inside = float(np.mean((truth > eta.f_quantiles[0]) & (truth < eta.f_quantiles[1])))
print(f"the true rate is inside its band at {inside:.0%} of the points")
assert inside > 0.7
