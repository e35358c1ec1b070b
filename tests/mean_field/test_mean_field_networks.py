"""Mean field on random conjugate networks: the bound never falls, ends at a maximum of each block,
is the mean of log p - log q, and stays below the evidence.
"""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from conjugate_networks import exact, log_weights, network
from jax import random

from ppl_gp.infer.probes import first_trace
from ppl_gp.mean_field.discrete import Discrete
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.mean_field.structure import find_structure
from ppl_gp.mean_field.sweep import bound

MANY = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(20)]
NUM = 4000


def check_never_falls(fit):
    bounds = fit.stats["bounds"]
    assert np.all(np.isfinite(bounds)) and fit.result in ("converged", "max_steps")
    assert np.all(np.diff(bounds) > -1e-11 * (1.0 + np.abs(bounds[1:])))


def moved(family, key, step):
    """The block with its natural parameters a relative `step` away, along a direction of `key`."""
    leaves, tree = jax.tree.flatten(family)
    keys = random.split(key, len(leaves))
    if isinstance(family, Discrete):
        eps = random.normal(key, leaves[0].shape)
        return jax.tree.unflatten(tree, [jax.nn.log_softmax(leaves[0] + step * eps)])
    square = [x.ndim >= 2 and x.ndim == len(family.batch) + 2 for x in leaves]
    new = [_moved(x, s, k, step) for x, s, k in zip(leaves, square, keys, strict=True)]
    return jax.tree.unflatten(tree, new)


def _moved(x, square, key, step):
    eps = random.normal(key, x.shape)
    if not square:
        return x * (1.0 + step * eps) + step * jnp.where(jnp.all(x > 0), 0.0, eps)
    R = jnp.eye(x.shape[-1]) + step * eps
    return jnp.swapaxes(R, -1, -2) @ x @ R


def check_is_a_maximum(net, fit):
    """Every block alone, moved either way, has a lower bound."""
    trace = first_trace(net.model, (net.y,), {})
    joint = log_joint_of(net.model, trace, (net.y,), {})
    structure = find_structure(joint, trace, net.apart, True)
    value = jax.jit(lambda q: bound(structure.joint, structure.terms, q))
    q = list(fit.blocks)
    assert abs(value(q) - fit.log_evidence) < 1e-9 * (1.0 + abs(fit.log_evidence))
    for j, family in enumerate(q):
        for step in (0.03, -0.03):
            other = moved(family, random.key(j), step)
            gain = value([*q[:j], other, *q[j + 1 :]]) - fit.log_evidence
            allowed = 1e-9 if isinstance(family, Discrete) else -1e-7  # sure labels do not move
            assert gain < allowed, (family.sites, step, float(gain))


def check_by_draws(net, fit):
    """The bound is E[log p - log q], and at most the log of the mean weight, an unbiased estimate
    of p(y), with its error.
    """
    log_w = log_weights(net, fit, NUM, random.key(2))
    if net.apart is not None:
        assert abs(log_w.mean() - fit.log_evidence) < 4.5 * log_w.std() / np.sqrt(NUM) + 1e-9
    weights = np.exp(log_w - log_w.max())
    estimate = np.log(weights.mean()) + log_w.max()
    assert fit.log_evidence < estimate + 4.0 * weights.std() / weights.mean() / np.sqrt(NUM)


@pytest.mark.parametrize("seed", MANY)
def test_a_random_network_is_climbed_to_a_bound(seed):
    net = network(seed)
    fit = net.fit()
    check_never_falls(fit)
    check_is_a_maximum(net, fit)
    check_by_draws(net, fit)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY[:10])
def test_a_gaussian_network_has_the_mean_and_the_precision_of_the_joint(seed):
    """Factors of a Gaussian have its mean and the blocks of its precision, and all sites in one
    block its evidence.
    """
    net = network(seed, gaussian=True)
    fit = net.fit()
    check_never_falls(fit)
    log_evidence, mean, precision = exact(net, {k: d.mean for k, d in fit.sites.items()})
    assert fit.log_evidence <= log_evidence + 1e-9
    index = positions(mean)
    for name, d in fit.sites.items():
        np.testing.assert_allclose(d.mean, mean[name], atol=2e-4)
        own = precision[np.ix_(index[name], index[name])]
        np.testing.assert_allclose(precision_of(d), own, rtol=1e-8, atol=1e-8)
    joint = net._replace(method={"factors": [list(fit.sites)]}).fit()
    assert abs(joint.log_evidence - log_evidence) < 1e-8 * (1.0 + abs(log_evidence))


def positions(values: dict) -> dict:
    """{site: where its values stand in the flattened tree}."""
    flat, back = jax.flatten_util.ravel_pytree(values)
    return {k: np.ravel(x).astype(int) for k, x in back(jnp.arange(flat.size, dtype=float)).items()}


def precision_of(q) -> np.ndarray:
    """(D, D) of all elements of a site."""
    if not q.event_shape:
        return np.diag(1.0 / np.ravel(q.variance))
    covariances = np.reshape(q.covariance_matrix, (-1, *q.covariance_matrix.shape[-2:]))
    return np.asarray(jax.scipy.linalg.block_diag(*np.linalg.inv(covariances)))
