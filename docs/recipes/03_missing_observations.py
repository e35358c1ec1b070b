# %% [markdown]
# # Missing observations
#
# Some rows of your table have inputs and no observation. Keep them in the table, and say which rows were observed by `obs_mask`. The other
# rows do not count, whatever number you put there. A prediction at such a row is the prediction of a new row.
#
# The last cell compares the log evidence with that of a fit without these rows. The two are equal.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = np.linspace(0.0, 10.0, 80)
y = np.sin(x) + 0.2 * rng.normal(size=80)
seen = (x < 4.0) | (x > 6.0)


def partly(X, seen=None, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y, obs_mask=seen)


fit = pg.fit(partly, pg.Laplace(), 0, x, seen=seen, y=np.where(seen, y, 0.0))
found = fit.predict(x, quantiles=(0.05, 0.95))

# %%
plt.fill_between(x, *found.quantiles, alpha=0.2, label="90 % of new observations")
plt.plot(x, found.mean, label="mean")
plt.plot(x[seen], y[seen], "k.", label="observed")
plt.plot(x[~seen], y[~seen], "rx", label="not observed")
plt.gca().set(title="Between 4 and 6 nothing was observed", xlabel="x", ylabel="y")
plt.legend()
plt.show()

# %%
whole = pg.fit(partly, pg.Laplace(), 0, x[seen], y=y[seen])
print(f"log evidence {fit.log_evidence:.6f}, without the missing rows {whole.log_evidence:.6f}")
assert abs(fit.log_evidence - whole.log_evidence) < 1e-4
