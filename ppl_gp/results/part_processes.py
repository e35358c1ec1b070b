"""The posterior processes of the GPs behind an integrated predictor."""

from typing import Any

import jax.numpy as jnp

from ppl_gp.errors import ModelError
from ppl_gp.gp import GP
from ppl_gp.local.factor import Root
from ppl_gp.posterior import Posterior, SoftmaxProcess, Unknowns
from ppl_gp.reading.predictor.parts import Loadings, Table, Weighted
from ppl_gp.sparse.inducing import Points
from ppl_gp.sparse.process import SparseProcess, reduction_of_some


def part_processes(
    process: Posterior | SoftmaxProcess | SparseProcess,
) -> dict[str, Any]:
    """{GP site: its posterior process}; of a site of several functions one each, `site[0]`, ...

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
    for k in sorted(train.parts):
        part = train.parts[k]
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
        return _given(Points(prior.X), prior, mean, reduction)
    F = part.flat[:, first : first + num]
    return _given(Points(prior.X), prior, F.T @ process.alpha, root.quadratic(F))


def _of_inducing(site: str, prior: GP, process: SparseProcess) -> list[SparseProcess]:
    """Of a GP's units from its own inducing variables; of one at a table of places, f = L w, w are
    those.
    """
    variables: Any = process.inducing
    own = Points(prior.X) if site in variables.tables else variables.gps[site]
    start, num = variables.start(site), own.num
    return [
        _given(own, prior, process.mean[u : u + num], reduction_of_some(process.reduction, u, num))
        for u in range(start, start + variables.size(site), num)
    ]


def _given(variables, prior: GP, mean, reduction) -> SparseProcess:
    return SparseProcess(prior, variables, variables.root(prior), mean, reduction)
