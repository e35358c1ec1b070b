"""Sites whose samplers take many steps are drawn by one program, and as NumPyro draws them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import monitoring, random
from numpyro import handlers

from ppl_gp.reading.tracing import bare_trace


def matrices(D):
    """Sites of matrices: alone, in a plate, masked."""
    numpyro.sample("corr", dist.LKJ(D, 1.5))
    numpyro.sample("root", dist.LKJCholesky(D, 1.0))
    numpyro.sample("factor", dist.WishartCholesky(D + 1.0, rate_matrix=jnp.eye(D)))
    with numpyro.plate("groups", 2):
        V = numpyro.sample("V", dist.InverseWishart(D + 1.0, scale_matrix=jnp.eye(D)))
        numpyro.sample("W", dist.Wishart(D + 1.0, rate_matrix=V).mask(jnp.array([True, False])))
    numpyro.sample("many", dist.Wishart(D + 1.0, rate_matrix=jnp.eye(D)), sample_shape=(3,))


def test_draws_are_numpyros():
    ours = bare_trace(matrices, (3,), {}, key=random.key(1))
    theirs = handlers.trace(handlers.seed(matrices, random.key(1))).get_trace(3)
    assert list(ours) == list(theirs)
    for name, site in theirs.items():
        if site["type"] == "sample":
            assert ours[name]["value"].shape == site["value"].shape
            np.testing.assert_allclose(ours[name]["value"], site["value"], rtol=1e-12, atol=1e-15)


def _programs(work) -> list:
    """Names of what is compiled."""
    seen = []

    def listen(event, _, **facts):
        if "backend_compile" in event:
            seen.append(facts.get("fun_name"))

    jax.clear_caches()
    monitoring.register_event_duration_secs_listener(listen)
    try:
        work()
    finally:
        monitoring.unregister_event_duration_listener(listen)
    return seen


def test_the_sampler_of_a_wishart_site_is_one_program():
    rate = jnp.eye(5)

    def model():
        numpyro.sample("W", dist.Wishart(7.0, rate_matrix=rate))

    ours = _programs(lambda: bare_trace(model, (), {}))
    theirs = _programs(lambda: handlers.trace(handlers.seed(model, random.key(0))).get_trace())
    assert sum("_drawn" in str(name) for name in ours) == 1
    assert len(ours) < len(theirs) - 20


class Wider(dist.Wishart):
    """A user's own, with a field that JAX does not know of."""

    def __init__(self, D, factor):
        self.factor = factor
        super().__init__(D + 1.0, rate_matrix=jnp.eye(D))

    def sample_with_intermediates(self, key, sample_shape=()):
        """Scaled; what `numpyro.sample` calls."""
        value, steps = super().sample_with_intermediates(key, sample_shape)
        return self.factor * value, steps


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_a_users_subclass_is_drawn_by_itself(factor):
    value = bare_trace(lambda: numpyro.sample("W", Wider(3, factor)), (), {})["W"]["value"]
    plain = bare_trace(lambda: numpyro.sample("W", Wider(3, 1.0)), (), {})["W"]["value"]
    np.testing.assert_allclose(value, factor * plain)
