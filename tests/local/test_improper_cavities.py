"""EP of several functions keeps to sites whose cavities are Gaussians: settings of hyperparameters
next to each other have one answer, not that of another fixed point with sites left alone.
"""

import numpy as np
import pytest
from test_rounding import X, Y

import ppl_gp as pg
from models.heteroscedastic import heteroscedastic

# a chain of draws stuck there: five of ten neighbours were `negative_cavity` or `nonfinite`, with
# evidences up to 28 nats away
AT = {
    "variance_f": 11.72363055423367,
    "lengthscale_f": 0.3367375736638099,
    "variance_g": 0.9376872933528105,
    "lengthscale_g": 1.565522098233437,
}


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.filterwarnings("ignore:EP.*is off by")
@pytest.mark.parametrize("longer", [0.0, 0.1, 0.2, 0.25])
def test_neighbours_have_the_same_answer(longer):
    """And the evidence's slope is that of a smooth function, to what its nodes allow."""
    steps = longer + np.array([0.0, -1e-5, 1e-3])
    evidences = []
    for step in steps.tolist():
        moved = {**AT, "lengthscale_f": AT["lengthscale_f"] * float(np.exp(step))}
        fit = pg.fit(heteroscedastic, pg.EP(hyper=pg.Fixed(moved)), 0, X, y=Y, throw=False)
        assert fit.result == "converged"
        evidences.append(fit.log_evidence)
    assert -33.0 < evidences[0] < -32.0
    assert np.all(np.abs(np.diff(evidences)) < 0.01)
