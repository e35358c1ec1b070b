# %% [markdown]
# # Measurements with known errors
#
# Your instrument reports a standard deviation for each measurement. Make it an argument of the model with one value per row. Measurements
# with a small error then count more.
#
# At prediction, pass the standard deviation of a future measurement. The band of the function itself does not depend on it, but the model
# needs the argument.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0.0, 10.0, 60))
sigma = rng.choice([0.05, 0.8], 60)
y = np.sin(x) + sigma * rng.normal(size=60)


def measured(X, sigma, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, sigma), obs=y)


fit = pg.fit(measured, pg.Laplace(), 0, x, sigma, y=y)  # exact: the noise is Gaussian
new = np.linspace(0.0, 10.0, 100)
found = fit.predict(new, np.full(100, 0.05), quantiles=(0.025, 0.975))

# %%
plt.fill_between(new, *found.f_quantiles, alpha=0.3, label="95 % of f")
plt.plot(new, found.f_mean, label="mean of f")
plt.errorbar(x, y, sigma, fmt="k.", alpha=0.5, lw=0.7, label="measurements, ±1 sd")
plt.gca().set(title="Good measurements count more", xlabel="x", ylabel="y")
plt.legend()
plt.show()

# %%
K = np.asarray(pg.kernels.RBF(float(fit.hyper["variance"]), float(fit.hyper["lengthscale"]))(x, x))
C = K + np.diag(sigma**2)
exact = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1])
print(f"log evidence {fit.log_evidence:.6f}, by dense algebra {exact:.6f}")
assert abs(fit.log_evidence - exact) < 1e-4
