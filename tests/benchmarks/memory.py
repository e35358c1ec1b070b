"""Peak memory of every verb of a sparse fit: N rows, S draws, a function with effects and a latent
input. Each model in a process of its own, each verb above what the process held before it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.benchmarks.common import Row
from tests.benchmarks.fresh import fresh

_SCRIPT = """
import json, pathlib, re, tempfile
import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
jax.config.update("jax_enable_x64", True)
import ppl_gp as pg

def kib(name):
    return int(re.search(name + r":\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

def grown(work):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is the present use from here
    before = kib("VmRSS")
    jax.block_until_ready(jax.tree.leaves(work()))
    return (kib("VmHWM") - before) / 1024

def effects(X, group, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([20]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + u[group]), obs=y)

def latent(X, group, y=None):
    with numpyro.plate("data", X.shape[0]):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
    inputs = jnp.concatenate([X, h[..., None]], -1)
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, jnp.ones(3)), inputs))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

n, draws, rng = {n}, {draws}, np.random.default_rng(0)
X, group, y = rng.normal(size=(n, 2)), rng.integers(0, 20, n), rng.integers(0, 2, n)
model = {model}
method = pg.SVGP(num_inducing=20, batch_size=min(n, 500), max_steps=20, inducing="kmeans")
fits = []
used = {{"fit": grown(lambda: fits.append(pg.fit(model, method, 0, X, group, y=y, throw=False)))}}
fit, folder = fits[0], pathlib.Path(tempfile.mkdtemp())
verbs = {{
    "predict": lambda: fit.predict(X, group).mean,
    "log_density": lambda: fit.log_density(X, y, group),
    "quantiles": lambda: fit.predict(X, group, quantiles=(0.05, 0.95)).quantiles,
    "sample": lambda: fit.sample(1, X, draws, group),
    "components": lambda: {{k: d.mean for k, d in fit.components(X, group).items()}},
    "to_datatree": lambda: [fit.to_datatree(num_draws=draws)] and (),
    "loo": lambda: [fit.loo()] and (),
    "infer_latents": lambda: fit.infer_latents(2, X, y, group).draws,
    "save": lambda: [fit.save(folder / "a.fit")] and (),
}}
for name, verb in verbs.items():
    try:
        used[name] = grown(verb)
    except pg.ModelError:
        used[name] = None
print(json.dumps(used))
"""


class Size(NamedTuple):
    """Rows, draws, and the models."""

    n: int
    draws: int
    models: tuple[str, ...]


FULL = Size(5000, 200, ("effects", "latent"))
TOY = Size(30, 3, ("effects",))


def rows(size: Size = FULL) -> Iterator[Row]:
    """Mebibytes of each verb, and the most that one takes."""
    for model in size.models:
        used = fresh(_SCRIPT.format(n=size.n, draws=size.draws, model=model), cold=False)
        took = {k: v for k, v in used.items() if v is not None}
        figure = ", ".join(f"{k} {v:.0f}" for k, v in took.items()) + " MiB"
        yield Row(
            f"memory of each verb, SVGP, {model}, n = {size.n}, {size.draws} draws",
            figure,
            "below 4096",
            max(took.values()),
            "MiB",
        )
