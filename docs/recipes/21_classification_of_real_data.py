# %% [markdown]
# # Classification of real data
#
# You want the probability of a class, and you do not know whether its boundary is a straight line.
# A Gaussian process learns the shape of the boundary. Compare it with logistic regression on test
# rows, because a straight line is often enough.
#
# The data are the breast tumours of scikit-learn: 569 rows, of which 212 are malignant. This page
# uses two columns, the mean texture and the mean smoothness. It trains on 200 rows with `EP()`, and
# tests on the other 369. Two weak columns make the task harder than it is with all 30.
# This page needs scikit-learn: `pip install ".[sklearn]"`.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import ppl_gp as pg

jax.config.update("jax_enable_x64", True)
data = load_breast_cancer(as_frame=True)
columns = ["mean texture", "mean smoothness"]
X, y = data.data[columns].to_numpy(), 1 - data.target.to_numpy()  # 1: malignant
X, X_test, y, y_test = train_test_split(X, y, train_size=200, random_state=0, stratify=y)
centre, spread = X.mean(0), X.std(0)
X, X_test = (X - centre) / spread, (X_test - centre) / spread  # in standard deviations


def tumours(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 1.0).expand([2]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=level + f), obs=y)


fit = pg.fit(tumours, pg.EP(), 0, X, y=y)
rival = LogisticRegression().fit(X, y)
probability = {
    "Gaussian process": np.asarray(fit.predict(X_test).probs),
    "logistic regression": rival.predict_proba(X_test)[:, 1],
    "share of training rows": np.full(len(y_test), y.mean()),
}
density = {k: np.mean(np.log(np.where(y_test == 1, p, 1.0 - p))) for k, p in probability.items()}
accuracy = {k: np.mean((p > 0.5) == y_test) for k, p in probability.items()}
for name in probability:
    print(f"{name}: {density[name]:.3f} nats per test row, {accuracy[name]:.0%} right")

# %% [markdown]
# The first number is the mean log probability of the true class, which is better closer to zero. It
# rewards honest probabilities. The second is the share of test rows on the right side of 1/2. The
# third line ignores the inputs, and any useful model has to beat it.

# %%
figure = pg.plot_surface(
    {"Breast tumours, EP": fit},
    X,
    y,
    labels=[f"{name} (standardised)" for name in columns],
    classes=("benign", "malignant"),
)
plt.show()

# %%
own = np.mean(fit.log_density(X_test, y_test))
print(f"the same score by fit.log_density: {own:.3f}")
assert abs(own - density["Gaussian process"]) < 1e-6
assert density["Gaussian process"] > density["logistic regression"] - 0.02
assert density["Gaussian process"] > density["share of training rows"] + 0.1
