"""Where else a run of `SVGP` may start: other length scales, other modes of q(f). The states have
the shapes of the first one, so that its compiled step serves them all.
"""

import dataclasses
from collections.abc import Iterator

from jax import random

from ppl_gp.hyperparameters import MAP
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.hyper.kernel_scales import other_scales
from ppl_gp.infer.svgp.look import Subject
from ppl_gp.infer.svgp.objective import hyper_at
from ppl_gp.infer.svgp.problem import Problem
from ppl_gp.infer.svgp.step import State, begin
from ppl_gp.model.factors import JointLogLikelihood, LogLikelihood
from ppl_gp.sparse.families import NaturalGaussian
from ppl_gp.sparse.svgp import SVGP

_WIDTH = 0.3  # of q(v) around a draw, in standard deviations of the prior


def starts_elsewhere(
    method: SVGP, subject: Subject, problem: Problem, start: State
) -> Iterator[State]:
    """Other length scales; where the likelihood is not proved log-concave, q(u) around a draw from
    the prior and around minus it.
    """
    for free in other_length_scales(method, subject, problem, start.free):
        yield begin(problem, free, start.variational)
    if _has_modes(subject):
        yield from (_around_draw(problem, start, sign) for sign in (-1.0, 1.0))


def other_length_scales(
    method: SVGP, subject: Subject, problem: Problem, free: dict
) -> Iterator[dict]:
    """`other_scales`, where nobody has given a start."""
    if isinstance(method.hyper, MAP) and method.hyper.init is None:
        batch = as_batch(subject.first, random.key(0))
        hyper = hyper_at(problem, free, batch)[0] | batch.given
        yield from other_scales(free, subject.model, batch.args, batch.kwargs, hyper)


def _has_modes(subject: Subject) -> bool:
    """Whether q(f) of the one function may have several. Abstract."""
    shapes = [subject.trace[k]["fn"].shape() for k in subject.gps]
    if not subject.structure.is_shallow or len(shapes) > 1 or len(shapes[0]) > 1:
        return False
    batch = as_batch(subject.first, random.key(0))
    hyper = {k: subject.trace[k]["value"] for k in subject.names} | batch.given
    joint = JointLogLikelihood(subject.model, batch.num, hyper, batch.args, batch.kwargs)
    return not LogLikelihood(joint, subject.gps[0]).is_concave


def _around_draw(problem: Problem, start: State, sign: float) -> State:
    def moved(q):
        narrow = q.narrowed(_WIDTH)
        draw = random.normal(random.key(11), narrow.nat1.shape, narrow.nat1.dtype)
        return dataclasses.replace(narrow, nat1=narrow.nat1 + sign * draw / _WIDTH**2)

    variational = start.variational
    q = {k: moved(q) if isinstance(q, NaturalGaussian) else q for k, q in variational.q.items()}
    return begin(problem, start.free, variational._replace(q=q))
