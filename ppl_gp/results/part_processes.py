"""The posterior processes of the GPs behind an integrated predictor."""

from typing import Any

from ppl_gp.gp import GP
from ppl_gp.local.factor import Root
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.predictor_prior import Columns, Loadings, Weighted
from ppl_gp.posterior import Posterior
from ppl_gp.sparse.inducing import Points
from ppl_gp.sparse.process import SparseProcess


def part_processes(model: Collapsed, process: Posterior) -> dict[str, Any]:
    """{GP site: its posterior process}, of those that are one function."""
    prior: Any = process.prior
    train: Loadings = prior.kernel.at(prior.X)
    priors = model.priors(prior.kernel, prior.X)
    found = {}
    for k, part in train.parts.items():
        if k not in priors:
            continue
        if isinstance(part, Weighted) and len(part.weights) == 1:
            found[k] = _of_weighted(part.weights[0], priors[k], process)
        elif isinstance(part, Columns) and priors[k].event_shape == (part.columns.shape[1],):
            found[k] = _of_columns(part.columns, priors[k], process)
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
