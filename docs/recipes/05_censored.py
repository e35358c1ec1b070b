# %% [markdown]
# # Censored observations
#
# A detector saturates at 1. If a value is larger, you know only that. The likelihood of such a row is the probability of a value
# above 1, and you can write it as a distribution of your own. A flag with one value per row says which rows are saturated.
#
# At prediction the flag is zero, because you want the value itself, not what the detector would show.
#
# Your class must keep every array that `log_prob` uses as an attribute of the instance, such as `self.saturated = saturated`. You need not
# declare it in `arg_constraints`. `fit` raises `ModelError` if `log_prob` takes an array from an enclosing function instead.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = np.linspace(0.0, 10.0, 80)
whole = 1.5 * np.sin(x) + 0.2 * rng.normal(size=80)
saturated = whole > 1.0
y = np.where(saturated, 1.0, whole)


class Saturating(dist.Distribution):
    """A normal of which values above the limit are known to be above it."""

    support = dist.constraints.real
    arg_constraints = {"loc": dist.constraints.real, "scale": dist.constraints.positive}

    def __init__(self, loc, scale, saturated):
        self.loc, self.scale, self.saturated = loc, scale, saturated
        super().__init__(batch_shape=jnp.shape(loc))

    def sample(self, key, sample_shape=()):
        return dist.Normal(self.loc, self.scale).sample(key, sample_shape)

    def log_prob(self, value):
        z = (value - self.loc) / self.scale
        density = -0.5 * z**2 - jnp.log(self.scale) - 0.5 * jnp.log(2 * jnp.pi)
        return jnp.where(self.saturated > 0, log_ndtr(-z), density)

    mean = property(lambda self: self.loc)
    variance = property(lambda self: jnp.broadcast_to(self.scale**2, jnp.shape(self.loc)))


def sensor(X, saturated, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(2.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", Saturating(f, noise, saturated), obs=y)


fit = pg.fit(sensor, pg.EP(), 0, x, saturated.astype(float), y=y)
found = fit.predict(x, np.zeros(80))

# %%
sd = np.sqrt(np.asarray(found.f_variance))
plt.fill_between(x, found.f_mean - 2 * sd, found.f_mean + 2 * sd, alpha=0.2, label="f, ±2 sd")
plt.plot(x, found.f_mean, label="mean of f")
plt.plot(x, 1.5 * np.sin(x), "k--", label="truth")
plt.plot(x[~saturated], y[~saturated], "k.", label="measured")
plt.plot(x[saturated], y[saturated], "r^", label="saturated")
plt.gca().set(title="Peaks that the detector cut off", xlabel="x", ylabel="signal")
plt.legend()
plt.show()

# %%
peak = float(np.asarray(found.f_mean)[saturated].max())
print(f"the highest mean is {peak:.2f}; the detector shows 1, the truth is 1.5")
assert peak > 1.15
