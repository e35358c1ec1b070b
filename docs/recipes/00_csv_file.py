# %% [markdown]
# # Fit your own CSV file
#
# You have a table in a CSV file, and you want a fit, a comparison of methods, and a picture. The first cell writes such a file, so that this
# page runs by itself. Replace it by your own file.
#
# The prior of the length scale is made from the training rows, in the units of the data. The inputs are hours here, and you do not have to
# standardise them.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
hour = rng.uniform(0.0, 24.0, 120).round(2)
visits = rng.poisson(np.exp(2.0 - 1.2 * np.cos(2.0 * np.pi * hour / 24.0)))
path = Path(tempfile.mkdtemp()) / "visits.csv"
pd.DataFrame({"hour": hour, "visits": visits}).to_csv(path, index=False)

# %%
table = pd.read_csv(path)
train, test = table.iloc[:80], table.iloc[80:]
X, y = train[["hour"]], train["visits"]
lengthscale_prior = pg.priors.lengthscale(X)


def counts(X, y=None):
    lengthscale = numpyro.sample("lengthscale", lengthscale_prior)
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)


print(pg.check(counts, X, y=y))  # every NO is worth reading before a fit

# %%
methods = {"Laplace": pg.Laplace(), "EP": pg.EP()}
fits = {name: pg.fit(counts, method, 0, X, y=y) for name, method in methods.items()}
print(pg.compare(fits, test[["hour"]], test["visits"]))

# %%
pg.plot_predictions(fits, X, y)
plt.show()

# %%
low, high = fits["EP"].predict(test[["hour"]], quantiles=(0.025, 0.975)).quantiles
inside = float(np.mean((test["visits"] >= low) & (test["visits"] <= high)))
print(f"{inside:.0%} of the 40 counts that no fit saw lie inside their 95 % interval")
assert inside > 0.85

# %% [markdown]
# Laplace and EP agree on these data. Of the 40 test counts, 95 % are inside the 95 % interval of EP.
#
# You can do the same from a shell. Put the model into a file `visits.py`, with `dist.LogNormal(0.0, 1.0)` for the length scale, because the
# command line standardises the inputs. Then run `ppl-gp compare visits.py:counts visits.csv --target visits --methods laplace,ep --out out`
# for the table, and `ppl-gp fit visits.py:counts visits.csv --target visits --plot visits.png` for the picture.
