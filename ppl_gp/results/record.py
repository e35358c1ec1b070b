"""What was inferred: the record that every verb takes, and the posterior process behind it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ppl_gp.deep.latents import LatentGuide
from ppl_gp.deep.structure import feeds
from ppl_gp.draws import Draws, Mixture
from ppl_gp.errors import ONE_TERM, DataError, ModelError, Result, warn
from ppl_gp.frames.names import Names
from ppl_gp.gp import GP, unwrap
from ppl_gp.kept import FromInducing, Kept
from ppl_gp.kept import Process as OneProcess
from ppl_gp.mean_field.family import Family
from ppl_gp.posterior import part_processes
from ppl_gp.quick import kept_values, quick_jit
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.reading import Declared, declare, require_unchanged
from ppl_gp.reading.refusals import require_none_tied, require_pairs, unpaired
from ppl_gp.reading.tracing import run, run_at_once
from ppl_gp.runtime import one_at_a_time
from ppl_gp.sparse.parts import PartsVariables

Process = OneProcess | Mixture


@dataclasses.dataclass(repr=False, kw_only=True)
class Record:
    """The fields that every method fills, and what follows from them. `Fit` adds the methods.

    Attributes
    ----------
    draws : Draws
        S weighted draws of hyperparameters, latents and q(f).
    log_evidence : float or None
        Log evidence or a lower bound at `hyper`, in nats. None if the hyperparameters were sampled.
    local : dict
        {latent site with one entry per datum: its q(h)}. Its draws are in `draws.latents`.
    blocks : tuple
        The factors of mean field. Empty for other methods.
    result : Result
        How the run ended.
    stats : dict
        Steps, residual, seconds, jitter and others.
    sampled, num_chains : bool, int
        Whether the hyperparameters have draws, and of how many chains, one after another.
    names : Names
        {path of an argument: its columns, category labels and row labels}, of arguments that were
        frames, columns or DataArrays.
    """

    model: Any  # a Declared; a plain function is declared at construction
    method: Any
    args: tuple
    kwargs: dict
    draws: Draws
    log_evidence: float | None
    result: Result
    stats: dict
    num_chains: int = 1
    sampled: bool = False
    local: dict[str, LatentGuide] = dataclasses.field(default_factory=dict)
    blocks: tuple[Family, ...] = ()
    names: Names = dataclasses.field(default_factory=Names)

    def __post_init__(self):
        if not isinstance(self.model, Declared):
            declared = declare(self.model, self.args, self.kwargs)
            known = {*self.draws.known, *self.draws.kept, *self.local}
            # without observations, what is left is observed
            unseen = tuple(k for k, _ in declared.reading.axes if k not in known)
            self.model = dataclasses.replace(declared, reading=declared.reading.observing(unseen))
        reading = self.model.reading
        self.draws = self.draws.apart(lambda site: reading.axis(site) is not None)

    @property
    def source(self) -> Declared:
        """The model as you declared it, even if some of its sites were integrated."""
        return self.model.source if isinstance(self.model, Collapsed) else self.model

    @functools.cached_property
    def hyper(self) -> dict:
        """{hyperparameter, param or drawn latent: value, or (S, ...) if they were sampled}."""
        return self.draws.known if self.sampled else self.draws.at(0).known

    @functools.cached_property
    def points(self) -> frozenset[str]:
        """Sites of `hyper` with one value and without a distribution.

        All of them under `MAP()` and `Fixed()`. For draws of a guide or points of a grid, those
        that are the same number in each. A chain that is stuck does not count.
        """
        if not self.sampled:
            return frozenset(self.hyper)
        one = lambda x: len(x) > 1 and x.dtype.kind == "f" and np.all(x == x[0])  # noqa: E731
        known = {k: x for k, x in self.hyper.items() if hasattr(x, "dtype") and not self.by_chains}
        return frozenset(k for k, x in known.items() if one(np.asarray(x)))

    @property
    def latent(self) -> Mapping[str, Kept]:
        """{GP site: the approximate posterior of f}, with a first axis of S draws, or of 1."""
        return self.draws.kept

    @property
    def by_chains(self) -> bool:
        """Whether its draws are of Markov chains, which have an ESS, and not of an approximation:
        a q without a bound has no log evidence either.
        """
        return "ess" in self.stats

    @property
    def log_evidence_se(self) -> float | None:
        """Standard error of `log_evidence` in nats if it is a mean over draws, else None."""
        return self.stats.get("log_evidence_se")

    @property
    def headline(self) -> str:
        """The model, the method, how the run ended, and the log evidence."""
        evidence = "" if self.log_evidence is None else f", log_evidence={self.log_evidence:.4f}"
        evidence += "" if self.log_evidence_se is None else f" (se {self.log_evidence_se:.2g})"
        name = getattr(self.model, "__qualname__", repr(self.model))
        return f"{name} by {self.method!r}: {self.result}{evidence}"

    def __repr__(self) -> str:
        hyper = ", ".join(_told(k, v) for k, v in self.hyper.items()) or "no hyperparameters"
        return f"{type(self).__name__}({self.headline}; {hyper})"

    @functools.cached_property
    @one_at_a_time
    def posterior(self) -> Process | dict[str, Process]:
        """The posterior of a GP as a distribution: `fit.posterior(X_new)`.

        Use it inside your own JAX code: mean and variance of f can be compiled and differentiated.
        With one GP site this is a function of the GP's own inputs, and with several a dictionary
        {site: function}. `joint=True` adds the covariances between rows.

        Returns
        -------
        Distribution
            The posterior of f at `X_new`. For `Sample` and `Grid`, a `MixtureSameFamily` over the S
            weighted draws.

        Raises
        ------
        ModelError
            If the model does not have a GP, or its kernel, mean or jitter is of the training rows
            alone.

        Notes
        -----
        Factored once, at the first use: O(N^3). With S draws, a call costs O(S (N^3 + M N^2)).
        """
        if not self.latent:
            raise ModelError(
                "posterior: the model has no GP site; what was inferred is in fit.hyper, and as a "
                "tree in fit.to_datatree()."
            )
        process: Any = self.process
        if not isinstance(self.model, Collapsed):
            return process
        with kept_values():
            found: Any = _mixed_parts(self) if self.sampled else part_processes(process)
        if not found:
            raise ModelError(
                "posterior: the model has no GP site; the effects that were integrated are in "
                "fit.sites, and what they add at new rows in fit.components(X_new, ...)."
            )
        sites = self.model.plan.sites
        for k, part in found.items():  # of several functions they are called f[0], f[1]
            beside = tuple(s for s in sites if s != k and not k.startswith(f"{s}["))
            found[k] = dataclasses.replace(part, beside=beside)
        return _one_or_all(found)

    @functools.cached_property
    @one_at_a_time
    def process(self) -> Process | dict[str, Process]:
        """The posterior process of `latent`, which is the predictor's if sites were integrated.

        `Posterior` for one value of the hyperparameters, else `Mixture`. Raises `ModelError` for
        draws of GPs that feed each other, whose inputs are random. With inducing variables, each
        layer is a process at its own inputs.
        """
        require_unchanged(self.model)
        self.require_pairs()
        with kept_values():  # kept: no array of a function that is compiled
            if self.draws.at(0).values and feeds_another(self):
                raise ModelError(
                    f"a GP of this model is fed by another (GP sites {list(self.latent)}), so it "
                    "is no process of given inputs; fit.predict and fit.sample draw through both."
                )
            processes = {site: _process(self, site) for site in self.latent}
        return _one_or_all(processes)

    @property
    def mixing(self) -> list[str]:
        """Sites whose row n depends on other rows' arguments: rows have no prediction alone."""
        return self.model.reading.mixed

    @functools.cached_property
    def unpaired(self) -> dict[str, str]:
        """{GP site whose kernel has no covariance between two given rows: the reason}."""
        known = self.draws.at(0).known
        return unpaired({k: training_prior(self, k, known) for k in self.latent})

    def require_untied(self) -> None:
        """Raise `ModelError` if the entries of a per-datum latent depend on each other."""
        if self.unpaired and isinstance(self.model, Collapsed):
            require_none_tied(self.model.tied)
        reading = self.model.reading
        tied = self.draws.known.keys() & {*reading.whole, *reading.mixed}
        require_none_tied(sorted(tied), "fit.hyper")

    def require_pairs(self) -> None:
        """Raise `ModelError` if new rows have no covariance with the training rows."""
        self.require_untied()
        require_pairs(self.unpaired)

    def require_spread(self, verb: str) -> None:
        """Raise `DataError` if q is a point: its draws have equal weights, whatever they leave."""
        kinds = {k: getattr(x, "dtype", None) for k, x in self.hyper.items()}  # none of a tree
        free = {k for k, dtype in kinds.items() if dtype is not None and dtype.kind == "f"}
        if self.sampled and not self.latent and free and free <= self.points:
            raise DataError(
                f"{verb}(): q of {type(self.method).__name__} is a point of {sorted(free)}, which "
                "weights cannot move. Fit with a spread, or score held-out data by log_density."
            )

    def warn_of_others(self, verb: str) -> None:
        """Warn of sites that score data, not by row, which a call per row leaves out."""
        reading = self.model.reading
        apart = [k for k in reading.observed if reading.axis(k) is None]
        if others := [k for k in apart if k not in reading.predicted]:
            warn(
                f"{verb}() scores each row of the first argument, and the observations of {others} "
                "belong to none: they are left out of its sum. Compare models that differ there by "
                "their log evidence, compare_models."
            )
        of_rows = any(p in reading.row_axes for p in reading.factored)  # else numbers and tables
        if of_rows and (summed := [k for k in reading.scored if reading.axis(k) is None]):
            warn(
                f"{verb}() leaves out the factors {summed}, which see observations and are one "
                f"number for all rows. {ONE_TERM}"
            )

    @property
    def independent_draws(self) -> float | None:
        """How many independent draws of the posterior this fit's are worth: S, or the smallest
        effective sample size of chains; `None` for one setting and for weighted points.
        """
        if not self.sampled or self.draws.is_weighted():
            return None
        ess = float(self.stats.get("ess") or self.draws.num)
        return float(np.clip(ess, 1.0, self.draws.num)) if np.isfinite(ess) else 1.0

    @property
    def inducing(self):
        """Inducing variables of a sparse fit, {site: ...} of several; for `inducing=` again."""
        found = {}
        for k, kept in self.latent.items():
            if isinstance(kept, FromInducing):
                own = kept.draw(0).inducing
                # the GPs' own: effects are what they are
                found |= own.gps if isinstance(own, PartsVariables) else {k: own}
        if not found:
            raise ModelError(
                f"{type(self.method).__name__} has no inducing variables; SVGP() and SparseNUTS() "
                "do."
            )
        return next(iter(found.values())) if len(found) == 1 else found


class _Processes(dict[str, Process]):
    """{GP site: its posterior process} of a model of several."""

    def __call__(self, X_new, joint: bool = False):
        raise ModelError(
            f"fit.posterior is a dictionary, as the model has the GP sites {list(self)}; call one "
            f"of its processes: fit.posterior[{next(iter(self))!r}](X_new)."
        )


def _one_or_all(processes: dict[str, Process]) -> Process | dict[str, Process]:
    return next(iter(processes.values())) if len(processes) == 1 else _Processes(processes)


def _told(name: str, value) -> str:
    if not hasattr(value, "shape"):  # a network's tree of parameters
        return name
    return f"{name} {value.shape}" if value.shape else f"{name}={float(value):.4g}"


def unfolded(values: dict) -> dict:
    """{site: array}, and of a tree {site and path: leaf}, such as `net$params.weight`."""
    flat = {k: jax.tree_util.tree_flatten_with_path(x)[0] for k, x in values.items()}
    name = lambda key: "." + jax.tree_util.keystr((key,), simple=True)  # noqa: E731
    return {k + "".join(map(name, at)): x for k, own in flat.items() for at, x in own}


def first_trace(record: Record) -> dict:
    """The model's trace on the training arguments, at the first draw of everything."""
    first = record.draws.at(0)
    return run_at_once(record.model, record.args, record.kwargs, first.known, first.values)


def prior_at(model, site: str, hyper: dict, args: tuple, kwargs: dict) -> GP:
    """The GP prior that the model declares at `args`, hyperparameters given. O(N)."""
    return unwrap(run(model, args, kwargs, hyper)[site]["fn"])


def training_prior(record: Record, site: str, hyper: dict) -> GP:
    return unwrap(run_at_once(record.model, record.args, record.kwargs, hyper)[site]["fn"])


@quick_jit
def _root(model, site: str, draw: Draws, args, kwargs):
    return draw.kept[site].root(prior_at(model, site, draw.known, args, kwargs))


def _process(record: Record, site: str) -> Process:
    if record.sampled:
        return Mixture(lambda draw: _of_draw(record, site, draw), record.draws)
    draw = record.draws.at(0)
    root = _root(record.model, site, draw, record.args, record.kwargs)
    # outside of the compiled function: a mean or kernel may close over the hyperparameters
    return draw.kept[site].process(training_prior(record, site, draw.known), root)


def _of_draw(record: Record, site: str, draw: Draws) -> OneProcess:
    kept = draw.kept[site]
    if kept.mean.ndim > 1 and not isinstance(record.model, Collapsed):
        raise ModelError(
            "a mixture of several functions has no one distribution; use fit.predict or fit.sample."
        )
    return kept.process(training_prior(record, site, draw.known))


def _mixed_parts(record: Record) -> dict[str, Mixture]:
    """As `part_processes`, each mixed over the draws. Which there are is read off abstractly."""
    name = record.model.plan.name  # pyright: ignore[reportAttributeAccessIssue]
    parts = lambda draw: part_processes(_of_draw(record, name, draw))  # noqa: E731
    of = lambda name: Mixture(lambda draw: parts(draw)[name], record.draws)  # noqa: E731
    names: list[str] = []
    jax.eval_shape(lambda draw: names.extend(parts(draw)), record.draws.at(0))
    return {name: of(name) for name in names}


def feeds_another(record: Record) -> bool:
    """Whether a GP of the model stands at inputs that another GP gives."""
    if len(record.latent) < 2:
        return False
    first = record.draws.at(0)
    known, data = {**first.known, **first.values}, (record.model, record.args, record.kwargs)
    gps, trace = tuple(record.latent), run(*data, known)
    return any(feeds(g, gps, trace, lambda v: run(*data, {**known, **v})) for g in gps)


def has_layers(record: Record) -> bool:
    """Whether f has no moments in closed form, as its inputs are latents or another GP's values."""
    return bool(record.local) or feeds_another(record)
