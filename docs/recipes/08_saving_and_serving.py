# %% [markdown]
# # Saving a fit and serving predictions
#
# You fit once, and another process answers requests. `fit.save` writes to one file what prediction needs. The file has no observations and
# no pickle. `pg.load(path, classifier)` takes the file and the model function, because the file contains no code.
#
# The first prediction with a given number of rows compiles, and later ones with as many rows do not. Pad requests to a few sizes.

# %%
import tempfile
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
X = rng.normal(size=(100, 2))
y = (X[:, 0] * X[:, 1] > 0).astype(int)


def classifier(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


path = Path(tempfile.mkdtemp()) / "classifier.fit"
pg.fit(classifier, pg.EP(), 0, X, y=y).save(path)
served = pg.load(path, classifier)
print(f"{path.stat().st_size / 1024:.0f} KiB")

# %%
seconds = []
for _ in range(20):
    start = time.perf_counter()
    np.asarray(served.predict(rng.normal(size=(64, 2))).probs)
    seconds.append(time.perf_counter() - start)
plt.semilogy(range(1, 21), seconds, "o")
plt.gca().set(
    title="64 rows per request: the first one compiles", xlabel="request", ylabel="seconds"
)
plt.show()

# %%
print(f"first {seconds[0]:.2f} s, then {np.median(seconds[1:]) * 1e3:.1f} ms")
assert np.median(seconds[1:]) < seconds[0]
