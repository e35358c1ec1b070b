"""The `Fit` behind draws by MCMC."""

from collections.abc import Mapping

from ppl_gp.draws import Draws
from ppl_gp.errors import Result
from ppl_gp.kept import Kept
from ppl_gp.results.fit import Fit


def sampled_fit(
    method, model, args, kwargs, hyper: dict, kept: Mapping[str, Kept], result: Result, stats: dict
) -> Fit:
    """A fit of S draws of equal weight: `hyper` {site: (S, ...)}, `kept` {GP site: S entries}."""
    return Fit(
        model=model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal(hyper, kept),
        log_evidence=None,
        result=result,
        stats=stats,
        num_chains=method.num_chains,
        sampled=True,
    )
