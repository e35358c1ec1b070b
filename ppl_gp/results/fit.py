"""`Fit`: what every method returns, and the one way to use it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ppl_gp.companions import mixing_sites
from ppl_gp.declared import Declared, declare, require_unchanged
from ppl_gp.deep.latents import LatentGuide
from ppl_gp.errors import ModelError, Result
from ppl_gp.posterior import Latent, Process
from ppl_gp.results.infer_latents import infer_latents
from ppl_gp.results.inference_data import to_datatree
from ppl_gp.results.loo import loo
from ppl_gp.results.predict import log_density, predict, sample
from ppl_gp.results.processes import posterior_of, values_at_training_inputs
from ppl_gp.results.store import save
from ppl_gp.sparse.process import SparseLatent
from ppl_gp.threads import one_at_a_time


def _verb(function):
    """A question to a fit: by one thread at a time, and of the model that was fitted."""

    @functools.wraps(function)
    def ask(self, *args, **kwargs):
        require_unchanged(self.model)
        return function(self, *args, **kwargs)

    return one_at_a_time(ask)


@dataclasses.dataclass(repr=False)
class Fit:
    """A fitted model. Made by `fit`; every method fills the same fields.

    - `log_evidence`: log q(y) or bound at `hyper`, nats; `None` where hyperparameters are sampled.
    - `hyper`: {site: value}, with a leading axis of S draws where sampled (`num_chains` chains one after another).
    - `latent`: {GP site: q(f) at the training inputs (`Latent`)}, leading axis S (1 where not sampled).
    - `local`: {latent site that stands one a datum: its q(h)}, where a method has one (draws of NUTS are in `hyper`).
    - `result`: how it ended (`Result`); `stats`: steps, residual, seconds, jitter ...
    """

    model: Callable
    method: Any
    args: tuple
    kwargs: dict
    hyper: dict
    latent: Mapping[str, Latent | SparseLatent]
    log_evidence: float | None
    result: Result
    stats: dict
    num_chains: int = 1
    sampled: bool = False
    local: dict[str, LatentGuide] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.model, Declared):
            return
        declared = declare(self.model, self.args, self.kwargs)
        known = {*self.hyper, *self.latent, *self.local}
        unseen = tuple(k for k, _ in declared.reading.axes if k not in known)  # without observations, what is left is observed
        self.model = Declared(declared.function, declared.reading.observing(unseen))

    def __repr__(self) -> str:
        """What was fitted by what and how it ended, without arrays."""
        evidence = "" if self.log_evidence is None else f", log_evidence={self.log_evidence:.4f}"
        hyper = ", ".join(f"{k} {np.shape(v)}" if np.ndim(v) else f"{k}={float(v):.4g}" for k, v in self.hyper.items())
        name = getattr(self.model, "__qualname__", repr(self.model))
        return f"Fit({name} by {self.method!r}: {self.result}{evidence}; {hyper or 'no hyperparameters'})"

    @functools.cached_property
    @_verb
    def posterior(self) -> Process | dict[str, Process]:
        """The posterior process, `fit.posterior(X_new)` at the GP site's own inputs; {site: process} for several sites.

        Factored once, at the first use: O(N^3).
        """
        return posterior_of(self)

    @functools.cached_property
    def mixing(self) -> list[str]:
        """Sites whose row n sees other rows' arguments, so that no row has a prediction of its own (see `companions.mixing_sites`)."""
        hyper = jax.tree.map(lambda x: x[0], self.hyper) if self.sampled else self.hyper
        return mixing_sites(self.model, self.args, self.kwargs, hyper, values_at_training_inputs(self))

    @property
    def inducing(self):
        """The inducing variables of a sparse fit, {site: ...} for several GP sites; to be given as `inducing=` again."""
        found = {k: v.draw(0).inducing for k, v in self.latent.items() if isinstance(v, SparseLatent)}
        if not found:
            raise ModelError(f"{type(self.method).__name__} has no inducing variables; SVGP() and SparseNUTS() do.")
        return next(iter(found.values())) if len(found) == 1 else found

    @_verb
    def predict(self, X_new, *args, **kwargs):
        """Predictions at new inputs, as `ppl_gp.results.predict.predict`."""
        return predict(self, X_new, *args, **kwargs)

    @_verb
    def log_density(self, X_new, y_new, *args, **kwargs):
        """log p(y*_n | x*_n, data), (N_new,), nats, as `ppl_gp.results.predict.log_density`."""
        return log_density(self, X_new, y_new, *args, **kwargs)

    @_verb
    def sample(self, rng_key, X_new, num_samples: int, *args, **kwargs):
        """Joint draws of f and y at new inputs, as `ppl_gp.results.predict.sample`."""
        return sample(self, rng_key, X_new, num_samples, *args, **kwargs)

    @_verb
    def infer_latents(self, rng_key, X_new, y_new, *args, **kwargs):
        """Draws of the latents of new data given their y, as `ppl_gp.results.infer_latents.infer_latents`."""
        return infer_latents(self, rng_key, X_new, y_new, *args, **kwargs)

    @_verb
    def loo(self):
        """Leave-one-out ELPD as ArviZ's `ELPDData`, as `ppl_gp.results.loo.loo`."""
        return loo(self)

    @_verb
    def to_datatree(self, **kwargs):
        """ArviZ's DataTree, as `ppl_gp.results.inference_data.to_datatree`."""
        return to_datatree(self, **kwargs)

    @_verb
    def save(self, path):
        """Write what prediction needs to one file, as `ppl_gp.results.store.save`."""
        return save(self, path)
