# %% [markdown]
# # Kernels
#
# A kernel says what you believe about a function before you see data: how smooth it is, how fast it changes, how far it moves, and
# whether it repeats. It is the main modelling decision of a Gaussian process. This page shows every kernel of the package, how to
# combine them, and how to choose.
#
# Formally, the kernel $k(x, x')$ is the prior covariance of the function's values at two inputs $x$ and $x'$. If $k(x, x')$ is large,
# the values $f(x)$ and $f(x')$ are similar. So a kernel defines which inputs are close to each other, and data at one input inform
# about others that are close.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
k = pg.kernels
grid = np.linspace(-5.0, 5.0, 201)


def draw(kernel, mean=None, num=5):
    """Draws of a function from its prior, (num, 201)."""
    return pg.GP(kernel, grid, mean=mean).sample(jax.random.key(295), (num,))


def panels(kernels, columns):
    """Five prior draws of each kernel, one panel per kernel."""
    rows = -(-len(kernels) // columns)
    figure = plt.figure(figsize=(2.4 * columns + 0.6, 2.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.ravel()[len(kernels) :]:
        ax.set_axis_off()
    for ax, (title, kernel) in zip(axes.ravel(), kernels.items(), strict=False):
        if title.startswith("White"):
            ax.plot(grid, draw(kernel, num=1).T, ".", markersize=4)
        else:
            ax.plot(grid, draw(kernel).T, linewidth=1.2)
        ax.set_title(title, fontsize="small")
        ax.set_xlabel("x", fontsize="small")
    return figure


# %% [markdown]
# ## All kernels at a glance
#
# The quickest way to understand a kernel is to look at functions drawn from it. Each panel
# shows five of them, with the numbers of the kernel in brackets. `White` shows one, because its values are not connected.

# %%
panels(
    {
        "RBF(1, 1)": k.RBF(1.0, 1.0),
        "Matern52(1, 1)": k.Matern52(1.0, 1.0),
        "Matern32(1, 1)": k.Matern32(1.0, 1.0),
        "Matern12(1, 1)": k.Matern12(1.0, 1.0),
        "RationalQuadratic\n(1, 1, alpha=0.2)": k.RationalQuadratic(1.0, 1.0, 0.2),
        "Periodic\n(1, 1, period=3)": k.Periodic(1.0, 1.0, 3.0),
        "Linear(1)": k.Linear(1.0),
        "Polynomial\n(0.02, degree=3)": k.Polynomial(0.02, 3),
        "Constant(1)": k.Constant(1.0),
        "White(1)": k.White(1.0),
    },
    columns=5,
)
plt.show()

# %% [markdown]
# The first four panels go from very smooth functions to rough ones. All four kernels have the same variance and the same
# [length scale](glossary.md#length-scale), the distance over which a function changes appreciably.
# `RationalQuadratic` mixes slow and fast changes, and `Periodic` repeats exactly. The last four are building blocks: straight
# lines through zero, polynomials, an unknown constant, and independent values at every input.
#
# | kernel | functions | parameters |
# |---|---|---|
# | `RBF` | very smooth: all derivatives exist | variance, length scale |
# | `Matern52` | smooth: two derivatives | variance, length scale |
# | `Matern32` | fairly rough: one derivative | variance, length scale |
# | `Matern12` | continuous but jagged, without derivatives | variance, length scale |
# | `RationalQuadratic` | a mixture of RBFs with many length scales | variance, length scale, `alpha`: a small value mixes more of them |
# | `Periodic` | repeats with a fixed period | variance, length scale (within a period, without unit), period (in units of x) |
# | `Linear` | straight lines through zero | variance of the slope |
# | `Polynomial` | polynomials of a degree | variance, degree, offset |
# | `Constant` | one unknown level | variance |
# | `White` | an independent value at each distinct input | variance |
#
# The arguments always have this order: first the variance, then the length scale, then the rest. A variance is a squared
# standard deviation, so `RBF(4.0, 1.0)` has functions that vary by about two.

# %% [markdown]
# ## Variance and length scale
#
# These two numbers matter in nearly every model. The variance says how far the function moves up and down. The length scale says how fast.

# %%
panels(
    {
        "variance 1, length scale 0.3": k.RBF(1.0, 0.3),
        "variance 1, length scale 3": k.RBF(1.0, 3.0),
        "variance 9, length scale 1": k.RBF(9.0, 1.0),
    },
    columns=3,
)
plt.show()

# %% [markdown]
# Compare the vertical axes as well: in the last panel the functions reach three times as far. In a model you rarely know these numbers, so you give
# them priors with `numpyro.sample` and the fit infers them. `pg.priors.lengthscale(X)` makes a prior in the units of your inputs.
# [Hyperparameters and priors](hyperparameters.md) explains both.

# %% [markdown]
# ## Sums and products
#
# Real functions often have several ingredients, such as a trend and a season. You can add and multiply kernels with `+` and `*`.
#
# - A **sum** of kernels is the kernel of a sum of independent functions. It works like "or": two inputs are similar if either kernel says so.
# - A **product** works like "and": two inputs are similar only if both kernels say so.
#
# A number in a sum or product means `Constant`. So `2.0 * k.RBF()` doubles the variance, and `1.0 + k.RBF()` adds an unknown level.

# %%
panels(
    {
        "Linear + RBF:\na trend with wiggles": k.Linear(0.3) + k.RBF(0.5, 1.0),
        "Periodic × RBF:\na season that changes": k.Periodic(period=2.0) * k.RBF(1.0, 3.0),
        "slow RBF + fast RBF:\ntwo time scales": k.RBF(4.0, 4.0) + k.RBF(0.1, 0.2),
    },
    columns=3,
)
plt.show()

# %% [markdown]
# The first panel shows lines with wiggles around them. In the second, neighbouring periods resemble each other, but the pattern drifts
# over a few periods. That is usually a better model of a season than `Periodic` alone, which repeats for ever. In the third panel, small
# fast changes ride on large slow ones.

# %% [markdown]
# ### A trend and a season
#
# Here are eight years of monthly data, with time in years. To see the trend and the season separately, declare one GP site for each
# and add the functions instead of the kernels. The model is the same, and `fit.components` returns each part.

# %%
rng = np.random.default_rng(0)
t = np.arange(96) / 12.0
season = (1.0 + 0.1 * t) * np.sin(2.0 * np.pi * t)
sales = 10.0 + 0.4 * t + season + 0.3 * rng.normal(size=96)


def seasonal(t, y=None):
    level = numpyro.sample("level", dist.Normal(10.0, 5.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    slow = numpyro.sample("slow", dist.LogNormal(1.5, 0.5))  # of the trend, in years
    trend = k.Linear(0.5) + k.RBF(1.0, slow)
    season = k.Periodic(1.0, 1.0, 1.0) * k.RBF(1.0, 10.0)
    f = numpyro.sample("trend", pg.GP(trend, t))
    g = numpyro.sample("season", pg.GP(season, t))
    with numpyro.plate("months", t.shape[0]):
        numpyro.sample("y", dist.Normal(level + f + g, noise), obs=y)


fit = pg.fit(seasonal, pg.Laplace(), 0, t, y=sales)
future = np.arange(0, 132) / 12.0
prediction = fit.predict(future)

plt.figure(figsize=(7.5, 3.2), layout="constrained")
lower, upper = prediction.interval(0.9)
plt.fill_between(future, lower, upper, alpha=0.2, label="90 % of new values")
plt.plot(future, prediction.mean, label="prediction")
plt.plot(t, sales, "k.", label="data")
plt.axvline(t[-1], color="grey", linestyle="--", linewidth=1)
plt.title("Linear + RBF for the trend, Periodic × RBF for the season")
plt.gca().set(xlabel="years", ylabel="sales")
plt.legend(loc="upper left")
plt.show()

# %% [markdown]
# After the dashed line the prediction has no data. The season goes on, the line continues, and the interval grows with the distance.
# `RBF` alone would lose both within one length scale.

# %% [markdown]
# ## Several inputs: one length scale per column
#
# With several input columns, each may matter at a different distance, or not at all. Give the kernel a vector of length scales, one per
# column. This is called automatic relevance determination ([ARD](glossary.md#ard)): a column with a very long length scale hardly
# affects the function.

# %%
X = rng.uniform(-2.0, 2.0, (80, 3))
signal = np.sin(2.0 * X[:, 0]) + 0.5 * X[:, 1]  # the last column is irrelevant
y = signal + 0.1 * rng.normal(size=80)


def relevance(X, y=None):
    scales = dist.LogNormal(0.0, 1.5).expand([3]).to_event(1)
    lengthscale = numpyro.sample("lengthscale", scales)
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(k.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


ard = pg.fit(relevance, pg.Laplace(), 0, X, y=y)
print("length scales per column:", np.round(ard.hyper["lengthscale"], 1))

# %% [markdown]
# The first column has the shortest length scale: the function has several bends along it. The second acts nearly linearly, so its length scale
# is longer than the range of the data. The third has no effect, and its length scale is the longest of all. Do not read
# length scales as importance in general, because a strong linear effect also has a long one.

# %% [markdown]
# ### Only some of the columns
#
# `active_dims=` names the columns that a kernel uses, counted from zero. A sum of kernels over single columns is an additive model.
# A product of them is an interaction.

# %%
additive = k.RBF(1.0, 1.0, active_dims=0) + k.RBF(1.0, 2.0, active_dims=1)
interaction = k.RBF(1.0, 1.0, active_dims=0) * k.RBF(1.0, 2.0, active_dims=1)
pair = np.array([[0.0, 0.0], [0.0, 9.0]])  # the same in column 0, far away in column 1
print("additive:   ", additive(pair, pair)[0, 1].round(3))
print("interaction:", interaction(pair, pair)[0, 1].round(3))

# %% [markdown]
# Calling a kernel returns its covariances. Two inputs that agree in column 0 and differ in column 1 are still related in the
# additive model, with covariance 1. Under the product they are practically unrelated.

# %% [markdown]
# ## Categories
#
# A category code, such as 0 for north and 1 for south, is not a distance. Do not pass it to `RBF`. You have two good choices.
#
# - **A level per category:** use the code as an index of a group effect, `f + u[group]`, as in
#   [Effects, groups and several functions](effects.md).
# - **A function per category:** multiply a kernel by `White` on the column of codes. `White` is nonzero only if both codes are equal.

# %%
group = rng.integers(0, 3, 60)
x = rng.uniform(0.0, 10.0, 60)
y_group = np.sin(x) + 0.4 * group * np.cos(0.5 * x) + 0.2 * rng.normal(size=60)


def curves(X, y=None):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    own_variance = numpyro.sample("own_variance", dist.LogNormal(-1.0, 1.0))
    shared = k.RBF(1.0, 1.5, active_dims=0)
    own = k.RBF(own_variance, 2.0, active_dims=0) * k.White(1.0, active_dims=1)
    f = numpyro.sample("f", pg.GP(shared + own, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


by_group = pg.fit(curves, pg.Laplace(), 0, np.column_stack([x, group]), y=y_group)
line = np.linspace(0.0, 10.0, 100)
plt.figure(figsize=(7.5, 3.2), layout="constrained")
for code in range(3):
    found = by_group.predict(np.column_stack([line, np.full(100, code)]))
    plt.fill_between(line, *found.f_interval(0.9), color=f"C{code}", alpha=0.15)
    plt.plot(line, found.f_mean, color=f"C{code}", label=f"group {code}")
    plt.plot(x[group == code], y_group[group == code], ".", color=f"C{code}")
plt.title("One shared function, and a deviation per group")
plt.gca().set(xlabel="x", ylabel="y")
plt.legend()
plt.show()

# %% [markdown]
# The three curves share their shape, because `shared` ignores the group. Each group also has its own deviation from it. The
# inferred `own_variance` says how different the groups are. The bands contain each function with probability 90 %.

# %% [markdown]
# ## The mean function
#
# Far from data, a prediction returns to the prior mean, which is zero by default. If zero is not a sensible value there, change the mean.
# `pg.GP(kernel, X, mean=...)` takes a number or a function of `X`, and `pg.means.Linear(slope, intercept)` is a ready-made line.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.5), sharey=True, layout="constrained")
axes[0].plot(grid, draw(k.RBF(0.3, 1.0)).T)
axes[0].set(title="mean zero", xlabel="x")
axes[1].plot(grid, draw(k.RBF(0.3, 1.0), mean=pg.means.Linear(0.8, 1.0)).T)
axes[1].plot(grid, 1.0 + 0.8 * grid, "k--", label="mean function")
axes[1].set(title="mean=pg.means.Linear(0.8, 1.0)", xlabel="x")
axes[1].legend()
plt.show()

# %% [markdown]
# The functions on the right scatter around the line. If you do not know the level or the slope, give them priors and add them to the function, as
# `level + slope * x + f`. The fit then integrates over them exactly, and `fit.sites` contains their posteriors. Centre your
# observations, or include a level. A zero mean for values near 1000 forces the variance to be huge.

# %% [markdown]
# ## A kernel of your own
#
# If no combination says what you believe, write a kernel. Any function of two arrays of inputs that returns their covariance matrix works
# in `pg.GP`, and kernels of tinygp do too. The arrays have the shape of the `X` that you pass: (N, D), or (N,) for a single input. The
# `jnp.reshape` below makes both (N,) and (N, 1) work. Wrap it in `pg.kernels.as_kernel` to add or multiply it. To give it parameters, define
# the function inside the model, or write a class:


# %%
class Brownian(pg.kernels.Kernel):
    """Brownian motion from zero: k(s, t) = rate min(s, t) for s, t >= 0."""

    rate: ArrayLike = 1.0

    def __call__(self, s, t):
        return self.rate * jnp.minimum(jnp.reshape(s, (-1, 1)), jnp.reshape(t, (1, -1)))

    def diag(self, t):
        return self.rate * jnp.reshape(t, -1)


after_zero = np.linspace(0.02, 10.0, 300)
plt.figure(figsize=(7.5, 2.5), layout="constrained")
both = {"Brownian": Brownian(1.0), "plus a season": Brownian(1.0) + k.Periodic(1.0, period=6.0)}
for title, kernel in both.items():
    path = pg.GP(kernel, after_zero).sample(jax.random.key(0))
    plt.plot(after_zero, path, label=title)
plt.title("A kernel of your own, alone and in a sum")
plt.gca().set(xlabel="time", ylabel="f")
plt.legend()
plt.show()

# %% [markdown]
# The class has one annotated field per parameter, as a dataclass has. `__call__` returns the matrix for two sets of inputs, and `diag` returns the
# variances at one set. It combines with all other kernels. [The recipe](recipes/09_custom_kernel.py) fits this kernel to data.
#
# A kernel must be a function of two rows only. If it reads an array with one value per row, such as distances that you
# computed before, predictions at new rows raise `ModelError`. Put those values into columns of the inputs instead.

# %% [markdown]
# ## Which kernel for which data
#
# - **No particular knowledge:** `Matern52`, or `RBF` if you expect a very smooth function.
# - **Rough series, such as prices or sensor readings:** `Matern32` or `Matern12`.
# - **Changes at several time scales:** a sum of two kernels with different length scales, or `RationalQuadratic`.
# - **A season:** `Periodic` with the known period times an `RBF` with a length scale of several periods.
# - **A trend that continues:** `Linear` plus a smooth kernel, or a slope in the linear predictor.
# - **Many columns, few of them relevant:** a length scale per column.
# - **Separate effects of columns:** a sum of kernels with `active_dims=`.
# - **Maps:** `Matern32` on both coordinates in the same units, with one length scale.
# - **Groups:** a group effect, or a product with `White` on the code.
# - **Slopes that you observe:** `pg.kernels.WithDerivatives`, with `value_inputs` and `derivative_inputs` for the rows.
#
# If you are in doubt between two, fit both and compare their predictions of new rows: see [Checking a model, comparing fits](comparing.md).

# %% [markdown]
# ## Numerical advice
#
# A covariance matrix can be so close to singular that its factorisation fails. The package adds a tiny variance to the diagonal to prevent that, the
# [jitter](glossary.md#jitter). Most trouble comes from a length scale that does not suit the inputs. `pg.check` compares both before a fit.


# %%
def too_long(t, y=None):
    f = numpyro.sample("f", pg.GP(k.RBF(1.0, 1000.0), t))
    with numpyro.plate("months", t.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


for row in str(pg.check(too_long, t, y=sales - 12.0)).splitlines():
    if "length scales" in row or "conditioning" in row:
        print(row)

# %% [markdown]
# The first line says NO, because a length scale of 1000 is far beyond the distances between the rows. Scale the
# inputs, or use `pg.priors.lengthscale(X)`.
#
# - **A length scale much longer than the data** makes rows nearly identical, and the matrix nearly singular. With `RBF` this happens first,
#   and with `Matern32` much later.
# - **A length scale shorter than the gaps between rows** makes every row independent. Predictions return to the mean between the data.
# - **Columns with very different units** need a length scale each, or standardised columns.
# - **float32** needs a larger jitter and gives less accurate answers. Turn on float64, as this page does.
#
# ### Details
#
# - The default jitter is 1e-8 of the kernel's mean variance in float64, and 1e-5 in float32. In float64, terms such as `Linear`,
#   `Polynomial` and `Constant` add only 1e-12 of their own variance.
# - `pg.GP(..., jitter=...)` sets an absolute variance instead. If the factorisation fails, the jitter is raised step by step, and
#   `fit.stats["jitter_raised"]` reports by how much.
# - `White` compares values: two rows with equal inputs share one draw. For noise that is independent per observation, use the
#   likelihood or `jitter=`.
# - Under Gaussian noise much smaller than the function, log evidences keep their digits down to a noise of about 1e-7 of the
#   function for `Laplace()`, 1e-6 for `VI()` and 1e-5 for `EP()`.
# - Integer inputs become floats in a kernel.
# - `WithDerivatives` raises `ModelError` for `Matern12` and `White`, because their functions have no derivative.
