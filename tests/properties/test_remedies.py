"""The remedy of a message, taken literally, runs: a table (message, what triggers it, remedy)."""

import functools
import re
import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy.sparse import csr_array, csr_matrix
from scipy.stats import multivariate_normal

import ppl_gp as pg

N = 6
X, Y, GROUP = np.linspace(0.0, 3.0, N), np.array([0, 1, 1, 0, 1, 0]), np.array([0, 1, 0, 1, 0, 1])
FIXED = pg.Fixed({})
LAPLACE = pg.Laplace(hyper=FIXED)
KERNEL = pg.kernels.RBF(1.0, 1.0)


def _bernoulli(eta, y):
    with numpyro.plate("data", eta.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def plain(X, y=None):
    _bernoulli(numpyro.sample("f", pg.GP(KERNEL, X)), y)


def with_mean(mean, X, y=None):
    _bernoulli(numpyro.sample("f", pg.GP(KERNEL, X, mean=mean)), y)


def with_scale(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(jnp.ones(2)).to_event(1))
    _bernoulli(scale[0] * numpyro.sample("f", pg.GP(KERNEL, X)), y)


def grouped(prior, X, group, y=None, scale=False, levels=2):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0)) if scale else 1.0
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    u = numpyro.sample("u", prior.expand([levels]).to_event(1))
    _bernoulli(f + tau * u[group], y)


NORMAL, STUDENT = partial(grouped, dist.Normal(0.0, 1.0)), partial(grouped, dist.StudentT(4.0))
FLAT = partial(grouped, dist.ImproperUniform(dist.constraints.real, (), ()))


def counts(X, exposure, y=None):
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f)), obs=y)


def classes(X, y=None):
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def units(X, y=None, size=None):
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("units", size or X.shape[0]):
        u = numpyro.sample("u", dist.Normal(0.0, 0.5))
    _bernoulli(f + u, y)


def constrained(X, group, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    numpyro.factor("sum", -100.0 * jnp.sum(u) ** 2)
    _bernoulli(f + u[group], y)


def observed_function(X, y=None):
    numpyro.sample("f", pg.GP(KERNEL, X), obs=y)


def through_noise(X, y=None):
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.001), obs=y)


def mixture(X, y=None, summed=False):
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        if summed:
            parts = dist.Normal(f[:, None] + jnp.array([0.0, 1.0]), 0.5)
            weights = dist.Categorical(jnp.array([0.5, 0.5]))
            numpyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y)
        else:
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("y", dist.Normal(f + z, 0.5), obs=y)


def batches(X, y=None, batch=2):
    plate = numpyro.plate("data", X.shape[0], subsample_size=batch)
    with plate as rows:
        pass
    f = numpyro.sample("f", pg.GP(KERNEL, X[rows]))
    with plate:
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=None if y is None else y[rows])


def without_function(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    _bernoulli(b * X, y)


def with_param(X, y=None, prior=False):
    one = numpyro.sample("c", dist.HalfNormal(1.0)) if prior else numpyro.param("c", 1.0)
    _bernoulli(one * numpyro.sample("f", pg.GP(KERNEL, X)), y)


def coupled(X, y=None):
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    _bernoulli(jnp.cumsum(f), y)


def looked_up(X, y=None):
    """The function at other rows: of X in another order."""
    _bernoulli(numpyro.sample("f", pg.GP(KERNEL, X))[jnp.argsort(-X)], y)


SCALES = np.array([0.5, 2.0])


def smooth_groups(X, group, y=None, plate=False):
    """A function for each group, each with a length scale of its own."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5).expand([2]).to_event(1))
    if plate:
        with numpyro.plate("groups", 2):
            f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, lengthscale), X))
    else:
        kernels = [pg.kernels.RBF(1.0, lengthscale[i]) for i in range(2)]
        gps = [pg.GP(k, X, jitter=1e-10) for k in kernels]
        f = jnp.stack([numpyro.sample(f"f{i}", gp) for i, gp in enumerate(gps)])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f[group, jnp.arange(X.shape[0])], 0.3), obs=y)


def scaled_prior(X, y=None):
    with numpyro.handlers.scale(scale=2.0):
        f = numpyro.sample("f", pg.GP(KERNEL, X))
    _bernoulli(f, y)


def of_prior(X, y=None, prior=None):
    """A GP whose variance has this prior."""
    variance = numpyro.sample("variance", prior)
    _bernoulli(numpyro.sample("f", pg.GP(pg.kernels.RBF(jnp.sum(variance), 1.0), X)), y)


def of_weights(X, y=None, prior=None):
    w = numpyro.sample("w", prior)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w * X, 1.0), obs=y)


def of_line(X, y=None):
    """Its two weights are correlated in the posterior."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * X, 0.5), obs=y)


def labelled(X, y=None):
    """Labels whose density is not conjugate to a mean that passes a sine."""
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(z + jnp.sin(m), 1.0), obs=y)


def two_functions(X, y=None):
    """Effects of each row beside two functions, and effects of groups."""
    with numpyro.plate("functions", 2):
        f = numpyro.sample("f", pg.GP(KERNEL, X))
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        scale = jnp.exp(0.1 * f[1])
        numpyro.sample("y", dist.Normal(f[0] + h + u[jnp.arange(X.shape[0]) % 3], scale), obs=y)


def beside_a_gp(X, w, y=None, sd=10.0):
    beta = numpyro.sample("beta", dist.Normal(0.0, sd))
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    _bernoulli(f + w * beta, y)


def periodic(X, y=None):
    period = numpyro.sample("period", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.Periodic(1.0, 1.0, period), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def shares(X, group, y=None, levels=2, prior=None):
    """Three shares without a GP, effects of groups with an unknown spread."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0) if prior is None else prior)
    with numpyro.plate("groups", levels):
        u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(2), tau**2 * jnp.eye(2)))
    logits = jnp.concatenate([jnp.zeros((X.shape[0], 1)), u[group]], 1)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Multinomial(6, logits=logits), obs=y)


SHARES = np.array([[1, 2, 3], [3, 2, 1], [2, 2, 2], [0, 3, 3], [4, 1, 1], [1, 1, 4]])


NOTICED = pg.MAP(maximise=("u",))


def spread(X, group, y=None, multiplied=False):
    """Student-t effects with an unknown scale, as their spread or beside them."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    own = 1.0 if multiplied else tau
    u = numpyro.sample("u", dist.StudentT(4.0, 0.0, own).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        shift = tau * u if multiplied else u
        numpyro.sample("y", dist.Normal(f + shift[group], 0.3), obs=y)


def tails(X, group, y=None, kind="spread"):
    """Student-t effects without a GP, their unknown scale as their spread or as a factor."""
    tau, own = numpyro.sample("tau", dist.HalfNormal(1.0)), kind == "factor"
    b = numpyro.sample("b", dist.Normal(0.0, tau if kind == "two" else 1.0))
    u = numpyro.sample("u", dist.StudentT(4.0, 0.0, 1.0 if own else tau).expand([2]).to_event(1))
    _bernoulli(b * X + (tau if own else 1.0) * u[group], y)


def two_signs(X, y=None):
    """A coefficient whose sign the data do not know: zero is a minimum."""
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.abs(w) * jnp.abs(w), 1.0), obs=y)


def outlier(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, 0.3), obs=y)


def flat_topped(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    numpyro.factor("quartic", -(w**4))
    f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def standardised(X, y=None):
    _bernoulli(numpyro.sample("f", pg.GP(KERNEL, (X - X.mean()) / X.std())), y)


def funnel(X, y=None):
    """A noise that is a function, and a level of each of the two."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), X))
    h = numpyro.sample("h", pg.GP(pg.kernels.RBF(0.5, 1.0), X))
    a, b = (numpyro.sample(k, dist.Normal(m, s)) for k, m, s in (("a", 0, 1), ("b", -1, 0.5)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + a, jnp.exp(h + b)), obs=y)


def fit(model, *args, method=LAPLACE, y=Y, **options):
    return pg.fit(model, method, 0, *args, y=y, **options)


def _silently(model, method):
    """The remedy of a warning leaves no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model, X, method=method, y=1.0 * Y)


def sparse(**options):
    return pg.SVGP(num_inducing=3, max_steps=1, **{"hyper": FIXED, **options})


def map_of(**options):
    return pg.Laplace(hyper=pg.MAP(max_steps=2, **options))


def asked(verb):
    """Of a fit of the plain model."""
    return lambda: verb(_plain_fit())


@functools.cache
def _plain_fit():
    return fit(plain, X)


MANY = dist.HalfNormal(jnp.ones(20)).to_event(1)
IMPROPER = dist.ImproperUniform(dist.constraints.positive, (), ())
STREAM = pg.Stream(lambda: iter([(X, Y)] * 3), num_data=N)

_CHAIN = {"num_warmup": 3, "num_samples": 3, "num_chains": 1}


class Row(NamedTuple):
    """What is said, by what, and the remedy as it is written there."""

    message: str
    trigger: object
    remedies: tuple
    slow: bool = False


def row(message, trigger, *remedies, slow=False):
    return Row(message, trigger, remedies, slow)


ROWS = {
    "a class as method": row(
        r"give an instance, Laplace\(\)",
        lambda: fit(plain, X, method=pg.Laplace),
        lambda: fit(plain, X, method=pg.Laplace()),
    ),
    "no key": row(
        r"fit\(model, method, 0, X, y=y\)",
        lambda: pg.fit(plain, LAPLACE, None, X, y=Y),
        lambda: pg.fit(plain, LAPLACE, 0, X, y=Y),
    ),
    "no observations": row(
        r"pass y=\.\.\.", lambda: fit(plain, X, y=None), lambda: fit(plain, X, y=Y)
    ),
    "too few steps": row(
        "raise `max_steps`.*throw=False returns it",
        lambda: fit(plain, X, method=pg.Laplace(hyper=FIXED, max_steps=1)),
        lambda: fit(plain, X, method=pg.Laplace(hyper=FIXED, max_steps=50)),
        lambda: fit(plain, X, method=pg.Laplace(hyper=FIXED, max_steps=1), throw=False),
    ),
    "Sample under SVGP": row(
        r"is SparseNUTS\(\)",
        lambda: fit(plain, X, method=sparse(hyper=pg.Sample())),
        lambda: fit(plain, X, method=pg.SparseNUTS(num_inducing=3, **_CHAIN), throw=False),
        slow=True,
    ),
    "Fixed of too few": row(
        "Give one constrained value for each",
        lambda: fit(with_scale, X),
        lambda: fit(with_scale, X, method=pg.Laplace(hyper=pg.Fixed({"scale": [1.0, 1.0]}))),
        slow=True,
    ),
    "Fixed of a wrong shape": row(
        r"give numpy\.full\(\(2,\), 0\.5\)",
        lambda: fit(with_scale, X, method=pg.Laplace(hyper=pg.Fixed({"scale": 0.5}))),
        lambda: fit(
            with_scale, X, method=pg.Laplace(hyper=pg.Fixed({"scale": np.full((2,), 0.5)}))
        ),
    ),
    "maximise as a string": row(
        r"maximise=\('u',\)", lambda: pg.MAP(maximise="u"), lambda: pg.MAP(maximise=("u",))
    ),
    "restarts of zero": row(
        "give a whole number, at least 1",
        lambda: pg.MAP(restarts=0),
        lambda: pg.MAP(restarts=1),
    ),
    "a wrong integrate": row(
        "give 'gaussian' or a tuple of names",
        lambda: fit(NORMAL, X, GROUP, method=pg.Laplace(hyper=FIXED, integrate="all")),
        lambda: fit(NORMAL, X, GROUP, method=pg.Laplace(hyper=FIXED, integrate="gaussian")),
        lambda: fit(NORMAL, X, GROUP, method=pg.Laplace(hyper=FIXED, integrate=("f", "u"))),
        slow=True,
    ),
    "integrate of a prior that is not Gaussian": row(
        "cannot be integrated.*Leave it out, or use NUTS",
        lambda: fit(STUDENT, X, GROUP, method=pg.Laplace(integrate=("u",))),
        lambda: fit(STUDENT, X, GROUP, method=pg.Laplace(integrate=("f",))),
        lambda: fit(STUDENT, X, GROUP, method=pg.NUTS(**_CHAIN), throw=False),
        slow=True,
    ),
    "Sample without hyperparameters": row(
        r"use Fixed\(\{\}\) or MAP\(\)",
        lambda: fit(plain, X, method=pg.Laplace(hyper=pg.Sample())),
        lambda: fit(plain, X, method=pg.Laplace(hyper=pg.Fixed({}))),
        lambda: fit(plain, X, method=pg.Laplace(hyper=pg.MAP())),
        slow=True,
    ),
    "an effect with an unknown scale": row(
        r"hyper=Sample\(\), or hyper=Fixed\({'tau': \.\.\., 'u': \.\.\.}\); .*e=\('u',\)\)",
        lambda: fit(STUDENT, X, GROUP, method=pg.Laplace(), scale=True),
        lambda: fit(
            STUDENT,
            X,
            GROUP,
            method=pg.Laplace(hyper=pg.Fixed({"tau": 1.0, "u": [0.0, 0.0]})),
            scale=True,
        ),
        lambda: fit(STUDENT, X, GROUP, method=map_of(maximise=("u",)), scale=True, throw=False),
        lambda: fit(
            STUDENT,
            X,
            GROUP,
            method=pg.Laplace(hyper=pg.Sample(num_warmup=2, num_samples=2)),
            scale=True,
            throw=False,
        ),
        lambda: fit(STUDENT, X, GROUP, method=pg.NUTS(**_CHAIN), scale=True, throw=False),
        slow=True,
    ),
    **{
        f"an unknown scale without a process, {name}": row(
            rf"{drawn}Laplace\(integrate=\(\), hyper=Fixed\({{'tau': \.\.\.}}\)\)",
            lambda kind=kind, method=method: fit(tails, X, GROUP, method=method, kind=kind),
            lambda kind=kind: fit(
                tails,
                X,
                GROUP,
                method=pg.Laplace(integrate=(), hyper=pg.Fixed({"tau": 1.0})),
                kind=kind,
            ),
        )
        for name, kind, method, drawn in (
            ("as a spread", "spread", pg.EP(), r"Sample\(\), or "),
            ("as a factor", "factor", pg.Laplace(), r"Sample\(\), or "),
            ("of two effects", "two", pg.Laplace(integrate=()), r"Use NUTS\(\), or "),
        )
    },
    "a maximum that there is none of": row(
        r"a maximum may not exist: 'u' .*NUTS\(\) or hyper=Sample\(\), or hold them by hyper=Fixed",
        lambda: fit(spread, X, GROUP, y=np.sin(3 * X), method=pg.Laplace(hyper=NOTICED)),
        lambda: fit(spread, X, GROUP, y=np.sin(3 * X), method=pg.NUTS(**_CHAIN), throw=False),
        lambda: fit(
            spread,
            X,
            GROUP,
            y=np.sin(3 * X),
            method=pg.Laplace(hyper=pg.Fixed({"tau": 1.0, "u": np.zeros(2)})),
        ),
        lambda: fit(
            spread,
            X,
            GROUP,
            y=np.sin(3 * X),
            method=pg.Laplace(hyper=pg.Sample(num_warmup=2, num_samples=2)),
            throw=False,
        ),
        # as docs/effects.md has it
        lambda: fit(
            partial(spread, multiplied=True),
            X,
            GROUP,
            y=np.sin(3 * X),
            method=pg.Laplace(hyper=NOTICED),
        ),
        slow=True,
    ),
    "an effect as a point": row(
        r"hyper=Fixed\({'u': \.\.\.}\); hyper=MAP\(maximise=\('u',\)\) says that you know",
        lambda: fit(STUDENT, X, GROUP, method=map_of(), throw=False),
        lambda: fit(STUDENT, X, GROUP, method=map_of(maximise=("u",)), throw=False),
        lambda: fit(STUDENT, X, GROUP, method=pg.Laplace(hyper=pg.Fixed({"u": [0.0, 0.0]}))),
        slow=True,
    ),
    "an effect with an improper prior": row(
        r"NUTS\(\), or hyper=Fixed\({'u': \.\.\.}\), or a normal prior of a large scale; "
        r"hyper=MAP\(maximise=\('u',\), init={'u': \.\.\.}\)",
        lambda: fit(FLAT, X, GROUP, method=map_of(), throw=False),
        lambda: fit(FLAT, X, GROUP, method=pg.Laplace(hyper=pg.Fixed({"u": [0.0, 0.0]}))),
        lambda: fit(
            FLAT,
            X,
            GROUP,
            method=map_of(maximise=("u",), init={"u": np.zeros(2)}),
            throw=False,
        ),
        lambda: fit(partial(grouped, dist.Normal(0.0, 100.0)), X, GROUP),
        slow=True,
    ),
    "an effect beside a factor": row(
        r"Sample\(\), or hyper=Fixed\(\{'u': \.\.\.\}\); hyper=MAP\(maximise=\('u',\)\)",
        lambda: fit(constrained, X, GROUP, method=pg.Laplace()),
        lambda: fit(constrained, X, GROUP, method=pg.Laplace(hyper=pg.Fixed({"u": [0.0, 0.0]}))),
        lambda: fit(constrained, X, GROUP, method=pg.Laplace(hyper=pg.MAP(maximise=("u",)))),
        lambda: fit(
            constrained, X, GROUP, method=pg.Laplace(hyper=pg.Sample(**_CHAIN)), throw=False
        ),
        lambda: fit(constrained, X, GROUP, method=pg.NUTS(**_CHAIN), throw=False),
        slow=True,
    ),
    "a plate of a written size": row(
        r"numpyro\.plate\('units', 12\)\. .*take the number from these, X\.shape\[0\]",
        lambda: fit(units, X, method=pg.Laplace(), size=N),
        lambda: fit(units, X, method=pg.Laplace()),
        slow=True,
    ),
    "a level that there is none of": row(
        "Declare as many members of the plate as there are levels",
        lambda: fit(NORMAL, X, GROUP + 1),
        lambda: fit(NORMAL, X, GROUP + 1, levels=3),
        slow=True,
    ),
    "a function that is observed": row(
        r"numpyro\.sample\('f', dist\.Normal\(f, 0\.001\), obs=y\)",
        lambda: fit(observed_function, X, y=np.sin(X)),
        lambda: fit(through_noise, X, y=np.sin(X)),
    ),
    "a mean that is an array": row(
        r"mean=lambda X: slope \* X\[:, 0\].*pg\.means\.Linear\(slope\).*f \+ slope \* x",
        lambda: fit(partial(with_mean, 0.5 * X), X),
        lambda: fit(partial(with_mean, lambda X: 0.5 * X[:, 0]), X[:, None]),
        lambda: fit(partial(with_mean, pg.means.Linear(0.5)), X),
        slow=True,
    ),
    "a length scale for each unit of a plate": row(
        r"declare a site for each.*f\[unit, jnp\.arange\(X\.shape\[0\]\)\]",
        lambda: fit(smooth_groups, X, GROUP, plate=True),
        lambda: fit(
            smooth_groups,
            X,
            GROUP,
            y=np.sin(X),
            method=pg.Laplace(hyper=pg.Fixed({"lengthscale": SCALES})),
        ),
        slow=True,
    ),
    **{
        f"a function that is looked up, {name}": row(
            r"pass X\[index\] to fit in place of X, and write f",
            lambda method=method: fit(looked_up, X, method=method),
            lambda method=method: fit(plain, X[np.argsort(-X)], method=method, throw=False),
            slow=name != "sparse",
        )
        for name, method in {
            "local": LAPLACE,
            "VI": pg.VI(hyper=FIXED),
            "sparse": sparse(),
            "minibatches": sparse(batch_size=3),
        }.items()
    },
    "an exposure of zero": row(
        r"row\(s\) \[2\].*leave such rows out",
        lambda: fit(counts, X, np.where(np.arange(N) == 2, 0.0, 1.0), y=Y * (np.arange(N) != 2)),
        lambda: fit(counts, X[3:], np.ones(3), y=Y[3:]),
    ),
    "inputs of three axes": row(
        r"give \(N, D\) or \(N,\)",
        lambda: pg.GP(KERNEL, np.zeros((2, 2, 2))),
        lambda: pg.GP(KERNEL, np.zeros((2, 2))),
    ),
    "a discrete latent": row(
        r"numpyro\.distributions\.MixtureSameFamily",
        lambda: fit(mixture, X, method=pg.NUTS(**_CHAIN), y=1.0 * Y),
        lambda: fit(mixture, X, y=1.0 * Y, summed=True),
        slow=True,
    ),
    "a param under NUTS": row(
        r"numpyro\.sample\('c', prior\).*hyper=MAP\(\)",
        lambda: fit(with_param, X, method=pg.NUTS(**_CHAIN)),
        lambda: fit(with_param, X, method=pg.NUTS(**_CHAIN), prior=True, throw=False),
        lambda: fit(with_param, X, method=map_of(), throw=False),
        slow=True,
    ),
    "a plate that subsamples": row(
        r"leave subsample_size out, or fit by SVGP\(\)",
        lambda: fit(batches, X),
        lambda: fit(plain, X),
        lambda: fit(batches, X, method=sparse()),
        slow=True,
    ),
    "leave-one-out of batches": row(
        r"can be None, fit with None, and SVGP\(batch_size=2\) draws the batches",
        lambda: fit(batches, X, method=sparse()).loo(),
        lambda: fit(batches, X, method=sparse(batch_size=2), batch=None).loo(),
        slow=True,
    ),
    "another argument of the model to the posterior of f": row(
        r"posterior\(X_new, joint=ndarray\).*leave other arguments out",
        asked(lambda fit: fit.posterior(X, np.ones(N))),
        asked(lambda fit: fit.posterior(X)),
        asked(lambda fit: fit.posterior(X, True)),
    ),
    "Grid of a param": row(
        r"Declare them by numpyro\.sample, or use MAP\(\) or Fixed",
        lambda: fit(with_param, X, method=pg.Laplace(hyper=pg.Grid())),
        lambda: fit(with_param, X, method=pg.Laplace(hyper=pg.Fixed({"c": 1.0}))),
    ),
    "values as hyper of SVGP": row(
        r"hyper=Fixed\(\{\.\.\.\}\)",
        lambda: pg.SVGP(hyper={"c": 1.0}),
        lambda: pg.SVGP(hyper=pg.Fixed({"c": 1.0})),
    ),
    "a class as hyper of SVGP": row(
        r"SVGP\(hyper=MAP\): give MAP\(\)",
        lambda: pg.SVGP(hyper=pg.MAP),
        lambda: pg.SVGP(hyper=pg.MAP()),
    ),
    "a wrong covariance": row(
        "give one of .*'full'",
        lambda: pg.SVGP(training=pg.Training(covariance="half")),
        lambda: pg.SVGP(training=pg.Training(covariance="full")),
    ),
    "beta of zero": row(
        r"only Training\(natural=False\)",
        lambda: pg.SVGP(layers=pg.Layers(beta=0.0)),
        lambda: pg.SVGP(layers=pg.Layers(beta=0.0), training=pg.Training(natural=False)),
    ),
    "a natural rate of two": row(
        r"give a size in \(0, 1\]",
        lambda: pg.SVGP(training=pg.Training(natural_rate=2.0)),
        lambda: pg.SVGP(training=pg.Training(natural_rate=1.0)),
    ),
    "a rule for points": row(
        "give one of .*an array Z, or inducing variables",
        lambda: fit(plain, X, method=sparse(inducing="best")),
        lambda: fit(plain, X, method=sparse(inducing=X[:3])),
        slow=True,
    ),
    "a guide without the posterior's correlations": row(
        r"guide of this family is not the posterior.* Take SVI\(guide=AutoMultivar\w+\), or NUTS",
        lambda: fit(of_line, X, method=pg.SVI(), y=1.0 * Y),
        lambda: _silently(of_line, pg.SVI(guide=AutoMultivariateNormal)),
        slow=True,
    ),
    "a guide that has not settled": row(
        r"has not settled: by importance weights .*Take num_steps=400, or a larger learning_rate",
        lambda: fit(of_line, X, method=pg.SVI(AutoMultivariateNormal, num_steps=100), y=1.0 * Y),
        lambda: _silently(of_line, pg.SVI(AutoMultivariateNormal, num_steps=400)),
        slow=True,
    ),
    "a wrong power": row(
        r"EP\(power=.*\)",
        lambda: pg.EP(power=2.0),
        lambda: pg.EP(power=1.0),
    ),
    "a damping of zero": row(
        r"give a value in \(0, 1\]", lambda: pg.EP(damping=0.0), lambda: pg.EP(damping=1.0)
    ),
    "factors by a name": row(
        r"give lists of names, \[\['mean', 'precision'\]\]",
        lambda: pg.MeanField(factors="mean"),
        lambda: pg.MeanField(factors=[["mean", "precision"]]),
    ),
    "no rows at all": row(
        "give at least one row of inputs",
        asked(lambda fit: fit.predict(X[:0])),
        asked(lambda fit: fit.predict(X[:1])),
    ),
    "a quantile of 1.5": row(
        r"as \(0\.05, 0\.95\), or leave it out",
        asked(lambda fit: fit.predict(X, quantiles=(1.5,))),
        asked(lambda fit: fit.predict(X, quantiles=(0.05, 0.95))),
        asked(lambda fit: fit.predict(X)),
    ),
    "y given to predict": row(
        r"log_density\(X_new, y_new\) scores observations",
        asked(lambda fit: fit.predict(X, y=Y)),
        asked(lambda fit: fit.log_density(X, Y)),
    ),
    "no y_new": row(
        r"this model needs y_new, as its fit had y",
        asked(lambda fit: fit.log_density(X)),
        asked(lambda fit: fit.log_density(X, Y)),
    ),
    "no draws": row(
        r"sample\(rng_key, X_new, num_samples, \.\.\.\)",
        asked(lambda fit: fit.sample(0, X, 0)),
        asked(lambda fit: fit.sample(0, X, 2)),
    ),
    "an argument that is missing": row(
        r"predict\(X_new, group=\.\.\.\), or in its place",
        lambda: fit(NORMAL, X, GROUP).predict(X),
        lambda: fit(NORMAL, X, GROUP).predict(X, group=GROUP),
        lambda: fit(NORMAL, X, GROUP).predict(X, GROUP),
        slow=True,
    ),
    "inputs of SciPy's": row(
        r"positional argument 0 is a sparse csr_matrix of shape \(6, 1\); pass X\.toarray\(\)",
        lambda: fit(plain, csr_matrix(X[:, None])),
        lambda: fit(plain, csr_matrix(X[:, None]).toarray()),
    ),
    "a column of SciPy's by name": row(
        r"argument 'group' is a sparse csr_matrix.*\.toarray\(\)",
        lambda: fit(NORMAL, X, group=csr_matrix(GROUP)),
        lambda: fit(NORMAL, X, group=csr_matrix(GROUP).toarray()[0]),
        slow=True,
    ),
    "new inputs of SciPy's": row(
        r"is a sparse csr_array.*X\.toarray\(\)",
        asked(lambda fit: fit.predict(csr_array(X[:, None]))),
        lambda: fit(plain, X[:, None]).predict(csr_array(X[:, None]).toarray()),
    ),
    "a column that is too wide beside a GP": row(
        r"'beta'.*centre and scale its column, or give 'beta' a narrower prior",
        lambda: fit(beside_a_gp, X, 1e7 * np.cos(X)),
        lambda: fit(beside_a_gp, X, np.cos(X) / np.std(np.cos(X))),
        lambda: fit(beside_a_gp, X, 1e7 * np.cos(X), sd=1e-6),
    ),
    "Grid of many": row(
        r"use Sample\(\)",
        lambda: fit(of_prior, X, prior=MANY, method=pg.Laplace(hyper=pg.Grid())),
        lambda: fit(
            of_prior,
            X,
            prior=MANY,
            method=pg.Laplace(hyper=pg.Sample(num_warmup=2, num_samples=2)),
            throw=False,
        ),
        slow=True,
    ),
    "a discrete hyperparameter": row(
        r"fix it with hyper=Fixed\(\{'variance': \.\.\.\}\)",
        lambda: fit(of_prior, X, prior=dist.Bernoulli(0.5), method=pg.Laplace()),
        lambda: fit(
            of_prior,
            X,
            prior=dist.Bernoulli(0.5),
            method=pg.Laplace(hyper=pg.Fixed({"variance": 1})),
        ),
        slow=True,
    ),
    "a prior without draws": row(
        r"give hyper=MAP\(init=\{'variance': \.\.\., \.\.\.\}, restarts=1\), or hyper=Fixed",
        lambda: fit(of_prior, X, prior=IMPROPER, method=pg.Laplace()),
        lambda: fit(
            of_prior, X, prior=IMPROPER, method=map_of(init={"variance": 1.0}), throw=False
        ),
        lambda: fit(
            of_prior, X, prior=IMPROPER, method=pg.Laplace(hyper=pg.Fixed({"variance": 1.0}))
        ),
        slow=True,
    ),
    "one start of a period": row(
        r"hyper=MAP\(restarts=8\)",
        lambda: fit(periodic, X, y=np.sin(X), method=map_of(), throw=False),
        lambda: fit(periodic, X, y=np.sin(X), method=map_of(restarts=8), throw=False),
        slow=True,
    ),
    "a scaled prior under EllipticalSlice": row(
        r"scale the observed sites alone, or use NUTS\(\)",
        lambda: fit(scaled_prior, X, method=pg.EllipticalSlice(**_CHAIN)),
        lambda: fit(scaled_prior, X, method=pg.NUTS(**_CHAIN), throw=False),
        slow=True,
    ),
    "effects that SVGP() would maximise": row(
        r"Laplace\(\), EP\(\) and VI\(\) integrate all.*SVGP\(hyper=AutoNormal\).*hyper=Fixed",
        lambda: fit(two_functions, X, y=1.0 * Y, method=pg.SVGP(num_inducing=3, max_steps=1)),
        lambda: fit(two_functions, X, y=1.0 * Y, method=pg.Laplace(), throw=False),
        lambda: fit(two_functions, X, y=1.0 * Y, method=pg.EP(), throw=False),
        lambda: fit(two_functions, X, y=1.0 * Y, method=pg.VI(), throw=False),
        lambda: fit(two_functions, X, y=1.0 * Y, method=sparse(hyper=AutoNormal), throw=False),
        lambda: fit(
            two_functions,
            X,
            y=1.0 * Y,
            method=sparse(hyper=pg.Fixed({"u": np.zeros(3)})),
            throw=False,
        ),
        slow=True,
    ),
    "a stream under SparseNUTS": row(
        r"The methods that take streams are SVGP\(\) and MeanField\(\)",
        lambda: pg.fit(plain, pg.SparseNUTS(num_inducing=3, **_CHAIN), 0, STREAM),
        lambda: pg.fit(plain, sparse(), 0, STREAM),
        slow=True,
    ),
    "marginals of a model without a predictor": row(
        "leave `marginals` out",
        lambda: fit(
            of_weights, X, prior=dist.StudentT(4.0), method=pg.Laplace(marginals="simplified")
        ),
        lambda: fit(of_weights, X, prior=dist.StudentT(4.0), method=pg.Laplace()),
        slow=True,
    ),
    "factors of a fit that has none": row(
        r"does not factorise; MeanField\(\) does",
        asked(lambda fit: fit.factors),
        lambda: (
            fit(
                of_weights, X, prior=dist.Normal(0.0, 1.0), method=pg.MeanField(), y=1.0 * Y
            ).factors
        ),
        slow=True,
    ),
    "inducing variables of a fit that has none": row(
        r"has no inducing variables; SVGP\(\) and SparseNUTS\(\) do",
        asked(lambda fit: fit.inducing),
        lambda: fit(plain, X, method=sparse()).inducing,
        slow=True,
    ),
    "latents of a fit that has none": row(
        r"fit a model with latents by SVGP\(\)",
        asked(lambda fit: fit.infer_latents(0, X, Y)),
        lambda: fit(
            units, X, method=sparse(layers=pg.Layers(latents=pg.Amortised()))
        ).infer_latents(0, X, Y),
        slow=True,
    ),
    "batches of a process": row(
        r"or take all rows, batch_size=None",
        lambda: fit(through_noise, X, y=1.0 * Y, method=pg.MeanField(batch_size=2)),
        lambda: fit(through_noise, X, y=1.0 * Y, method=pg.MeanField()),
        slow=True,
    ),
    "a spread that is held, no GP": row(
        r"NUTS\(\), or Laplace\(integrate=\(\), hyper=Fixed\(\{'tau': \.\.\.\}\)\)",
        lambda: fit(shares, X, GROUP, y=SHARES, method=pg.Laplace(integrate=())),
        lambda: fit(
            shares,
            X,
            GROUP,
            y=SHARES,
            method=pg.Laplace(integrate=(), hyper=pg.Fixed({"tau": 0.5})),
        ),
        lambda: fit(shares, X, GROUP, y=SHARES, method=pg.NUTS(**_CHAIN), throw=False),
    ),
    "Sample of all latents together": row(
        r"taken together, by hyper=MAP\(\) or Fixed\(\{\.\.\.\}\)",
        lambda: fit(without_function, X, method=pg.Laplace(integrate=(), hyper=pg.Sample())),
        lambda: fit(without_function, X, method=pg.Laplace(integrate=(), hyper=pg.MAP(2))),
        lambda: fit(
            shares,
            X,
            GROUP,
            y=SHARES,
            method=pg.Laplace(integrate=(), hyper=pg.Fixed({"tau": 0.5})),
        ),
        slow=True,
    ),
    "a column that is standardised in minibatches": row(
        r"rows: .* the inputs or the mean of 'f' see other rows \(test_remedies.py, line \d+.*"
        r"before the fit.*SVGP\(batch_size=6\)",
        lambda: fit(standardised, X, method=sparse(batch_size=3)),
        lambda: fit(plain, (X - X.mean()) / X.std(), method=sparse(batch_size=3), throw=False),
        lambda: fit(standardised, X, method=sparse(batch_size=6), throw=False),
    ),
    "a prediction in a function that is compiled": row(
        r"jax\.jit.*fit\.posterior\(X_new\)\.mean and \.variance",
        asked(lambda fit: jax.jit(lambda x: fit.predict(x).mean)(X)),
        asked(lambda fit: fit.predict(X).mean),
        asked(lambda fit: jax.jit(lambda x: fit.posterior(x).mean)(X)),
        asked(lambda fit: jax.jit(lambda x: fit.posterior(x).variance)(X)),
    ),
    "a density under jit, of arrays that it does not trace": row(
        r"jax\.jit.*fit\.posterior\(X_new\)\.mean and \.variance",
        asked(lambda fit: jax.jit(lambda x: x + fit.log_density(X, Y))(0.0)),
        asked(lambda fit: fit.log_density(X, Y)),
        asked(lambda fit: jax.jit(lambda x: x + fit.posterior(X).mean)(0.0)),
    ),
    "negative curvature": row(
        r"try NUTS\(\), or for a model with a GP EP\(power=0\.5, damping=0\.5\)",
        lambda: fit(
            two_signs, X, method=pg.Laplace(hyper=pg.MAP(init={"w": 0.0})), y=np.full(N, 4.0)
        ),
        lambda: fit(two_signs, X, method=pg.NUTS(**_CHAIN), y=np.full(N, 4.0), throw=False),
        lambda: fit(
            outlier,
            X,
            y=np.sin(X),
            method=pg.EP(hyper=FIXED, power=0.5, damping=0.5),
        ),
        slow=True,
    ),
    "a grid that does not hold the posterior": row(
        r"not_gaussian.*use Sample\(\)",
        lambda: fit(flat_topped, X, y=np.sin(X), method=pg.Laplace(hyper=pg.Grid())),
        lambda: fit(
            flat_topped,
            X,
            y=np.sin(X),
            method=pg.Laplace(hyper=pg.Sample(num_warmup=2, num_samples=2)),
            throw=False,
        ),
        slow=True,
    ),
    "a Gaussian that is wider than the prior": row(
        r"times as wide as f's prior.*Compare with EP\(\), VI\(\) or NUTS\(\)",
        lambda: fit(outlier, X[:1], y=np.array([3.87])),
        lambda: fit(outlier, X[:1], y=np.array([3.87]), method=pg.EP(hyper=FIXED)),
        lambda: fit(outlier, X[:1], y=np.array([3.87]), method=pg.VI(hyper=FIXED)),
        lambda: fit(outlier, X[:1], y=np.array([3.87]), method=pg.NUTS(**_CHAIN), throw=False),
        slow=True,
    ),
    "too few nodes": row(
        r"\(num_nodes=24\).*raise num_nodes, or use NUTS\(\)",
        lambda: fit(
            funnel, np.array([0.0, 1.0]), y=np.array([0.5, -1.0]), method=pg.EP(hyper=FIXED)
        ),
        lambda: fit(
            funnel,
            np.array([0.0, 1.0]),
            y=np.array([0.5, -1.0]),
            method=pg.EP(hyper=FIXED, num_nodes=200),
        ),
        lambda: fit(
            funnel,
            np.array([0.0, 1.0]),
            y=np.array([0.5, -1.0]),
            method=pg.NUTS(**_CHAIN),
            throw=False,
        ),
        slow=True,
    ),
    "leave-one-out beside effects of each row": row(
        r"use VI\(\), EP\(\) or Laplace\(\), or score held-out data by log_density",
        lambda: fit(units, X, method=sparse(), throw=False).loo(),
        lambda: fit(units, X, method=pg.VI(hyper=FIXED)).loo(),
        lambda: fit(units, X, method=pg.EP(hyper=FIXED)).loo(),
        lambda: fit(units, X, method=LAPLACE).loo(),
        lambda: fit(units, X, method=sparse(), throw=False).log_density(X, Y),
        slow=True,
    ),
    "evidences of several kinds": row(
        r"Fit all by one kind of method, or pass mixed=True",
        lambda: pg.compare_models(
            {"a": _plain_fit(), "b": fit(plain, X, method=pg.VI(hyper=FIXED))}
        ),
        lambda: pg.compare_models({"a": _plain_fit(), "b": _plain_fit()}),
        lambda: pg.compare_models(
            {"a": _plain_fit(), "b": fit(plain, X, method=pg.VI(hyper=FIXED))}, mixed=True
        ),
        slow=True,
    ),
    "an evidence of draws": row(
        r"Laplace\(\), EP\(\), VI\(\) and SVGP\(\) under MAP\(\) or Fixed\(\) have one.*by loo\(\)",
        lambda: pg.compare_models(
            {"a": _plain_fit(), "b": fit(plain, X, method=pg.NUTS(**_CHAIN), throw=False)}
        ),
        lambda: pg.compare_models({"a": _plain_fit(), "b": _plain_fit()}),
        lambda: fit(plain, X, method=pg.NUTS(num_warmup=30, num_samples=100), throw=False).loo(),
        slow=True,
    ),
    "a process of a model without one": row(
        r"effects that were integrated are in fit\.sites.*fit\.components\(X_new, \.\.\.\)",
        lambda: fit(without_function, X).posterior,
        lambda: fit(without_function, X).sites,
        lambda: fit(without_function, X).components(X),
        slow=True,
    ),
}


def _happens(trigger) -> str:
    """The text of the error that a trigger raises, or else of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trigger()
        except pg.errors.PplGpError as error:
            return str(error)
    return " ".join(str(w.message) for w in caught)


@pytest.mark.parametrize(
    "name",
    [pytest.param(k, marks=pytest.mark.slow) if r.slow else k for k, r in ROWS.items()],
)
def test_the_remedy_of_a_message_runs(name):
    said = _happens(ROWS[name].trigger)
    assert re.search(ROWS[name].message, said), said
    for remedy in ROWS[name].remedies:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            remedy()


@pytest.mark.slow
def test_a_length_scale_for_each_group_is_dense_algebra():
    held = pg.Laplace(hyper=pg.Fixed({"lengthscale": SCALES}))
    found = fit(smooth_groups, X, GROUP, y=np.sin(X), method=held)
    away = (X[:, None] - X) / SCALES[GROUP][:, None]
    K = np.where(GROUP[:, None] == GROUP, np.exp(-0.5 * away**2), 0.0)
    evidence = multivariate_normal(np.zeros(N), K + (0.09 + 1e-10) * np.eye(N)).logpdf(np.sin(X))
    np.testing.assert_allclose(found.log_evidence, evidence, atol=1e-8)


METHODS = {
    "Laplace": pg.Laplace(),
    "EP": pg.EP(),
    "VI": pg.VI(),
    "LocalBound": pg.LocalBound(),
    "SVGP": pg.SVGP(num_inducing=3, max_steps=1),
    "SparseNUTS": pg.SparseNUTS(num_inducing=3, **_CHAIN),
    "NUTS": pg.NUTS(**_CHAIN),
    "EllipticalSlice": pg.EllipticalSlice(**_CHAIN),
    "SVI": pg.SVI(num_steps=2),
    "MeanField": pg.MeanField(),
}


def _named(said) -> list[str]:
    if "No method of this package takes this model" in said:
        return []
    (told,) = re.findall(r"Methods that take this model: ([\w, ]+)\.", said)
    return told.split(", ")


# name -> (what is refused, the methods that its message has to name)
REFUSED = {
    "EP one after another": (
        lambda: fit(classes, X, method=pg.EP(sequential=True), y=np.arange(N) % 3),
        {"Laplace", "EP", "VI", "SVGP", "SparseNUTS", "NUTS", "EllipticalSlice"},
    ),
    "a discrete latent of each datum": (lambda: fit(mixture, X, y=1.0 * Y), {"MeanField"}),
    "rows that see each other": (lambda: fit(coupled, X), {"NUTS", "EllipticalSlice"}),
    "counts under LocalBound": (
        lambda: fit(counts, X, np.ones(N), method=pg.LocalBound()),
        {"Laplace", "EP", "VI", "SVGP", "SparseNUTS", "NUTS", "EllipticalSlice"},
    ),
    "a process under SVI": (
        lambda: fit(plain, X, method=pg.SVI()),
        {"Laplace", "EP", "VI", "LocalBound", "SVGP", "SparseNUTS", "NUTS", "EllipticalSlice"},
    ),
    "a prior without a family": (
        lambda: fit(of_weights, X, prior=dist.StudentT(4.0), method=pg.MeanField()),
        {"NUTS", "SVI", "Laplace"},
    ),
    "labels without an end": (
        lambda: fit(of_weights, X, prior=dist.Poisson(1.0), method=pg.MeanField()),
        set(),
    ),
    "labels and a mean that is not conjugate": (
        lambda: fit(labelled, X, method=pg.MeanField(), y=1.0 * Y),
        set(),
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize(
    "name", ["rows that see each other", *sorted(set(REFUSED) - {"rows that see each other"})]
)
def test_methods_that_a_message_names_have_been_asked(name):
    trigger, wanted = REFUSED[name]
    assert set(_named(_happens(trigger))) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_that_is_named_takes_the_model(name):
    """And every other refuses it, but `MeanField()`, whose proof is run for few models."""
    for model, y in ((classes, np.arange(N) % 3), (coupled, Y), (mixture, 1.0 * Y)):
        (listed,) = (i.message for i in pg.check(model, X, y=y).items if i.name == "methods")
        if name in re.split(r"\W+", listed):
            fit(model, X, method=METHODS[name], y=y, throw=False)
        elif name != "MeanField":
            with pytest.raises(pg.errors.PplGpError):
                fit(model, X, method=METHODS[name], y=y, throw=False)
