"""The walk by labels: which axes are the rows, and whether a row stands alone.

Each model has a second route: a row that changes its place must take its terms along, and a row
more must change none. Of models that the walk refuses, it must not be so.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro import handlers
from scipy.stats import multivariate_normal

import ppl_gp as pg
from ppl_gp.reading.arguments import Leaves
from ppl_gp.reading.reading import declare
from ppl_gp.reading.rows import Rows
from ppl_gp.reading.rows import rows_of as read_rows
from ppl_gp.reading.tracing import bare_trace, look_at
from ppl_gp.reading.walk import line_of

N = 7
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 2)))
Y = jnp.asarray(RNG.uniform(0.1, 0.9, N))
GROUP = jnp.asarray(RNG.integers(0, 3, N))
K, KEY = pg.kernels.RBF(1.0, 1.0), jax.random.key(1)


def rows_of(model, args, kwargs) -> Rows:
    leaves = Leaves(model, args, kwargs)
    return read_rows(model, leaves, look_at(model, leaves))


def gp(inputs, name="f", mean=None, kernel=K):
    return numpyro.sample(name, pg.GP(kernel, inputs, mean=mean))


def observe(X, y, loc, scale=0.3):
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(loc, scale), obs=y)


def of_f(transform):
    """A model whose y is observed around transform(f, X)."""

    def model(X, y=None):
        observe(X, y, transform(gp(X), X))

    return model


def newton(f, until):
    """Roots of z^3 + z = f, all in one loop."""

    def step(state):
        z, _ = state
        new = z - (z**3 + z - f) / (3 * z**2 + 1)
        return new, jnp.abs(new - z)

    return lax.while_loop(lambda s: until(s[1]), step, (jnp.zeros_like(f), jnp.ones_like(f)))[0]


def one_root(f):
    """The same of one number: `vmap` holds each row where it has ended."""

    def step(state):
        z, _ = state
        new = z - (z**3 + z - f) / (3 * z**2 + 1)
        return new, jnp.abs(new - z)

    return lax.while_loop(lambda s: s[1] > 1e-3, step, (jnp.zeros(()), jnp.ones(())))[0]


def called_back(z):
    return jax.pure_callback(lambda z: z**2, jax.ShapeDtypeStruct(z.shape, z.dtype), z)


def walk_over_rows(f, X):
    return lax.scan(lambda c, z: (0.5 * c + z, c), 0.0, f)[1]


def held(f, X):
    return lax.fori_loop(0, 5, lambda i, z: jnp.tanh(z + f), jnp.zeros_like(f))


ALONE = {
    "plain": lambda f, X: f,
    "by column": lambda f, X: f + X[:, 0] * jnp.exp(X[:, 1]),
    "a product with weights": lambda f, X: f + X @ jnp.array([0.3, -0.2]),
    "a norm of each row": lambda f, X: f * jnp.linalg.norm(X, axis=1),
    "the largest column": lambda f, X: f + jnp.max(X, -1) + jnp.argmax(X, 1),
    "sorted within a row": lambda f, X: f + jnp.sort(X, 1)[:, 0],
    "its own number, looked up": lambda f, X: f[jnp.arange(X.shape[0])],
    "by vmap": lambda f, X: jax.vmap(lambda z, x: jnp.where(x[0] > 0, z, jnp.exp(z)))(f, X),
    "by lax.map": lambda f, X: lax.map(lambda row: row[0] + row[1] @ row[1], (f, X)),
    "a loop within lax.map": lambda f, X: lax.map(
        lambda z: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x + z), 0.0 * z), f
    ),
    "a loop over columns within lax.map": lambda f, X: lax.map(
        lambda row: lax.scan(lambda s, x: (s + x * row[0], s), 0.0 * row[0], row[1])[0], (f, X)
    ),
    "a callback of one row": lambda f, X: lax.map(called_back, f),
    "in a loop that is the same for all": held,
    "a loop of each row's own": lambda f, X: jax.vmap(one_root)(f),
    "solved for each row": lambda f, X: (
        f + jax.vmap(lambda x: jnp.linalg.solve(jnp.eye(2) + jnp.outer(x, x), x))(X)[:, 0]
    ),
    "a column set": lambda f, X: f + X.at[:, 0].set(2.0 * X[:, 0]).sum(1),
    "a row of a table": lambda f, X: (
        f + jnp.array([1.0, 2.0, 5.0])[jnp.clip(X[:, 0], 0, 2).astype(int)]
    ),
    "padded columns": lambda f, X: f + jnp.pad(X, ((0, 0), (1, 1))).sum(1),
    "stacked and taken apart": lambda f, X: jnp.stack([f, X[:, 0]], 1)[:, 0],
    "outer and back": lambda f, X: (f[:, None] * jnp.ones(3)).sum(1),
    "by jit": lambda f, X: jax.jit(lambda z: z**2)(f),
    "einsum": lambda f, X: f + jnp.einsum("nd,nd->n", X, X),
    "a loop over columns": lambda f, X: lax.fori_loop(0, 2, lambda i, z: z + X[:, i], f),
    "segments of nothing": lambda f, X: f + jax.nn.softmax(X, 1)[:, 0],
    "one number for all": lambda f, X: f * jnp.full(len(f), 0.3) + jnp.zeros(len(f)),
    "columns put together": lambda f, X: f + jnp.concatenate([X, jnp.ones((len(f), 1))], 1).sum(1),
    "columns set one by one": lambda f, X: (
        f + jnp.zeros((len(f), 3)).at[:, 0].set(X[:, 0]).at[:, 1].set(2.0) @ jnp.arange(3.0)
    ),
    "a first level of zero": lambda f, X: (
        f + jnp.concatenate([jnp.zeros(1), jnp.array([2.0])])[(X[:, 0] > 0).astype(int)]
    ),
    "a scan over columns": lambda f, X: lax.scan(lambda c, x: (0.9 * c + x, c), f, X.T)[0],
    "a scan that carries nothing on": lambda f, X: lax.scan(lambda c, z: (c, c * z), 2.0, f)[1],
    "the largest of equal ones": lambda f, X: f + jnp.max(jnp.full(len(f), 2.0)),
    "a sum of as many as there are rows": lambda f, X: f + jnp.sum(jnp.ones(N)),
    "powers": lambda f, X: f + jnp.vander(X[:, 0], 3) @ jnp.array([0.1, 0.2, 0.3]),
}
MIXED = {
    "centred": (lambda f, X: f - f.mean(), "mixes"),
    "cumulated": (lambda f, X: jnp.cumsum(f), "mixes"),
    "cumulated by a loop in a loop": (
        lambda f, X: lax.scan(
            lambda s, z: (lax.fori_loop(0, 2, lambda i, x: x + z, s), s), 0.0 * f[0], f
        )[1],
        "mixes",
    ),
    "rolled": (lambda f, X: jnp.roll(f, 1), "mixes"),
    "reversed": (lambda f, X: f[::-1], "mixes"),
    "sorted": (lambda f, X: jnp.sort(f), "mixes"),
    "the largest first": (lambda f, X: lax.top_k(f[:, None], len(f), axis=0)[0][:, 0], "mixes"),
    "over the largest": (lambda f, X: f / jnp.abs(f).max(), "mixes"),
    "a norm of all": (lambda f, X: f / jnp.linalg.norm(X), "mixes"),
    "the first row": (lambda f, X: f + X[0, 0], "mixes"),
    "pairs": (lambda f, X: f + jnp.exp(-((f[:, None] - f) ** 2)).sum(1), "mixes"),
    "a product with all": (lambda f, X: f + X @ X.T @ X[:, 0], "mixes"),
    "a random walk": (walk_over_rows, "mixes"),
    "sums by group": (
        lambda f, X: f + jax.ops.segment_sum(f, (X[:, 0] > 0).astype(int), 2)[0],
        "mixes",
    ),
    "one entry set": (lambda f, X: f.at[2].set(f[4]), "mixes"),
    "until all have ended": (lambda f, X: newton(f, lambda e: jnp.any(e > 1e-1)), "mixes"),
    "a branch by all": (lambda f, X: lax.cond(f[0] > 0, lambda z: z, jnp.exp, f), "mixes"),
    "its number": (lambda f, X: f + jnp.arange(X.shape[0]), "number"),
    "even and odd": (lambda f, X: jnp.where(jnp.arange(X.shape[0]) % 2 == 0, f, -f), "number"),
    "the first is set": (lambda f, X: f + jnp.zeros(len(f)).at[0].set(1.0), "number"),
    "how many before": (lambda f, X: f + jnp.cumsum(jnp.ones(len(f))), "number"),
    "the first and the rest": (
        lambda f, X: f + jnp.concatenate([jnp.ones(1), jnp.zeros(len(f) - 1)]),
        "number",
    ),
    "padded": (lambda f, X: f + jnp.pad(jnp.ones(1), (0, len(f) - 1)), "number"),
    "a season": (
        lambda f, X: f + jnp.array([0.0, 1.0, 4.0])[jnp.tile(jnp.arange(3), len(f))[: len(f)]],
        "number",
    ),
    "a slice of numbers": (lambda f, X: f + jnp.arange(40.0)[: len(f)], "number"),
    "a factor that decays": (
        lambda f, X: lax.scan(lambda c, z: (0.9 * c, c * z), 1.0, f)[1],
        "number",
    ),
    "steps that count": (
        lambda f, X: f + lax.scan(lambda c, _: (c + 1, c), 0.0, None, length=len(f))[1],
        "number",
    ),
    "a draw for each row": (lambda f, X: f + jax.random.normal(KEY, f.shape), "number"),
    "left out at random": (lambda f, X: f * jax.random.bernoulli(KEY, 0.5, f.shape), "number"),
    "a key for each row": (
        lambda f, X: f + jax.vmap(jax.random.normal)(jax.random.split(KEY, len(f))),
        "number",
    ),
    "how many rows": (lambda f, X: f * X.shape[0], "count"),
    "how many rows, in a power": (lambda f, X: jnp.abs(f) ** (1 / X.shape[0]), "count"),
    "how many rows, by a sum": (lambda f, X: f + jnp.sum(jnp.ones_like(f)), "count"),
    "how many rows, by a product": (lambda f, X: f * jnp.prod(jnp.full(len(f), 1.1)), "count"),
    "how many rows, by a norm": (lambda f, X: f * jnp.linalg.norm(jnp.ones(len(f))), "count"),
    "how many rows, contracted": (lambda f, X: f + jnp.ones(len(f)) @ jnp.ones(len(f)), "count"),
    "how many rows, by a trace": (lambda f, X: f + jnp.trace(jnp.eye(len(f))), "count"),
    "the last number": (lambda f, X: f + jnp.arange(len(f))[-1], "count"),
    "the largest number": (lambda f, X: f + jnp.max(jnp.arange(len(f)) // 2), "count"),
    "where the largest is": (lambda f, X: f + jnp.argmax(jnp.arange(len(f))), "count"),
    "how many rows, counted one by one": (
        lambda f, X: f + jnp.bincount(jnp.zeros(len(f), int), length=1)[0],
        "count",
    ),
    "how many rows, added to one entry": (
        lambda f, X: f + jnp.zeros(2).at[jnp.zeros(len(f), int)].add(1.0)[0],
        "count",
    ),
    "how many steps": (
        lambda f, X: f + lax.scan(lambda c, _: (c + 1.0, None), 0.0, None, length=len(f))[0],
        "count",
    ),
    "how many steps, over equal ones": (
        lambda f, X: f + lax.scan(lambda c, z: (0.5 * c + 1.0, None), 0.0, jnp.ones(len(f)))[0],
        "count",
    ),
    "if there are many": (lambda f, X: jnp.where(jnp.ones(len(f)).sum() > N - 1, f, -f), "count"),
    "solved together": (lambda f, X: jnp.linalg.solve(jnp.eye(X.shape[0]) + X @ X.T, f), "mixes"),
    "a callback": (lambda f, X: called_back(f), "unknown"),
    "reduced by a function": (lambda f, X: f + lax.reduce(f, 0.0, jnp.logaddexp, (0,)), "unknown"),
}


def terms(model, order, latent, more=()):
    """log p(y_n) of the rows in an order."""
    f = {"f": latent[order]}
    trace = bare_trace(model, (X[order],), {"y": Y[order]}, f, f)
    return np.asarray(trace["y"]["fn"].log_prob(trace["y"]["value"]))


def is_alone(model) -> bool:
    """In another order, and without each one."""
    rng, rows = np.random.default_rng(1), np.arange(N)
    latent = jnp.asarray(3.0 * rng.normal(size=N))
    here = terms(model, rows, latent)
    orders = [rng.permutation(N), rows[::-1], *(np.delete(rows, n) for n in rows)]
    return all(np.allclose(here[o], terms(model, o, latent), rtol=1e-12) for o in orders)


@pytest.mark.parametrize("name", ALONE)
def test_rows_that_stand_alone_are_proved(name):
    model = of_f(ALONE[name])
    assert is_alone(model)
    found = rows_of(model, (X,), {"y": Y})
    assert (found.mixing, found.kernels) == ({}, {})
    assert found.axes == {"f": 0, "y": -1}
    assert (found.rows, found.plates) == ({"X": (0,), "y": (0,)}, ("data",))


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_see_others_are_told_with_the_line(name):
    transform, kind = MIXED[name]
    model = of_f(transform)
    assert kind == "unknown" or not is_alone(model)
    found = rows_of(model, (X,), {"y": Y})
    cause = found.mixing["y"]
    assert cause.kind == kind
    assert "test_rows.py" in line_of(cause.source)


@pytest.mark.parametrize("name", [*ALONE, *MIXED])
def test_one_row_is_read_as_any_other_number_of_them(name):
    model = of_f(ALONE.get(name) or MIXED[name][0])
    one, many = (rows_of(model, (X[:n],), {"y": Y[:n]}) for n in (1, N))
    kinds = lambda found: {k: c.kind for k, c in found.mixing.items()}  # noqa: E731
    assert kinds(one) == kinds(many)
    assert (one.axes, one.rows, one.plates) == (many.axes, many.rows, many.plates)


def recursion(X):
    h = [X[0, 0]]
    for n in range(1, len(X)):
        h.append(0.5 * h[-1] + X[n, 0])
    return jnp.stack(h)


INPUTS = {
    "a recursion": (recursion, "mixes"),
    "sorted": (lambda X: jnp.sort(X, 0), "mixes"),
    "ranks": (lambda X: 1.0 * jnp.argsort(jnp.argsort(X, 0), 0), "mixes"),
    "orthogonal columns": (lambda X: jnp.linalg.qr(X)[0], "mixes"),
    "with noise": (lambda X: X + jax.random.normal(KEY, X.shape), "number"),
    "by an unknown operation": (called_back, "unknown"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_a_function_that_see_others_are_told_with_the_line(name):
    """And the function has its rows: it is no walk over them, and the likelihood couples none."""
    inputs, kind = INPUTS[name]

    def model(X, y=None):
        observe(X, y, gp(inputs(X)) + X[:, 1])

    found = rows_of(model, (X,), {"y": Y})
    assert found.axes == {"f": 0, "y": -1} and found.whole == ()
    assert found.coupled == {} and found.mixing["f"].kind == kind
    assert "test_rows.py" in line_of(found.mixing["f"].source)


def test_the_line_is_the_users():
    def model(X, y=None):
        f = gp(X)
        observe(X, y, f + 1.0 - jnp.mean(f))

    line = line_of(rows_of(model, (X,), {"y": Y}).mixing["y"].source)
    assert line.endswith("observe(X, y, f + 1.0 - jnp.mean(f))")


def places(X, place, y=None):
    f = gp(X)
    observe(place, y, f[place])


def pairs(X, first, second, y=None):
    f = gp(X)
    observe(first, y, f[first] - f[second])


def tables(X, centres, group, y=None):
    observe(X, y, gp(X) + centres[group])


def outputs(X, y=None):
    with numpyro.plate("outputs", 3):
        f = gp(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.T, 0.3).to_event(1), obs=y)


def of_sites(X, group, y=None):
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(u[group] + e, 0.3), obs=y)


def scalar(X, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    observe(X, y, theta)


def map_model(w, adjacency, y=None):
    precision = jnp.diag(adjacency.sum(1) + 0.1) - adjacency
    s = numpyro.sample("s", dist.MultivariateNormal(0.0, precision_matrix=precision))
    observe(w, y, 0.5 * w + s)


def subsampled(X, y=None):
    data = numpyro.plate("data", X.shape[0], subsample_size=2)
    with data as rows:
        pass
    f = gp(X[rows])
    with data:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[rows])


M = 4
FIRST, SECOND = jnp.array([0, 1, 2, 2, 3, 0, 1]), jnp.array([1, 2, 3, 0, 0, 2, 3])
ROWS = {  # model, arguments, {site: axis}, {argument: axes}
    "places": (places, (X[:M], FIRST), {"y": -1}, {"place": (0,), "y": (0,)}),
    "as many places as rows": (places, (X, GROUP), {"y": -1}, {"place": (0,), "y": (0,)}),
    "pairs": (pairs, (X[:M], FIRST, SECOND), {"y": -1}, {"first": (0,), "second": (0,), "y": (0,)}),
    "a table of N": (
        tables,
        (X, Y, GROUP),
        {"f": 0, "y": -1},
        {"X": (0,), "group": (0,), "y": (0,)},
    ),
    "groups": (of_sites, (X, GROUP), {"e": -1, "y": -1}, {"X": (0,), "group": (0,), "y": (0,)}),
    "a number for all": (scalar, (X,), {"y": -1}, {"X": (0,), "y": (0,)}),
    "subsampled": (subsampled, (X,), {"f": 0, "y": -1}, {"X": (0,), "y": (0,)}),
}


@pytest.mark.parametrize("case", ROWS)
def test_the_rows_are_the_observations_own(case):
    model, args, axes, rows = ROWS[case]
    found = rows_of(model, args, {"y": Y})
    assert (found.axes, found.rows, found.mixing) == (axes, rows, {})
    assert found.grows and found.plates == ("data",)


def test_of_several_axes_the_rows_are_those_of_the_inputs():
    found = rows_of(outputs, (X,), {"y": jnp.ones((N, 3))})
    assert found.axes == {"f": 0, "y": -1}
    square = rows_of(outputs, (X[:3],), {"y": jnp.ones((3, 3))})
    assert (square.axes, square.rows) == (found.axes, {"X": (0,), "y": (0,)})


def test_both_axes_of_a_square_array_grow_with_the_rows():
    adjacency = jnp.asarray(np.eye(N, k=1) + np.eye(N, k=-1))
    found = rows_of(map_model, (Y, adjacency), {"y": Y})
    assert found.rows == {"w": (0,), "adjacency": (0, 1), "y": (0,)}
    assert found.grows


@pytest.mark.parametrize(
    "model, arguments", [(m, a) for m, a, *_ in ROWS.values() if m is not subsampled]
)
def test_one_row_is_no_special_case(model, arguments):
    many = rows_of(model, arguments, {"y": Y})
    one = tuple(
        x[:1] if k in many.rows else x
        for k, x in zip(model.__code__.co_varnames, arguments, strict=False)
    )
    found = rows_of(model, one, {"y": Y[:1]})
    assert (found.axes, found.rows, found.plates) == (many.axes, many.rows, many.plates)


def test_an_array_that_the_model_holds_goes_by_number():
    noise = jnp.linspace(0.1, 0.4, N)
    found = rows_of(lambda X, y=None: observe(X, y, gp(X), noise), (X,), {"y": Y})
    assert found.mixing["y"].kind == "number"
    assert not found.grows
    same = rows_of(lambda X, y=None: observe(X, y, gp(X), jnp.full(N, 0.2)), (X,), {"y": Y})
    assert (same.mixing, same.grows) == ({}, False)


def test_kernels_that_see_the_data_are_told():
    def model(X, y=None):
        observe(X, y, gp(X, kernel=pg.kernels.RBF(1.0, jnp.std(X))))

    found = rows_of(model, (X,), {"y": Y})
    assert found.kernels["f"].kind == "mixes"
    assert "jnp.std(X)" in line_of(found.kernels["f"].source)


def test_masks_are_rows_and_mix_nothing():
    def model(X, seen, y=None):
        f = gp(X)
        with handlers.mask(mask=seen):
            observe(X, y, f)

    found = rows_of(model, (X, Y > 0.5), {"y": Y})
    assert found.rows == {"X": (0,), "seen": (0,), "y": (0,)}
    assert found.mixing == {} and found.around == {}


WHAT = ("mask", "scale")
AROUND = {
    "the first ones": (lambda X: jnp.arange(X.shape[0]) < 4, "number"),
    "large ones": (lambda X: X[:, 0] > X[:, 0].mean(), "mixes"),
    "all, of many": (lambda X: jnp.ones(X.shape[0]).sum() > N - 1, "count"),
}


@pytest.mark.parametrize("name", AROUND)
def test_masks_and_scales_of_other_rows_are_told(name):
    """In a batch they would be others, and a mask would be so at new rows."""
    of_rows, kind = AROUND[name]

    def model(X, y=None):
        f = gp(X)
        with handlers.mask(mask=of_rows(X)), handlers.scale(scale=1.0 + of_rows(X)):
            observe(X, y, f)

    found = rows_of(model, (X,), {"y": Y})
    assert {k: c.kind for k, c in found.around.items()} == {("y", k): kind for k in WHAT}
    assert found.mixing == {}
    batches = pg.SVGP(num_inducing=3, batch_size=3, max_steps=2, hyper=pg.Fixed())
    with pytest.raises(pg.ModelError, match="the mask of 'y' sees"):
        pg.fit(model, batches, 0, X, y=Y)
    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed()), 0, X, y=Y)
    np.testing.assert_allclose(fit.predict(X).f_mean[:2], fit.predict(X[:2]).f_mean, rtol=1e-8)
    with pytest.raises(pg.ModelError, match="the mask of 'y' sees.*Pass the mask to the model"):
        fit.log_density(X[:2], Y[:2])


def of_one_plate(around):
    """A model that draws batches of its rows by itself."""

    def model(X, group, batch=None, y=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=batch)
        with data as i:
            pass
        f = gp(X[i])
        with data, around(i, group):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[i])

    return model


def _sizes(group):
    return 1.0 / jnp.bincount(group, length=3)


DRAWN = {
    "its own entry": (lambda i, g: handlers.scale(scale=1.0 + g[i]), None),
    "a count of all rows": (lambda i, g: handlers.scale(scale=_sizes(g)[g[i]]), None),
    "the first rows": (lambda i, g: handlers.mask(mask=i < 4), None),
    "a count of the batch": (lambda i, g: handlers.scale(scale=_sizes(g[i])[g[i]]), "mixes"),
    "the first of the batch": (lambda i, g: handlers.mask(mask=jnp.arange(3) < 2), "number"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_a_row_sees_of_a_batch_that_the_model_draws_is_told(name):
    around, kind = DRAWN[name]
    model, more = of_one_plate(around), {"y": Y, "batch": 3}
    found = declare(model, (X, GROUP), more).reading.drawn
    assert [how for *_, how in found] == ([] if kind is None else [kind])
    method = pg.SVGP(num_inducing=3, max_steps=200, hyper=pg.Fixed(), learning_rate=0.1)
    if kind is not None:
        with pytest.raises(pg.ModelError, match="of 'y' sees.*without subsample_size"):
            pg.fit(model, method, 0, X, GROUP, **more)
        return
    whole = pg.fit(model, pg.Laplace(hyper=pg.Fixed()), 0, X, GROUP, y=Y)
    every = pg.SVGP(inducing=X, max_steps=200, hyper=pg.Fixed())
    fit = pg.fit(model, every, 0, X, GROUP, **more, throw=False)
    assert abs(fit.log_evidence - whole.log_evidence) < 0.05


def test_the_diagonal_of_a_square_array_is_told_however_it_is_read():
    """At new rows, and in batches, its other axis has other entries."""
    V, two = jnp.eye(N) + 0.1 * jnp.outer(Y, Y), pg.SVGP(batch_size=3, max_steps=2)
    for diagonal in (lambda V, i: jnp.diag(V), lambda V, i: V[i, i], lambda V, i: V[i][i, i]):

        def model(X, V, y=None, diagonal=diagonal):
            i = jnp.arange(X.shape[0])
            observe(X, y, gp(X), jnp.sqrt(diagonal(V, i)))

        fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed()), 0, X, V, y=Y)
        K_y = np.asarray(K(X, X)) + 1e-6 * np.eye(N) + np.diag(np.diag(V))
        assert abs(fit.log_evidence - multivariate_normal(np.zeros(N), K_y).logpdf(Y)) < 1e-3
        with pytest.raises(pg.ModelError, match="the density of 'y' sees"):
            fit.predict(X[:2], V[:2])
        with pytest.raises(pg.ModelError, match="the density of 'y' sees.*SVGP.batch_size=7"):
            pg.fit(model, two, 0, X, V, y=Y)


def test_a_coefficient_of_what_sees_other_rows_is_told_by_its_line():
    """And not as a kernel of a site that the model does not have."""

    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        observe(X, y, gp(X) + slope * (X - X[0])[:, 0])

    with pytest.raises(pg.ModelError, match=r"sees other rows \(.*observe.*or use Laplace"):
        pg.fit(model, pg.SVGP(num_inducing=3, max_steps=2), 0, X, y=Y)
    assert np.isfinite(pg.fit(model, pg.Laplace(), 0, X, y=Y).log_evidence)


def test_a_mask_that_the_model_holds_is_told():
    """As that, and not as a number of rows that is written down."""
    held = jnp.arange(N) < 4

    def model(X, y=None):
        with handlers.mask(mask=held):
            observe(X, y, X[:, 0])

    reading = declare(model, (X,), {"y": Y}).reading
    assert "holds arrays of its own" in reading.held


def test_so_many_rows_of_each_level_are_traced_at_twice_as_many():
    def model(X, y=None):
        with numpyro.plate("levels", 2):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        observe(X, y, jnp.repeat(u, X.shape[0] // 2))

    found = rows_of(model, (X[:6],), {"y": Y[:6]})
    assert found.grows and found.rows["X"] == (0,) and "y" in found.mixing
