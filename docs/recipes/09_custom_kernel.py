# %% [markdown]
# # Write your own kernel
#
# You need a covariance that the package does not have. Any function of two arrays of inputs that returns their covariance is a kernel. After
# `as_kernel` you can add it to other kernels and multiply it with them. The example is Brownian motion, $k(s, t) = \min(s, t)$.
#
# The last cell compares the log evidence with the same number from dense linear algebra.

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
t = np.sort(rng.uniform(0.0, 5.0, 70))
path = np.cumsum(np.sqrt(np.diff(t, prepend=0.0)) * rng.normal(size=70))
y = path + 0.2 * rng.normal(size=70)


def brownian(s, t):
    return jnp.minimum(jnp.reshape(s, (-1, 1)), jnp.reshape(t, (1, -1)))


def motion(X, y=None):
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    kernel = rate * pg.kernels.as_kernel(brownian)
    f = numpyro.sample("f", pg.GP(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


fit = pg.fit(motion, pg.Laplace(), 0, t, y=y)
new = np.linspace(0.05, 6.0, 120)
found = fit.predict(new, quantiles=(0.025, 0.975))

# %%
plt.fill_between(new, *found.f_quantiles, alpha=0.2, label="95 % of f")
plt.plot(new, found.f_mean, label="mean of f")
plt.plot(t, y, "k.", label="data")
plt.gca().set(
    title="Brownian motion: uncertainty grows after the last datum", xlabel="time", ylabel="y"
)
plt.legend()
plt.show()

# %%
C = float(fit.hyper["rate"]) * np.minimum(t[:, None], t) + float(fit.hyper["noise"]) ** 2 * np.eye(
    70
)
exact = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1])
print(f"log evidence {fit.log_evidence:.5f}, by dense algebra {exact:.5f}")
assert abs(fit.log_evidence - exact) < 1e-4
