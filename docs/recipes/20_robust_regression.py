# %% [markdown]
# # Robust regression with outliers
#
# Some of your observations are plainly wrong, for example because a sensor failed. Normal noise
# makes a large error nearly impossible, so the curve bends towards it. Student-t noise has heavy
# tails, and the curve can ignore such rows. Use it if you cannot remove the bad rows by hand.
#
# The truth here is $\sin(x)$ with noise of standard deviation 0.2. Eight of 80 rows are 2 to 4 too
# high. With normal noise `Laplace()` is exact. A Student-t likelihood is not log-concave, so this
# page uses `VI()`, as [Choosing a method](../methods.md) recommends for heavy tails.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0.0, 10.0, 80))
y = np.sin(x) + 0.2 * rng.normal(size=80)
bad = np.zeros(80, dtype=bool)
bad[rng.choice(np.arange(30, 60), 8, replace=False)] = True
y = y + bad * rng.uniform(2.0, 4.0, 80)


def curve(X, y=None, heavy=True):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    noise = dist.StudentT(3.0, f, scale) if heavy else dist.Normal(f, scale)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", noise, obs=y)


fits = {
    "Normal noise": pg.fit(curve, pg.Laplace(), 0, x, y=y, heavy=False),
    "Student-t noise": pg.fit(curve, pg.VI(), 0, x, y=y, heavy=True),
}
new = np.linspace(0.0, 10.0, 200)
found = {name: fit.predict(new) for name, fit in fits.items()}
error = {k: np.sqrt(np.mean((p.f_mean - np.sin(new)) ** 2)) for k, p in found.items()}
for name, fit in fits.items():
    print(f"{name}: scale {fit.hyper['scale']:.2f}, error of the curve {error[name]:.2f}")

# %% [markdown]
# The error is the root mean square distance from the true curve. The scale of the normal noise has
# to cover the outliers, so it is far above 0.2 and the band is wide everywhere. The Student-t scale
# is close to the truth, because the outliers are in its tails.

# %%
for colour, (name, p) in zip(("C1", "C0"), found.items(), strict=True):
    plt.fill_between(new, *p.f_interval(0.95), color=colour, alpha=0.2)
    plt.plot(new, p.f_mean, color=colour, label=f"{name}, 95 % band of f")
plt.plot(new, np.sin(new), "k--", label="truth")
plt.plot(x[~bad], y[~bad], "k.", label="data")
plt.plot(x[bad], y[bad], "rx", label="outliers")
plt.gca().set(title="Outliers pull the curve of normal noise", xlabel="x", ylabel="y")
plt.legend(loc="upper left", fontsize="small")
plt.ylim(-2.0, 6.5)
plt.show()

# %%
normal, student = error["Normal noise"], error["Student-t noise"]
lower, upper = found["Student-t noise"].f_interval(0.95)
inside = np.mean((np.sin(new) > lower) & (np.sin(new) < upper))
print(f"the truth is inside the Student-t band at {inside:.0%} of the points")
assert student < 0.15 and normal > 2.0 * student and inside > 0.8
