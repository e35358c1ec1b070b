"""Ask several libraries the same, and tell our answer beside the best of theirs."""

from typing import NamedTuple

from tests.benchmarks.common import Row
from tests.benchmarks.peers.call import available, run_peer

LIMIT = 900.0  # seconds, for one answer
NO_PEER = "no peer installed: make bench-peers"


class Measured(NamedTuple):
    """A figure as text, and the number in it for the history."""

    figure: str
    value: float | None
    unit: str
    compared: bool = True  # with a peer, which a target may be about

    def row(self, what: str, target: str = "reported") -> Row:
        """The line of the table."""
        target = target if self.compared or target == "reported" else "none without a peer"
        return Row(what, self.figure, target, self.value, self.unit)


def everyone(kind: str = "svgp") -> tuple[str, ...]:
    """Us, and every peer of this kind that is installed."""
    return "ppl_gp", *available(kind)


def ask(given: dict, settings: dict, names) -> dict[str, dict]:
    """{library: answer}, one after the other, ours first; those that failed left out, with the
    reason printed.
    """
    answers = {name: run_peer(name, given, settings, LIMIT) for name in names}
    for name, answer in answers.items():
        if "error" in answer:
            print(f"{name}: {answer['error']}", flush=True)
    return {name: answer for name, answer in answers.items() if "error" not in answer}


def against_best(answers: dict[str, dict], scale: float, unit: str) -> Measured:
    """Our time, the best peer's, and their ratio; only theirs if ours failed, only ours if there is
    no peer.

    `scale`: of the unit, in a second. The value is the ratio, or our time where there is none.
    """
    times = {k: v["seconds"] * scale for k, v in answers.items()}
    ours = times.pop("ppl_gp", None)
    others = ", ".join(f"{k} {v:.3g}" for k, v in times.items())
    if ours is None:
        return Measured(f"{others} {unit}; ours failed", None, unit)
    if not times:
        return Measured(f"{ours:.3g} {unit} ({NO_PEER})", ours, unit, compared=False)
    ratio = ours / min(times.values())
    return Measured(
        f"{ours:.3g} {unit}; {others}: {ratio:.2f} of the best peer's", ratio, "of the best peer's"
    )
