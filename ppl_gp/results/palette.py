"""How methods are told apart in pictures: seven of them a panel, by colours that the colour-blind
see (Okabe & Ito 2008) and by markers that grey keeps.
"""

from collections.abc import Mapping

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
MARKERS = "osD^vP*"


def sevens(fits: Mapping) -> list[dict]:
    """The fits in their order, those of a panel together."""
    names, most = list(fits), len(COLOURS)
    return [{k: fits[k] for k in names[i : i + most]} for i in range(0, len(names), most)]
