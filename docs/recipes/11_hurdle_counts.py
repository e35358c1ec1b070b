# %% [markdown]
# # Hurdle model for counts
#
# Two questions about a count can have different answers: does anything happen, and if so, how much? A hurdle model has a function for each.
# Zeros come from the first alone. NumPyro's hurdle takes any distribution of counts. Each row depends on both functions, and `Laplace()`,
# `EP()` and `VI()` take such a model.
#
# The two halves of this model share nothing. The last cell therefore fits each half alone, and their log evidences add up to that of
# the whole.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0.0, 10.0, 150))
some = rng.uniform(size=150) < 1.0 / (1.0 + np.exp(-2.0 * np.sin(x)))
y = np.where(some, 1 + rng.poisson(np.exp(0.5 + 0.15 * x)), 0)


def hurdle(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 1.5), X))  # log odds of a count above zero
    g = numpyro.sample("g", pg.GP(pg.kernels.RBF(2.0, 3.0), X))  # log rate of counts above zero
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.HurdleLogits(dist.Poisson(jnp.exp(g)), -f), obs=y)


fit = pg.fit(hurdle, pg.Laplace(), 0, x, y=y)
new = np.linspace(0.0, 10.0, 80)
found = fit.predict(new)
above = 1.0 / (1.0 + np.exp(-np.asarray(fit.posterior["f"](new).mean)))

# %%
figure, (top, bottom) = plt.subplots(2, 1, sharex=True, layout="constrained")
top.plot(x, y > 0, "k|", label="above zero or not")
top.plot(new, above, label="its probability at the mean of f")
top.set(title="A hurdle ...", ylabel="probability")
bottom.plot(x, y, "k.", label="counts")
bottom.plot(new, found.mean, label="expected count")
bottom.set(title="... and the counts behind it", xlabel="x", ylabel="count")
top.legend(loc=(0.36, 0.5))
bottom.legend()
plt.show()


# %%
def gate(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 1.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


class Positive(dist.Poisson):
    """A Poisson of which zeros are not seen."""

    def log_prob(self, value):
        return super().log_prob(value) - jnp.log(-jnp.expm1(-self.rate))


def counts(X, y=None):
    g = numpyro.sample("g", pg.GP(pg.kernels.RBF(2.0, 3.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", Positive(jnp.exp(g)), obs=y)


apart = pg.fit(gate, pg.Laplace(), 0, x, y=(y > 0).astype(int)).log_evidence
apart += pg.fit(counts, pg.Laplace(), 0, x[y > 0], y=y[y > 0]).log_evidence
print(f"log evidence {fit.log_evidence:.6f}, of the two halves fitted separately {apart:.6f}")
assert abs(fit.log_evidence - apart) < 1e-4
