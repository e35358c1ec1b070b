"""Running a NumPyro kernel in chunks: progress, Ctrl-C that keeps the draws so far, and no
recompilation on new data.

Chains are one function over a leading axis: a compiled loop on CPU, a vectorised map on
accelerators, spread over devices. On CPU every Cholesky factor already fills the cores, and a
vectorised `while_loop` would run all lanes as long as the slowest and both sides of every `cond`;
on a GPU one wide kernel is worth that.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.infer
from jax import lax, random
from jax.sharding import AxisType, PartitionSpec
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer.util import constrain_fn

from ppl_gp.draws import Draws
from ppl_gp.errors import Result
from ppl_gp.kept import Kept
from ppl_gp.quick import full_jit, quick_jit
from ppl_gp.results.fit import Fit
from ppl_gp.runtime import Stage, interruptible
from ppl_gp.settings import ChainSettings


def over_leading_axis(function, xs):
    """function mapped over the leading axis of the pytree xs, on one device."""
    return lax.map(function, xs) if jax.default_backend() == "cpu" else jax.vmap(function)(xs)


def over_devices(function, xs):
    """As `over_leading_axis`, in parallel on as many of JAX's devices as divide the axis."""
    num_devices = math.gcd(jax.tree.leaves(xs)[0].shape[0], jax.local_device_count())
    if num_devices == 1:
        return over_leading_axis(function, xs)
    along, devices = PartitionSpec("chain"), jax.local_devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("chain",), (AxisType.Auto,), devices=devices)
    one = partial(over_leading_axis, function)
    # The check of varying axes does not know every primitive that a sampler uses.
    return jax.shard_map(one, mesh=mesh, in_specs=along, out_specs=along, check_vma=False)(xs)


CHUNK = 25
_R_HAT_LIMIT = 1.05
# effective ones, below which r-hat says nothing: Gelman et al. 2013 (BDA3), 11.5
_DRAWS_PER_CHAIN = 10
_MIN_DRAWS = 4  # of a chain, that its halves have a variance


class Kernel(numpyro.infer.NUTS):
    """NumPyro's NUTS, its constrained draws made from the model alone: NumPyro's `postprocess_fn`
    keeps the transforms of the last trace, which may be of other options of the model.
    """

    def postprocess_fn(self, model_args, model_kwargs):
        """(z) -> constrained values, and deterministic sites."""
        given = self.model, model_args, model_kwargs
        return partial(constrain_fn, *given, return_deterministic=True)


class Chains(NamedTuple):
    """Draws by site, leading axes (chain, draw)."""

    values: dict[str, Any]
    extra: dict[str, Any]

    @property
    def flat(self) -> dict[str, Any]:
        """{site: (S, ...)} of all chains together."""
        return jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), self.values)


@quick_jit
def _init(kernel, keys, num_warmup: int, args, kwargs):
    def one(key):
        return kernel.init(random.wrap_key_data(key), num_warmup, None, args, kwargs)

    return over_devices(one, keys)


@full_jit
def _chunk(kernel, states, args, kwargs, num: int):

    def transition(state, _):
        state = kernel.sample(state, args, kwargs)
        return state, _record(state)

    return over_devices(lambda state: lax.scan(transition, state, None, length=num), states)


def _record(state):
    fields = {"z": state.z}
    for name, label in _FIELDS.items():
        inner = getattr(state, name, getattr(getattr(state, "hmc_state", None), name, None))
        if inner is not None:
            fields[label] = inner
    return fields


_FIELDS = {
    "diverging": "diverging",
    "accept_prob": "acceptance_rate",
    "num_steps": "n_steps",
    "energy": "energy",
}


@full_jit
def _postprocess(kernel, z, args, kwargs):
    """Constrained values and deterministic sites of every draw."""
    transform = kernel.postprocess_fn(args, kwargs)
    return lax.map(lambda chain: lax.map(transform, chain), z)


def run_chains(
    kernel, config: ChainSettings, rng_key, args, kwargs, *, progress: bool, label: str
) -> Chains:
    """Warm up and sample all chains. Ctrl-C keeps the draws so far, or raises in the warm-up."""
    keys = random.key_data(random.split(rng_key, config.num_chains))
    states = _init(kernel, keys, config.num_warmup, args, kwargs)
    stages = _stages(kernel, states, args, kwargs, _schedule(config))
    (_, parts), _ = interruptible(stages, label, config.num_warmup + config.num_samples, progress)
    record = jax.tree.map(lambda *x: np.concatenate(x, 1), *parts)
    return Chains(_postprocess(kernel, record.pop("z"), args, kwargs), record)


def _stages(kernel, states, args, kwargs, schedule) -> Iterator[Stage[tuple[Any, list]]]:
    """Chunks of transitions: (states of the chains, the chunks of draws so far)."""
    done, parts = 0, []
    yield Stage((states, parts), done, keep=False)
    for num, keep in schedule:
        states, record = _chunk(kernel, states, args, kwargs, num)
        done, parts = done + num, [*parts, record] if keep else parts
        divergences = sum(int(np.sum(p["diverging"])) for p in parts if "diverging" in p)
        text = f"{'sampling' if keep else 'warm-up'}, {divergences} divergences"
        yield Stage((states, parts), done, text, keep)


def _schedule(config: ChainSettings):
    for total, keep in ((config.num_warmup, False), (config.num_samples, True)):
        full, rest = divmod(total, CHUNK)
        yield from ((CHUNK, keep) for _ in range(full))
        if rest:
            yield rest, keep


def diagnose(draws: Chains, names) -> tuple[Result, dict]:
    """r-hat and ESS (the worst entry of each named site), divergences, and the verdict.

    `converged` needs a number for every site: r-hat below 1.05, ESS of at least 10 draws a chain
    (twice as many as halves of chains, times five: Gelman et al. 2013, 11.5), at most 5 %
    divergences. NaN stands for what is no number: fewer than 4 draws, a site or a chain that never
    moved, an ESS estimate below one.
    """
    figures = {name: _figures(np.asarray(draws.values[name], float)) for name in names}
    r_hat, ess = ({name: figure[i] for name, figure in figures.items()} for i in (0, 1))
    divergences = int(np.sum(draws.extra.get("diverging", 0)))
    share = divergences / max(1, np.size(draws.extra.get("diverging", [0])))
    # NaN is neither below nor above.
    mixed = all(r < _R_HAT_LIMIT for r in r_hat.values()) and share < 0.05
    least = {name: _DRAWS_PER_CHAIN * np.shape(draws.values[name])[0] for name in names}
    mixed = mixed and all(ess[name] >= least[name] for name in names)
    return Result.converged if mixed else Result.not_mixed, {
        "r_hat": float(np.max(list(r_hat.values()))),
        "ess": float(np.min(list(ess.values()))),
        "r_hat_by_site": r_hat,
        "ess_by_site": ess,
        "divergences": divergences,
        "sample_stats": draws.extra,
    }


def _figures(x) -> tuple[float, float]:
    """(r-hat, ESS) of the worst entry of a site, x (chain, draw, ...). Entries that are constants
    of the site's support (the zeros of a triangular factor) are left out: others move there.
    """
    x = x.reshape(*x.shape[:2], -1)
    x = x[..., np.ptp(x, (0, 1)) != 0]
    if x.shape[1] < _MIN_DRAWS or x.shape[2] == 0 or not np.all(np.ptp(x, 1)):
        return float("nan"), float("nan")
    ess = float(np.min(effective_sample_size(x)))
    return float(np.max(split_gelman_rubin(x))), ess if ess >= 1.0 else float("nan")


def sampled_fit(
    draws: Chains, names, method, model, args, kwargs, hyper: dict, kept: Mapping[str, Kept]
) -> Fit:
    """A fit of S draws of equal weight: `hyper` {site: (S, ...)}, `kept` {GP site: S entries};
    `names`: the sites by which chains are judged.
    """
    result, stats = diagnose(draws, names)
    return Fit(
        model=model,
        method=method,
        args=args,
        kwargs=kwargs,
        draws=Draws.equal(hyper, kept),
        log_evidence=None,
        result=result,
        stats=stats,
        num_chains=jax.tree.leaves(draws.values)[0].shape[0],
        sampled=True,
    )
