"""What a comparison says in words: three separate sentences for each method, on its evidence, its
latents and its predictions, each with the size of the difference and what that matters for.

A difference within the errors of its numbers is never called wrong. k-hat and the share of draws
that counts judge q(f) where it has draws; a mode without one is seen only if a search for other
modes found it (`results.modes`).
"""

import math

from ppl_gp.results.compare.truth import KHAT_LIMIT

# reference standard deviations within which latent means and standard deviations count as the same
NEAR = 0.25
SMALL_GAP = 0.1  # nats within which a log evidence counts as right
MOST = 0.95  # share of the evidence that q's own draws have to meet where another mode was found
WASTEFUL = 0.5  # effective share of q's draws below which q is a poor approximation
ERRORS = 3.0  # standard errors within which two numbers count as equal


def verdict(row: dict, reference: str | None, reference_error: float | None) -> str:
    """The sentences on one row of `Comparison.table`. Thresholds: `NEAR`, `SMALL_GAP`, `WASTEFUL`,
    `ERRORS`, k-hat 0.7.
    """
    if row["result"] not in ("converged", "completed"):
        return f"{row['method']}: it ended as '{row['result']}'; do not use its numbers."
    if row["method"] == reference:
        known = reference_error is not None
        error = f"; their own error is about {reference_error:.2f} posterior sd" if known else ""
        return f"{row['method']}: its draws are the reference{error}."
    found = (_evidence(row), _latents(row, reference), _predictions(row, reference))
    return f"{row['method']}: {' '.join(s for s in found if s) or 'nothing here judges it.'}"


def _evidence(row) -> str | None:
    if row["truth"] is None:
        return None
    gap = row["log_evidence"] - row["truth"]
    figure = (
        f"{abs(gap):.2f} nats {'above' if gap > 0 else 'below'} the importance-sampled "
        f"truth ± {row['truth_se']:.2f}"
    )
    if abs(gap) <= max(SMALL_GAP, ERRORS * row["truth_se"]):
        return f"Evidence: right within the errors ({figure})."
    factor = math.exp(min(abs(gap), 50.0))
    return (
        f"Evidence: {figure}; where it is compared with another method's or model's, the ratio is "
        f"off by a factor of {factor:.3g}."
    )


def _latents(row, reference) -> str | None:
    parts = [part for part in (_shape(row), _nearness(row, reference)) if part]
    return f"Latents: {'; '.join(parts)}." if parts else None


def _shape(row) -> str | None:
    if row["khat"] is None:
        return None
    if row.get("share") is not None and row["share"] < MOST:
        return (
            f"the Gaussian approximation has {100 * row['share']:.0f} % of the posterior, and the "
            "rest is in other modes: do not use its means and intervals"
        )
    figure = f"k-hat {row['khat']:.2f}, {100 * row['efficiency']:.0f} % of its draws count"
    if row["khat"] <= KHAT_LIMIT and row["efficiency"] >= WASTEFUL:
        return f"the Gaussian approximation is close to the posterior ({figure})"
    if row["khat"] <= KHAT_LIMIT or row["efficiency"] >= WASTEFUL:
        return f"the Gaussian approximation is usable but not exact ({figure})"
    return f"the Gaussian approximation is too far off for weights to correct it ({figure})"


def _nearness(row, reference) -> str | None:
    if row["mean_distance"] is None:
        return None
    mean, sd = row["mean_distance"], row["sd_distance"]
    figure = f"means differ from {reference} by up to {mean:.2f} sd and spreads by up to {sd:.2f}"
    if max(mean, sd) <= NEAR:
        return f"{figure}, which is small"
    return f"{figure}, which matters for intervals of single latents"


def _predictions(row, reference) -> str | None:
    gap, error = row.get("log_density_gap"), row.get("log_density_gap_se")
    if gap is None or error is None:
        return None
    figure = f"{abs(gap):.3f} ± {error:.3f} nats per test row"
    if abs(gap) <= ERRORS * error:
        return f"Predictions: equal to those of {reference} within the errors ({figure})."
    how = "better" if gap > 0 else "worse"
    return f"Predictions: {how} than those of {reference} by {figure}, on these test rows."
