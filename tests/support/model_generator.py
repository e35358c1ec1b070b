"""Models named by their parts: `Spec`, which parts go together, and specs drawn at random.

A datum has up to R x P entries (repeats, outputs), which share its f. `generated_problem.Problem`
makes the model.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from likelihood_families import FAMILIES

# Where a row's entries stand in the site, as a function of (rows, R, P, ...) arrays.
LAYOUTS = {
    "plain": lambda a: a[:, 0, 0],
    "no_plate": lambda a: a[:, 0, 0],
    "one_event": lambda a: a[:, 0, 0],
    "outputs_inner": lambda a: a[:, 0, :],
    "outputs_outer": lambda a: np.moveaxis(a[:, 0, :], 1, 0),
    "event_inner": lambda a: a[:, 0, :],
    "bare_inner": lambda a: a[:, 0, :],
    "bare_outer": lambda a: np.moveaxis(a[:, 0, :], 1, 0),
    "repeats_inner": lambda a: a[:, :, 0],
    "repeats_outer": lambda a: np.moveaxis(a[:, :, 0], 1, 0),
    "repeats_and_outputs": lambda a: np.moveaxis(a, 0, 1),
}
OUTPUTS = (
    "outputs_inner",
    "outputs_outer",
    "event_inner",
    "bare_inner",
    "bare_outer",
    "repeats_and_outputs",
)
# the rows are the site's axis 1
ROWS_SECOND = ("outputs_outer", "bare_outer", "repeats_outer", "repeats_and_outputs")
WITH_COLUMNS = ("wide", "dict", "tuple")
REPEATS = ("repeats_inner", "repeats_outer", "repeats_and_outputs")


@dataclass(frozen=True)
class Spec:
    """One model. Sizes are small and meant to coincide: N `num`, `outputs` P, `repeats` R,
    `blanks`, `groups`, D.
    """

    family: str = "normal"
    layout: str = "plain"
    # column (N, 1), vector (N,), wide (N, D), dict, tuple, float32, stations (N,) of a table
    inputs: str = "column"
    # s: one site, a site in the outputs' plate, a param, a constant, or a table that is passed (P,)
    noise: str = "global"
    # e: none, positional, keyword, default, default_keyword, inside (the inputs' container),
    # scalar, zero_dim, option
    exposure: str = "none"
    mask: str = "none"  # handler, obs_mask
    scale: str = "none"  # constant, rows
    factor: str = "none"  # penalty, shared, observing, censored
    second: str = "none"  # blanks, keyword, dict, tuple
    effect: str = "none"  # groups, columns
    method: str = "laplace"
    num: int = 9
    outputs: int = 3
    repeats: int = 2
    blanks: int = 5
    groups: int = 3
    columns: int = 2
    rows: tuple[int, ...] = ()  # numbers of new rows beside the usual ones

    def __str__(self):
        changed = [
            f for f in fields(self) if getattr(self, f.name) != f.default and f.name != "rows"
        ]
        return (
            "-".join(f"{_SHORT.get(f.name, '')}{getattr(self, f.name)}" for f in changed)
            or "normal"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size of the model but one and the number of new rows: N, and those that its parts
        have.
        """
        found = {getattr(self, name) for name in self.used} | {FAMILIES[self.family].outcomes or 1}
        return tuple(sorted(found - {1}))

    @property
    def used(self) -> tuple[str, ...]:
        """The sizes that this spec's parts have."""
        having = {
            "num": True,
            "outputs": self.layout in OUTPUTS,
            "repeats": self.layout in REPEATS,
            "blanks": self.second == "blanks",
            "groups": self.effect == "groups" or self.inputs == "stations",
            "columns": self.inputs in WITH_COLUMNS,
        }
        return tuple(name for name, has in having.items() if has)


_SHORT = {
    "num": "N",
    "outputs": "P",
    "repeats": "R",
    "blanks": "B",
    "groups": "G",
    "columns": "D",
} | {
    "noise": "s_",
    "exposure": "e_",
    "mask": "mask_",
    "scale": "scale_",
    "factor": "factor_",
    "second": "second_",
}

_DATA_LAST = (
    "plain",
    "no_plate",
    "outputs_outer",
    "repeats_outer",
    "event_inner",
    "bare_inner",
    "bare_outer",
)
_EVENTS = ("one_event", "event_inner")
_TWO_SITES = ("keyword", "dict", "tuple")


def is_model(spec: Spec) -> bool:
    """Whether the parts go together, as a NumPyro model and in `Problem`."""
    per_output = spec.noise in ("outputs", "table")
    rules = (
        not per_output or spec.layout in OUTPUTS,
        spec.mask == "none" or spec.layout not in _EVENTS,
        spec.scale != "rows"
        or spec.layout not in ("one_event", "bare_inner", "bare_outer", "repeats_and_outputs"),
        spec.second == "blanks" or spec.second == "none" or spec.layout in _DATA_LAST,
        spec.second != "blanks" or not per_output,
        spec.factor != "penalty" or spec.layout in _DATA_LAST,
        spec.factor not in ("observing", "censored") or _is_bare(spec),
        spec.factor != "censored" or spec.family == "normal",
        (spec.exposure == "inside") <= (spec.inputs in ("dict", "tuple")),
        spec.layout != "one_event" or spec.second not in _TWO_SITES,
    )
    return all(rules)


def _is_bare(spec):
    return (spec.layout, spec.mask, spec.scale, spec.second) == ("plain", "none", "none", "none")


_CHOICES = {
    "family": tuple(FAMILIES),
    "layout": tuple(LAYOUTS),
    "inputs": ("column", "vector", "wide", "dict", "tuple", "float32", "stations"),
    "noise": ("global", "outputs", "param", "constant", "table"),
    "exposure": (
        *("none", "positional", "keyword", "default", "default_keyword"),
        *("inside", "scalar", "zero_dim", "option"),
    ),
    "mask": ("none", "none", "handler", "obs_mask"),
    "scale": ("none", "none", "constant", "rows"),
    "factor": ("none", "none", "penalty", "shared", "observing", "censored"),
    "second": ("none", "none", "blanks", "keyword", "dict", "tuple"),
    "effect": ("none", "none", "groups", "columns"),
    "method": ("laplace", "laplace", "laplace", "ep", "vi"),
}


def random_specs(count: int, seed: int = 0) -> list[Spec]:
    """Specs with two to four parts other than the plain ones, sizes that coincide in most of them;
    no two the same.
    """
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        parts = rng.choice(list(_CHOICES)[1:-1], rng.integers(2, 5), replace=False)
        chosen = {p: str(rng.choice(_CHOICES[p])) for p in (*parts, "family", "method")}
        spec = _sized(Spec(**chosen), rng)
        if is_model(spec):
            found.setdefault(str(spec), spec)
    return list(found.values())


def _sized(spec, rng) -> Spec:
    """With sizes of which two are equal; asked at a number of rows that is none of them and at two
    that are.
    """
    names = list(spec.used)
    sizes = dict(
        zip(
            names,
            (8, *(int(v) for v in rng.permutation([2, 3, 4, 5, 6])[: len(names) - 1])),
            strict=True,
        )
    )
    if len(names) > 1:
        sizes |= dict.fromkeys(rng.choice(names, 2, replace=False), int(rng.integers(4, 7)))
    spec = replace(spec, **sizes)
    asked = rng.permutation(spec.sizes)[:2]
    return replace(spec, rows=(7, *(int(m) for m in asked)))
