"""What a file says of a model whose Gaussian sites were integrated into one predictor."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ppl_gp.errors import StoreError
from ppl_gp.model.arguments import is_array
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.declared import Declared
from ppl_gp.model.plan import Observed, Plan
from ppl_gp.model.skeleton import Skeleton
from ppl_gp.results.store.coding import decode, encode


def source_of(model: Declared) -> Declared:
    """The model as the user declared it."""
    return model.source if isinstance(model, Collapsed) else model


def encode_predictor(model: Declared) -> dict | None:
    """The plan and the arguments' skeleton as JSON; `None` of a model with nothing integrated."""
    if not isinstance(model, Collapsed):
        return None
    plan, bones = dataclasses.asdict(model.plan), model.skeleton
    tree = jax.tree.unflatten(bones.structure, list(range(len(bones.entries))))
    return {
        "plan": {**plan, "observed": [[k, list(v)] for k, v in model.plan.observed]},
        "paths": list(bones.paths),
        "entries": [_entry(x, p) for p, x in zip(bones.paths, bones.entries, strict=True)],
        "tree": encode(tree, {}, "", "arguments"),
        "rows": [list(pair) for pair in bones.rows],
        "columns": list(bones.columns),
    }


def decode_predictor(source: Declared, told: dict | None) -> Declared:
    """The model again. Raises `StoreError` where what the file says is damaged."""
    if told is None:
        return source
    try:
        plan, tree = told["plan"], decode(told["tree"], {})
        order: Any = jax.tree.leaves(tree)
        entries = tuple(_decoded(told["entries"][i]) for i in order)
        bones = Skeleton(
            tuple(told["paths"]),
            entries,
            jax.tree.structure(tree),
            tuple((p, int(a)) for p, a in told["rows"]),
            tuple(told["columns"]),
        )
        whole = Plan(
            tuple(plan["sites"]),
            int(plan["functions"]),
            bool(plan["independent"]),
            tuple(map(int, plan["softmax"])),
            tuple((k, int(a)) for k, a in plan["axes"]),
            tuple((k, Observed(v[0], tuple(v[1]), tuple(v[2]))) for k, v in plan["observed"]),
            tuple(plan["hyper"]),
            str(plan["name"]),
            tuple(plan.get("seen", ())),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StoreError(f"is damaged: its predictor cannot be read ({error}).") from error
    return Collapsed(source, whole, bones)


def _entry(x, path: str) -> list:
    if is_array(x):
        return ["array", np.dtype(x.dtype).str, list(x.shape)]
    return ["option", encode(x, {}, "", f"argument '{path}'")]


def _decoded(told: list):
    kind, *value = told
    if kind == "array":
        return jax.ShapeDtypeStruct(tuple(value[1]), jax.dtypes.canonicalize_dtype(value[0]))
    return decode(value[0], {})
