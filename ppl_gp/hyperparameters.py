"""What happens to the hyperparameters: configuration only, shared by every method's `hyper=` argument."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppl_gp.errors import DataError


@dataclass(frozen=True)
class MAP:
    """Maximise log evidence + log declared priors in the declared coordinates, as NumPyro's AutoDelta (no Jacobian).

    Sites declared by `numpyro.param` have no prior. `restarts`: the first start is the prior's median, the others are
    prior draws, run in one compiled call a step; the best is kept. `tol`: on the largest gradient entry, nats.
    """

    restarts: int = 1
    max_steps: int = 200
    tol: float = 1e-4
    init: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self):
        if self.restarts < 1:
            raise DataError(f"MAP(restarts={self.restarts}): give at least 1.")


@dataclass(frozen=True)
class Fixed:
    """Hold the hyperparameters at these constrained values, one for each site; `{}` for a model without any."""

    values: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Sample:
    """NUTS over the hyperparameters of the model with f integrated out by the method (`pg.marginal`)."""

    num_warmup: int = 300
    num_samples: int = 500
    num_chains: int = 1
    target_accept_prob: float = 0.8

    def __post_init__(self):
        if min(self.num_warmup, self.num_samples, self.num_chains) < 1:
            raise DataError(f"{self}: num_warmup, num_samples and num_chains must be at least 1.")
