# %% [markdown]
# # Ordinal ratings
#
# Ratings from 0 to 4 have an order, but their distances mean nothing. An ordinal model describes them by a noisy function and cut points: the
# rating says between which two cuts the value lies. The cuts are hyperparameters, and the fit finds them.
#
# `found.probs` has a column for each rating. The last cell compares them with a closed form.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.stats import norm

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0.0, 10.0, 150))
noisy = 2.0 * np.sin(x) + rng.normal(size=150)
y = np.digitize(noisy, [-1.5, -0.5, 0.5, 1.5])


def ratings(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    first = numpyro.sample("first", dist.Normal(-1.5, 1.0))
    gaps = numpyro.sample("gaps", dist.LogNormal(0.0, 0.5).expand([3]).to_event(1))
    cuts = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", pg.observations.OrdinalProbit(f, cuts), obs=y)


fit = pg.fit(ratings, pg.Laplace(), 0, x, y=y)
new = np.linspace(0.0, 10.0, 100)
found = fit.predict(new)
cuts = float(fit.hyper["first"]) + np.append(0.0, np.cumsum(fit.hyper["gaps"]))
print("cuts", cuts.round(2), "truth -1.5 -0.5 0.5 1.5")

# %%
figure, (top, bottom) = plt.subplots(2, 1, sharex=True, height_ratios=(1, 2), layout="constrained")
top.plot(x, y, "k|")
top.set(title="Five ordered ratings, and the probability of each", ylabel="rating", yticks=range(5))
probs = np.asarray(found.probs).T
bottom.stackplot(new, probs, colors=plt.get_cmap("cividis")(np.linspace(0.0, 1.0, 5)), alpha=0.8)
for k, middle in enumerate(np.cumsum(probs, 0) - 0.5 * probs):
    at = probs[k].argmax()  # where the rating is likeliest
    bottom.text(new[at], middle[at], f"{k}", c="k" if k > 2 else "w", ha="center", va="center")
bottom.set(xlabel="x", ylabel="cumulative probability", xlim=(0.0, 10.0), ylim=(0.0, 1.0))
plt.show()

# %%
mean, sd = np.asarray(found.f_mean), np.sqrt(1.0 + np.asarray(found.f_variance))
exact = norm.cdf((cuts - mean[:, None]) / sd[:, None])  # p(y <= k): a normal in a normal
gap = np.abs(np.cumsum(found.probs, 1)[:, :4] - exact).max()
print(f"largest distance to the closed form: {gap:.1e}")
assert gap < 1e-6
