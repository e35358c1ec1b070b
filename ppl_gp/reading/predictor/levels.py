"""Whether the integrated sites have what the rows of a model look up in them."""

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError, warn
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.predictor import Rest


def require_levels(model: Collapsed, args: tuple, kwargs: dict, hyper: dict) -> None:
    """Raise `DataError` where an index of an effect, or of a place, is out of its range, which
    JAX would take for the nearest one inside. Not under `jit`.
    """
    num, arrays = model.completed(args, kwargs)
    rest = Rest(arrays if num > 1 else model.skeleton.twice(arrays), hyper)
    zero = model.moved.zero(rest)
    names = [None] * len(jax.tree.leaves(zero)) + sorted(arrays)
    here = model.moved.at(rest)
    for indices, sizes, places, signed in here.predictors.looked_up(zero, rest):
        outside = np.asarray((indices < 0) | (indices >= jnp.asarray(sizes)))
        paths = [p for i in places if i < len(names) and (p := names[i])]
        if (below := min((int(np.min(x)) for x in signed), default=0)) < 0:
            warn(
                f"argument {paths} leads to negative indices ({below}), which count from the end: "
                "-1 is the last level. Start at 0; if -1 stands for a missing group (as "
                "pandas.factorize has it), give that a level of its own."
            )
        if outside.any():
            rows, bad = outside.any(-1), np.asarray(indices)[outside]
            if len(signed) == 1 and signed[0].shape == rows.shape:  # before JAX adds the size
                bad = np.asarray(signed[0])[rows]
            raise DataError(
                f"argument {paths} leads to the index {np.unique(bad)[:3].tolist()}, and what it "
                f"looks up has {[n for n in sizes if n > 1] or sizes} entries: a level that the "
                "model does not have. Declare as many members of the plate as there are levels, "
                "new ones included: those without data keep their prior."
            )
