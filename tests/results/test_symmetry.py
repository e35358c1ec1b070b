"""Label switching: plates whose orders leave the log joint as it is are told, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import gammaln

import ppl_gp as pg
from models.mixture import mixture
from ppl_gp.draws import Draws
from ppl_gp.errors import Result
from ppl_gp.reading.roles import is_observed
from ppl_gp.reading.tracing import bare_trace
from ppl_gp.results.fit import Fit

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3))


def made(model, *args, **kwargs):
    """A fit whose one draw is the prior's: nothing is inferred."""
    trace = bare_trace(model, args, kwargs)
    latent = {
        k: s["value"] for k, s in trace.items() if s["type"] == "sample" and not is_observed(s)
    }
    draws = Draws.one(latent, {})
    return Fit(
        model=model,
        method=pg.MeanField(),
        args=args,
        kwargs=kwargs,
        draws=draws,
        log_evidence=None,
        result=Result.converged,
        stats={},
        sampled=True,
    )


@pytest.mark.slow
def test_components_of_a_mixture_change_places():
    """As many components as columns: axes of events have the same length, and stay."""
    (found,) = made(mixture, jnp.asarray(X), num_components=3, concentration=0.5).symmetries
    assert (found.plate, found.size) == ("components", 3)
    assert set(found.sites) == {"mean", "precision", "weights"} and found.labels == ("z",)
    assert found.log_count == pytest.approx(gammaln(4))
    assert str(found).startswith("plate 'components': 3! orders of ")


def normals(X, prior=(0.0, 0.0, 0.0), shares=None, marginal=False):
    """Three normals of known spread; `shares` known, or unknown; labels summed, or not."""
    with numpyro.plate("components", 3):
        m = numpyro.sample("m", dist.Normal(jnp.asarray(prior), 2.0))
    if shares is None:
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("data", X.shape[0]):
        if marginal:
            mixing = dist.Categorical(jnp.asarray(shares))
            both = dist.MixtureSameFamily(mixing, dist.Normal(m, 1.0))
            numpyro.sample("x", both, obs=X[:, 0])
        else:
            z = numpyro.sample("z", dist.Categorical(jnp.asarray(shares)))
            numpyro.sample("x", dist.Normal(m[z], 1.0), obs=X[:, 0])


EQUAL = (1 / 3, 1 / 3, 1 / 3)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (("m", "shares"), ("z",))),
        ({"prior": (0.0, 0.0, 1e-5)}, None),  # told apart by their priors, by little
        ({"marginal": True}, (("m", "shares"), ())),
        ({"shares": EQUAL}, (("m",), ("z",))),
        ({"shares": EQUAL, "marginal": True}, (("m",), ())),
        ({"shares": (0.3, 0.3, 0.4)}, None),  # two can change places, not all three
    ],
)
def test_what_moves_together_is_found(options, expected):
    found = made(normals, jnp.asarray(X), **options).symmetries
    assert [(s.sites, s.labels) for s in found] == ([] if expected is None else [expected])


def test_rounding_of_large_terms_hides_no_orders():
    (found,) = made(normals, jnp.asarray(X), prior=(1e6, 1e6, 1e6)).symmetries
    assert (found.sites, found.labels) == (("m", "shares"), ("z",))


def test_float32_rounds_more():
    with jax.enable_x64(False):
        (found,) = made(normals, jnp.asarray(X), shares=EQUAL, marginal=True).symmetries
    assert (found.sites, found.labels) == (("m",), ())


def groups(X, which, y=None):
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(a[which], 1.0), obs=y)


def test_groups_that_the_data_name_are_none():
    which = jnp.asarray([0, 1, 2, 0, 1, 2, 0, 1])
    assert made(groups, jnp.asarray(X), which, y=jnp.asarray(X[:, 0])).symmetries == ()


@pytest.mark.slow
def test_the_tree_tells():
    fit = made(mixture, jnp.asarray(X), num_components=2)
    told = fit.to_datatree().attrs["symmetries"]
    assert told == str(fit.symmetries[0]) and "2! orders" in told
    which = jnp.asarray([0, 1, 2, 0, 1, 2, 0, 1])
    other = made(groups, jnp.asarray(X), which, y=jnp.asarray(X[:, 0]))
    assert "symmetries" not in other.to_datatree().attrs
