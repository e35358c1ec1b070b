"""Factor analysis: a few continuous latents a row (Bishop 2006, section 12.2.4).

    tau_d       ~ Gamma(1, 1)                       precision of column d
    loadings_d  ~ N(0, I_K)                         of column d
    h_n         ~ N(0, I_K)
    x_nd        ~ N(loadings_d . h_n, tau_d^-1)

For centred columns. Loadings and latents may be rotated together: q holds one rotation.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def factor_analysis(X, num_factors=2):
    """X (N, D), observed."""
    N, D = X.shape
    with numpyro.plate("columns", D):
        tau = numpyro.sample("tau", dist.Gamma(1.0, 1.0))
        loadings = numpyro.sample(
            "loadings", dist.Normal(0.0, 1.0).expand([num_factors]).to_event(1)
        )
    with numpyro.plate("data", N):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([num_factors]).to_event(1))
        noise = 1.0 / jnp.sqrt(tau)
        numpyro.sample("x", dist.Normal(h @ loadings.T, noise).to_event(1), obs=X)
