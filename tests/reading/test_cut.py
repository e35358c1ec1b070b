"""Linear predictors as the smallest cut between the Gaussian sites and what is computed from
them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.special import gammaln, logsumexp

from ppl_gp.reading.predictor.cut import at_places

N, LONGER = 7, 11
RNG = np.random.default_rng(0)


def rest_of(num):
    rng = np.random.default_rng(1)
    return {
        "X": rng.normal(size=(num, 2)),
        "group": rng.integers(0, 4, num),
        "place": rng.integers(0, N, num),
        "y": rng.poisson(2.0, num).astype(float),
    }


def of_rows(z, num):
    """{site: an array of its shape where the data are `num` rows}."""
    return {k: jnp.zeros(tuple(num if n == "N" else n for n in shape)) for k, shape in z.items()}


def found(function, sites):
    here, there = (
        at_places(function, of_rows(sites, num), jax.tree.map(jnp.asarray, rest_of(num)))
        for num in (N, LONGER)
    )
    short, long = ([v.aval.shape for v in x.every] for x in (here, there))
    assert len(short) == len(long)
    grown = [np.flatnonzero(np.not_equal(a, b)) for a, b in zip(short, long, strict=True)]
    axes = [int(g[0]) if g.size else None for g in grown]
    return here.smallest(axes.__getitem__)


def shapes_of(cut):
    return tuple(v.aval.shape for v in cut.arrays)


def require_right(cut, function, sites):
    """Affine predictors, and the function of them is the function of z."""
    rest = jax.tree.map(jnp.asarray, rest_of(N))
    zs = [
        {k: jnp.asarray(RNG.normal(size=x.shape)) for k, x in of_rows(sites, N).items()}
        for _ in range(2)
    ]
    for z in zs:
        np.testing.assert_allclose(cut.below(cut.at(z, rest), rest), function(z, rest), rtol=1e-12)
    middle = jax.tree.map(lambda a, b: 0.3 * a + 0.7 * b, *zs)
    for a, b, c in zip(*(cut.at(z, rest) for z in (*zs, middle)), strict=True):
        np.testing.assert_allclose(0.3 * a + 0.7 * b, c, atol=1e-12)


def poisson(eta, y):
    return y * eta - jnp.exp(eta) - gammaln(y + 1)


MIXED = {"f": ("N",), "beta": (2,), "u": (4,)}


@jax.jit
def mixed(z, rest):
    return z["f"] + rest["X"] @ z["beta"] + z["u"][rest["group"]]


def test_effects_and_a_function_are_one_predictor():
    function = lambda z, rest: poisson(0.4 + mixed(z, rest), rest["y"])  # noqa: E731
    cut = found(function, MIXED)
    assert shapes_of(cut) == ((N,),)
    require_right(cut, function, MIXED)


def test_places_as_many_as_data_are_told_from_data():
    function = lambda z, rest: poisson(z["f"][rest["place"]], rest["y"])  # noqa: E731
    cut = found(function, {"f": (N,)})
    assert shapes_of(cut) == ((N,),)
    require_right(cut, function, {"f": (N,)})
    z = {"f": jnp.arange(float(N))}
    rest = jax.tree.map(jnp.asarray, rest_of(N))
    np.testing.assert_array_equal(cut.at(z, rest)[0], rest["place"])


@pytest.mark.parametrize(
    "sites, function, shapes",
    [
        (
            {"f": ("N",), "g": ("N",)},
            lambda z, rest: -((rest["y"] - z["f"]) ** 2) * jnp.exp(-z["g"]) - z["g"] / 2,
            ((N,), (N,)),
        ),
        (
            {"f": ("N",), "u": (4,)},
            lambda z, rest: poisson(jnp.exp(z["f"]) + z["u"][rest["group"]], rest["y"]),
            ((N,), (N,)),
        ),
        (
            {"f": (3, "N")},
            lambda z, rest: z["f"].T[jnp.arange(rest["y"].shape[0]), 1] - logsumexp(z["f"].T, 1),
            ((N, 3),),
        ),
        (
            {"f": (2, "N")},
            lambda z, rest: jnp.sum(
                poisson(jnp.asarray([[1.0, 2.0], [0.5, -1.0], [2.0, 0.3]]) @ z["f"], rest["y"]), 0
            ),
            ((2, N),),
        ),
        (
            {"f": ("N",), "h": ("N",)},
            lambda z, rest: (
                poisson(z["f"] - 2.0 * z["h"], rest["y"]) + jnp.sin(z["f"] - 2.0 * z["h"])
            ),
            ((N,),),
        ),
    ],
    ids=["heteroscedastic", "a nonlinear effect", "softmax", "outputs", "written twice"],
)
def test_no_more_functions_a_datum_than_are_needed(sites, function, shapes):
    cut = found(function, sites)
    assert shapes_of(cut) == shapes
    require_right(cut, function, sites)


@pytest.mark.parametrize(
    "function",
    [
        lambda z, rest: lax.scan(lambda c, f: (c + f, jnp.exp(c)), 0.0, z["u"][rest["group"]])[1],
        lambda z, rest: rest["y"] * jnp.exp(z["u"][0]),
    ],
    ids=["an effect in a loop is its rows", "a scale"],
)
def test_what_is_no_function_of_rows(function):
    cut = found(function, {"u": (4,)})
    assert cut is None or shapes_of(cut) == ((N,),)


SIGNS = {
    "negative": (lambda eta: -eta, 1.0),
    "twice negative": (lambda eta: -jnp.negative(eta), 1.0),
    "half": (lambda eta: eta / 2.0, 1.0),
    "minus three": (lambda eta: -3.0 * eta, 1.0),
    "with an offset": (lambda eta: 1.0 - eta, -1.0),
}


@pytest.mark.parametrize("how", SIGNS)
def test_the_predictor_has_the_sign_and_scale_of_the_sum(how):
    link, sign = SIGNS[how]

    def function(z, rest):
        eta = z["f"] + z["u"][rest["group"]]
        return rest["y"] * jnp.exp(link(eta)) + link(eta)

    cut = found(function, {"f": ("N",), "u": (4,)})
    require_right(cut, function, {"f": ("N",), "u": (4,)})
    rest = jax.tree.map(jnp.asarray, rest_of(N))
    z = {"f": jnp.asarray(RNG.normal(size=N)), "u": jnp.zeros(4)}
    here, zero = (cut.at(x, rest)[0] for x in (z, jax.tree.map(jnp.zeros_like, z)))
    np.testing.assert_allclose(here - zero, sign * z["f"], rtol=1e-12)


@pytest.mark.parametrize("link, sign", [(lambda x: -x, 1.0), (lambda x: -0.5 * x, -0.5)])
def test_a_factor_of_one_term_is_its_own(link, sign):
    function = lambda z, rest: jnp.exp(link(z["u"][rest["group"]]))  # noqa: E731
    cut = found(function, {"u": (4,)})
    rest = jax.tree.map(jnp.asarray, rest_of(N))
    np.testing.assert_allclose(cut.at({"u": jnp.ones(4)}, rest)[0], sign * np.ones(N))
