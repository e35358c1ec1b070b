"""Which axes of arguments have one length, whatever it is: they meet in a sum or product, with each
other or with values of latent sites.
"""

import equinox as eqx
import jax

from ppl_gp.gp import GP
from ppl_gp.model.arguments import Leaves
from ppl_gp.model.growth import Look
from ppl_gp.model.tracing import bare_trace
from ppl_gp.proofs.same_length import Axis, SameLength
from ppl_gp.wrappers import unwrap

_ARGUMENT, _SITE = "argument ", "site "


def tied(model, leaves: Leaves, base: Look) -> dict[Axis, Axis]:
    """{(path, axis): what stands for all of its length}, of arrays' axes of several entries. One
    abstract trace; nothing of a model that looks at values.
    """
    dynamic, static = eqx.partition(base.values, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    arrays = {
        p: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        for p, x in leaves.arrays.items()
    }
    named = {_ARGUMENT + p: x for p, x in arrays.items()}
    named |= {_SITE + k: v for k, v in dynamic.items()}

    def parts(named):
        values = eqx.combine({k: named[_SITE + k] for k in dynamic}, static)
        args, kwargs = leaves.replaced({p: named[_ARGUMENT + p] for p in arrays})
        trace = bare_trace(model, args, kwargs, values, values)
        sites = {k: unwrap(s["fn"]) for k, s in trace.items() if s["type"] == "sample"}
        inputs = {k: fn.X for k, fn in sites.items() if isinstance(fn, GP)}
        rest = {k: fn for k, fn in sites.items() if not isinstance(fn, GP)}
        return inputs, [x for x in jax.tree.leaves(rest) if isinstance(x, jax.Array)]

    axes = SameLength()
    try:
        inputs, _ = axes.read(parts, named)
    except jax.errors.JAXTypeError:
        return {}
    for name, at in inputs.items():
        if _SITE + name not in named:  # observed itself
            continue
        axes.join(at[0], (_SITE + name, len(named[_SITE + name].shape) - 1))
    return {
        (p, i): axes.group((_ARGUMENT + p, i))
        for p, x in arrays.items()
        for i, n in enumerate(x.shape)
        if n > 1
    }
