"""What a run of `SVGP` does not change, and what it raises: ELBO of a batch plus log prior; and a
batch's rows over devices: data-parallel training by JAX's sharding, in any processes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ppl_gp.deep.bound import terms
from ppl_gp.deep.structure import Structure
from ppl_gp.errors import DataError
from ppl_gp.infer.batches import Source
from ppl_gp.infer.hyper.autoguides import HyperGuide
from ppl_gp.infer.hyper.space import Space, log_prior
from ppl_gp.sparse.bound import Batch, Terms, Variational
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import NaturalGaussian, Nudge
from ppl_gp.sparse.svgp import Layers

# of the natural-gradient step on minibatches: 0.1, decaying to a tenth of that
FIRST_RATE, LAST_SHARE = 0.1, 0.1


class Problem(eqx.Module):
    """What a run does not change. Of its entries that are no arrays compiled steps are a function:
    the next fit finds them again, and another value of a rate compiles nothing anew.
    """

    model: Callable
    expectation: Expectation
    structure: Structure
    layers: Layers  # of equal ones the same code: without q(h), whose arrays are the state's
    beta: Array  # in place of theirs
    guide: HyperGuide | None
    names: tuple[str, ...]  # hyperparameters that are trained or drawn
    train_inducing: bool
    whole: bool  # every batch is all data
    drawn: bool  # the bound of a batch is an estimate by draws
    learning: Any  # rate before its decay, or a schedule: step -> rate
    natural: Any  # size of the natural-gradient step, a schedule, or `None`
    optimiser: Callable | None
    num_data: Array  # N, also where a batch's rows weigh 1 in a plate of the model that subsamples
    max_steps: int
    warm_up: int
    fixed: dict  # hyperparameters
    units: Any  # of the structure of the trained inducing variables
    # {latent site: what of q(h) is no array, such as an encoder's activation functions}
    frozen: dict

    @property
    def draws_hyper(self) -> bool:
        """Whether hyperparameters have a distribution."""
        return self.guide is not None and self.guide.draws

    @property
    def noisy(self) -> bool:
        """Whether the bound of a step is an estimate."""
        return self.drawn or not self.whole

    def learning_rate(self, step):
        """Of the optimiser: a number decays by a cosine to a hundredth."""
        if not isinstance(self.learning, Array):
            return self.learning(step)
        return self.learning * optax.cosine_decay_schedule(1.0, self.max_steps, alpha=0.01)(step)

    def natural_rate(self, step):
        """Size of the natural-gradient step."""
        if self.natural is None and self.noisy:
            return FIRST_RATE * LAST_SHARE ** (step / self.max_steps)
        rate = jnp.asarray(1.0) if self.natural is None else self.natural
        return rate if isinstance(rate, Array) else rate(step)

    def optax(self, step) -> optax.GradientTransformation:
        """The optimiser of everything but natural-gradient sites, at a step of the run."""
        # the run's step, not the optimiser's own count, which begins again after a warm-up
        return (self.optimiser or optax.adam)(lambda _: self.learning_rate(step))


def is_trained(problem: Problem, free, variational: Variational):
    """A tree of booleans like (free, variational): what the optimiser trains."""

    def mark(tree, yes):
        return jax.tree.map(lambda x: yes and eqx.is_inexact_array(x), tree)

    q = {k: mark(v, not isinstance(v, NaturalGaussian)) for k, v in variational.q.items()}
    variables = mark(variational.variables, problem.train_inducing)
    return mark(free, True), Variational(variables, q, mark(variational.latents, True))


def objective(
    problem: Problem,
    free: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
) -> tuple[Float[Array, ""], Terms]:
    """(the objective, nats; the bound's terms) on a batch of B of N data:

      sum_n (N / B) E[log p(y_n | f_n, h_n)]      expected log likelihood, f ~ q(f), h_n ~ q(h_n)
    - sum_n (N / B) KL[q(h_n) || p(h_n)]          latents; both lines are one log-mean-exp over K
                                                  copies where num_importance = K > 1
    - sum over GP sites of KL[q(u) || p(u)]
    + log p(observations that belong to no datum)
    + log p(hyperparameters)                      - log q of them where a guide draws them

    Every KL times `beta`. `deep.bound.terms` has all lines but the last; `nudge`: zeros whose
    gradient is the natural one.
    """
    hyper, log_p = hyper_at(problem, free, batch)
    t = terms_at(problem, hyper, variational, batch, nudge)
    return t.bound + log_p, t


def terms_at(
    problem: Problem,
    hyper: dict,
    variational: Variational,
    batch: Batch,
    nudge: dict[str, Nudge] | None = None,
) -> Terms:
    """The terms of the bound on a batch, at hyperparameters."""
    whole = variational._replace(latents=eqx.combine(variational.latents, problem.frozen))
    p, layers = problem, dataclasses.replace(problem.layers, beta=problem.beta)
    return terms(p.model, p.expectation, layers, p.structure, hyper, whole, batch, nudge)


def hyper_at(problem: Problem, free, batch: Batch):
    """(hyperparameters, log prior - log q of them)."""
    if problem.guide is None:
        given = {**problem.fixed, **batch.given}
        where = Space(problem.model, problem.names, batch.args, batch.kwargs, given)
        hyper, log_q = where.constrain(free), jnp.zeros(())
    else:
        key = jax.random.fold_in(batch.key, 1)
        hyper, log_q = problem.guide.draw(free, key, batch.args, batch.kwargs)
    hyper = {**problem.fixed, **hyper}
    log_p = log_prior(problem.model, batch.args, batch.kwargs, {**hyper, **batch.given})
    return hyper, log_p - log_q


class Placement(NamedTuple):
    """Where batches and parameters live; without a mesh on the default device. Rows are split over
    the mesh's one axis, parameters are on every device; the compiler adds the sums of partial
    bounds and gradients. With several processes (`jax.distributed`) every process must run the same
    program on the same data, and holds the rows of its own devices only.
    """

    mesh: Any = None

    def batch(self, batch: Batch, axis: int = 0) -> Batch:
        """Its rows along an axis: 1 where the first counts batches."""
        if self.mesh is None:
            return batch
        num, along = batch.weights.shape[axis], PartitionSpec(*[None] * axis, "data")
        if num % self.mesh.size:  # a last sum over few data: on every device
            return self.replicated(batch)

        def put(x):
            is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            has_rows = not is_key and x.ndim > axis and x.shape[axis] == num
            return self._place(x, along if has_rows else PartitionSpec())

        return self._mapped(put, batch)

    def replicated(self, tree):
        """On every device."""
        return self._mapped(lambda x: self._place(x, PartitionSpec()), tree)

    def local(self, tree):
        """Back on this process' default device, where each process can use them alone."""
        return self._mapped(lambda x: jnp.asarray(np.asarray(x)), tree)

    def _mapped(self, put, tree):
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: put(x) if eqx.is_array(x) else x, tree)

    def _place(self, x, spec):
        sharding = NamedSharding(self.mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self._place(jax.random.key_data(x), spec))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def placement(devices: int | None, source: Source) -> Placement:
    """A mesh over this many of all processes' devices; `None`: no mesh."""
    if devices is None:
        return Placement()
    if devices > jax.device_count():
        raise DataError(
            f"SVGP(devices={devices}): JAX sees {jax.device_count()}; on CPU ask for more with "
            "numpyro.set_host_device_count(n) before anything else."
        )
    if source.batch_size is not None and source.batch_size % devices:
        raise DataError(
            f"SVGP(devices={devices}): a batch of {source.batch_size} rows cannot be split evenly; "
            "choose a multiple."
        )
    some = jax.devices()[:devices]
    return Placement(jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=some))
