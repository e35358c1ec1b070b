"""What was inferred: the record that every verb takes, and the posterior process behind it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import equinox as eqx
import jax
import numpy as np

from ppl_gp.companions import mixing_sites
from ppl_gp.declared import Declared, declare, require_unchanged
from ppl_gp.deep.latents import LatentGuide
from ppl_gp.deep.structure import feeds
from ppl_gp.errors import ModelError, Result
from ppl_gp.gp import GP, unwrap
from ppl_gp.local.pseudo import Root
from ppl_gp.posterior import Latent, Mixture, Posterior, Process, process
from ppl_gp.sparse.process import SparseLatent, SparseProcess
from ppl_gp.sparse.root import Root as SparseRoot
from ppl_gp.threads import one_at_a_time
from ppl_gp.tracing import run


@dataclasses.dataclass(repr=False, kw_only=True)
class Record:
    """What was inferred: fields only, and what follows from them at once. Every method fills the same fields.

    - `log_evidence`: log q(y) or bound at `hyper`, nats; `None` where hyperparameters are sampled.
    - `hyper`: {site: value}, with a leading axis of S draws where sampled (`num_chains` chains one after another).
    - `latent`: {GP site: q(f) at the training inputs (`Latent`)}, leading axis S (1 where not sampled).
    - `local`: {latent site that stands one a datum: its q(h)}, where a method has one (draws of NUTS are in `hyper`).
    - `result`: how it ended (`Result`); `stats`: steps, residual, seconds, jitter ...
    """

    model: Any  # a Declared; a plain function is declared at construction
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
        unseen = tuple(
            k for k, _ in declared.reading.axes if k not in known
        )  # without observations, what is left is observed
        self.model = Declared(declared.function, declared.reading.observing(unseen))

    def __repr__(self) -> str:
        """What was fitted by what and how it ended, without arrays."""
        evidence = "" if self.log_evidence is None else f", log_evidence={self.log_evidence:.4f}"
        hyper = ", ".join(_told(k, v) for k, v in self.hyper.items())
        name = getattr(self.model, "__qualname__", repr(self.model))
        return f"{type(self).__name__}({name} by {self.method!r}: {self.result}{evidence}; {hyper or 'no hyperparameters'})"

    @functools.cached_property
    @one_at_a_time
    def posterior(self) -> Process | dict[str, Process]:
        """The posterior process, `fit.posterior(X_new)` at the GP site's own inputs; {site: process} for several sites.

        Factored once, at the first use: O(N^3).
        """
        require_unchanged(self.model)
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


def _told(name: str, value) -> str:
    if not hasattr(value, "shape") or np.shape(value):
        return f"{name} {np.shape(value)}" if hasattr(value, "shape") else name
    return f"{name}={float(value):.4g}"


def prior_at(model, site: str, hyper: dict, args: tuple, kwargs: dict) -> GP:
    """The GP prior that the model declares at `args`, hyperparameters given. O(N)."""
    return unwrap(run(model, args, kwargs, hyper)[site]["fn"])


def training_prior(record: Record, site: str, hyper: dict) -> GP:
    """The GP prior at the training inputs."""
    return prior_at(record.model, site, hyper, record.args, record.kwargs)


@eqx.filter_jit
def _root(model, site, hyper, args, kwargs, latent) -> Root | SparseRoot:
    return process(prior_at(model, site, hyper, args, kwargs), latent).root


def posterior_of(record: Record):
    """`Posterior` where the hyperparameters are one value, else `Mixture` over the draws; {site: ...} for several.

    Raises `ModelError` for draws of GPs that feed each other, whose inputs are then random; with inducing variables each layer is a
    process at its own inputs.
    """
    if len(record.latent) > 1 and values_at_training_inputs(record) and feeds_another(record):
        raise ModelError(
            f"a GP of this model is fed by another (GP sites {list(record.latent)}), so it is no process of given inputs; "
            "fit.predict and fit.sample draw through both."
        )
    processes = {site: _one(record, site, latent) for site, latent in record.latent.items()}
    return next(iter(processes.values())) if len(processes) == 1 else processes


def feeds_another(record: Record) -> bool:
    """Whether a GP of the model stands at inputs that another GP gives."""
    hyper = jax.tree.map(lambda x: x[0], record.hyper) if record.sampled else record.hyper
    known = {**hyper, **values_at_training_inputs(record)}
    gps, trace = tuple(record.latent), run(record.model, record.args, record.kwargs, known)
    return any(
        feeds(g, gps, trace, lambda v: run(record.model, record.args, record.kwargs, {**known, **v})) for g in gps
    )


def values_at_training_inputs(record: Record) -> dict:
    """{GP site: a value of f there}, for running the model on its training arguments; sites without one are left out."""
    return {k: v.at_training_inputs for k, v in record.latent.items() if v.at_training_inputs is not None}


def _one(record, site, latent) -> Process:
    if record.sampled:
        return Mixture(lambda hyper: training_prior(record, site, hyper), record.hyper, latent)
    entry = latent.draw(0)
    root = _root(record.model, site, record.hyper, record.args, record.kwargs, entry)
    # The prior is made outside the compiled function: a mean or kernel may close over the hyperparameters.
    prior = training_prior(record, site, record.hyper)
    if isinstance(entry, SparseLatent):
        return SparseProcess(prior, entry.inducing, cast(SparseRoot, root), entry.mean, entry.reduction, entry.basis)
    return Posterior(prior, entry.alpha, root)  # pyright: ignore[reportArgumentType]
