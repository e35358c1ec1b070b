"""What a comparison says in words: one plain sentence a method, from its k-hat, evidence and
distances.

k-hat and the share of draws that counts judge q(f) where it has draws. A mode of the posterior
without one is seen only where a search for other modes found it (`results.modes`); then nothing of
q is called trustworthy that misses more than 5 % of the evidence.
"""

from ppl_gp.results.compare.truth import KHAT_LIMIT

# reference standard deviations within which latent means and standard deviations count as the same
NEAR = 0.25
SMALL_GAP = 0.1  # nats within which a log evidence counts as right
MOST = 0.95  # share of the evidence that q's own draws have to meet where another mode was found
WASTEFUL = 0.5  # effective share of q's draws below which q is a poor stand-in for the posterior


def verdict(row: dict, reference: str | None, reference_error: float | None) -> str:
    """One sentence on one row of `Comparison.table`. Thresholds: `NEAR`, `SMALL_GAP`, `WASTEFUL`,
    k-hat 0.7.
    """
    if row["result"] not in ("converged", "completed"):
        return f"{row['method']}: do not trust it, it ended as '{row['result']}'."
    parts = [
        part
        for part in (_evidence(row), _shape(row), _nearness(row, reference, reference_error))
        if part
    ]
    return f"{row['method']}: {'; '.join(parts) or 'nothing here judges it'}."


def _evidence(row) -> str | None:
    if row["truth"] is None:
        return None
    gap = row["log_evidence"] - row["truth"]
    figure = (
        f"{abs(gap):.2f} nats {'above' if gap > 0 else 'below'} the importance-sampled "
        f"truth ± {row['truth_se']:.2f}"
    )
    if abs(gap) <= max(SMALL_GAP, 3.0 * row["truth_se"]):
        return f"trust its log evidence ({figure})"
    return f"do not trust its log evidence ({figure})"


def _shape(row) -> str | None:
    if row["khat"] is None:
        return None
    if row.get("share") is not None and row["share"] < MOST:
        return (
            f"do not trust its q(f): it has {100 * row['share']:.0f} % of the posterior, the "
            "rest is in other modes"
        )
    figure = f"k-hat {row['khat']:.2f}, {100 * row['efficiency']:.0f} % of its draws count"
    if row["khat"] <= KHAT_LIMIT and row["efficiency"] >= WASTEFUL:
        return f"its q(f) stands for the posterior at its hyperparameters ({figure})"
    if row["khat"] <= KHAT_LIMIT or row["efficiency"] >= WASTEFUL:
        return (
            "its q(f) needs importance weights to stand for the posterior at its "
            f"hyperparameters ({figure})"
        )
    return (
        "its q(f) is too far from the posterior at its hyperparameters even for importance "
        f"weights ({figure})"
    )


def _nearness(row, reference, reference_error) -> str | None:
    if row["method"] == reference:
        precision = (
            f" to about {reference_error:.2f} posterior sd" if reference_error is not None else ""
        )
        return f"its draws are the reference, trust them{precision}"
    if row["mean_distance"] is None:
        return None
    far = [
        k for k, d in (("means", row["mean_distance"]), ("spreads", row["sd_distance"])) if d > NEAR
    ]
    figure = f"{row['mean_distance']:.2f} and {row['sd_distance']:.2f} sd at most from {reference}"
    if far:
        return (
            f"do not trust every latent {' and '.join(far)} (means and sds {figure}, which "
            "also samples hyperparameters)"
        )
    return f"trust its latent means and spreads (means and sds {figure})"
