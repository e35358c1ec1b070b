"""What a fit keeps of q(f) at one GP site, in four final forms that make posterior processes.

- `FromPseudo`: a Gaussian pseudo-likelihood at the training inputs (the local methods);
  `FromFunctions` where a datum sees several functions.
- `FromDraws`: draws of f at the training inputs (`NUTS`, `EllipticalSlice`).
- `FromInducing`: q(u) over inducing variables (`SVGP`), or draws of u (`SparseNUTS`).

Every array of a fit's `Kept` has a leading axis of S draws of the hyperparameters (S = 1 where they
are one value). `draw(s)` takes it off, and all methods but that one are of such an entry.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import random
from jaxtyping import Array, Float

from ppl_gp.gp import GP
from ppl_gp.local.factor import Root
from ppl_gp.local.natural import Marginals, PseudoLikelihood, prediction_root
from ppl_gp.local.softmax import PredictionRoot, SoftmaxRoot
from ppl_gp.numerics.blocks import diagonal_of
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky, tril_inverse
from ppl_gp.numerics.low_rank import LowRank
from ppl_gp.posterior import Posterior, SoftmaxProcess, Unknowns, coloured, unknowns
from ppl_gp.reading.predictor.prior import covariance_of, loads_of
from ppl_gp.sparse.families import Root as SparseRoot
from ppl_gp.sparse.inducing import InducingVariables
from ppl_gp.sparse.process import SparseProcess, draw_given_inducing, draw_jointly

Process = Posterior | SoftmaxProcess | SparseProcess


class Kept(eqx.Module):
    """What is kept of q(f) at one GP site.

    - `is_draws`: f itself was drawn: nothing is integrated, and any likelihood will do.
    - `has_sites`: each datum has a factor in q(f) that can be taken out (a cavity, for `loo`).
    """

    is_draws: ClassVar[bool] = False
    has_sites: ClassVar[bool] = False
    # (S, *C, N); of u, whitened, where inducing variables are kept
    mean: eqx.AbstractVar[Float[Array, "..."]]

    @property
    def num_draws(self) -> int:
        """S."""
        return self.mean.shape[0]

    @property
    def coupled(self) -> int:
        """R, where a datum sees R functions that are correlated given the data; else 0."""
        return 0

    def draw(self, s):
        """Entry s, of the same kind, without the leading axis."""
        return jax.tree.map(lambda x: x[s], self)

    @property
    def values(self) -> Float[Array, "*C N"] | None:
        """f at the training inputs, for running the model there; `None`: at its prior mean."""
        return self.mean

    @abstractmethod
    def root(self, prior: GP) -> PredictionRoot | Unknowns | SparseRoot:
        """The factor that the process needs, O(N^3) or O(M^3)."""

    @abstractmethod
    def process(self, prior: GP, root: Any = None) -> Process:
        """The posterior process, factored anew unless `root` is given."""

    def at(self, prior: GP, new: GP, ask, root: Any = None):
        """ask(process, new), which begins with a mean; with an axis for several functions."""
        return ask(self.process(prior, root), new)

    def moments(self, prior: GP):
        """(mean, variance) of f at the training inputs, (*C, N) each."""
        return self.mean, self.variance  # pyright: ignore[reportAttributeAccessIssue]

    @abstractmethod
    def sample(self, prior: GP, key, num: int) -> Float[Array, "num *C N"]:
        """Draws of f at the training inputs."""


class BehindSites(Kept):
    """q(f) behind a pseudo-likelihood, whose natural parameters are `sites`: marginals at the
    training inputs and `alpha` = K^-1 (mean - m).
    """

    has_sites: ClassVar[bool] = True
    mean: Float[Array, "*S_and_R N"]
    variance: Float[Array, "*S_and_R N"]
    alpha: Float[Array, "*S RN"]
    sites: PseudoLikelihood

    def root(self, prior):
        K = covariance_of(prior)
        if isinstance(K, LowRank) and K.rest is None:
            return unknowns(K, prior.mean, self.sites)
        return prediction_root(K, self.sites)

    def process(self, prior, root=None):
        root = self.root(prior) if root is None else root
        kind = SoftmaxProcess if isinstance(root, SoftmaxRoot) else Posterior
        return kind(prior, self.alpha, root)  # pyright: ignore[reportArgumentType]

    def sample(self, prior, key, num):
        """Jointly: mean + L z, L L^T the covariance. O((R N)^3 + num (R N)^2) of R functions,
        O(num N U) of U unknowns, O(R N^3 + num R N^2) of a softmax.
        """
        root, unit = self.root(prior), default_jitter(prior.variance)
        if isinstance(root, Unknowns):
            w, F = self.unknowns(root, prior, key, num), loads_of(prior)
            centred = jax.vmap(lambda w: F @ w)(w)
        elif isinstance(root, SoftmaxRoot):
            K = covariance_of(prior).parts  # pyright: ignore[reportAttributeAccessIssue]
            centred = coloured(*root.left(K, K), unit, key, num)
        else:
            K = prior.covariance_matrix
            L, _ = robust_cholesky(K - root.quadratic(K), unit)
            centred = random.normal(key, (num, len(K)), self.mean.dtype) @ L.T
            centred += self.skew(centred, lambda bend: bend @ L @ L.T)
        return self.mean + jnp.reshape(centred, (num, *self.mean.shape))

    def unknowns(self, q: Unknowns, prior: GP, key, num: int) -> Float[Array, "num U"]:
        """Draws of the unknowns less their mean. O(num U^2), skewed O(num N U)."""
        w, F = q.gram.colour(random.normal(key, (num, q.mean.size), q.mean.dtype)), loads_of(prior)
        back = lambda bend: q.gram.solve(F.pull(bend))  # noqa: E731
        return w + self.skew(jax.vmap(lambda w: F @ w)(w), jax.vmap(back))

    def skew(self, f: Float[Array, "num N"], back: Callable) -> Any:
        """What is added to draws of a centred Gaussian, of which `f` is the predictor: Cov[., f] D
        (f^2 - Var f) / 6, with D = `sites.third`.

        It gives them the third cumulants sum_n D_n Cov[., f_n]^3 of the posterior, to first order
        in D, and leaves their means. `back`: D ... -> Cov[., f] D ....
        """
        third = self.sites.third
        return 0.0 if third is None else back(third * (f**2 - self.variance) / 6.0)


class FromPseudo(BehindSites):
    """One function: marginals and alpha (N,)."""


class FromFunctions(BehindSites):
    """R correlated functions for each datum: marginals (R, N), alpha (R N,), coupled sites."""

    @property
    def coupled(self):
        return self.mean.shape[-2]


class FromDraws(Kept):
    """Draws of f, several functions (*C, N) included."""

    is_draws: ClassVar[bool] = True
    mean: Float[Array, "*S_and_C N"]

    @property
    def variance(self):
        """None is left, once f is given."""
        return jnp.zeros_like(self.mean)

    def root(self, prior):
        """K^-1 = W^T W, of values without noise."""
        W = tril_inverse(prior.scale_tril)
        return Root(W, jnp.zeros(W.shape[-1], W.dtype), jnp.ones((), W.dtype))

    def process(self, prior, root=None):
        """Of one function; `at` takes several."""
        return _given_values(prior, self.mean, self.root(prior) if root is None else root)

    def at(self, prior, new, ask, root=None):
        """Several functions are each conditioned about their means; K is factored once."""
        if self.mean.ndim == 1:
            return ask(self.process(prior, root), new)
        root = self.root(prior) if root is None else root
        one = lambda f: ask(_given_values(_centred(prior), f, root), _centred(new))  # noqa: E731
        for _ in range(self.mean.ndim - 1):
            one = jax.vmap(one)
        mean, *rest = one(self.mean - prior.mean)
        return mean + new.mean, *rest

    def sample(self, prior, key, num):
        """The draw itself, `num` times."""
        return jnp.broadcast_to(self.mean, (num, *self.mean.shape))


class FromInducing(Kept):
    """q(v) = N(mean, I - reduction) of whitened inducing variables, (*F, M) and (*F, M, M), its
    diagonal (*F, M), or an `Arrow`; one for all functions of a predictor (`inducing.functions`).

    Draws of u: `mean` is the draw of v, `reduction` one.
    """

    inducing: InducingVariables
    mean: Float[Array, "*S_and_F M"]
    reduction: Any

    @property
    def coupled(self):
        R = self.inducing.functions
        return R if R > 1 else 0

    @property
    def values(self):
        return None

    def root(self, prior):
        return self.inducing.root(prior)

    def process(self, prior, root=None):
        root = self.root(prior) if root is None else root
        return SparseProcess(prior, self.inducing, root, self.mean, self.reduction)

    def moments(self, prior):
        """O(M^3 + N M^2)."""
        return self.process(prior).marginals(prior)

    def sample(self, prior, key, num):
        """Jointly up to `MAX_JOINT` rows, O(N^3 + num N^2); R N rows of R coupled functions.

        Above, u is drawn jointly and f given u row by row, whose covariance is the remainder k - Q
        alone: every marginal is exact, O(N M) a draw.
        """
        rows = max(1, self.coupled) * prior.X.shape[0]
        draw = draw_jointly if rows <= MAX_JOINT else draw_given_inducing
        return draw(self.process(prior), prior, key, num)


def from_sites(q: Marginals, sites: PseudoLikelihood) -> FromPseudo | FromFunctions:
    """What is kept of a Gaussian pseudo-likelihood with its marginals."""
    if (R := sites.functions) == 1:
        return FromPseudo(q.mean, q.variance, q.alpha, sites)
    mean, variance = (jnp.reshape(x, (R, -1)) for x in (q.mean, diagonal_of(q.variance)))
    return FromFunctions(mean, variance, q.alpha, sites)


MAX_JOINT = 2000  # rows up to which draws of f from inducing variables have their full covariance


def _given_values(prior: GP, f, root: Root) -> Posterior:
    """p(f(X*) | f(X) = f). O(N^2)."""
    return Posterior(prior, root.W.T @ (root.W @ (f - prior.mean)), root)


def _centred(gp: GP) -> GP:
    return GP(gp.kernel, gp.X, None, gp.jitter)
