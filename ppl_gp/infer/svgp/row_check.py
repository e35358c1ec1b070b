"""Whether a datum's row means the same in every batch: what minibatches need, checked before any is
drawn.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from ppl_gp.deep.latents import latent_form
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import HERE, IN_ORDER, NotPointwiseError
from ppl_gp.gp import unwrap
from ppl_gp.infer.sources import take
from ppl_gp.model.factors import JointLogLikelihood
from ppl_gp.model.roles import log_prob_per_datum
from ppl_gp.model.tracing import run
from ppl_gp.quick import quick_jit
from ppl_gp.sparse.bound import Batch


def require_rows_apart(
    model, structure: Structure, hyper: dict, trace: dict, batch: Batch, axes, num_data: int
) -> None:
    """Raise `NotPointwiseError` where a datum's likelihood, inputs or prior depend on which other
    rows its batch holds.

    The rows of a batch are drawn anew, with repetitions and in another order: at the same values of
    f and latents each must have the terms that it had. An array that has N rows and is no data (a
    table of places) does not pass, nor does a lookup f[order], nor a normalisation over the rows.
    Rows in another order alone tell a lookup from a normalisation. Two evaluations of the model, a
    third where it fails, one compilation, O(B).
    """
    num = batch.weights.shape[0]
    values = {
        k: random.normal(random.fold_in(random.key(4), i), trace[k]["fn"].shape())
        for i, k in enumerate(structure.gps)
    }
    axis = {k: v.ndim - 1 for k, v in values.items()} | {
        k: latent_form(trace[k], num)[0] for k in structure.latents
    }
    values |= {k: trace[k]["value"] for k in structure.latents}
    by_row, shared = _seen(model, structure, num, hyper, values, batch.args, batch.kwargs)

    def moved_by(rows) -> list[str]:
        moved = {k: jnp.take(v, rows, axis[k]) for k, v in values.items()}
        args, kwargs = jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x,
            take(batch.args, batch.kwargs, rows, axes),
        )
        by_row_after, shared_after = _seen(model, structure, num, hyper, moved, args, kwargs)
        wrong = [k for k, x in by_row.items() if not _same(x[rows], by_row_after[k])]
        return wrong + [k for k, x in shared.items() if not all(map(_same, x, shared_after[k]))]

    rng = np.random.default_rng(3)
    if not (wrong := moved_by(rng.integers(0, num, num))):
        return
    begin, whole = "minibatches would read wrong rows", f"SVGP(batch_size={num_data})"
    if moved_by(rng.permutation(num)):
        raise NotPointwiseError(
            f"{begin}: the model looks {wrong[0]} up by numbers of rows, or in an array of as many "
            f"rows as there are data. {IN_ORDER} Or take all data in a step, {whole}."
        )
    line = _line_over_rows(model, structure, num, hyper, values, batch.args, batch.kwargs)
    raise NotPointwiseError(
        f"{begin}: the model computes {wrong[0]} from all rows of a batch{line}, by a mean or a "
        "scale over the rows, for example. Compute it before the fit and pass the result to fit, "
        f"or take all data in a step, {whole}."
    )


def _line_over_rows(model, structure: Structure, num: int, *values) -> str:
    """Where the user's code reduces an axis of all rows: (function, line)."""
    closed, *_ = eqx.filter_make_jaxpr(_seen.__wrapped__)(model, structure, num, *values)
    for equation in closed.jaxpr.eqns:
        over, left = ([num in v.aval.shape for v in x] for x in (equation.invars, equation.outvars))
        for frame in equation.source_info.traceback.frames if any(over) and not any(left) else ():
            if not frame.file_name.startswith(HERE) and "/lib/python" not in frame.file_name:
                return f" ({frame.function_name}, line {frame.line_num})"
    return ""


@quick_jit
def _seen(model, structure: Structure, num: int, hyper, values, args, kwargs) -> tuple[dict, dict]:
    """({what: of each row (B, ...)}, {what: that all rows share}) of a model at given values of f
    and latents.
    """
    gps = {k: values[k] for k in structure.gps}
    given = {**hyper, **{k: values[k] for k in structure.latents}}
    trace = run(model, args, kwargs, given, gps)
    by_row = {"the likelihood": JointLogLikelihood(model, num, given, args, kwargs)(gps)}
    by_row |= {f"the prior of '{k}'": log_prob_per_datum(trace[k]) for k in structure.latents}
    priors = {k: unwrap(trace[k]["fn"]) for k in structure.gps}
    for name, prior in priors.items():
        by_row[f"the inputs of '{name}'"] = jnp.asarray(prior.X, float).reshape(num, -1)
        by_row[f"the mean of '{name}'"] = jnp.moveaxis(prior.mean, -1, 0)
    kernels = {f"the kernel of '{k}'": jax.tree.leaves(p.kernel) for k, p in priors.items()}
    return by_row, {
        k: [x for x in leaves if jnp.shape(x)[:1] != (num,)] for k, leaves in kernels.items()
    }


def _same(a, b) -> bool:
    """Up to the order of sums."""
    a, b = jnp.asarray(a, float), jnp.asarray(b, float)
    # Values without a number, as at random f of an inner layer, have to be alike.
    known = jnp.isfinite(a) & jnp.isfinite(b)
    scale = jnp.max(jnp.where(known, jnp.abs(a), 0.0), initial=jnp.finfo(a.dtype).tiny)
    close = jnp.abs(a - b) <= jnp.sqrt(jnp.finfo(a.dtype).eps) * scale
    return bool(jnp.all(jnp.where(known, close, (a == b) | (jnp.isnan(a) & jnp.isnan(b)))))
