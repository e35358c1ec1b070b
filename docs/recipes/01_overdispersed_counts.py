# %% [markdown]
# # Overdispersed counts
#
# Counts often scatter more than a Poisson distribution allows. A negative binomial has a second parameter, the concentration, that lets
# them. Here its mean is $e^{f(x)}$ with a smooth function $f$, and its concentration is a hyperparameter. Write the model, and any method
# fits it.
#
# The picture shows the central 90 % interval of new counts. Its ends are quantiles of the predictive distribution, and therefore whole
# numbers. They are not computed from a mean and a standard deviation.

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
x = np.sort(rng.uniform(0.0, 10.0, 120))
y = rng.negative_binomial(2.0, 2.0 / (2.0 + np.exp(1.5 + np.sin(x))))
lengthscale_prior = pg.priors.lengthscale(x)


def counts(X, y=None):
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior)
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(level + f), concentration), obs=y)


fit = pg.fit(counts, pg.Laplace(), 0, x, y=y)
print({k: round(float(v), 2) for k, v in fit.hyper.items()})

# %%
new = np.linspace(0.0, 10.0, 80)
found = fit.predict(new, quantiles=(0.05, 0.95))
plt.fill_between(new, *found.quantiles, step="mid", alpha=0.2, label="90 % of new counts")
plt.plot(new, found.mean, label="expected count")
plt.plot(x, y, "k.", label="data")
plt.gca().set(
    title="Counts that scatter more than a Poisson: 90 % of new ones", xlabel="x", ylabel="count"
)
plt.legend()
plt.show()

# %%
low, high = fit.predict(x, quantiles=(0.05, 0.95)).quantiles
inside = float(np.mean((y >= low) & (y <= high)))
print(f"{inside:.0%} of the counts lie inside their interval")
assert inside > 0.85
