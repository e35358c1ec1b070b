"""The posterior processes of the GPs behind an integrated predictor."""

from typing import Any

import jax.numpy as jnp

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP
from ppl_gp.local.factor import Root
from ppl_gp.posterior import Posterior, SoftmaxProcess, Unknowns
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.parts import Loadings, Table, Weighted
from ppl_gp.sparse.inducing import Points
from ppl_gp.sparse.process import SparseProcess
from ppl_gp.sparse.projection import reduction_of_some


def part_processes(
    model: Collapsed,
    process: Posterior | SoftmaxProcess | SparseProcess,
) -> dict[str, Any]:
    """{GP site: its posterior process}; of a site of several functions one each, `site[0]`, ...

    Raises `ModelError` for a GP whose prior mean is computed from other integrated sites, where
    these reach the data in other ways too, or f has inducing variables or a table of places.
    """
    prior: Any = process.prior
    _require_own_means(model, process)
    if isinstance(process, SparseProcess):
        return _of_inducing(model.priors(prior.kernel, prior.X), process)
    train: Loadings = prior.kernel.at(prior.X)
    priors = model.priors(prior.kernel, prior.X)
    found, start = {}, 0
    for k in sorted(train.parts):
        part = train.parts[k]
        width = part.num_unknowns if isinstance(part, Table) else 0
        if k in priors and isinstance(part, Weighted):
            found |= _units(k, part, priors[k], process)
        elif k in priors and isinstance(part, Table):
            found |= _of_table(k, part, start, priors[k], process)
        start += width
    return found


def _require_own_means(model: Collapsed, process: Any) -> None:
    """A GP whose mean takes part of other integrated sites is a process where these reach the data
    through it alone, and where it is not told by inducing variables.
    """
    prior = process.prior
    behind = model.mean_sites(prior.kernel, prior.X)
    direct = model.seen_directly(prior.kernel, prior.X)
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


def _named(site: str, units: list) -> dict[str, Any]:
    """One process, or one a unit of the site's plate."""
    return {site if len(units) == 1 else f"{site}[{p}]": x for p, x in enumerate(units)}


def _units(site: str, part: Weighted, prior: GP, process) -> dict[str, Posterior]:
    weights = part.weights
    of = lambda p: _of_weighted(weights[:, p], prior, process)  # noqa: E731
    return _named(site, [of(p) for p in range(weights.shape[1])])


def _of_table(site: str, part: Table, start: int, prior: GP, process) -> dict[str, SparseProcess]:
    """Of a GP at a table of places, or of each unit of one; its unknowns begin at `start`, units
    outermost.
    """

    def of(first: int) -> SparseProcess:
        if isinstance(process.root, Unknowns):
            return _of_unknowns(process.root, start + first, prior)
        return _of_columns(part.flat[:, first : first + num], prior, process)

    (num,) = prior.event_shape
    return _named(site, [of(first) for first in range(0, part.num_unknowns, num)])


def _of_inducing(priors: dict[str, GP], process: SparseProcess) -> dict[str, SparseProcess]:
    """Of each GP from its own inducing variables; of one at a table of places, f = L w, w are
    those.
    """
    variables: Any = process.inducing
    found = {}
    for k, prior in priors.items():
        own = Points(prior.X) if k in variables.tables else variables.gps[k]
        start = variables.start(k)

        def of(first: int, prior=prior, own=own) -> SparseProcess:
            mean = process.mean[first : first + own.num]
            reduction = reduction_of_some(process.reduction, first, own.num)
            return SparseProcess(prior, own, own.root(prior), mean, reduction)

        units = range(start, start + variables.size(k), own.num)
        found |= _named(k, [of(first) for first in units])
    return found


def _of_weighted(a, prior: GP, process) -> Posterior:
    """Of f in eta_r = a_r f + ..., a (R, N): Cov[eta_r, f*] = a_r k."""
    alpha = jnp.sum(a * jnp.reshape(process.alpha, a.shape), 0)
    return Posterior(prior, alpha, process.root.of_sum(a))


def _of_columns(F, prior: GP, process: Any) -> SparseProcess:
    """Of f at a table of places, f = L w, Cov[eta, w] = F: q(w) = N(F^T alpha, I - F^T R F)."""
    points = Points(prior.X)
    reduction = process.root.quadratic(F)
    return SparseProcess(prior, points, points.root(prior), F.T @ process.alpha, reduction)


def _of_unknowns(q: Unknowns, start: int, prior: GP) -> SparseProcess:
    """Of f = L w at a table of places, from q(w); its unknowns begin at `start`."""
    points, (num,) = Points(prior.X), prior.event_shape
    half = q.gram.half_of(start, num)
    reduction, mean = jnp.eye(num) - half.T @ half, q.mean[start : start + num]
    return SparseProcess(prior, points, points.root(prior), mean, reduction)
