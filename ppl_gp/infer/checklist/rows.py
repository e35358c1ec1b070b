"""The item about rows, (whether it is in order, message): which arguments grow with the data, and
whether predictions at other rows can be made.
"""

from typing import cast

from ppl_gp.gp import unwrap
from ppl_gp.infer.checklist.subject import Subject
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.companions import mixing_sites, require_none_tied, require_pairs, unpaired
from ppl_gp.model.declared import Declared
from ppl_gp.model.levels import tied
from ppl_gp.model.roles import is_factor


def rows(subject: Subject):
    """Whether a row is predicted by its own arguments alone, and which those are."""
    reading = subject.model.reading
    hyper = {k: subject.trace[k]["value"] for k in (*subject.found.hyper, *subject.found.params)}
    if isinstance(subject.whole, Collapsed):
        held = {k: x for k, x in hyper.items() if k not in subject.integrated}
        require_none_tied(tied(subject.whole, subject.args, subject.kwargs, held))
    require_pairs(unpaired({k: unwrap(subject.trace[k]["fn"]) for k in subject.found.gps}))
    if mixing := mixing_sites(cast(Declared, subject.model), subject.args, subject.kwargs, hyper):
        return (
            False,
            f"a row of {mixing} sees other rows' arguments: predictions would depend on their "
            "companions; standardise outside.",
        )
    if not reading.grows and not subject.args:
        return (
            False,
            "another number of rows cannot be traced: no argument is positional, and the first "
            "positional one holds the inputs; declare the inputs as model(X, ...), to predict at "
            "new ones.",
        )
    if not reading.grows:
        return (
            False,
            "another number of rows cannot be traced: the model holds arrays of its own; pass "
            "them, to predict at new inputs.",
        )
    given = f"; at new inputs give {list(reading.needed)} again" if reading.needed else ""
    factors = [k for k in subject.found.observed if is_factor(subject.trace[k])]
    kinds = "".join(
        f"; factor '{k}' is {'part of the likelihood' if k in reading.scored else 'a penalty'}"
        for k in factors
    )
    return True, f"one entry per datum: {[p for p, _ in reading.rows]}{given}{kinds}."
