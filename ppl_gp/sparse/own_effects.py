"""Effects that stand one a datum, integrated before q is looked at.

With eta_n = f_n + e_n, independent e_n ~ N(0, s_n^2), and q(f) from inducing variables,

  log p(y) >= sum_n E_q[log int p(y_n | f_n + e) N(e; 0, s_n^2) de] - KL[q(u) || p(u)],

which is the sparse bound of the model with e integrated. It has no parameter of a datum, so that a
minibatch's is unbiased. No q(e | f), Gaussian or not, gives more: by Jensen log int p(y | f + e)
p(e) de >= E_q(e | f)[log p(y | f + e) + log p(e) - log q(e | f)], with equality where q(e | f) is
p(e | f, y) alone. Of Gaussian noise the integral has a closed form; else it is one-dimensional
quadrature with nodes where N(e; 0, s^2) p(y | f + e) needs them.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.gp import GP
from ppl_gp.numerics.modes import normal_log_pdf
from ppl_gp.numerics.quadrature import likelihood_nodes
from ppl_gp.quick import pruned
from ppl_gp.reading.affine import degree
from ppl_gp.reading.factors import JointLogLikelihood, is_concave
from ppl_gp.reading.predictor.parts import Own, added
from ppl_gp.reading.predictor.prior import PredictorGP

NODES = 96  # of the integral over one effect
FINER = 4  # times as many, to tell the error of these
DRAWN_FROM = 384  # nodes of the distribution function that effects are drawn by


def split_effects(priors: dict[str, GP]) -> tuple[dict[str, GP], dict[str, Array]]:
    """({GP site: prior without effects that stand one a datum}, {GP site that has such effects:
    their variances}). Of one function a datum.
    """
    left, own = dict(priors), {}
    for k, prior in priors.items():
        if isinstance(prior, PredictorGP) and _own_of(prior, prior.X[:2]):
            left[k], own[k] = prior.without_own(), added(_own_of(prior, prior.X))[0, 0]
    return left, own


def _own_of(prior: PredictorGP, X) -> list[Array]:
    """Covariances within a row of each of them, (R, R, n)."""
    parts = prior.kernel.at(X).parts.values()
    return [part.covariance for part in parts if isinstance(part, Own)]


def averaged(joint: JointLogLikelihood, own: dict[str, Array]) -> "JointLogLikelihood | Averaged":
    """A likelihood with such effects integrated; as it is where there are none."""
    if not own:
        return joint
    ((site, variance),) = own.items()
    return Averaged(joint, site, variance)


class Averaged(eqx.Module):
    """{site: f (N,)} -> log int p(y_n | f_n + e) N(e; 0, variance_n) de, (N,), nats."""

    joint: JointLogLikelihood
    site: str = eqx.field(static=True)
    variance: Float[Array, "N"]
    num_nodes: int = eqx.field(default=NODES, static=True)

    def __call__(self, latent: dict) -> Float[Array, "N"]:
        f, variance = latent[self.site], self._positive()
        found = self._closed(f, variance) if self._is_gaussian(f) else self._sum(f, variance)
        return jnp.where(self.variance > 0, found, self._at(f))

    def shared(self, latent: dict | None = None) -> Float[Array, ""]:
        """As of the likelihood itself."""
        return self.joint.shared(latent)

    def finer(self) -> "Averaged":
        """By more nodes."""
        return Averaged(self.joint, self.site, self.variance, FINER * self.num_nodes)

    def draw(self, f: Float[Array, "N"], key) -> Float[Array, "N"]:
        """e_n ~ p(e | f_n, y_n): of Gaussian noise exactly, else by the inverse of the distribution
        function at `DRAWN_FROM` nodes, linear between them. O(N DRAWN_FROM).
        """
        variance = self._positive()
        if self._is_gaussian(f):
            _, b, t = quadratic(self._at, f)
            rest = 1.0 + t * variance
            white = random.normal(key, f.shape, f.dtype)
            e = b * variance / rest + jnp.sqrt(variance / rest) * white
        else:
            x, log_w = self._nodes(f, variance, DRAWN_FROM)
            p = jax.nn.softmax(log_w + jax.vmap(self._at)(x), 0)
            u, below = random.uniform(key, f.shape, f.dtype), jnp.cumsum(p, 0) - 0.5 * p
            e = jax.vmap(jnp.interp, (0, 1, 1))(u, below, x) - f
        return jnp.where(self.variance > 0, e, 0.0)

    def _at(self, f):
        return self.joint({self.site: f})

    def _positive(self):
        return jnp.where(self.variance > 0, self.variance, 1.0)

    def _is_gaussian(self, f) -> bool:
        """Whether log p is proved a polynomial of degree two in f; one abstract trace."""
        return degree(self._at, f) <= 2

    def _closed(self, f, variance):
        c, b, t = quadratic(self._at, f)
        rest = 1.0 + t * variance
        return c + 0.5 * (b**2 * variance / rest - jnp.log(rest))

    def _sum(self, f, variance):
        """By nodes that stay where they are as far as derivatives go: their weights carry them."""
        hold = lambda x: lax.stop_gradient(x) if eqx.is_inexact_array(x) else x  # noqa: E731
        still = jax.tree.map(hold, self)
        held = lax.stop_gradient((f, variance))
        x, log_w = still._nodes(*held, self.num_nodes)
        x, spacing = lax.stop_gradient((x, log_w - normal_log_pdf(x, *held)))
        terms = normal_log_pdf(x, f, variance) + spacing + jax.vmap(self._at)(x)
        return logsumexp(terms, 0)

    def _nodes(self, f, variance, num: int):
        concave = is_concave(lambda f: self.joint.trace({self.site: f}), None, f.shape[-1])
        return likelihood_nodes(self._at, f, variance, num=num, concave=concave)


def quadratic(log_lik: Callable, f) -> tuple[Array, Array, Array]:
    """(value, slope, minus curvature) of a pointwise log-likelihood."""
    gradient = jax.grad(pruned(lambda f: jnp.sum(log_lik(f)), f))
    slope, curvature = jax.jvp(gradient, (f,), (jnp.ones_like(f),))
    return log_lik(f), slope, -curvature
