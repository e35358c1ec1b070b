"""GPJax's variational families: one jitted scan over the minibatches, the body of its own `fit` and
`fit_natgrads`.

Methods: "adam" on everything; "natgrad", natural gradients for the whitened q and Adam for the
rest; "dual", the same with the dual parameterisation (t-SVGP).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import tasks
from gpjax import (
    Dataset,
    __version__,
    gps,
    kernels,
    likelihoods,
    mean_functions,
    objectives,
    variational_families,
)
from gpjax.natural_gradients import natural_gradient_step, partition_variational


class Logit(likelihoods.Bernoulli):
    """Bernoulli with a logit link instead of GPJax's probit; its base integrates by 20-point
    quadrature.
    """

    def link_function(self, f):
        """p(y | f)."""
        return dist.Bernoulli(logits=f, validate_args=False)


def _family(problem, settings, method):
    """q, whitened with a full covariance or dual; either starts at the prior."""
    families = {
        "adam": variational_families.WhitenedVariationalGaussian,
        "natgrad": variational_families.WhitenedVariationalGaussian,
        "dual": variational_families.DualVariationalGaussian,
    }
    kernel = kernels.RBF(
        lengthscale=jnp.asarray(problem.lengthscale), variance=jnp.asarray(problem.variance)
    )
    prior = gps.Prior(mean_function=mean_functions.Zero(), kernel=kernel, jitter=settings["jitter"])
    start = {"variational_mean": problem.mean[:, None], "variational_root_covariance": problem.root}
    start = {name: jnp.asarray(value) for name, value in start.items()} if method == "adam" else {}
    return families[method](model=prior * Logit(), inducing_inputs=jnp.asarray(problem.Z), **start)


def _moments(posterior, X):
    """Mean and variance; GPJax's Gaussian itself does not survive the way out of jit."""
    f = posterior(X, covariance="diagonal")
    return f.mean, f.variance


class Engine:
    """See `protocol`."""

    def __init__(self, problem, settings, method, learning_rate, gamma):
        jax.config.update("jax_enable_x64", settings["dtype"] == "float64")
        self.X, self.y = jnp.asarray(problem.X), jnp.asarray(problem.y)[:, None]
        self.chunk, self.gamma, self.natural = settings["chunk"], gamma, method != "adam"
        self.elbo = objectives.dual_elbo if method == "dual" else objectives.elbo
        self.adam, family = optax.adam(learning_rate), _family(problem, settings, method)
        split = partition_variational(family) if self.natural else (None, family)
        state = (*split, self.adam.init(eqx.filter(split[1], eqx.is_array)))
        # GPJax's zero mean is weakly typed, and would compile again once a step has made it strong.
        self.start = self.state = jax.tree.map(
            lambda a: jnp.asarray(a, a.dtype) if eqx.is_array(a) else a, state
        )
        self._run, self._terms = eqx.filter_jit(self._scan), eqx.filter_jit(self._expected)
        self._predict, self._condition = (
            eqx.filter_jit(_moments),
            eqx.filter_jit(lambda q: q.condition(None)),
        )

    def _loss(self, trained, q, data):
        return -self.elbo(eqx.combine(q, trained) if self.natural else trained, data)

    def _step(self, state, data):
        """One step on a minibatch; the bound before it (before Adam's half of it, with natural
        gradients).
        """
        q, trained, moments = state
        if self.natural:
            objective = lambda family, data: -self.elbo(family, data)  # noqa: E731
            q, _ = natural_gradient_step(
                q, trained, data, objective, jnp.asarray(self.gamma, self.X.dtype)
            )
        loss, grads = eqx.filter_value_and_grad(self._loss)(trained, q, data)
        updates, moments = self.adam.update(grads, moments, eqx.filter(trained, eqx.is_array))
        return (q, eqx.apply_updates(trained, updates), moments), -loss

    def _scan(self, state, X, y, rows):
        arrays, static = eqx.partition(state, eqx.is_array)

        def body(arrays, row):
            batch = (X[row], y[row]) if rows.shape[1] else (X, y)
            state, bound = self._step(eqx.combine(arrays, static), Dataset(*batch, n_total=len(y)))
            return eqx.filter(state, eqx.is_array), bound

        arrays, bounds = jax.lax.scan(body, arrays, rows)
        return eqx.combine(arrays, static), bounds

    def _q(self):
        return eqx.combine(*self.state[:2]) if self.natural else self.state[1]

    def _expected(self, family, X, y):
        return jnp.sum(objectives.variational_expectation(family, Dataset(X, y)))

    def run(self, rows):
        """Steps; see `protocol`."""
        self.state, bounds = self._run(self.state, self.X, self.y, jnp.asarray(rows))
        return np.asarray(jax.block_until_ready((self.state, bounds))[1])

    def bound(self):
        """The bound on all data, in chunks."""
        q, at = self._q(), range(0, len(self.y), self.chunk)
        terms = sum(
            float(self._terms(q, self.X[i : i + self.chunk], self.y[i : i + self.chunk]))
            for i in at
        )
        return terms - float(q.prior_kl())

    def predict(self, X):
        """Mean and variance of f, with the factor of K(Z, Z) computed once."""
        posterior = self._condition(self._q())
        parts = [
            self._predict(posterior, jnp.asarray(X[i : i + self.chunk]))
            for i in range(0, len(X), self.chunk)
        ]
        return tuple(np.concatenate([np.asarray(p[k]) for p in parts]) for k in (0, 1))

    def reset(self):
        """Parameters and optimiser back to their start."""
        self.state = self.start


if __name__ == "__main__":
    tasks.main("GPJax", __version__, Engine)
