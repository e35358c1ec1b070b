"""A mixture of Gaussians with unknown weights, means and precisions (Bishop 2006, section 10.2).

    weights          ~ Dirichlet(concentration, ..., concentration)
    precision_k      ~ Wishart(D, I)                    D degrees of freedom, rate matrix I
    mean_k           ~ N(0, precision_k^-1)
    z_n              ~ Categorical(weights)
    x_n | z_n = k    ~ N(mean_k, precision_k^-1)

For columns of mean zero and standard deviation about one. A small `concentration` empties the
components that the data do not need.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def mixture(X, num_components=6, concentration=1e-3):
    """X (N, D), observed."""
    N, D = X.shape
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(num_components, concentration)))
    with numpyro.plate("components", num_components):
        precision = numpyro.sample("precision", dist.Wishart(D, rate_matrix=jnp.eye(D)))
        mean = numpyro.sample(
            "mean", dist.MultivariateNormal(jnp.zeros(D), precision_matrix=precision)
        )
    with numpyro.plate("data", N):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("x", dist.MultivariateNormal(mean[z], precision_matrix=precision[z]), obs=X)
