"""The posterior processes of the GPs behind an integrated predictor."""

from typing import Any

import jax.numpy as jnp

from ppl_gp.gp import GP
from ppl_gp.local.factor import Root
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.predictor_prior import Columns, Loadings, Weighted
from ppl_gp.posterior import OfUnknowns, Posterior, Unknowns
from ppl_gp.sparse.inducing import Points
from ppl_gp.sparse.process import SparseProcess


def part_processes(model: Collapsed, process: Posterior | OfUnknowns) -> dict[str, Any]:
    """{GP site: its posterior process}, of those that are one function."""
    prior: Any = process.prior
    train: Loadings = prior.kernel.at(prior.X)
    priors = model.priors(prior.kernel, prior.X)
    found, start = {}, 0
    for k in sorted(train.parts):
        part = train.parts[k]
        width = part.columns.shape[1] if isinstance(part, Columns) else 0
        if k in priors and isinstance(part, Weighted) and len(part.weights) == 1:
            found[k] = _of_weighted(part.weights[0], priors[k], process)
        elif k in priors and isinstance(part, Columns) and priors[k].event_shape == (width,):
            found[k] = (
                _of_unknowns(process.root.part(start, width), priors[k])
                if isinstance(process.root, Unknowns)
                else _of_columns(part.columns, priors[k], process)
            )
        start += width
    return found


def _of_weighted(a, prior: GP, process: Posterior) -> Posterior:
    """Of f in eta = a f + ...: Cov[eta, f*] = a k."""
    root = process.root
    return Posterior(prior, a * process.alpha, Root(root.W * a, root.diagonal * a**2, root.sign))


def _of_columns(F, prior: GP, process: Posterior) -> SparseProcess:
    """Of f at a table of places, f = L w, Cov[eta, w] = F: q(w) = N(F^T alpha, I - F^T R F)."""
    points = Points(prior.X)
    reduction = process.root.quadratic(F)
    return SparseProcess(prior, points, points.root(prior), F.T @ process.alpha, reduction)


def _of_unknowns(q: Unknowns, prior: GP) -> SparseProcess:
    """Of f = L w at a table of places, from q(w)."""
    points, covariance = Points(prior.X), q.half.T @ q.half
    reduction = jnp.eye(len(q.mean)) - covariance
    return SparseProcess(prior, points, points.root(prior), q.mean, reduction)
