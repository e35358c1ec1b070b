"""The posterior process at one setting of the hyperparameters: a GP that was conditioned.

Here from a pseudo-likelihood (`kept` has it from values of f); from inducing variables it is a
`sparse.process.SparseProcess`, over draws a `draws.Mixture`, with the same calls.

The functions of a softmax, independent a priori, cost O(R N^2 M), not O(R^2 N^2 M), at new inputs.
With E, M as in `local.softmax` and G_r = chol(M)^-1 E_r k_r (Rasmussen & Williams 2006, equation
3.44 and algorithm 3.4):

Cov[f*_r, f*_s] = 1[r = s] (k**_r - k_r^T E_r k_r) + G_r^T G_s,

what is left of a function that has data of its own, and what it shares with the others.

Behind an integrated predictor each GP is a process of its own, `part_processes`.
"""

from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, random
from jaxtyping import Array, Float

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, Conditioned
from ppl_gp.local.factor import Root
from ppl_gp.local.natural import PseudoLikelihood
from ppl_gp.local.softmax import PredictionRoot, SoftmaxRoot
from ppl_gp.numerics.arrow import ArrowGram
from ppl_gp.numerics.blocks import gram_blocks, product_blocks, times
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky
from ppl_gp.numerics.low_rank import Dense, Gram, LowRank
from ppl_gp.reading.predictor.parts import Loadings, Table, Weighted
from ppl_gp.reading.predictor.prior import blocks_of, loads_of
from ppl_gp.sparse.inducing import Points
from ppl_gp.sparse.process import SparseProcess, reduction_of_some


class Unknowns(eqx.Module):
    """q(w) = N(mean, G^-1) of the unknowns w behind a predictor eta = m + F w, w ~ N(0, I): G = I +
    F^T T F, which no wide prior cancels.
    """

    mean: Float[Array, "U"]
    gram: Gram

    def moments(self, loads: Any) -> tuple[Array, Array]:
        """Mean and variance of what is computed from them, loads w, (M,) each."""
        if not isinstance(self.gram, ArrowGram):
            loads = Dense(loads.array())
        mean = loads @ self.mean
        return mean, loads.variance(self.gram, mean)

    def moments_of(self, part: Any, start: int) -> tuple[Array, Array]:
        """Of what a `Table` adds, whose unknowns begin at `start`. O(U^2), of levels O(U)."""
        size = part.num_unknowns
        mean, levels = self.mean[start : start + size], (start, size)
        if isinstance(self.gram, ArrowGram) and levels == (self.gram.start, self.gram.num):
            own = self.gram.inverse.own
            return part.weight * mean[part.index], part.weight**2 * own[part.index]
        half = self.gram.half_of(start, size)
        return part.flat @ mean, jnp.sum((half @ part.flat.T) ** 2, 0)


def unknowns(K: LowRank, mean, sites: PseudoLikelihood) -> Unknowns:
    """Of F F^T under a pseudo-likelihood. O(N U^2)."""
    gram = K.F.gram(sites.nat2)
    pulled = K.F.pull(sites.nat1 - times(sites.nat2, jnp.ravel(mean)))
    return Unknowns(gram.solve(pulled), gram)


class Posterior(Conditioned):
    """p(f(X*) | data) = N(m* + k*^T alpha, k** - k*^T R k*) with R = (K + T^-1)^-1 factored once
    (R&W 3.21, 3.24), or from q(w) of the unknowns of a predictor eta = m + F w.

    `posterior(X_new)` gives marginals as `Normal`, (M,); `posterior(X_new, joint=True)` a
    `MultivariateNormal`. X_new are the GP site's own inputs, or a `GP` at them (then its kernel and
    mean are taken). O(M N^2), and O(M U^2) of U unknowns.

    The R functions of a predictor are correlated within a row and between rows. Marginals are
    (R, M), and matrices have rows (function, row), functions outermost.
    """

    alpha: Float[Array, "RN"]
    root: PredictionRoot | Unknowns

    def marginals(self, new: GP):
        """(mean, variance), (M,) or (R, M) each; rounding below zero is raised to zero."""
        if isinstance(self.root, Unknowns):
            centred, variance = self.root.moments(loads_of(new))
        else:
            k = new.kernel(self.prior.X, new.X)
            centred, variance = k.T @ self.alpha, new.variance - self.root.explained(k)
        shaped = lambda x: jnp.reshape(x, new.shape())  # noqa: E731
        return new.mean + shaped(centred), jnp.maximum(shaped(variance), 0.0)

    def within(self, new: GP) -> tuple[Array, Array, Array]:
        """(mean, variance, (R, M) each; covariances within a row, (M, R, R)). O(M N^2 R^3)."""
        k, like, root = self._columns(new), blocks_of(new), cast(Root, self.root)
        if isinstance(self.root, Unknowns):
            blocks = gram_blocks(self.root.gram.half() @ k, like)
        else:
            seen = gram_blocks(root.W @ k, like) * root.sign
            blocks = like - seen - product_blocks(k, times(root.diagonal, k), like)
        return *self.marginals(new), jnp.moveaxis(blocks, -1, 0)

    def joint(self, new: GP):
        """(mean (M,), covariance (M, M)), or of all (R M,) values."""
        k, mean = self._columns(new), jnp.ravel(new.mean)
        if isinstance(self.root, Unknowns):
            half = self.root.gram.half() @ k
            return mean + k.T @ self.root.mean, half.T @ half
        return mean + k.T @ self.alpha, new.covariance_matrix - self.root.quadratic(k)

    def _columns(self, new: GP):
        """Covariances with the training rows, or loads of unknowns, (..., R M)."""
        if isinstance(self.root, Unknowns):
            return loads_of(new).array().T
        return new.kernel(self.prior.X, new.X)

    def sample(self, key, new: GP, num: int) -> Float[Array, "num R M"]:
        """Joint draws. O((R M)^3 + num (R M)^2), and what `joint` costs."""
        mean, covariance = self.joint(new)
        L, _ = robust_cholesky(covariance, default_jitter(new.variance))
        white = random.normal(key, (num, mean.size), mean.dtype)
        return jnp.reshape(mean + white @ L.T, (num, *new.shape()))


class SoftmaxProcess(Conditioned):
    """As `Posterior`, of the scores of a softmax. O(R N^2 M); `joint` alone has (R M)^2 numbers."""

    alpha: Float[Array, "RN"]
    root: SoftmaxRoot

    def marginals(self, new):
        k = self._columns(new)
        explained, G = self.root.separately(k)
        variance = jnp.reshape(new.variance, explained.shape) - explained + jnp.sum(G**2, 1)
        return self._mean(new, k), jnp.maximum(variance, 0.0)

    def within(self, new) -> tuple[Array, Array, Array]:
        k = self._columns(new)
        explained, G = self.root.separately(k)
        own = jnp.eye(len(explained), dtype=explained.dtype)[:, :, None] * explained
        blocks = blocks_of(new) - own + jnp.einsum("anm,bnm->abm", G, G)
        variance = jnp.maximum(jnp.einsum("aam->am", blocks), 0.0)
        return self._mean(new, k), variance, jnp.moveaxis(blocks, -1, 0)

    def joint(self, new):
        k = self._columns(new)
        A, G = self.root.left(new.kernel.separate(new.X), k)
        shared = jnp.concatenate([*G], 1)
        covariance = jax.scipy.linalg.block_diag(*A) + shared.T @ shared
        return jnp.ravel(self._mean(new, k)), covariance

    def sample(self, key, new, num: int) -> Float[Array, "num R M"]:
        """Joint draws. O(R (M^3 + N^2 M) + num R (M^2 + N M))."""
        k = self._columns(new)
        left = self.root.left(new.kernel.separate(new.X), k)
        return self._mean(new, k) + coloured(*left, default_jitter(new.variance), key, num)

    def _mean(self, new, k) -> Float[Array, "R M"]:
        alpha = jnp.reshape(self.alpha, k.shape[:2])
        return new.mean + jnp.einsum("rnm,rn->rm", k, alpha)

    def _columns(self, new) -> Float[Array, "R N M"]:
        """Covariances of each function with itself at the training rows."""
        return new.kernel.separate_cross(self.prior.X, new.X)


def coloured(
    A: Float[Array, "R M M"], G: Float[Array, "R N M"], unit, key, num: int
) -> Float[Array, "num R M"]:
    """Draws of N(0, diag(A_1, ..., A_R) + G^T G), as L_r z_r + G_r^T z of Cholesky factors of the
    A_r and of a z that the functions share. `unit`: a first raise of the diagonal.
    """
    own_key, shared_key = random.split(key)
    own = random.normal(own_key, (num, *A.shape[:2]), A.dtype)
    shared = random.normal(shared_key, (num, G.shape[1]), A.dtype)
    L = lax.map(lambda A: robust_cholesky(A, unit)[0], A)
    return jnp.einsum("rij,srj->sri", L, own) + jnp.einsum("rnm,sn->srm", G, shared)


def part_processes(process: Posterior | SoftmaxProcess | SparseProcess) -> dict[str, Any]:
    """{GP site behind a predictor: its posterior process}; `site[0]`, ... of several functions.

    Raises `ModelError` for a GP whose prior mean is computed from other integrated sites, where
    these reach the data in other ways too, or f has inducing variables or a table of places.
    """
    prior: Any = process.prior
    _require_own_means(process)
    priors = prior.behind.priors()
    if isinstance(process, SparseProcess):
        found = {k: _of_inducing(k, own, process) for k, own in priors.items()}
    else:
        found = _of_columns(prior.kernel.at(prior.X), priors, process)
    named = {}
    for k, units in found.items():
        one = len(units) == 1
        named |= {k if one else f"{k}[{p}]": unit for p, unit in enumerate(units)}
    return named


def _require_own_means(process: Any) -> None:
    """A GP whose mean takes part of other integrated sites is a process where these reach the data
    through it alone, and where it is not told by inducing variables.
    """
    prior = process.prior
    behind, direct = prior.behind.mean_sites(), prior.behind.seen_directly()
    one = isinstance(process, Posterior) and isinstance(process.root, Root)
    sparse = not one or prior.kernel.functions > 1
    for site, sites in behind.items():
        others = frozenset().union(*(s for k, s in behind.items() if k != site))
        if sites and (sparse or sites & (direct | others)):
            raise ModelError(
                f"the posterior of GP site '{site}' is no process of its own here: its prior mean "
                f"is computed from {sorted(sites)}, which are integrated too. predict() and "
                "components() have the moments at new rows, and sample() joint draws; or add the "
                "mean to a GP of mean zero where the likelihood takes it."
            )


def _of_columns(train: Loadings, priors: dict[str, GP], process: Any) -> dict[str, list]:
    """Of each GP's units, by their columns of the predictor: functions, or tables of places."""
    found, start = {}, 0
    for k, part in sorted(train.parts.items()):
        if k in priors and isinstance(part, Weighted):
            units = range(part.weights.shape[1])
            found[k] = [_of_weighted(part.weights[:, p], priors[k], process) for p in units]
        elif k in priors and isinstance(part, Table):
            (num,) = priors[k].event_shape
            units = range(0, part.num_unknowns, num)  # outermost
            found[k] = [_of_table(part, start, u, priors[k], process) for u in units]
        start += part.num_unknowns if isinstance(part, Table) else 0
    return found


def _of_weighted(a, prior: GP, process) -> Posterior:
    """Of f in eta_r = a_r f + ..., a (R, N): Cov[eta_r, f*] = a_r k."""
    alpha = jnp.sum(a * jnp.reshape(process.alpha, a.shape), 0)
    return Posterior(prior, alpha, process.root.of_sum(a))


def _of_table(part: Table, start: int, first: int, prior: GP, process: Any) -> SparseProcess:
    """Of f = L w at a table of places, whose unknowns are those from `first` on of the part's,
    which begin at `start`: from q(w), else with Cov[eta, w] = F, q(w) = N(F^T alpha, I - F^T R F).
    """
    (num,), root = prior.event_shape, process.root
    if isinstance(root, Unknowns):
        begin = start + first
        half = root.gram.half_of(begin, num)
        mean, reduction = root.mean[begin : begin + num], jnp.eye(num) - half.T @ half
    else:
        F = part.flat[:, first : first + num]
        mean, reduction = F.T @ process.alpha, root.quadratic(F)
    return _given(Points(prior.X), prior, mean, reduction)


def _of_inducing(site: str, prior: GP, process: SparseProcess) -> list[SparseProcess]:
    """Of a GP's units from its own inducing variables; at a table of places, f = L w, from w."""
    variables: Any = process.inducing
    own = Points(prior.X) if site in variables.tables else variables.gps[site]
    start, num = variables.start(site), own.num
    return [
        _given(own, prior, process.mean[u : u + num], reduction_of_some(process.reduction, u, num))
        for u in range(start, start + variables.size(site), num)
    ]


def _given(variables, prior: GP, mean, reduction) -> SparseProcess:
    return SparseProcess(prior, variables, variables.root(prior), mean, reduction)
