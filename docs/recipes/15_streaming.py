# %% [markdown]
# # Streaming data in batches
#
# Your data are in many files or in a database, and do not fit into memory. `Stream` takes a function that returns the batches of one pass
# over the data, and the number of rows. The model stays the same. Shuffle the rows before you write them.
#
# The last cell compares the fit with an exact one, which is possible here because the noise is Gaussian and there are 1500 rows.

# %%
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
folder = Path(tempfile.mkdtemp())
for k in range(15):  # fifteen files of 100 rows
    x = rng.uniform(-3.0, 3.0, 100)
    np.savez(folder / f"{k:02}.npz", x=x, y=np.sin(2.0 * x) + 0.3 * rng.normal(size=100))


def batches():
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            yield file["x"], file["y"]


def curve(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 0.7), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


method = pg.SVGP(num_inducing=30, max_steps=150)
fit = pg.fit(curve, method, 0, pg.Stream(batches, num_data=1500))
new = np.linspace(-3.0, 3.0, 100)
found = fit.predict(new, quantiles=(0.05, 0.95))

# %%
x, y = (np.concatenate(parts) for parts in zip(*batches(), strict=True))
plt.plot(x, y, ".", c="0.8", ms=2, label="data")
plt.fill_between(new, *found.quantiles, alpha=0.2, label="90 % of new observations")
plt.plot(new, found.f_mean, label="mean of f")
plt.gca().set(title="Fifteen files, read ten times", xlabel="x", ylabel="y", ylim=(-2.0, 2.6))
plt.legend(loc="upper center", ncols=3)
plt.show()

# %%
whole = pg.fit(curve, pg.Laplace(), 0, x, y=y)  # exact: the noise is Gaussian
exact = whole.predict(new)
gap = np.abs(np.asarray(found.f_mean - exact.f_mean)) / np.sqrt(np.asarray(exact.f_variance))
print(f"bound {fit.log_evidence:.1f}, exact log evidence {whole.log_evidence:.1f}")
print(f"means differ from the exact ones by {np.median(gap):.2f} posterior sds (median)")
assert fit.log_evidence < whole.log_evidence + 1e-3 and np.median(gap) < 1.0
