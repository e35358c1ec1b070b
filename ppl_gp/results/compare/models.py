"""`compare_models`: p(model | data) from the log evidences of different models of the same data.

p(M_i | y) is proportional to p(M_i) p(y | M_i) (PRML 3.67). Estimates of log p(y | M_i) (Laplace,
EP) and lower bounds (VI, LocalBound, SVGP) are not compared with each other unless asked: a bound's
gap differs between models by an unknown amount.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from rich.table import Table
from scipy.special import logsumexp

from ppl_gp.errors import DataError, Result
from ppl_gp.gp import bare_shape, mask_of, unwrap
from ppl_gp.reading.tracing import run
from ppl_gp.results.compare.table import printed
from ppl_gp.results.datatree import require_same_stream, training_sites
from ppl_gp.results.fit import Fit
from ppl_gp.results.query.layout import observed_names
from ppl_gp.settings import MAP


@dataclasses.dataclass(frozen=True)
class ModelComparison:
    """Posterior probabilities of models of the same data, from `compare_models`.

    Parameters
    ----------
    table : list of dict
        One entry per model, in the order given. It has `model`, `prior`, `probability`, and
        `log_odds` in nats, to the best model. `log_evidence` is in nats, with `log_symmetry` added,
        and `log_evidence_se` is its error if it is a mean over draws, else None. `kind` is
        "estimate" or "lower bound". `maximised` is how many numbers were maximised instead of
        integrated.
    """

    table: list[dict]

    @property
    def probabilities(self) -> dict[str, float]:
        """{model: p(model | data)}. They sum to one."""
        return {row["model"]: row["probability"] for row in self.table}

    @property
    def best(self) -> str:
        """The name of the most probable model."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    def __rich__(self) -> Table:
        rows = [
            {
                "model": row["model"],
                "log evidence (nats)": f"{row['log_evidence']:.3f}{_error(row)}",
                "kind": row["kind"],
                "prior": f"{row['prior']:.3f}",
                "p(model | data)": f"{row['probability']:.3f}",
                "log odds": f"{row['log_odds']:.2f}",
            }
            for row in self.table
        ]
        shown = Table(caption=self._caption(), caption_justify="left")
        for name in rows[0]:
            shown.add_column(name, justify="left" if name in ("model", "kind") else "right")
        for row in rows:
            shown.add_row(*row.values())
        return shown

    def __str__(self) -> str:
        return printed(self.__rich__())

    def _caption(self) -> str | None:
        maximised = {row["model"]: row["maximised"] for row in self.table if row["maximised"]}
        if not maximised:
            return None
        told = ", ".join(f"{k} {n}" for k, n in maximised.items())
        return (
            f"Hyperparameters at their maximum, not integrated ({told} numbers): models with more "
            "of them are favoured. Fits by Grid() or Sample() integrate them: compare their loo()."
        )


def compare_models(
    fits: Mapping[str, Fit],
    prior: Mapping[str, float] | None = None,
    log_symmetry: Mapping[str, float] | None = None,
    mixed: bool = False,
) -> ModelComparison:
    """Compute the posterior probabilities of models from the evidences of their fits.

    Use it for different models, or hyperparameters, of the same observations.

    Parameters
    ----------
    fits : mapping
        {name: fit with a `log_evidence`}.
    prior : mapping, default None
        {name: p(model)}, positive, of every model; it is normalised. None gives all models the same
        probability.
    log_symmetry : mapping, default None
        {name: nats to add to its evidence}: log K! if a bound describes one of the K! equal modes
        of a mixture of K components. `fit.symmetries` has it as `log_count`.
    mixed : bool, default False
        True compares lower bounds with estimates.

    Returns
    -------
    ModelComparison
        `print` it.

    Raises
    ------
    DataError
        For fewer than two fits, and for a fit without an evidence (samplers, `Sample`, `Grid`, a
        loaded file without observations), with an improper prior, or that did not end well. Also
        for different observations, masks or `scale` handlers (streams must be one `Stream`),
        unknown names, and priors that are not positive. Bounds and estimates together need
        `mixed=True`.

    Notes
    -----
    `p(model | data)` is proportional to p(model) exp(log evidence). Cost: one run of each model.
    Source: Bishop (2006), sections 3.4 and 10.2.4 (symmetries).

    Examples
    --------
    >>> def model(X, ell, y=None):
    ...     f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, ell), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> x = np.linspace(0.0, 1.0, 10)
    >>> y = np.sin(6.0 * x)
    >>> fits = {str(k): pg.fit(model, pg.Laplace(), 0, x, k, y=y) for k in (0.3, 3.0)}
    >>> pg.compare_models(fits).best
    '0.3'
    """
    _require_fits(fits)
    names = list(fits)
    prior = _weights("prior", prior or dict.fromkeys(names, 1.0), names, math.nan)
    symmetry = _weights("log_symmetry", log_symmetry, names, 0.0)
    if bad := [k for k, p in prior.items() if not (p > 0 and math.isfinite(p))]:
        raise DataError(f"compare_models(prior={prior}): give {bad} positive numbers.")
    methods = {k: type(fit.method) for k, fit in fits.items()}
    kinds = {k: getattr(of, "evidence_is", of.__name__) for k, of in methods.items()}
    if len(set(kinds.values())) > 1 and not mixed:
        raise DataError(
            f"compare_models(): {kinds} are not the same quantity, and the gap of a bound to its "
            "evidence is not known. Fit all by one kind of method, or pass mixed=True."
        )
    _require_proper(fits)
    _require_same_observations(fits)
    _require_ended(fits)
    evidence = np.array([float(fits[k].log_evidence or 0.0) + symmetry[k] for k in names])
    shares = np.array([prior[k] for k in names])
    joint = evidence + np.log(shares / shares.sum())
    probability = np.exp(joint - logsumexp(joint))
    return ModelComparison(
        [
            {
                "model": k,
                "log_evidence": float(evidence[i]),
                "log_evidence_se": fits[k].log_evidence_se,
                "kind": kinds[k],
                "maximised": _maximised(fits[k]),
                "prior": float(shares[i] / shares.sum()),
                "probability": float(probability[i]),
                "log_odds": float(joint[i] - joint.max()),
            }
            for i, k in enumerate(names)
        ]
    )


def _error(row: dict) -> str:
    se = row["log_evidence_se"]
    return "" if se is None else f" (se {se:.2g})"


def _maximised(fit: Fit) -> int:
    """Numbers that MAP set at their maximum; none where all latents were expanded about it."""
    if not isinstance(getattr(fit.method, "hyper", None), MAP) or fit.sampled:
        return 0
    return int(sum(np.size(x) for x in jax.tree.leaves(fit.hyper)))


def _require_fits(fits) -> None:
    if not isinstance(fits, Mapping) or len(fits) < 2:
        raise DataError(f"compare_models({fits!r}): give two fits or more, {{name: fit, ...}}.")
    if strange := [k for k, fit in fits.items() if not isinstance(fit, Fit)]:
        raise DataError(f"compare_models(): {strange} are no fits; give what pg.fit returned.")
    if loaded := [k for k, fit in fits.items() if type(fit.method).__name__ == "SavedMethod"]:
        raise DataError(
            f"compare_models(): {loaded} were loaded, and no file keeps the observations, which "
            "have to be the same: compare before saving, or fit again."
        )
    for name, fit in fits.items():
        if fit.log_evidence is None or not math.isfinite(fit.log_evidence):
            raise DataError(
                f"compare_models(): '{name}' by {type(fit.method).__name__} has log evidence "
                f"{fit.log_evidence}; Laplace(), EP(), VI() and SVGP() under MAP() or Fixed() have "
                "one, if a Stream does not end early. Fits by draws can be compared by loo()."
            )


def _require_ended(fits) -> None:
    for name, fit in fits.items():
        if fit.result not in (Result.converged, Result.completed):
            raise DataError(
                f"compare_models(): '{name}' ended as '{fit.result}', so that its log evidence may "
                f"be nats off: {fit.result.message}"
            )


def _weights(what: str, given: Mapping[str, float] | None, names, default: float):
    if unknown := set(given or {}) - set(names):
        raise DataError(
            f"compare_models({what}=...) names {sorted(unknown)}, which are none of {names}."
        )
    return {k: float((given or {}).get(k, default)) for k in names}


def _require_proper(fits: Mapping[str, Fit]) -> None:
    for name, fit in fits.items():
        trace = run(fit.source, fit.args, fit.kwargs, fit.draws.at(0).known)
        priors = {k: unwrap(s["fn"]) for k, s in trace.items() if s["type"] == "sample"}
        if improper := [k for k, p in priors.items() if isinstance(p, dist.ImproperUniform)]:
            raise DataError(
                f"compare_models(): '{name}' has improper priors, of {improper}, whose constant is "
                "arbitrary, and the evidence with it; declare proper ones."
            )


def _require_same_observations(fits: Mapping[str, Fit]) -> None:
    require_same_stream("compare_models", fits)
    traces = {k: training_sites(fit) for k, fit in fits.items()}
    seen = {k: {n: _seen(t[n]) for n in observed_names(t)} for k, t in traces.items()}
    first, reference = next(iter(seen.items()))
    for name, values in seen.items():
        if not values or not _alike(values, reference):
            raise DataError(
                f"compare_models(): '{name}' and '{first}' do not observe the same values "
                f"({_told(values)}; {_told(reference)}): evidences are densities of what is "
                "observed. Mask and scale the same data in both; a model of log y needs the "
                "Jacobian: observe y under a TransformedDistribution."
            )


class _Seen(NamedTuple):
    """What a site observes, NaN where it is masked, and how often each entry counts."""

    values: np.ndarray
    scale: np.ndarray


def _seen(site: dict) -> _Seen:
    fn, values = site["fn"], np.asarray(site["value"], float)
    scale = np.broadcast_to(1.0 if site["scale"] is None else site["scale"], fn.batch_shape)
    mask = np.asarray(mask_of(fn))
    mask = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, bare_shape(fn)))
    mask = mask.reshape(*mask.shape, *(1,) * max(values.ndim - mask.ndim, 0))
    return _Seen(np.squeeze(np.where(mask, values, np.nan)), np.squeeze(scale))


def _told(named: dict[str, _Seen]) -> str:
    seen = list(named.values())
    counts = [int(np.sum(np.isfinite(x.values))) for x in seen]
    scales = sorted({float(w) for x in seen for w in np.ravel(x.scale)} - {1.0})
    weighed = f", by scale handlers {scales[:3]} times" if scales else ""
    return f"shapes {[x.values.shape for x in seen]}, {counts} values{weighed}"


def _alike(a: dict[str, _Seen], b: dict[str, _Seen]) -> bool:
    """Sites of the same names by name, others in their order."""
    ordered = [b[k] for k in a] if a.keys() == b.keys() else b.values()
    sites = zip(a.values(), ordered, strict=False)
    pairs = (pair for site in sites for pair in zip(*site, strict=True))
    return len(a) == len(b) and all(np.array_equal(*pair, equal_nan=True) for pair in pairs)
