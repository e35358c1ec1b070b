"""One small classification problem, fitted by every kind of method, for the tests of what is done
with a fit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg
from ppl_gp.draws import Draws
from ppl_gp.errors import Result
from ppl_gp.gp import unwrap
from ppl_gp.kept import FromDraws, FromPseudo
from ppl_gp.local.natural import PseudoLikelihood, condition
from ppl_gp.reading.arguments import as_arrays
from ppl_gp.reading.roles import is_gp
from ppl_gp.reading.tracing import run
from ppl_gp.results.fit import Fit

OK = Result.converged
HYPER = {"lengthscale": 1.2, "variance": 2.0}
NUM, NUM_NEW = 25, 7


def classifier(X, y=None, link="logit"):
    """A GP classifier with two hyperparameters."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample(
            "y",
            dist.Bernoulli(logits=f) if link == "logit" else pg.observations.BernoulliProbit(f),
            obs=y,
        )


def classification():
    """X (25, 2), y in {0, 1} and X_new (7, 2)."""
    rng = np.random.default_rng(3)
    X, X_new = rng.normal(size=(NUM, 2)), rng.normal(size=(NUM_NEW, 2))
    return X, (np.sin(2 * X[:, 0]) + X[:, 1] + 0.5 * rng.normal(size=NUM) > 0).astype(int), X_new


def methods():
    """Every kind of method on the classifier, by name; the sampled ones with few draws, so pass
    throw=False.
    """
    fixed = pg.Fixed(HYPER)
    return {
        "laplace": pg.Laplace(hyper=fixed),
        "ep": pg.EP(hyper=fixed),
        "vi": pg.VI(hyper=fixed),
        "bound": pg.LocalBound(hyper=fixed),
        "laplace_sample": pg.Laplace(hyper=pg.Sample(num_warmup=50, num_samples=25, num_chains=2)),
        "nuts": pg.NUTS(num_warmup=100, num_samples=25, num_chains=2),
    }


def made_fit(model, hyper, X, *, num_draws=None, seed=0, sites=None, **kwargs):
    """A `Fit` made by hand, without inference: what is done with a fit does not depend on how it
    came about.

    `num_draws=None`: one setting of the hyperparameters and a pseudo-likelihood, `sites` = (nat1,
    nat2) or random ones. Otherwise draws of f and of the hyperparameters, around `hyper`, for every
    GP site.
    """
    args, kwargs = as_arrays((X,), kwargs)
    hyper = {k: jnp.asarray(v, float) for k, v in hyper.items()}
    rng = np.random.default_rng(seed)
    trace = run(model, args, kwargs, hyper)
    gps = [k for k, site in trace.items() if is_gp(site)]
    if num_draws is None:
        (name,) = gps
        shape = trace[name]["fn"].shape()
        sites = sites or (
            jnp.asarray(rng.normal(size=shape)),
            jnp.asarray(rng.uniform(0.2, 2.0, size=shape)),
        )
        latent = {name: latent_of(unwrap(trace[name]["fn"]), PseudoLikelihood(*sites))}
        return Fit(
            model=model,
            method=pg.EP(),
            args=args,
            kwargs=kwargs,
            draws=Draws.one(hyper, latent),
            log_evidence=0.0,
            result=OK,
            stats={},
        )
    spread = {
        k: v * np.exp(0.1 * rng.normal(size=(num_draws, *np.shape(v)))) for k, v in hyper.items()
    }
    draws = {k: jnp.asarray(rng.normal(size=(num_draws, *trace[k]["fn"].shape()))) for k in gps}
    latent = {k: FromDraws(f) for k, f in draws.items()}
    hyper = {k: jnp.asarray(v) for k, v in spread.items()}
    return Fit(
        model=model,
        method=pg.NUTS(),
        args=args,
        kwargs=kwargs,
        draws=Draws.equal(hyper, latent),
        log_evidence=None,
        result=OK,
        stats={},
        sampled=True,
    )


def latent_of(prior, sites):
    """q(f) behind a pseudo-likelihood, with a leading axis of one draw."""
    q = jax.jit(condition)(prior.covariance_matrix, prior.mean, sites)
    return jax.tree.map(lambda x: x[None], FromPseudo(q.mean, q.variance, q.alpha, sites))
