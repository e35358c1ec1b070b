"""q(u) at a GP site of a NumPyro model: what replaces the prior there, and its KL rule."""

from typing import Any, cast

import equinox as eqx
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP
from ppl_gp.reading.refusals import require_pairs, unpaired
from ppl_gp.sparse.families import DiagonalGaussian, Family, FullGaussian
from ppl_gp.sparse.inducing import InducingVariables, Points, as_floats
from ppl_gp.sparse.process import SparseProcess, sparse_process
from ppl_gp.sparse.svgp import COVARIANCES


class SparseMarginals(dist.Distribution):
    """q(f) at the rows of X, batch_shape F, event_shape (N,). `sample` draws each f_n from its
    marginal.

    That is what a bound with a pointwise likelihood needs: its rows need not be drawn together.
    `kl` is KL[q(u) || p(u)], and NumPyro's `kl_divergence(SparseMarginals, GP)` returns it. There
    is no joint density of marginals: `log_prob` raises.
    """

    support = constraints.real_vector
    reparametrized_params = ["loc", "variance_n"]
    pytree_data_fields = ("process", "prior", "loc", "variance_n", "kl")
    has_rsample = True

    def __init__(
        self, process: SparseProcess, prior: GP, kl: Float[Array, "*F"], *, validate_args=None
    ):
        self.process, self.prior, self.kl = process, prior, kl
        self.loc, self.variance_n = process.marginals(prior)
        shape = jnp.shape(self.loc)
        super().__init__(shape[:-1], shape[-1:], validate_args=validate_args)

    @property
    def mean(self):
        """(*F, N)."""
        return self.loc

    @property
    def variance(self):
        """(*F, N)."""
        return self.variance_n

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """m_n + sqrt(v_n) z_n with independent z."""
        white = random.normal(key, sample_shape + jnp.shape(self.loc), self.loc.dtype)
        return self.loc + jnp.sqrt(self.variance_n) * white

    def log_prob(self, value):
        raise ModelError(
            "a sparse q(f) is drawn row by row and has no joint density: use "
            "numpyro.infer.TraceMeanField_ELBO, whose KL term is KL[q(u) || p(u)] in closed form."
        )


@kl_divergence.register(SparseMarginals, GP)
def _kl_sparse(q: SparseMarginals, p: GP):
    return q.kl


def _param(name: str, init) -> Array:
    # declared as any array-like or None: of an array, or a function of one, it gives an array
    return cast(Array, numpyro.param(name, init))


class SparsePosterior(eqx.Module):
    """A trainable q(u) of a GP site, for `guide` and `approximate`.

    Its parameters are `numpyro.param`s, so NumPyro's `SVI` trains them.

    Parameters
    ----------
    inducing : array or InducingVariables
        Points Z (M, D) or (M,), or inducing variables.
    covariance : "full" or "diagonal", default "full"
        Covariance of the whitened q(v).
    train_inducing : bool, default True
        Whether points are parameters too.

    Raises
    ------
    DataError
        For another `covariance`.

    Notes
    -----
    The parameters of a site f are `f_loc`, `f_scale_tril` or `f_log_scale`, and `f_Z` if points are
    trained.

    Examples
    --------
    >>> q = pg.SparsePosterior(jnp.linspace(0.0, 6.0, 12), covariance="diagonal")
    >>> q.train_inducing
    True
    """

    inducing: Any
    covariance: str = eqx.field(default="full", static=True)
    train_inducing: bool = eqx.field(default=True, static=True)

    def __check_init__(self):
        if self.covariance not in COVARIANCES:
            raise DataError(
                f"SparsePosterior(covariance={self.covariance!r}): give one of {COVARIANCES}."
            )

    def at_site(self, name: str, fn, prior: GP) -> SparseMarginals:
        """The distribution at a GP site, with its parameters registered under the site's name."""
        require_pairs(unpaired({name: prior}))
        variables = self._variables(name)
        q = self._family(name, fn.shape()[:-1], variables).whitened()
        return SparseMarginals(sparse_process(prior, variables, q), prior, q.kl)

    def _variables(self, name) -> InducingVariables:
        given = self.inducing
        if isinstance(given, InducingVariables) and not isinstance(given, Points):
            return given
        Z = given.Z if isinstance(given, Points) else as_floats(jnp.asarray(given))
        return Points(_param(f"{name}_Z", Z) if self.train_inducing else Z)

    def _family(self, name, batch, variables) -> Family:
        zeros = jnp.zeros((*batch, variables.num))
        loc = _param(f"{name}_loc", zeros)
        if self.covariance == "diagonal":
            return DiagonalGaussian(loc, _param(f"{name}_log_scale", zeros))
        eye = jnp.broadcast_to(jnp.eye(variables.num), (*zeros.shape, variables.num))
        return FullGaussian(loc, _param(f"{name}_scale_tril", eye))
