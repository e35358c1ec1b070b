"""Whether finitely many outcomes are classes or counts: both have a probability each, and are
scored differently.
"""

import jax

from ppl_gp.gp import unwrap
from ppl_gp.observations import OrdinalProbit
from ppl_gp.results.query.query import Case

# Distributions over classes by the parameter that has an entry for each; a count has a number of
# trials instead.
_CLASSES = ("CategoricalProbs", "CategoricalLogits", "OrderedLogistic", "OrderedProbit")


def observes_counts(case: Case) -> bool:
    """Whether the outcomes of the one observed site are numbers: neither true or false, nor one of
    named or ordered classes.
    """
    (site,) = case.layout.sites
    if site.support is None or site.boolean:
        return False
    found = []

    def look(draw):  # abstract values suffice
        found.append(unwrap(case.trace(draw, {})[site.name]["fn"]))
        return 0

    jax.eval_shape(look, case.draws.at(0))
    return not (isinstance(found[0], OrdinalProbit) or type(found[0]).__name__ in _CLASSES)
