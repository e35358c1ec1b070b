# %% [markdown]
# # Priors for length scales
#
# A length scale has the unit of its input. A default prior such as LogNormal(0, 1) suits inputs of about one, and misleads a fit to inputs
# in metres. `pg.priors.lengthscale` makes a prior from the data, between the distance to the nearest row and the largest distance.
#
# The first cell shows what `pg.check` says about both priors. The picture draws them, and the last cell compares the fits.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
metres = np.sort(rng.uniform(0.0, 3000.0, 80))
y = np.sin(metres / 400.0) + 0.2 * rng.normal(size=80)


def declare(lengthscale):
    def model(X, y=None):
        ell = numpyro.sample("lengthscale", lengthscale)
        noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, ell), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    return model


priors = {"LogNormal(0, 1)": dist.LogNormal(0.0, 1.0), "pg.priors": pg.priors.lengthscale(metres)}
for name, prior in priors.items():
    checklist = pg.check(declare(prior), metres, y=y)
    print(name, [i.message for i in checklist.items if i.name == "length scales"])

# %%
ell = np.geomspace(0.1, 1e4, 400)
for k, (name, prior) in enumerate(priors.items()):
    density = ell * np.exp(np.asarray(prior.log_prob(ell)))
    plt.semilogx(ell, density, c=f"C{k}")
    plt.text(ell[density.argmax()], density.max() + 0.01, name, c=f"C{k}", ha="center")
plt.axvspan(np.median(np.diff(metres)), np.ptp(metres), color="grey", alpha=0.15)
middle = np.sqrt(np.median(np.diff(metres)) * np.ptp(metres))
plt.text(middle, 0.49, "nearest to farthest row", ha="center")
plt.gca().set(
    title="Only one of the two priors lies between the data's distances",
    xlabel="length scale (m)",
    ylabel="density of its logarithm",
    ylim=(0.0, 0.53),
)
plt.show()

# %%
fits = {
    name: pg.fit(declare(prior), pg.Laplace(), 0, metres, y=y) for name, prior in priors.items()
}
print({name: round(float(fit.hyper["lengthscale"]), 1) for name, fit in fits.items()})
assert 200.0 < float(fits["pg.priors"].hyper["lengthscale"]) < 900.0
