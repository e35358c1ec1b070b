"""Items about what a model declares, each (whether it is in order, message): GP sites,
hyperparameters, observations, the predictor.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.gp import unwrap
from ppl_gp.infer.checklist.subject import Subject, space_of
from ppl_gp.model.collapsed import Collapsed
from ppl_gp.model.forgotten import require_observations
from ppl_gp.model.levels import require_levels
from ppl_gp.model.roles import is_factor, require_gp


def gp_sites(subject: Subject):
    """Shapes and kernels of the GP sites."""
    if not subject.found.gps and subject.integrated:
        return True, f"none: a predictor of {list(subject.integrated)}, for local methods and NUTS."
    if not subject.found.gps and (subject.found.hyper or subject.found.local_latents):
        return (
            True,
            "none, and no linear predictor of Gaussian sites (the methods stand below).",
        )
    require_gp(subject.found, subject.trace)
    sites = {name: subject.trace[name]["fn"] for name in subject.found.gps}
    return True, "; ".join(
        f"{k} {fn.shape()}, {type(unwrap(fn).kernel).__name__}" for k, fn in sites.items()
    )


def hyperparameters(subject: Subject):
    """Shapes and priors of what is neither a GP, nor integrated, nor observed."""
    held = [k for k in subject.found.hyper if k not in subject.integrated]
    names = (*held, *subject.found.params)
    space_of(subject)  # raises for a discrete one
    if not names:
        return True, "none: the model is fitted as it stands, with Fixed({})."
    values = {k: subject.trace[k]["value"] for k in names}
    sizes = {
        k: f"tree of {len(jax.tree.leaves(v))}"
        for k, v in values.items()
        if not eqx.is_array_like(v)
    }
    shapes = {k: sizes.get(k) or jnp.shape(v) for k, v in values.items()}
    kinds = {
        k: "param, no prior" if k in subject.found.params else _family(subject.trace[k]["fn"])
        for k in names
    }
    return True, "; ".join(f"{k} {shapes[k] or ''} {kinds[k]}".replace("  ", " ") for k in names)


def _family(fn) -> str:
    return type(unwrap(fn)).__name__


def observations(subject: Subject):
    """Shapes, families and supports of the observed sites."""
    sites = {k: subject.trace[k] for k in subject.found.observed}
    data = {k: s for k, s in sites.items() if not is_factor(s)}
    require_observations(subject.model, subject.args, subject.kwargs, subject.trace)
    if not sites:
        return False, "nothing is observed; pass y=..., and obs=y in the model."
    described = [
        f"{k} {s['fn'].shape()} {_family(s['fn'])} on {unwrap(s['fn']).support}"
        for k, s in data.items()
    ]
    constant = [k for k, s in data.items() if np.ptp(np.asarray(s["value"], float)) == 0.0]
    note = f"; all values of {constant} are equal, so the data say little" if constant else ""
    return True, "; ".join(described) + note


def predictor(subject: Subject):
    """Which Gaussian sites the local methods integrate, and which they hold."""
    held = [k for k in subject.found.hyper if k not in subject.integrated]
    if isinstance(subject.whole, Collapsed):
        hyper = {k: subject.trace[k]["value"] for k in subject.whole.plan.hyper}
        require_levels(subject.whole, subject.args, subject.kwargs, hyper)
    if not subject.integrated:
        return True, "f itself: no other Gaussian site enters through one linear predictor."
    R = subject.whole.plan.functions if isinstance(subject.whole, Collapsed) else 1
    if R > 1:
        return True, (
            f"{R} functions a datum, of {list(subject.integrated)}, which Laplace, EP and VI "
            f"integrate{_held(held)}."
        )
    return True, (
        f"one, of {list(subject.integrated)}, which Laplace, EP, VI and LocalBound "
        f"integrate{_held(held)}."
    )


def _held(names: list[str]) -> str:
    return f"; {names} are hyperparameters" if names else ""
