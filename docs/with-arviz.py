# %% [markdown]
# # ArviZ
#
# [ArviZ](https://python.arviz.org) is the standard Python library for looking at Bayesian fits: tables, diagnostics, posterior predictive checks and
# comparisons. Every fit of ppl_gp exports its draws to ArviZ by `fit.to_datatree()`, whichever method made it. So you can use
# the same pictures for Laplace's method and for NUTS.
#
# The functions used here are in two packages, `arviz_stats` for tables and `arviz_plots` for pictures. The first is installed with ppl_gp.
# The second is an extra: `pip install ".[plots]"`, see [Installation](installation.md).

# %%
import arviz_base
import arviz_plots as azp
import arviz_stats as azs
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
arviz_base.rcParams["plot.backend"] = "matplotlib"

rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0.0, 10.0, 60))
group = rng.integers(0, 4, 60)
y = rng.poisson(np.exp(1.0 + np.sin(x) + np.array([-0.8, -0.3, 0.3, 0.8])[group]))


def counts(x, group, y=None, groups=True):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), x))
    eta = level + f
    if groups:
        with numpyro.plate("ward", 4):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        eta = eta + u[group]
    with numpyro.plate("day", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


nuts = pg.NUTS(num_warmup=300, num_samples=500, num_chains=2)
full = pg.fit(counts, nuts, 0, x, group, y=y)
plain = pg.fit(counts, pg.Laplace(hyper=pg.Grid()), 0, x, group, y=y, groups=False)

# %% [markdown]
# The data are 60 counts in four wards. The first fit has a smooth function of `x` and an effect per ward, sampled by NUTS. The second
# ignores the wards and uses Laplace's method with a grid over the length scale.

# %% [markdown]
# ## The tree of a fit
#
# `fit.to_datatree()` returns an xarray `DataTree` with ArviZ's usual groups. With `whole=True` it also contains what the checks below need: prior
# draws, new data drawn from the posterior (posterior predictive draws), and prior densities.

# %%
tree = full.to_datatree(whole=True)
for name, node in tree.children.items():
    shapes = [f"{k}{tuple(v.sizes.values())}" for k, v in node.data_vars.items()]
    print(f"{name:22s}", *shapes)

# %% [markdown]
# The shapes begin with chains and draws. The names of further dimensions come from the plates of the model: `ward` has four
# entries and `day` has 60. If your inputs are a data frame, its labels become coordinates.
#
# Hyperparameters that `MAP()` or `Fixed()` keep at one value are in the group `point_estimates`, so that no
# table reports them with a spread of zero.

# %% [markdown]
# ## A summary table
#
# The first thing to look at is the table of means, standard deviations and intervals. For a sampler it also has two checks, `ess_bulk` and `r_hat`.

# %%
print(azs.summary(tree, var_names=["level", "lengthscale", "u"]).to_string())

# %% [markdown]
# For a report, aim at an `r_hat` of at most 1.01. A run with one above 1.05 ends as `not_mixed`. Also, `ess_bulk`, the [effective sample size](glossary.md#effective-sample-size), should be at least
# a few hundred. The columns `mcse_mean` and `mcse_sd` are the Monte Carlo errors. For methods other than samplers the draws are
# independent, so both checks are perfect by construction and say nothing about the approximation.

# %% [markdown]
# ## Traces and ranks
#
# Do the chains of a sampler agree? A trace shows the draws in order, one colour per chain. The rank picture compares the chains more sharply.

# %%
azp.plot_trace(tree, var_names=["level", "lengthscale"])
plt.show()

# %%
visuals = {"credible_interval": False, "remove_axis": False}
azp.plot_rank(tree, var_names=["level", "lengthscale"], visuals=visuals)
plt.show()

# %% [markdown]
# Each line of the rank picture belongs to one chain. It shows by how much the chain's share of draws below a value differs from
# that of all chains together.
#
# **All is well** if the traces look like noise without drift, with the colours on top of each other. The rank lines should
# stay within about 0.1 of zero for chains of this length.
#
# **Trouble:** a trace that wanders slowly, a chain that stays at another value, or rank lines that move far from zero. Run
# longer, or declare the model with unit scales. Such pictures are pointless for Laplace, EP or VI, whose draws are independent.

# %% [markdown]
# ## Intervals of many quantities
#
# A forest shows the intervals of many quantities in one picture, here those of the ward effects.

# %%
azp.plot_forest(tree, var_names=["level", "u"], combined=True)
plt.show()

# %% [markdown]
# Each row has a point estimate, a thick central interval and a thin wider one. The effects rise from ward 0 to ward 3, as in the
# data that we generated. Their intervals are wide because a common shift of all wards can be exchanged for a shift of `level`.

# %% [markdown]
# ## Prior against posterior
#
# How much did the data teach you about a parameter? `plot_prior_posterior` draws both distributions.

# %%
azp.plot_prior_posterior(tree, var_names=["level", "lengthscale"])
plt.show()

# %% [markdown]
# **All is well** if the posterior is narrower than the prior and inside it.
#
# **Trouble:** a posterior equal to the prior means that the data say nothing about the parameter. A posterior at the edge of the prior says that
# they disagree, and you should reconsider the prior.
#
# `psense_summary` asks the related question of how much the posterior changes if the prior or the likelihood counts a little more or less.

# %%
print(azs.psense_summary(tree, var_names=["level", "lengthscale"]).to_string())

# %% [markdown]
# Values above 0.05 mean that the posterior is sensitive to that part of the model. For `lengthscale` only the likelihood
# matters, which is what you want. The posterior of `level` depends a little on its prior, because the function and the
# ward effects can take over a part of the level.

# %% [markdown]
# ## Posterior predictive check
#
# Could the fitted model have produced your data? The check draws new data sets from it and compares them with the observed one.

# %%
azp.plot_ppc_dist(tree, kind="ecdf")
plt.show()

# %% [markdown]
# Each thin line is the cumulative distribution of one simulated data set, and the dark line is that of the observed data.
#
# **All is well** if the dark line is inside the bundle. **Trouble:** it leaves the bundle, for example because there are more zeros or
# more large counts than the model can produce.
#
# The check uses the same data twice, so it is lenient. The next one is sharper.

# %% [markdown]
# ## LOO-PIT
#
# [LOO-PIT](glossary.md#loo-pit) predicts each observation from all others, and asks at which quantile of that prediction it is. If the model is
# calibrated, these quantiles are uniform.

# %%
azp.plot_loo_pit(tree)
plt.show()

# %% [markdown]
# The line is the difference between the observed and the uniform cumulative distribution.
#
# **All is well** if it stays inside the envelope. **Trouble:** an S shape means that intervals are too narrow or too wide. A hump to
# one side means that predictions are biased.

# %% [markdown]
# ## Leave-one-out scores and k-hat
#
# `fit.loo()` estimates how well the model predicts each left-out observation, and returns ArviZ's `ELPDData`. The sum is the
# [elpd](glossary.md#elpd), the expected log predictive density. Higher is better.

# %%
scores = {"with wards": full.loo(), "without": plain.loo()}
print(scores["with wards"])

# %%
azp.plot_khat(scores["with wards"])
plt.show()

# %% [markdown]
# Every observation has a [k-hat](glossary.md#k-hat), a measure of how reliable its leave-one-out score is.
#
# **All is well** if all values are below 0.7, as here. **Trouble:** an observation above 0.7 has a large influence on the fit, so its score cannot be trusted.
# Look at that row, or score rows that you keep out of the fit with `fit.log_density`.

# %% [markdown]
# ## Comparing models
#
# `compare` ranks models by their elpd. Use it to decide whether the ward effects improve predictions.

# %%
table = azs.compare(scores)
print(table.round(2).to_string())

# %%
azp.plot_compare(table)
plt.show()

# %% [markdown]
# The row at the top predicts best. `elpd_diff` is the distance to it in nats, and `dse` is the standard error of this difference.
# Here the difference is about three standard errors, so the wards matter. A difference below four nats, or below two standard errors, does not decide.
#
# To compare inference methods for one model instead, use [`pg.compare`](comparing.md). It also compares evidences and the posteriors
# themselves.

# %% [markdown]
# ## Details
#
# - **Predictions in the tree.** `fit.to_datatree(whole=True, predictions=X_new)` adds the groups `predictions` and `predictions_constant_data`. A model of several arguments
#   takes a dictionary. `azp.plot_lm(tree, x=..., y=..., group="predictions")` draws them. The group has y, f and deterministic sites, drawn jointly over
#   the rows.
# - **Names.** A slash in a site's name becomes a dot. Sites and plates called `chain` or `draw` become `chain_` and `draw_`. `coords=` and
#   `pred_coords=` override labels.
# - **Grids and weights.** The tree of a `Grid()` fit has draws of equal weight. Quantiles of its hyperparameters are those of few distinct values, so
#   take them from `Sample()`.
# - **After loading.** A saved fit contains no observations. A loaded fit has no `loo()`, and its tree has no log likelihoods.
# - **LOO of an approximation.** `fit.loo()` of a local method refits the other rows at the same hyperparameters. In models with latents per row, it is
#   conditional on each row's own latent.
# - **Versions.** Python 3.11 has ArviZ 0.8, and later versions of Python have ArviZ 1. This page runs with both. In 0.8, `plot_trace_dist` fails with the newest
#   xarray, and `plot_rank` draws a wrong envelope, which this page turns off.
# - **Bundled package.** From Python 3.12 on, the package `arviz` collects the three parts, so `az.plot_forest` is `azp.plot_forest`.
