"""The Gaussian-process latent-variable model: high-dimensional data as functions of a few hidden
coordinates.

    lengthscale_q ~ LogNormal(0, 1)                a latent dimension; a long one switches it off
    variance      ~ LogNormal(0, 1)
    noise_scale   ~ LogNormal(-1, 1)
    h_n           ~ N(0, I)                        (Q,)
    f_d           ~ GP(0, RBF) on h                d = 1 ... D
    y_nd          ~ N(f_d(h_n), noise_scale^2)

(Lawrence 2005; Titsias & Lawrence 2010; with a linear kernel it is probabilistic principal
component analysis.) For columns of y that are standardised.
"""

import numpyro
import numpyro.distributions as dist

import ppl_gp as pg


def gplvm(X, y=None, latent_dim=2, num_outputs=None, kernel=pg.kernels.RBF):
    """y (N, D). X holds one entry per datum, an index say: only its length is used.

    `num_outputs`: D, needed where y is drawn or predicted. `kernel`: a function of (variance,
    lengthscale).
    """
    D = y.shape[-1] if num_outputs is None else num_outputs
    data = numpyro.plate("data", X.shape[0], dim=-1)
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(0.0, 1.0).expand([latent_dim]).to_event(1)
    )
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise_scale = numpyro.sample("noise_scale", dist.LogNormal(-1.0, 1.0))
    with data:
        h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([latent_dim]).to_event(1))
    with numpyro.plate("outputs", D):
        f = numpyro.sample("f", pg.GP(kernel(variance, lengthscale), h))
    with data:
        numpyro.sample("y", dist.Normal(f.T, noise_scale).to_event(1), obs=y)
