# %% [markdown]
# # Write your own observation distribution
#
# A scale shows whole numbers. A reading says only that the value is within half a unit of it. You write this as a subclass of NumPyro's
# `Distribution` with a `log_prob`, and every method takes it. For predictions of y, add `mean`, `variance` and `sample`.
#
# Keep everything that `log_prob` uses as attributes of the instance, as `__init__` does here.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import ndtr
from scipy.stats import multivariate_normal

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = np.linspace(0.0, 10.0, 40)
y = np.round(1.2 * np.sin(x) + 0.2 * rng.normal(size=40))


class Rounded(dist.Distribution):
    """A normal, rounded to whole numbers."""

    support = dist.constraints.real
    arg_constraints = {"loc": dist.constraints.real, "scale": dist.constraints.positive}

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale
        super().__init__(batch_shape=jnp.shape(loc))

    def sample(self, key, sample_shape=()):
        return jnp.round(dist.Normal(self.loc, self.scale).sample(key, sample_shape))

    def log_prob(self, value):
        low = (jnp.abs(value - self.loc) - 0.5) / self.scale  # the nearer edge: no tail cancels
        return jnp.log(ndtr(-low) - ndtr(-low - 1.0 / self.scale))


def scale(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", Rounded(f, 0.2), obs=y)


methods = {"Laplace": pg.Laplace(), "EP": pg.EP(), "VI": pg.VI()}
fits = {name: pg.fit(scale, method, 0, x, y=y) for name, method in methods.items()}

# %%
new = np.linspace(0.0, 10.0, 120)
for (name, fit), style in zip(fits.items(), ("-", "--", ":"), strict=True):
    plt.plot(new, fit.posterior(new).mean, style, label=name)
plt.plot(new, 1.2 * np.sin(new), c="0.5", lw=0.8, label="truth")
plt.plot(x, y, "k.", label="as shown")
plt.gca().set(
    title="Rounded readings determine the curve between whole numbers", xlabel="x", ylabel="value"
)
plt.legend()
plt.show()

# %%
# What is seen is a box, and f + noise is Gaussian: the evidence is the probability of the box.
C = np.asarray(pg.kernels.RBF(1.0, 1.5)(x, x)) + 0.2**2 * np.eye(40)
box = multivariate_normal(np.zeros(40), C, maxpts=100_000, abseps=0.0, releps=0.01, seed=0)
truth = np.log(box.cdf(y + 0.5, lower_limit=y - 0.5))
found = {name: round(fit.log_evidence, 3) for name, fit in fits.items()}
print(f"log evidence {found}, of the box {truth:.3f}")
assert abs(found["EP"] - truth) < 0.1 and found["VI"] < truth + 0.03
