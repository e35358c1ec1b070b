# %% [markdown]
# # Which picture
#
# This page shows every picture that ppl_gp draws, on two small examples. For each one it says which question the picture answers, what
# you should see if all is well, and what trouble looks like.
#
# | question | picture |
# |---|---|
# | What does the fit predict along one input? | [`pg.plot_predictions`](#Predictions-along-one-input), or `fit.plot()` |
# | What does it predict over two inputs? | [`pg.plot_surface`](#Probabilities-over-two-inputs) |
# | What does each term contribute? | [`pg.plot_components`](#The-terms-of-the-predictor) |
# | How large are the effects? | [`pg.plot_effects`](#Effects-with-intervals) |
# | Are the stated probabilities and intervals right? | [`pg.plot_calibration`](#Calibration-on-new-data) |
# | Do the methods agree on the posterior? | [`pg.plot_forest`](#The-posterior-of-each-method) |
# | Is a method's evidence right? | [`pg.plot_evidence`](#Evidence-against-the-truth) |
#
# Each function returns a matplotlib `Figure`, so you can change it, or save it with `figure.savefig("name.png")`.
# For posterior predictive checks, traces and ranks, see [ArviZ](with-arviz.py).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(1)

# %% [markdown]
# ## The first example: visits to a clinic
#
# Each row is a patient with an age and a ward. The number of visits scatters more than a Poisson count does. We fit two models: a Poisson model,
# which is wrong, and one with an extra effect per row for the scatter.

# %%
num = 300
age = rng.uniform(20.0, 80.0, num).round()
ward = rng.integers(0, 3, num)
scatter = 0.8 * rng.normal(size=num)
rate = np.exp(1.0 + np.sin(age / 10.0) + np.array([-0.8, 0.0, 0.8])[ward] + scatter)
names = pd.Categorical(np.array(["north", "south", "west"])[ward])
table = pd.DataFrame({"age": age, "ward": names, "visits": rng.poisson(rate)})
X, y = table[["age", "ward"]][:150], table["visits"][:150]
X_test, y_test = table[["age", "ward"]][150:], table["visits"][150:]


def poisson(X, y=None, extra=False):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(2.5, 0.5))
    kernel = 1.0 + pg.kernels.RBF(1.0, lengthscale)  # a level, and a function of age
    f = numpyro.sample("f", pg.GP(kernel, X[:, 0]))
    ward = numpyro.sample("ward", dist.ZeroSumNormal(1.0, (3,)))
    eta = f + ward[X[:, 1].astype(int)]
    spread = numpyro.sample("spread", dist.HalfNormal(1.0)) if extra else 0.0
    with numpyro.plate("patients", X.shape[0]):
        if extra:
            eta = eta + numpyro.sample("e", dist.Normal(0.0, spread))
        numpyro.sample("visits", dist.Poisson(jnp.exp(eta)), obs=y)


fits = {
    "Poisson": pg.fit(poisson, pg.Laplace(), 0, X, y=y),
    "with scatter per row": pg.fit(poisson, pg.Laplace(), 0, X, y=y, extra=True),
}
good = fits["with scatter per row"]

# %% [markdown]
# ## Predictions along one input
#
# `pg.plot_predictions` draws the mean and the 95 % interval of new observations along one input, with the data. With several inputs, `along=` names
# the one that varies. The title says where the others are kept, and `at=` sets them. `fit.plot()` is the same for one fit and its own data.

# %%
pg.plot_predictions(fits, X, y, along="age", at={"ward": "south"})
plt.show()

# %% [markdown]
# **All is well** if the curve follows the data, about 95 % of the points are inside the band, and the band widens where data are sparse. Here the points
# include all wards, so some lie outside for that reason.
#
# **Trouble:** on the left the curve jumps from point to point, because the Poisson model has no other way to explain the scatter. A
# curve that chases points means that the model lacks a source of variation, or that its length scale is too short. If the curve misses bends
# instead, the length scale is too long.

# %% [markdown]
# ## The terms of the predictor
#
# The [linear predictor](glossary.md#linear-predictor) of this model is a sum of a function of age and a ward effect. `pg.plot_components` draws
# each term with its mean and two standard deviations.

# %%
pg.plot_components(good, X, along={"f": "age", "ward": "ward"})
plt.show()

# %% [markdown]
# **All is well** if a term's band is narrow compared with the term's own range, as here. The wave of age and the order of the wards are clear.
#
# **Trouble:** a band that contains zero everywhere says that the data do not need this term. Two terms with wide bands that mirror each other
# share a level that neither of them determines. Effects that sum to zero, `ZeroSumNormal` in this model, avoid that.
# You can also draw `"total"`, which is the sum.

# %% [markdown]
# ## Effects with intervals
#
# `pg.plot_effects` shows each effect with its mean and its central 90 % interval, as `fit.summary()` lists them.

# %%
pg.plot_effects(good, ["ward"])
plt.show()

# %% [markdown]
# **All is well** if the intervals are short compared with the differences between effects. The dashed line marks zero.
#
# **Trouble:** intervals that all reach far across zero say that the groups do not differ measurably. Intervals of several groups that
# have the same large width mean that their common level is not determined.

# %% [markdown]
# ## Calibration on new data
#
# `pg.plot_calibration` uses rows that the fit has not seen. For numbers it compares the level of central intervals with the share of test rows that are inside them.

# %%
pg.plot_calibration(fits, X_test, y_test)
plt.show()

# %% [markdown]
# **All is well** if the line is close to the diagonal, as for the model with scatter.
#
# **Trouble:** the line of the Poisson model is below the diagonal. Its 90 % intervals contain far fewer than 90 % of the observations, so
# the model is overconfident. A line above the diagonal means intervals that are too wide. The number in the
# legend is the mean distance from the diagonal.

# %% [markdown]
# ## The second example: two classes
#
# The next pictures compare inference methods on one model. There are two inputs and only 50 binary observations, so that the methods differ visibly.

# %%
points = rng.uniform(-2.0, 2.0, (250, 2))
hidden = 3.0 * np.sin(1.5 * points[:, 0]) + 2.0 * points[:, 1]
label = (rng.uniform(size=250) < 1.0 / (1.0 + np.exp(-hidden))).astype(int)
train, train_label = points[:50], label[:50]
test, test_label = points[50:], label[50:]


def binary(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(2.0, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


nuts = pg.NUTS(num_warmup=300, num_samples=500, num_chains=2)
methods = {"Laplace": pg.Laplace(), "EP": pg.EP(), "NUTS": nuts}
classifiers = {}
for name, method in methods.items():
    classifiers[name] = pg.fit(binary, method, 0, train, y=train_label)

# %% [markdown]
# ## Probabilities over two inputs
#
# `pg.plot_surface` draws the probability of the second class over two inputs, one panel per fit. The black line is the boundary at which the probability is 1/2.

# %%
pg.plot_surface(classifiers, train, train_label, labels=("x1", "x2"))
plt.show()

# %% [markdown]
# **All is well** if the boundary separates most points of the two colours, and the colours fade towards 1/2 far from the data.
#
# **Trouble:** a boundary that winds around single points is fitted to noise. Full colours far from all data mean an overconfident model. If the
# panels of two methods differ, at least one of the methods is wrong: compare them as below.

# %% [markdown]
# ## The posterior of each method
#
# `pg.plot_forest` shows medians with 50 % and 94 % intervals of the hyperparameters and of a few latent values. NUTS is the reference,
# because its draws are exact up to Monte Carlo error.

# %%
pg.plot_forest(classifiers)
plt.show()

# %% [markdown]
# **All is well** if the intervals of a method agree with those of NUTS. Methods that fix the hyperparameters, as `MAP()` does, show
# them as points.
#
# **Trouble:** intervals shifted towards zero are typical of Laplace's method with binary data. You can see it in `f[0]`. Intervals that are shorter than those of NUTS mean that
# uncertainty is missing, for example that of the hyperparameters. `hyper=pg.Grid()` adds it.

# %% [markdown]
# ## Evidence against the truth
#
# The log [evidence](glossary.md#evidence), the log probability of the data given the hyperparameters, is used to choose hyperparameters and
# models. `pg.compare` estimates the true value by importance sampling, and `pg.plot_evidence` draws both.

# %%
comparison = pg.compare(classifiers, test, test_label)
pg.plot_evidence(comparison)
plt.show()

# %% [markdown]
# **All is well** if the red diamond is at the black bar, or a few hundredths of a [nat](glossary.md#nat) from it, as for EP. The number next to the diamond
# is the difference.
#
# **Trouble:** a diamond far below or above the bar. Laplace's evidence is lowest compared with its bar, which is typical of binary data. A difference of a few
# tenths of a nat rarely matters for predictions. It does matter when you compare models whose evidences differ by that much. Methods that
# sample the hyperparameters, such as NUTS, have no evidence and are missing from the picture.

# %% [markdown]
# ## Calibration of classes
#
# For classes, `pg.plot_calibration` groups the test rows by their predicted probability. It then compares each group's mean prediction with the frequency of the second class.

# %%
pg.plot_calibration(classifiers, test, test_label)
plt.show()

# %% [markdown]
# **All is well** if the bars cross the diagonal. The lower panel shows how many test rows each group has, and groups with few rows have long bars. Here the lines
# zigzag in the middle, where groups have about ten rows, but most bars cross the diagonal. The ECE in the legend is the
# [expected calibration error](glossary.md#expected-calibration-error), the mean distance from it.
#
# **Trouble:** points above the diagonal on the right and below it on the left mean that the predictions are too cautious. The opposite
# slope means that they are overconfident.
