"""Numbers of configurations that are none: named with their value, before any work."""

from inspect import unwrap
from types import SimpleNamespace

import numpy as np
import pytest

import ppl_gp as pg
from ppl_gp.settings import require_positive, require_whole
from ppl_gp.sparse import svgp

SPARSE = pg.SVGP, pg.CollapsedSVGP
WHOLE = {
    "max_steps": (pg.Laplace, pg.EP, pg.VI, pg.LocalBound, pg.MAP, pg.Grid, *SPARSE),
    "num_nodes": (pg.EP, pg.VI, pg.Expectation),
    "restarts": (pg.MAP, pg.Grid),
    "num_inducing": SPARSE,
    "batch_size": (pg.SVGP,),
    "num_importance": (pg.Layers,),
}


@pytest.mark.parametrize("value", [0, -3, True])
@pytest.mark.parametrize("name", WHOLE)
def test_counts_are_whole_and_from_one_on(name, value):
    for kind in WHOLE[name]:
        with pytest.raises(pg.DataError, match=rf"{kind.__name__}\({name}={value!r}\)"):
            kind(**{name: value})
        assert getattr(kind(**{name: 3}), name) == 3


class Config:
    """What the checks read, without the tests' checks of annotations."""

    def __init__(self, value):
        self.number = value


@pytest.mark.parametrize("value", [2.5, "a", None, np.float64(2.0)])
def test_what_is_no_whole_number_is_named(value):
    with pytest.raises(pg.DataError, match=r"Config\(number="):
        require_whole(Config(value), "number")
    require_whole(Config(np.int64(2)), "number")


@pytest.mark.parametrize("value", ["a", None, 1j])
def test_what_is_no_number_is_named(value):
    with pytest.raises(pg.DataError, match=r"Config\(number="):
        require_positive(Config(value), "number")
    require_positive(Config(np.float32(1e-3)), "number")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_tolerances_are_positive(value):
    kinds = (pg.Laplace, pg.EP, pg.VI, pg.LocalBound, pg.MAP, pg.Grid, pg.SVGP, pg.CollapsedSVGP)
    for kind in kinds:
        with pytest.raises(pg.DataError, match=rf"{kind.__name__}\(tol="):
            kind(tol=value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hyper": {"lengthscale": 1.0}}, "hyper=Fixed"),
        ({"learning_rate": -0.05}, "learning_rate=-0.05"),
    ],
)
def test_natural_mistakes_with_svgp_are_told(options, words):
    with pytest.raises(pg.DataError, match=words):
        pg.SVGP(**options)


@pytest.mark.parametrize(
    ("name", "value"), [("training", "adam"), ("layers", pg.Free()), ("checkpoint", "run")]
)
def test_a_part_of_another_kind_is_told(name, value):
    """By the check alone: here the annotations are checked before it."""
    method = SimpleNamespace(**(vars(pg.SVGP()) | {name: value}))
    with pytest.raises(pg.DataError, match=rf"SVGP\({name}=.*give {name}=pg\.\w+\(\.\.\.\)"):
        unwrap(svgp._require_parts)(method)
