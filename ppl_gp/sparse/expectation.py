"""E_q[log p(y_n | f_n)] for one function a datum, two or three, or many: Gauss-Hermite, its tensor
product, or draws.

Per-datum effects, integrated before q is looked at.

With eta_n = f_n + e_n, independent e_n ~ N(0, s_n^2), and q(f) from inducing variables,

  log p(y) >= sum_n E_q[log int p(y_n | f_n + e) N(e; 0, s_n^2) de] - KL[q(u) || p(u)],

which is the sparse bound of the model with e integrated. It has no parameter of a datum, so that a
minibatch's is unbiased. No q(e | f), Gaussian or not, gives more: by Jensen log int p(y | f + e)
p(e) de >= E_q(e | f)[log p(y | f + e) + log p(e) - log q(e | f)], with equality where q(e | f) is
p(e | f, y) alone. Of Gaussian noise the integral has a closed form; else it is one-dimensional
quadrature with nodes where N(e; 0, s^2) p(y | f + e) needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_gp.errors import DataError
from ppl_gp.gp import GP
from ppl_gp.numerics.blocks import flatten, lower_root
from ppl_gp.numerics.modes import normal_log_pdf
from ppl_gp.numerics.quadrature import hermite, likelihood_nodes
from ppl_gp.quick import pruned
from ppl_gp.reading.dependence import degree
from ppl_gp.reading.factors import JointLogLikelihood, is_concave
from ppl_gp.reading.predictor.parts import Own, added
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.settings import require_whole

MAX_CUBATURE = 3
NODES = {1: 20, 2: 12, 3: 8}
FINE = 384


@dataclass(frozen=True)
class Expectation:
    """How `SVGP` integrates the likelihood over the functions of a row.

    Parameters
    ----------
    num_nodes : int, default None
        Nodes of Gauss-Hermite quadrature per direction, for up to three functions that are not
        additive. `None` takes 20, 12 or 8 for one, two or three functions.
    num_draws : int, default None
        Use this many draws instead of nodes, for any number of functions. `None` takes 10 draws if
        more than three functions are not additive, and nodes otherwise.

    Raises
    ------
    DataError
        For counts below 1.

    Examples
    --------
    >>> pg.Expectation().nodes(2), pg.Expectation(num_draws=20).nodes(2)
    (12, None)
    """

    num_nodes: int | None = None
    num_draws: int | None = None
    # log p(y_n | f_n) is known to be a sum of terms that see one function each (several outputs,
    # each with a function of its own), which one set of nodes serves: a method's to say
    additive: bool = field(default=False, repr=False)

    def __post_init__(self):
        require_whole(self, "num_nodes", "num_draws")

    def nodes(self, num_functions: int) -> int | None:
        """Nodes in each direction, or `None` where draws are to be used."""
        directions = 1 if self.additive else num_functions
        if self.num_draws is not None or directions > MAX_CUBATURE:
            return None
        return self.num_nodes or NODES[directions]


def expected_log_lik(
    log_lik: Callable, mean: dict, variance: dict, expectation: Expectation, key
) -> Float[Array, "B"]:
    """E[log p(y_n | f_n)] with independent f ~ N(mean, variance), {site: (*C, B)} each; (B,), nats.
    Functions of one site that are correlated have covariances (R, R, B) in place of variances.

    Gauss-Hermite is exact for polynomials of degree 2 num_nodes - 1 and converges slowly where log
    p is peaked on a scale far below f's standard deviation (StudentT(4) of scale 0.05 under sd 1:
    +0.56 nats a datum with 20 nodes, so a sum of it is no bound); `expectation_error` tells by how
    much.

    Cost: num_nodes^F (num_nodes where it is additive, or num_draws) evaluations of the likelihood.
    Raises `DataError` for `num_nodes` above three functions that are not additive.
    """
    m, rebuild = flatten(mean)
    if (num := expectation.nodes(m.shape[0])) is None:
        if expectation.num_nodes is not None and expectation.num_draws is None:
            raise DataError(
                f"num_nodes={expectation.num_nodes}: cubature serves up to 3 functions, this "
                f"model has {m.shape[0]}; leave it out, or give num_draws."
            )
        z = random.normal(key, (expectation.num_draws or 10, *m.shape), m.dtype)
        at = _coloured(mean, variance)
        return jnp.mean(jax.vmap(lambda z: log_lik(at(rebuild(z))))(z), 0)
    if expectation.additive:  # each term depends on one function, and so on its marginal alone
        diagonal = lambda m, v: jnp.einsum("aan->an", v) if v.ndim > m.ndim else v  # noqa: E731
        variance = {k: diagonal(mean[k], v) for k, v in variance.items()}
    z, w = hermite(num, 1 if expectation.additive else m.shape[0])
    at, ones = _coloured(mean, variance), jnp.ones_like(m)
    values = jax.vmap(lambda z: log_lik(at(rebuild(z[:, None] * ones))))(jnp.asarray(z, m.dtype))
    return jnp.asarray(w, m.dtype) @ values


def _positive(variance):
    """For roots, which have no derivative at the zeros of rows that see no unknown."""
    return jnp.maximum(variance, jnp.finfo(variance.dtype).tiny ** 0.5)


def _coloured(mean: dict, variance: dict) -> Callable:
    """z ~ N(0, I), {site: (*C, B)} -> f ~ N(mean, variance)."""

    def of_site(m, v):
        if v.ndim == m.ndim:
            sd = jnp.sqrt(_positive(v))
            return lambda z: m + sd * z
        return lambda z: m + jnp.einsum("nab,bn->an", lower_root(jnp.moveaxis(v, -1, 0)), z)

    colour = {k: of_site(mean[k], v) for k, v in variance.items()}
    return lambda z: {k: colour[k](x) for k, x in z.items()}


def expectation_error(
    log_lik: Callable,
    mean: dict,
    variance: dict,
    expectation: Expectation,
    key,
    finer: Callable | None = None,
) -> Float[Array, "B"]:
    """Error of expected_log_lik(how), (B,), nats.

    One function: its distance to `FINE` nodes that follow the likelihood, good to about 1e-8, and
    positive where a bound made of it is too high. Several, and where a likelihood is an integral
    itself, of which `finer` has more nodes: twice the distance to three times the Gauss-Hermite
    nodes without its sign, the sum of which covers the error (tests/test_error_estimates.py). 0
    for draws, which are right on average.
    Cost: `FINE` or 3^F as many likelihood values; for reports.
    """
    m, rebuild = flatten(mean)
    if (num := expectation.nodes(m.shape[0])) is None:
        return jnp.zeros_like(m[0])
    coarse = expected_log_lik(log_lik, mean, variance, expectation, key)
    if m.shape[0] > 1 or finer is not None:
        more = replace(expectation, num_nodes=3 * num)
        return 2.0 * jnp.abs(coarse - expected_log_lik(finer or log_lik, mean, variance, more, key))

    def one(f):
        return log_lik(rebuild(f[None]))

    f, log_w = likelihood_nodes(one, m[0], _positive(flatten(variance)[0][0]), num=FINE, tilt=1.0)
    w = jnp.exp(log_w)
    return coarse - jnp.sum(jnp.where(w > 0, jnp.multiply(w, jax.vmap(one)(f)), 0.0), 0)


OWN_NODES = 96  # of the integral over one effect
FINER = 4  # times as many, to tell the error of these
DRAWN_FROM = 384  # nodes of the distribution function that effects are drawn by


def split_effects(priors: dict[str, GP]) -> tuple[dict[str, GP], dict[str, Array]]:
    """({GP site: prior without per-datum effects}, {GP site that has such effects:
    their variances}). Of one function a datum.
    """
    left, own = dict(priors), {}
    for k, prior in priors.items():
        if isinstance(prior, PredictorGP) and _own_of(prior, prior.X[:2]):
            left[k], own[k] = prior.without_own(), added(_own_of(prior, prior.X))[0, 0]
    return left, own


def _own_of(prior: PredictorGP, X) -> list[Array]:
    """Covariances within a row of each of them, (R, R, n)."""
    return [part.covariance for part in prior.kernel.at(X).parts.values() if isinstance(part, Own)]


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
    num_nodes: int = eqx.field(default=OWN_NODES, static=True)

    def __call__(self, latent: dict) -> Float[Array, "N"]:
        f, variance = latent[self.site], self._positive()
        if self._is_gaussian(f):
            c, b, t = quadratic(self._at, f)
            rest = 1.0 + t * variance
            found = c + 0.5 * (b**2 * variance / rest - jnp.log(rest))
        else:
            found = self._sum(f, variance)
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
