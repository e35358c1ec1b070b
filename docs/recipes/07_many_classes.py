# %% [markdown]
# # Classification with several classes
#
# A label is one of three classes. Give each class a function, in a plate, and put a softmax over their values. Each row depends on three
# functions at once. `Laplace()`, `EP()` and `VI()` all take such a model, and `Laplace()` costs the least.
#
# The picture shows the most probable class at each place. The lines are where its probability is 0.5, 0.7 and 0.9.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
centres = np.array([[-1.5, 0.0], [1.5, 0.0], [0.0, 2.0]])
y = rng.integers(0, 3, 90)
X = centres[y] + 0.8 * rng.normal(size=(90, 2))


def classes(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5))
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


fit = pg.fit(classes, pg.Laplace(), 0, X, y=y)
side = np.linspace(-4.0, 4.0, 30)
grid = np.stack([a.ravel() for a in np.meshgrid(side, side)], 1)
probs = np.asarray(fit.predict(grid).probs)

# %%
colours = ["#0072B2", "#E69F00", "#009E73"]  # told apart by the colour-blind, and by their shapes
plt.contour(
    side, side, probs.max(1).reshape(30, 30), levels=[0.5, 0.7, 0.9], colors="grey", linewidths=0.6
)
for k, marker in enumerate("o^s"):
    here = 1.0 * (probs.argmax(1) == k).reshape(30, 30)
    plt.contourf(side, side, here, levels=[0.5, 1.5], colors=colours[k], alpha=0.2)
    plt.plot(*X[y == k].T, marker, c=colours[k], ms=5)
    place = [(-3.2, -2.2), (3.2, -2.2), (0.0, 3.6)][k]
    plt.text(*place, f"class {k}", c=colours[k], weight="bold", ha="center")
plt.gca().set(
    title="The likeliest class, and how sure of it (0.5, 0.7, 0.9)", xlabel="x1", ylabel="x2"
)
plt.show()

# %%
test = rng.integers(0, 3, 300)
guess = np.asarray(fit.predict(centres[test] + 0.8 * rng.normal(size=(300, 2))).probs).argmax(1)
print(f"{np.mean(guess == test):.0%} of 300 new rows right")
assert np.mean(guess == test) > 0.8
