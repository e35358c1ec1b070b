"""What a comparison says in words: three separate sentences for each method, on its evidence, its
latents and its predictions, each with the size of the difference and what that matters for.

A difference of at most `ERRORS` standard errors is never called wrong, and one that is larger is
never called equal: it is called small where it is. k-hat and the share of draws that count judge
q(f) where it has draws; a mode without one is seen only if a search found it (`truth`).
"""

import math

from ppl_gp.results.compare.truth import KHAT_LIMIT

# reference standard deviations within which latent means and standard deviations count as the same
NEAR = 0.25
SMALL_GAP = 0.1  # nats of a log evidence below which a difference is called small
MOST = 0.95  # share of the evidence that q's own draws have to meet where another mode was found
WASTEFUL = 0.5  # effective share of q's draws below which q is a poor approximation
ERRORS = 3  # standard errors beyond which two numbers are called different


def verdict(row: dict, reference: str | None, reference_error: float | None) -> str:
    """The sentences on one row of `Comparison.table`."""
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
        f"truth ± {row['truth_se']:.2g}"
    )
    if within := _within(gap, row["truth_se"]):
        return f"Evidence: right {within} ({figure})."
    if abs(gap) <= SMALL_GAP:
        return f"Evidence: {figure}: more than its error, but small."
    factor = math.exp(min(abs(gap), 50.0))
    return (
        f"Evidence: {figure}; where it is compared with another method's or model's, the ratio is "
        f"off by a factor of {factor:.3g}."
    )


def _within(gap: float, error: float) -> str:
    """How many standard errors, rounded up, the difference is at most; nothing above `ERRORS`."""
    num = next((n for n in range(1, ERRORS + 1) if abs(gap) <= n * error), 0)
    return f"within {num} standard error{'s' * (num > 1)}" if num else ""


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
    figure = f"{abs(gap):.3f} ± {error:.2g} nats per test row"
    if within := _within(gap, error):
        return f"Predictions: equal to those of {reference} {within} ({figure})."
    how = "better" if gap > 0 else "worse"
    return f"Predictions: {how} than those of {reference} by {figure}, on these test rows."
