"""What a run of `SVGP` does not change: its static plan, rates, and arrays that are held."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ppl_gp.deep.importance import Sampling
from ppl_gp.deep.structure import Structure
from ppl_gp.infer.hyper.autoguides import HyperGuide
from ppl_gp.sparse.bound import Variational
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import NaturalGaussian

# of the natural-gradient step on minibatches: 0.1, decaying to a tenth of that
FIRST_RATE, LAST_SHARE = 0.1, 0.1


@dataclass(frozen=True)
class Plan:
    """What is static about a run: hashable, so that the next fit finds the compiled step again."""

    model: Callable
    expectation: Expectation
    structure: Structure
    sampling: Sampling
    guide: HyperGuide | None
    names: tuple[str, ...]  # hyperparameters that are trained or drawn
    train_inducing: bool
    whole: bool  # every batch is all data
    drawn: bool  # the bound of a batch is an estimate by draws
    schedule: Callable | None  # step -> learning rate, where the user gave one
    natural_schedule: Callable | None  # step -> size of the natural-gradient step, likewise
    optimiser: Callable | None
    max_steps: int
    warm_up: int

    @property
    def draws_hyper(self) -> bool:
        """Whether hyperparameters have a distribution."""
        return self.guide is not None and self.guide.draws

    @property
    def noisy(self) -> bool:
        """Whether the bound of a step is an estimate."""
        return self.drawn or not self.whole


class Rates(NamedTuple):
    """The numbers that a step is made with: arrays, so that another value compiles nothing anew."""

    learning: Any  # before its decay
    natural: Any  # `None`: as `Problem.natural_rate` chooses
    beta: Any


class Problem(eqx.Module):
    """The plan and the arrays that a run does not change: rates, fixed hyperparameters, units of
    the inducing variables.
    """

    plan: Plan = eqx.field(static=True)
    rates: Rates
    fixed: dict
    units: Any  # of the structure of the trained inducing variables
    # {latent site: what of q(h) is no array, such as an encoder's activation functions}
    frozen: dict

    def learning_rate(self, step):
        """Of the optimiser: a number decays by a cosine to a hundredth."""
        if self.plan.schedule is not None:
            return self.plan.schedule(step)
        return self.rates.learning * optax.cosine_decay_schedule(
            1.0, self.plan.max_steps, alpha=0.01
        )(step)

    def natural_rate(self, step):
        """Size of the natural-gradient step."""
        if self.plan.natural_schedule is not None:
            return self.plan.natural_schedule(step)
        if self.rates.natural is None and self.plan.noisy:
            return FIRST_RATE * LAST_SHARE ** (step / self.plan.max_steps)
        return jnp.asarray(1.0) if self.rates.natural is None else self.rates.natural

    def optax(self, step) -> optax.GradientTransformation:
        """The optimiser of everything but natural-gradient sites, at a step of the run."""
        # the run's step, not the optimiser's own count, which begins again after a warm-up
        return (self.plan.optimiser or optax.adam)(lambda _: self.learning_rate(step))


def is_trained(plan: Plan, free, variational: Variational):
    """A tree of booleans like (free, variational): what the optimiser trains."""

    def mark(tree, yes):
        return jax.tree.map(lambda x: yes and eqx.is_inexact_array(x), tree)

    q = {k: mark(v, not isinstance(v, NaturalGaussian)) for k, v in variational.q.items()}
    variables = mark(variational.variables, plan.train_inducing)
    return mark(free, True), Variational(variables, q, mark(variational.latents, True))
