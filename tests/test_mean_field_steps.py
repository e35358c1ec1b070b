"""Stochastic steps of mean field: blends of natural parameters, unbiased steps, whole batches as
coordinate ascent, streams, checkpoints and Ctrl-C.
"""

import jax
import numpy as np
import pytest
from jax import random

from ppl_gp.conjugate.family import blend
from tests.conjugate_families import NAMES, families


@pytest.mark.one_case
@pytest.mark.parametrize("name", NAMES)
def test_a_blend_is_of_natural_parameters(name):
    """log q of a blend is that blend of the two log q, up to a constant, anywhere."""
    rng = np.random.default_rng(4)
    old, new = families(rng)[name], families(rng)[name]
    z = jax.vmap(old.somewhere)(random.split(random.key(1), 8))
    for rate in (0.0, 0.3, 1.0):
        mixed = blend(old, new, rate)
        a, b, found = (np.asarray(jax.vmap(q.log_prob)(z)) for q in (old, new, mixed))
        apart = found - (1.0 - rate) * a - rate * b
        np.testing.assert_allclose(apart, apart[0], rtol=1e-8, atol=1e-8 * np.abs(found).max())
    for end, rate in ((old, 0.0), (new, 1.0)):
        for x, y in zip(jax.tree.leaves(blend(old, new, rate)), jax.tree.leaves(end), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_a_category_that_cannot_be_stays_so():
    q = families(np.random.default_rng(0))["discrete"]
    sure = q.at_eta(np.array([[0.0, -np.inf, -np.inf], [-1.0, -np.inf, -0.5]]).clip(-1e300))
    for rate in (0.0, 0.5, 1.0):
        probs = np.exp(blend(sure, sure, rate).log_probs)
        np.testing.assert_allclose(probs[0], [1.0, 0.0, 0.0])
