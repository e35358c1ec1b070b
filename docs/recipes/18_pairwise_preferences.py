# %% [markdown]
# # Pairwise preferences
#
# People compare two items at a time: "I prefer a to b". You want a ranking of all items, also of
# those that nobody has compared. Use this for taste tests, for matches between players, or for A/B
# tests.
#
# Each item has features and a utility `f`, which is a GP of the features. The log odds of
# preferring a to b are `f[a] - f[b]`. The model looks `f` up at both items, so it has one row per
# comparison.
#
# The truth here is 40 coffees with a sweetness and an acidity. The best has a sweetness of 6 and an
# acidity of 4. Only the first 30 coffees were compared, 400 times.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.stats import spearmanr

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
coffees = rng.uniform(0.0, 10.0, (40, 2))  # sweetness and acidity
truth = 5.0 * np.exp(-0.5 * ((coffees - [6.0, 4.0]) ** 2 / [9.0, 16.0]).sum(1))
a = rng.integers(0, 30, 400)
b = (a + rng.integers(1, 30, 400)) % 30  # another coffee than a
y = rng.binomial(1, 1.0 / (1.0 + np.exp(truth[b] - truth[a])))  # 1: a was preferred


def preferences(a, b, items, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.7).expand([2]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), items))
    with numpyro.plate("comparisons", a.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f[a] - f[b]), obs=y)


fit = pg.fit(preferences, pg.EP(), 0, a, b, coffees, y=y)
print("length scales of sweetness and acidity:", np.round(fit.hyper["lengthscale"], 1))
others = np.arange(1, 40)
utility = fit.predict(others, np.zeros(39, int))  # each coffee against coffee 0
middle, (low, high) = np.asarray(utility.f_mean), np.asarray(utility.f_interval(0.9))
true_utility = truth[1:] - truth[0]
print("best five, found:", others[np.argsort(-middle)[:5]], "true:", np.argsort(-truth)[:5])

# %% [markdown]
# Only differences of utilities matter to the data, so the level of `f` is arbitrary. `fit.predict`
# compares every coffee with coffee 0. Its `f_mean` is the log odds of preferring that coffee.

# %%
kinds = {"compared": others < 30, "never compared": others >= 30}
for color, (name, rows) in zip(("C0", "C3"), kinds.items(), strict=True):
    bars = np.stack([middle - low, high - middle])[:, rows]
    plt.errorbar(true_utility[rows], middle[rows], bars, fmt="o", c=color, alpha=0.7, label=name)
plt.axline((0.0, 0.0), slope=1.0, color="k", linestyle="--", label="found = true")
plt.gca().set(
    title="Utilities of coffees from comparisons (bars: 90 % intervals)",
    xlabel="true utility, less that of coffee 0 (log odds)",
    ylabel="found utility (log odds)",
)
plt.legend()
plt.show()

# %%
rank = {name: spearmanr(middle[rows], true_utility[rows])[0] for name, rows in kinds.items()}
inside = np.mean((true_utility > low) & (true_utility < high))
for name, value in rank.items():
    print(f"rank correlation with the truth, {name}: {value:.2f}")
print(f"true utilities in their 90 % intervals: {inside:.0%}")
assert rank["compared"] > 0.9 and rank["never compared"] > 0.8 and inside > 0.7
