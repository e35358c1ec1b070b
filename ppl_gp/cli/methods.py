"""Method names on the command line to configured methods."""

from typing import NamedTuple

from ppl_gp.errors import DataError
from ppl_gp.hyperparameters import MAP, Sample
from ppl_gp.infer.mcmc.elliptical import EllipticalSlice
from ppl_gp.infer.mcmc.nuts import NUTS
from ppl_gp.infer.mcmc.sparse_nuts import SparseNUTS
from ppl_gp.local.bound import LocalBound
from ppl_gp.local.ep import EP
from ppl_gp.local.laplace import Laplace
from ppl_gp.local.vi import VI
from ppl_gp.sparse.svgp import SVGP

LOCAL = {"laplace": Laplace, "ep": EP, "vi": VI, "bound": LocalBound}
DRAWS = {"nuts": NUTS, "slice": EllipticalSlice, "sparse-nuts": SparseNUTS}
NAMES = (*LOCAL, "svgp", *DRAWS)


class Effort(NamedTuple):
    """How hard to try: restarts of the maximiser, or lengths of the chains."""

    restarts: int = 1
    num_warmup: int = 500
    num_samples: int = 500
    num_chains: int = 2
    # local methods: NUTS over the hyperparameters instead of their maximum
    sample_hyper: bool = False
    max_tree_depth: int = 10  # of nuts and sparse-nuts: at most 2^depth - 1 leapfrog steps a draw
    target_accept_prob: float = 0.8


def configured(name: str, effort: Effort):
    """The method of this name."""
    chains = {k: getattr(effort, k) for k in ("num_warmup", "num_samples", "num_chains")}
    if name in DRAWS:
        chains["target_accept_prob"] = effort.target_accept_prob
        return DRAWS[name](
            **chains, **({} if name == "slice" else {"max_tree_depth": effort.max_tree_depth})
        )
    if name == "svgp":
        if effort.sample_hyper:
            raise DataError("svgp does not sample hyperparameters; the method sparse-nuts does.")
        return SVGP()
    return LOCAL[name](
        hyper=Sample(**chains) if effort.sample_hyper else MAP(restarts=effort.restarts)
    )


def parse(names: str) -> list[str]:
    """The names in a comma-separated list, in its order; `DataError` for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in NAMES]:
        raise DataError(f"--methods {','.join(unknown)}: give some of {','.join(NAMES)}.")
    if not wanted:
        raise DataError(f"--methods is empty; give some of {','.join(NAMES)}.")
    return list(dict.fromkeys(wanted))
