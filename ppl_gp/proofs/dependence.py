"""What is computed from what, read off a function's jaxpr: a proof of independence, whatever the
values are.
"""

from typing import Any

import jax
import jax.extend

# Primitives that call one jaxpr with their own inputs.
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
)


def depends(function, x) -> bool:
    """Whether any output of `function` is computed from x."""
    return any(jax.tree.leaves(reached(function, x)))


def reached(function, x):
    """The outputs of `function` with each array replaced by whether it is computed from x. Tracers
    are fine.
    """
    return jax.tree.map(
        bool,
        sources(lambda named: function(named["x"]), {"x": x}),
        is_leaf=lambda s: isinstance(s, frozenset),
    )


def sources(function, named: dict[str, Any]):
    """The outputs of `function(named)` with each array replaced by the names in `named`, a
    frozenset, that it is computed from.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(named)
    # as JAX sorts a dictionary's keys
    names = [name for name in sorted(named) for _ in jax.tree.leaves(named[name])]
    flow = _flow(jaxpr.jaxpr, [frozenset([name]) for name in names])
    return jax.tree.unflatten(jax.tree.structure(shapes), flow)


def _flow(jaxpr, given: list[frozenset]) -> list[frozenset]:
    """The sources of a jaxpr's outputs from those of its inputs. A called function is entered; a
    loop counts as a whole.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(variable) -> frozenset:
        return (
            frozenset()
            if isinstance(variable, jax.extend.core.Literal)
            else known.get(variable, frozenset())
        )

    for equation in jaxpr.eqns:
        into = [of(v) for v in equation.invars]
        inner = called(equation)
        out = (
            [frozenset().union(*into)] * len(equation.outvars)
            if inner is None
            else _flow(inner, into)
        )
        known.update(zip(equation.outvars, out, strict=True))
    return [of(v) for v in jaxpr.outvars]


def called(equation):
    """The jaxpr of a function that an equation calls with its own inputs, or `None`."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if (
        equation.primitive.name not in _CALLS
        or inner is None
        or len(inner.invars) != len(equation.invars)
    ):
        return None
    return inner
