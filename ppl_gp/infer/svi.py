"""`SVI`: NumPyro's stochastic variational inference behind the same verb, for models without a GP.

The guide's distribution is kept as draws, so that every verb answers as it does for `NUTS`.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro import handlers, infer
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDelta,
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoNormal,
    AutoSemiDAIS,
)
from numpyro.infer.util import log_density
from numpyro.optim import optax_to_numpyro

from ppl_gp.draws import Draws
from ppl_gp.errors import LISTED, DataError, ModelError, Result, warn
from ppl_gp.infer.elbo.by_datum import ELBO
from ppl_gp.infer.fit import run_method
from ppl_gp.infer.loop import Stage, interruptible
from ppl_gp.infer.mcmc.sampled_model import missing_parts, require_samplable, self_contained
from ppl_gp.infer.probes.guides import require_guide
from ppl_gp.infer.probes.observed import first_trace
from ppl_gp.model.roles import roles
from ppl_gp.quick import full_jit
from ppl_gp.results.fit import Fit
from ppl_gp.wrappers import unwrap

CHUNK = 50  # steps between two looks at Ctrl-C
BOUNDS = 200  # draws of the bound at the end
_POINTS = (AutoDelta, AutoLaplaceApproximation)  # trained as a point: their loss is no bound
_ANNEALED = (AutoDAIS, AutoSemiDAIS)


@dataclass(frozen=True)
class SVI:
    """NumPyro's SVI with any of its guides.

    - `guide`: an autoguide class, `functools.partial` of one (`init_scale=`), an autoguide that was
      made of the model, or a guide function with the model's arguments.
    - `loss`: a NumPyro loss, by default `ppl_gp.ELBO()`.
    - `optimiser`: an optax transformation, used as it is; by default Adam, whose rate falls from
      `learning_rate` to zero along a squared cosine (memory of squared gradients: 20 steps).
    - `num_draws`: draws of the guide's distribution that are kept.

    Results: completed; nonfinite; interrupted. `log_evidence` is the bound at the end, nats, the
    mean of 200 draws with standard error `stats["log_evidence_se"]`; `None` of guides that are
    trained as points. `stats["losses"]`: of every step. A warning where a mean is further than 0.1
    posterior sd from where it would settle (`stats["mean_shift"]`), or a sd is off by more than a
    tenth (`stats["sd_factor"]`), as the importance weights of 200 draws say.
    Importance-weighted and Renyi's bounds settle elsewhere than these weights say. For them, and
    for guides of points, `stats["ended"]` says that the end was not judged.
    Latents that stand one a datum have parameters of their own in an autoguide: all rows are used
    at every step, unless the model subsamples, which is refused here (`NumPyro`'s own SVI does it).

    `ModelError` for GP sites (`SVGP` is for those), params, discrete latents. A step costs one
    gradient of the loss. Each fit compiles anew, as autoguides hold the shapes of their data.
    """

    evidence_is: ClassVar[str] = "lower bound"

    guide: Any = AutoNormal
    loss: Any = field(default_factory=ELBO)
    num_steps: int = 2000
    learning_rate: float = 0.05
    optimiser: Any = None
    num_draws: int = 1000

    def __post_init__(self):
        for name in ("num_steps", "num_draws"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise DataError(f"SVI({name}={value!r}): give a whole number of at least 1.")
        if not self.learning_rate > 0:
            raise DataError(f"SVI(learning_rate={self.learning_rate!r}): give a positive number.")
        if not (self.optimiser is None or isinstance(self.optimiser, optax.GradientTransformation)):
            raise DataError(
                f"SVI(optimiser={type(self.optimiser).__name__}): give an optax transformation, "
                "optax.adam(0.02), and no optimiser of numpyro.optim."
            )
        if _is_auto_class(self.guide) and issubclass(_class_of(self.guide), _ANNEALED):
            raise DataError(
                f"SVI(guide={_class_of(self.guide).__name__}): annealed guides have no "
                "draws after training that can be scored; take AutoNormal or "
                "AutoMultivariateNormal."
            )


class _Run(NamedTuple):
    """Where the optimiser stands, and the losses so far."""

    state: Any
    losses: list


def _class_of(guide) -> Any:
    return guide.func if isinstance(guide, functools.partial) else guide


def _is_auto_class(guide) -> bool:
    made = _class_of(guide)
    return isinstance(made, type) and issubclass(made, AutoGuide)


@run_method.register
def _fit_svi(method: SVI, model, rng_key, args, kwargs, progress) -> Fit:
    trace = first_trace(model, args, kwargs)
    found = roles(trace)
    if found.gps:
        raise ModelError(
            f"SVI() is for models without a GP, and {list(found.gps)} are GP sites: use "
            f"NumPyro's own SVI with pg.guide(model, ...). {LISTED}"
        )
    require_samplable(model, trace, args, kwargs, "SVI()")
    whole = self_contained(model, missing_parts(trace))
    guide = method.guide(whole) if _is_auto_class(method.guide) else method.guide
    optimiser = optax_to_numpyro(method.optimiser or _adam(method))
    svi = infer.SVI(whole, guide, optimiser, method.loss)
    key_init, key_bound, key_draws = random.split(rng_key, 3)
    stages = _stages(svi, trace, key_init, args, kwargs, method.num_steps)
    run, stopped = interruptible(stages, "SVI", method.num_steps, progress)
    losses, params = np.concatenate(run.losses), svi.get_params(run.state)
    stats = {"losses": losses, "steps": len(losses)}
    result = Result.interrupted if stopped else Result.completed
    bound, names = None, (*found.hyper, *found.local_latents)
    if not np.all(np.isfinite(losses)):
        result = Result.nonfinite
    elif _is_bound(method.loss) and not _has_points(guide, params, args, kwargs):
        bound, stats["log_evidence_se"] = _bound(svi, params, key_bound, args, kwargs)
        if not stopped and _is_elbo(method.loss):
            distance = _distance(svi, params, key_bound, args, kwargs, names)
            _tell_of_distance(method, **distance)
            stats |= distance
    if result is Result.completed and "mean_shift" not in stats:
        stats["ended"] = "all steps made; whether they were enough was not judged"
    with numpyro.validation_enabled(False):
        drawn = _draws(guide, params, key_draws, method.num_draws, args, kwargs)
    return Fit(
        model=model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal({k: drawn[k] for k in names}, {}),
        log_evidence=bound,
        result=result,
        stats=stats,
        num_chains=1,
        sampled=True,
    )


def _adam(method: SVI) -> optax.GradientTransformation:
    """Its memory of squared gradients is 20 steps long: that of 1000 is full of the start's."""
    rate = optax.cosine_decay_schedule(method.learning_rate, method.num_steps, exponent=2.0)
    return optax.adam(rate, b2=0.95)


def _is_bound(loss) -> bool:
    """Renyi's bound of a negative order lies above log p(y)."""
    return not (isinstance(loss, infer.RenyiELBO) and loss.alpha < 0.0)


def _is_elbo(loss) -> bool:
    """Other losses settle elsewhere."""
    single = getattr(loss, "num_importance", 1) == 1 and getattr(loss, "beta", 1.0) == 1.0
    return single and not isinstance(loss, infer.RenyiELBO)


def _has_points(guide, params, args, kwargs) -> bool:
    """Whether q has no density: a site of it is a point."""
    if isinstance(guide, AutoGuideList):
        return any(_has_points(g, params, args, kwargs) for g in guide._guides)
    if isinstance(guide, AutoGuide):
        return isinstance(guide, _POINTS)
    trace = _traced(guide, params, args, kwargs, random.key(0))
    return any(isinstance(unwrap(s["fn"]), dist.Delta) for s in trace.values())


def _traced(guide: Callable, params, args, kwargs, key) -> dict:
    """The sample sites of a guide function."""
    with handlers.block():
        given = handlers.seed(handlers.substitute(guide, data=params), key)
        trace = handlers.trace(given).get_trace(*args, **kwargs)
    return {k: s for k, s in trace.items() if s["type"] == "sample"}


def _stages(svi, trace, key, args, kwargs, num: int) -> Iterator[Stage[_Run]]:
    """Chunks of steps."""
    run = _Run(_started(svi, trace, key, args, kwargs), [])
    yield Stage(run, 0, keep=False)
    for done in range(0, num, CHUNK):
        state, losses = _steps(svi, run.state, args, kwargs, min(CHUNK, num - done))
        run = _Run(state, [*run.losses, np.asarray(losses)])
        yield Stage(run, done + len(losses), f"loss {float(losses[-1]):.3f}")


def _started(svi, trace, key, args, kwargs):
    """The optimiser's first state. `ModelError` for a guide of other sites than the model's, and
    where the density is finite nowhere.
    """
    try:
        if not getattr(svi.loss, "multi_sample_guide", False):  # draws of it have an axis more
            drawn = _traced(svi.guide, {}, args, kwargs, random.split(key, 3)[2])  # as `init` does
            require_guide(drawn, trace, "SVI()")
        return svi.init(key, *args, **kwargs)
    except RuntimeError as error:
        if "valid initial parameters" not in str(error):
            raise
        raise ModelError(
            "SVI(): the log density of the model, or its gradient, is not finite at any value "
            "where NumPyro's guide tried to begin; write it so that it is (jnp.where with safe "
            "arguments in both branches), or begin elsewhere: functools.partial(AutoNormal, "
            "init_loc_fn=numpyro.infer.init_to_value(values={...}))."
        ) from error


@full_jit
def _steps(svi, state, args, kwargs, num: int):
    return lax.scan(lambda s, _: svi.update(s, *args, **kwargs), state, None, length=num)


def _bound(svi, params, key, args, kwargs) -> tuple[float, float]:
    """(the bound at these parameters, its standard error), nats."""
    loss = copy.copy(svi.loss)
    if getattr(loss, "beta", 1.0) != 1.0:  # a loss with another weight of the KL is no bound
        loss.beta = 1.0

    @full_jit
    def losses(params, args, kwargs):
        def one(key):
            return loss.loss(key, params, svi.model, svi.guide, *args, **kwargs)

        return lax.map(one, random.split(key, BOUNDS))

    found = -np.asarray(losses(params, args, kwargs))
    return float(found.mean()), float(found.std(ddof=1) / np.sqrt(BOUNDS))


def _distance(svi, params, key, args, kwargs, names) -> dict[str, float]:
    """How far q is from where it would settle, the most of all latents, unconstrained:
    {"mean_shift": in posterior sd; "sd_factor": of a sd}.

    By the coefficients of log p(y, z) - log q(z) on standardised u and u^2 - 1 under q, which are
    zero there (Stein's identity), and count as zero within four standard errors.
    """

    @full_jit
    def weights(params, args, kwargs):
        def one(key):
            keys = random.split(key)
            log_q, drawn = log_density(handlers.seed(svi.guide, keys[0]), args, kwargs, params)
            values = {k: drawn[k]["value"] for k in names}
            model = handlers.seed(svi.model, keys[1])
            log_p, trace = log_density(model, args, kwargs, {**params, **values})
            free = [biject_to(trace[k]["fn"].support).inv(x) for k, x in values.items()]
            return log_p - log_q, jnp.concatenate([jnp.ravel(x) for x in free])

        return lax.map(one, random.split(key, BOUNDS))

    log_w, z = map(np.asarray, weights(params, args, kwargs))
    u, w = (z - z.mean(0)) / z.std(0), (log_w - log_w.mean())[:, None]
    x = np.stack([u, u**2 - 1.0])  # (2, draws, latents)
    size = np.mean(x**2, 1)
    moved = np.mean(x * w, 1) / size
    noise = 4.0 * (w - np.sum(moved[:, None] * x, 0)).std(0) / np.sqrt(BOUNDS * size)
    slope, bend = np.where(np.abs(moved) > noise, moved, 0.0)
    precision = np.maximum(1.0 - 2.0 * bend, 0.01)  # of the posterior, in units of q's
    mean = np.max(np.abs(slope) / np.sqrt(precision))
    factor = np.exp(np.max(np.abs(np.log(precision))) / 2.0)
    return {"mean_shift": float(mean), "sd_factor": float(factor)}


def _draws(guide: Callable, params, key, num: int, args, kwargs) -> dict[str, jax.Array]:
    """{site: (num, ...)} of the guide's distribution."""
    if isinstance(guide, AutoGuide):
        # of a guide of points NumPyro runs the model, for its deterministic sites
        return dict(guide.sample_posterior(key, params, *args, sample_shape=(num,), **kwargs))
    again = infer.Predictive(guide, params=params, num_samples=num)
    return {k: jnp.asarray(x) for k, x in again(key, *args, **kwargs).items()}


def _tell_of_distance(method: SVI, mean_shift: float, sd_factor: float) -> None:
    """Warn where q is further than a tenth from where it would settle."""
    found = [f"a mean is about {mean_shift:.2g} posterior sd off"] * (mean_shift > 0.1)
    found += [f"a sd is wrong by a factor of about {sd_factor:.3g}"] * (sd_factor > 1.1)
    if found:
        warn(
            f"SVI(num_steps={method.num_steps}) has not settled: by the weights of its draws "
            f"{' and '.join(found)}. Take num_steps={4 * method.num_steps}, a larger "
            "learning_rate, or a guide whose means and spreads are free.",
        )
