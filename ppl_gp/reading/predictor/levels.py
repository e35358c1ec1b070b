"""Whether the integrated sites have what the rows of a model look up in them: indices in range, and
entries for other rows than the data's.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import DataError, warn
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.predictor import (
    Rest,
    innovations,
    shapes,
    traced,
)


def require_levels(model: Collapsed, args: tuple, kwargs: dict, hyper: dict) -> None:
    """Raise `DataError` where an index of an effect, or of a place, is out of its range, which
    JAX would take for the nearest one inside. Not under `jit`.
    """
    num, arrays = model.completed(args, kwargs)
    if num < 2:
        arrays = model.skeleton.twice(arrays)
    rest = Rest(arrays, hyper)
    e = innovations(model.source, model.skeleton, shapes(rest), model.plan.sites)
    zero = {k: jnp.zeros(x.shape, x.dtype) for k, x in e.items()}
    names = [None] * len(jax.tree.leaves(zero)) + sorted(arrays)
    here = traced(model.source, model.skeleton, model.plan.sites, rest)
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


def tied(model: Collapsed, args: tuple, kwargs: dict, hyper: dict) -> list[str]:
    """Integrated sites with an entry for each row of the data and covariances between them (a
    random walk over the rows), of which other rows have none. Abstract traces.
    """
    num, arrays = model.completed(args, kwargs)
    here, longer = (
        innovations(
            model.source,
            model.skeleton,
            shapes(Rest(model.skeleton.resized(arrays, n), hyper)),
            model.plan.sites,
        )
        for n in (num, num + 1)
    )
    apart = dict(model.plan.axes)
    return [k for k, x in here.items() if x.shape != longer[k].shape and k not in apart]
