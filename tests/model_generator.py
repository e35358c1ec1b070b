"""Models put together from parts: `Spec` names the parts, `Problem` is the NumPyro function, its data, and its mathematics in NumPy.

A datum has up to R x P entries (repeats, outputs), which share its f. NumPy holds them as (rows, R, P); `to_site` turns
that into the shape that the model's site has. All numbers are drawn once for a pool of rows; the first N train.
"""

import zlib
from dataclasses import dataclass, fields

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from likelihood_families import FAMILIES
from numpyro import handlers

import ppl_gp as pg

VARIANCE, LENGTHSCALE, JITTER = 1.3, 0.9, 1e-6
POOL = 24

# Where a row's entries stand in the site: name -> (rows' axis, ...) as a function of (rows, R, P) arrays.
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
OUTPUTS = ("outputs_inner", "outputs_outer", "event_inner", "bare_inner", "bare_outer", "repeats_and_outputs")
REPEATS = ("repeats_inner", "repeats_outer", "repeats_and_outputs")


@dataclass(frozen=True)
class Spec:
    """One model. Sizes are small and meant to coincide: N `num`, `outputs` P, `repeats` R, `blanks`, `groups`, D."""

    family: str = "normal"
    layout: str = "plain"
    inputs: str = "column"  # column (N, 1), vector (N,), wide (N, D), dict, tuple, float32, stations (N,) of a table
    # s: one site, a site in the outputs' plate, a param, a constant, or a table that is passed (P,)
    noise: str = "global"
    # e: none, positional, keyword, default, default_keyword, inside (the inputs' container), scalar, zero_dim, option
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
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default and f.name != "rows"]
        return "-".join(f"{_SHORT.get(f.name, '')}{getattr(self, f.name)}" for f in changed) or "normal"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size of the model but one and the number of new rows: N, and those that its parts have."""
        outcomes = FAMILIES[self.family].outcomes
        found = {
            self.num,
            self.outputs if self.layout in OUTPUTS else 0,
            self.repeats if self.layout in REPEATS else 0,
            self.blanks if self.second == "blanks" else 0,
            self.groups if self.effect == "groups" else 0,
            self.columns if self.inputs in ("wide", "dict", "tuple") else 0,
            self.groups if self.inputs == "stations" else 0,
            outcomes or 0,
        }
        return tuple(sorted(found - {0, 1}))


_SHORT = {"num": "N", "outputs": "P", "repeats": "R", "blanks": "B", "groups": "G", "columns": "D"} | {
    "noise": "s_", "exposure": "e_", "mask": "mask_", "scale": "scale_", "factor": "factor_", "second": "second_"
}  # fmt: skip


class Problem:
    """A spec's model, its hyperparameters and data, and the same mathematics in NumPy."""

    def __init__(self, spec: Spec):
        self.spec, self.family = spec, FAMILIES[spec.family]
        rng = np.random.default_rng(zlib.crc32(str(spec).encode()))
        self.R = spec.repeats if spec.layout in REPEATS else 1
        self.P = spec.outputs if spec.layout in OUTPUTS else 1
        self.D = spec.columns if spec.inputs in ("wide", "dict", "tuple") else 1
        self.coords = np.linspace(-2.0, 2.0, spec.groups)[rng.permutation(spec.groups)]
        self._draw_arguments(rng)
        self._draw_observations(rng)
        self.hyper = self._hyper()
        self.model = self._with_signature()

    # Data, for every row of the pool.

    def _draw_arguments(self, rng):
        spec = self.spec
        self.station = rng.integers(0, spec.groups, POOL)
        self.x = np.round(rng.uniform(-2.0, 2.0, (POOL, self.D)), 3)
        if spec.inputs == "stations":
            self.x = self.coords[self.station][:, None]
        if spec.inputs == "float32":
            self.x = self.x.astype(np.float32).astype(float)
        constant = {"scalar": 2, "zero_dim": 2, "option": 2, "none": 1}
        value = constant.get(spec.exposure)
        self.e = rng.integers(1, 5, POOL) if value is None else np.full(POOL, value)
        per_output = spec.noise in ("outputs", "table")
        self.s = rng.uniform(0.4, 1.5, self.P) if per_output else np.full(self.P, 0.7)
        self.group = rng.integers(0, spec.groups, POOL)
        self.b = rng.normal(size=spec.groups if spec.effect == "groups" else self.D)
        self.weights = rng.uniform(0.3, 2.0, POOL) if spec.scale == "rows" else np.full(POOL, 1.0)
        self.z = rng.normal(size=spec.blanks)
        self.mask = np.ones((POOL, self.R, self.P), bool)
        if spec.mask != "none":
            self.mask = rng.uniform(size=self.mask.shape) < 0.7
        self.censored = rng.uniform(size=POOL) < 0.4

    def _draw_observations(self, rng):
        f = np.sin(2.0 * self.x[:, 0]) + self.offset(np.arange(POOL))
        shape = np.zeros((POOL, self.R, self.P))
        self.y = self.family.draw(rng, f[:, None, None] + shape, self.s + shape, self.e[:, None, None] + 0 * shape.astype(int))
        self.v = rng.normal(2.0 * f, 0.5)

    def offset(self, rows):
        """What is added to f by effects with known coefficients, (len(rows),)."""
        effects = {"groups": self.b[self.group[rows] % len(self.b)], "columns": self.x[rows] @ self.b[: self.D]}
        return effects.get(self.spec.effect, np.zeros(len(rows)))

    # The model.

    def _hyper(self):
        spec, values = self.spec, {"variance": np.asarray(VARIANCE)}
        if spec.noise == "outputs":
            outer = spec.layout in ("outputs_outer", "bare_outer")
            values["s"] = self.s[:, None] if outer else self.s
        if spec.noise in ("global", "param"):
            values["s"] = self.s[0]
        if spec.effect != "none":
            values["b"] = self.b
        return values

    def _with_signature(self):
        """The model with its exposure taken in this spec's way."""
        core, spec = self.core, self.spec

        def plain(X, y=None, **rest):
            core(X, 1, y, **rest)

        def inside(X, y=None, **rest):
            core(X, X["e"] if isinstance(X, dict) else X[-1], y, **rest)

        def positional(X, e, y=None, **rest):
            core(X, e, y, **rest)

        def keyword(X, y=None, *, e, **rest):
            core(X, e, y, **rest)

        def default(X, e=1, y=None, **rest):
            core(X, e, y, **rest)

        def option(X, y=None, link="one", columns=("a", "b"), **rest):
            core(X, 2 if link == "two" and list(columns) == ["c", "d"] else 1, y, **rest)

        by_name = {"none": plain, "zero_dim": keyword, "scalar": positional, "default_keyword": default}
        return by_name.get(spec.exposure) or locals()[spec.exposure]

    def core(self, X, e, y, mask=None, weights=None, z=None, v=None, censored=None, group=None, table=None, coords=None):
        """The model itself; every argument after y comes by keyword, where the spec has it."""
        spec = self.spec
        inputs = self._gp_inputs(X, coords)
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, LENGTHSCALE), inputs, jitter=JITTER))
        n = f.shape[0]
        s = self._noise(table)
        eta = f + self._effect(inputs, group)
        if spec.factor == "shared":
            numpyro.factor("shared", -0.5 * jnp.log(variance) ** 2)
        if spec.second == "blanks":
            with numpyro.plate("blanks", spec.blanks):
                numpyro.sample("z", dist.Normal(0.0, s), obs=z)
        if spec.factor == "penalty":
            with numpyro.plate("data", n):
                numpyro.factor("penalty", -0.25 * f**2)
        weights = 2.0 if spec.scale == "constant" else weights
        with handlers.scale(scale=1.0 if weights is None else self._along(weights)):
            self._observe(n, f, eta, s, e, y, v, mask, censored)

    def _gp_inputs(self, X, coords):
        if self.spec.inputs == "stations":
            return coords[X]
        if self.spec.inputs == "dict":
            return jnp.stack([X["x"], *(X[f"x{i}"] for i in range(1, self.D))], -1)
        return jnp.stack(X[: self.D], -1) if self.spec.inputs == "tuple" else X

    def _noise(self, table):
        spec = self.spec
        if spec.noise == "outputs":
            if spec.layout.startswith("bare"):
                s = numpyro.sample("s", dist.LogNormal(0.0, 1.0).expand(self.hyper["s"].shape).to_event())
                return s
            with numpyro.plate("outputs", self.P, dim=-2 if spec.layout == "outputs_outer" else -1):
                return numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        if spec.noise == "table":
            return table[:, None] if spec.layout in ("outputs_outer", "bare_outer") else table
        if spec.noise == "param":
            return numpyro.param("s", 1.0, constraint=dist.constraints.positive)
        return numpyro.sample("s", dist.LogNormal(0.0, 1.0)) if spec.noise == "global" else self.s[0]

    def _effect(self, inputs, group):
        if self.spec.effect == "none":
            return 0.0
        with numpyro.plate(self.spec.effect, len(self.b)):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        return b[group] if self.spec.effect == "groups" else inputs.reshape(inputs.shape[0], -1) @ b

    def _along(self, values):
        """(n,) values along the site's data axis."""
        inner = ("outputs_inner", "bare_inner", "repeats_inner", "repeats_and_outputs")
        return values[:, None] if jnp.ndim(values) and self.spec.layout in inner else values

    def _plates(self, n):
        """The plates around y, by layout; an event or a bare batch has its axes without one."""
        data = {"outputs_inner": -2, "repeats_inner": -2, "repeats_and_outputs": -2}.get(self.spec.layout, -1)
        plates = [] if self.spec.layout in ("no_plate", "one_event", "bare_inner", "bare_outer") else [("data", n, data)]
        outputs = {"outputs_inner": -1, "outputs_outer": -2, "repeats_and_outputs": -1}.get(self.spec.layout)
        repeats = {"repeats_inner": -1, "repeats_outer": -2, "repeats_and_outputs": -3}.get(self.spec.layout)
        plates += [("outputs", self.P, outputs)] if outputs else []
        plates += [("repeats", self.R, repeats)] if repeats else []
        return [numpyro.plate(name, size, dim=dim) for name, size, dim in plates]

    def _observe(self, n, f, eta, s, e, y, v, mask, censored):
        spec = self.spec
        along = (lambda a: a[:, None] if jnp.ndim(a) else a) if spec.layout == "event_inner" else self._along
        fn = self.family.site(along(eta), s, along(e))
        if spec.layout in ("repeats_inner", "repeats_outer", "bare_outer"):
            shape = {"repeats_inner": (n, self.R), "repeats_outer": (self.R, n), "bare_outer": (self.P, n)}[spec.layout]
            fn = fn.expand(shape)
        if spec.layout in ("event_inner", "one_event"):
            fn = fn.to_event(1)
        if isinstance(y, dict | tuple):
            y, v = (y["y"], y["v"]) if isinstance(y, dict) else y
        with _all(self._plates(n)):
            if spec.factor == "observing":
                if y is not None:
                    numpyro.factor("likelihood", fn.log_prob(y))
            elif spec.factor == "censored":
                self._censored(fn, y, censored)
            elif spec.mask == "obs_mask":
                numpyro.sample("y", fn, obs=y, obs_mask=mask)
            else:
                with handlers.mask(mask=True if mask is None else mask):
                    numpyro.sample("y", fn, obs=y)
        if spec.second in ("keyword", "dict", "tuple"):
            with numpyro.plate("data", n):
                numpyro.sample("v", dist.Normal(2.0 * f, 0.5), obs=v)

    def _censored(self, fn, y, censored):
        """Where `censored`, y says that the value is above it."""
        with handlers.mask(mask=True if y is None else ~censored):
            numpyro.sample("y", fn, obs=y)
        if y is not None:
            above = jnp.log1p(-dist.Normal(fn.loc, fn.scale).cdf(y))
            numpyro.factor("above", jnp.where(censored, above, 0.0))

    # The arguments of a call.

    def arguments(self, rows):
        """((X, ...), {keyword: row-wise array}) at rows of the pool: what has to be given again."""
        spec, rows = self.spec, np.asarray(rows)
        x, e, rest = self.x[rows], self.e[rows], {}
        X = {"column": x, "wide": x, "vector": x[:, 0], "stations": self.station[rows], "float32": x.astype(np.float32)}
        X = X.get(spec.inputs)
        if spec.inputs == "tuple":
            X = (*x.T, e) if spec.exposure == "inside" else tuple(x.T)
        if spec.inputs == "dict":
            X = {"x": x[:, 0], **{f"x{i}": x[:, i] for i in range(1, self.D)}}
            X |= {"e": e} if spec.exposure == "inside" else {}
        args = (X, e) if spec.exposure in ("positional", "default") else (X,)
        rest |= {"e": e} if spec.exposure in ("keyword", "default_keyword") else {}
        rest |= {"mask": self.to_site(self.mask[rows])} if spec.mask != "none" else {}
        rest |= {"weights": self.weights[rows]} if spec.scale == "rows" else {}
        rest |= {"censored": self.censored[rows]} if spec.factor == "censored" else {}
        rest |= {"group": self.group[rows]} if spec.effect == "groups" else {}
        return args, rest

    def remembered(self):
        """(positional, keyword) arguments of training that are not one entry a datum."""
        spec, rest = self.spec, {}
        rest |= {"e": np.asarray(2.0)} if spec.exposure == "zero_dim" else {}
        rest |= {"link": "two", "columns": ["c", "d"]} if spec.exposure == "option" else {}
        rest |= {"z": self.z} if spec.second == "blanks" else {}
        rest |= {"table": self.s} if spec.noise == "table" else {}
        rest |= {"coords": self.coords} if spec.inputs == "stations" else {}
        return ((2,) if spec.exposure == "scalar" else ()), rest

    def observations(self, rows):
        """(y, {keyword: observations}) at rows of the pool, as the model takes them."""
        y, v = self.to_site(self.y[rows]), self.v[rows]
        containers = {"dict": {"y": y, "v": v}, "tuple": (y, v)}
        return containers.get(self.spec.second, y), {"v": v} if self.spec.second == "keyword" else {}

    def to_site(self, values):
        """(rows, R, P, ...) in the shape of the site y."""
        return LAYOUTS[self.spec.layout](values)

    # The mathematics.

    def kernel(self, a, b):
        """k(x_a, x_b) between rows of the pool, without jitter."""
        squared = np.sum((self.x[a][:, None] - self.x[b][None]) ** 2, -1)
        return VARIANCE * np.exp(-0.5 * squared / LENGTHSCALE**2)

    def log_lik(self, rows, y=None, training=True):
        """f (..., rows) -> log p(y_n | f_n) (..., rows), nats; in training with scales and with factors that see no y."""
        spec, rows = self.spec, np.asarray(rows)
        y = self.y[rows] if y is None else y
        scale = self.weights[rows] * (2.0 if spec.scale == "constant" else 1.0)

        def value(f):
            eta = (f + self.offset(rows))[..., None, None]
            entries = self.family.log_prob(y, eta, self.s, self.e[rows][:, None, None])
            if spec.factor == "censored":
                entries = np.where(self.censored[rows][:, None, None], self._log_above(y, eta, rows), entries)
            total = np.sum(np.where(self.mask[rows], entries, 0.0), (-1, -2))
            if spec.second in ("keyword", "dict", "tuple"):
                total = total - 0.5 * ((self.v[rows] - 2.0 * f) / 0.5) ** 2 - np.log(0.5) - 0.5 * np.log(2 * np.pi)
            if not training:
                return total
            return scale * total - (0.25 * f**2 if spec.factor == "penalty" else 0.0)

        return value

    def _log_above(self, y, eta, rows):
        from scipy.special import log_ndtr

        return log_ndtr((eta - y) / (self.s / np.sqrt(self.e[rows][:, None, None])))

    def shared(self) -> float:
        """What the evidence holds beside f: blanks that inform the noise, a factor of a hyperparameter."""
        if self.spec.second == "blanks":
            s = self.s[0]
            return float(np.sum(-0.5 * (self.z / s) ** 2 - np.log(s) - 0.5 * np.log(2 * np.pi)))
        return -0.5 * np.log(VARIANCE) ** 2 if self.spec.factor == "shared" else 0.0

    def moments(self, rows):
        """f (..., rows) -> (mean, variance) of the entries of y, (..., rows, R, P)."""
        rows = np.asarray(rows)
        shape = (len(rows), self.R, self.P)

        def value(f):
            eta = (f + self.offset(rows))[..., None, None]
            found = self.family.moments(eta + np.zeros(shape), self.s, self.e[rows][:, None, None])
            return [np.broadcast_to(m, (*f.shape[:-1], *shape)) for m in found]

        return value


class _all:
    """Several context managers as one, in order."""

    def __init__(self, managers):
        self.managers = managers

    def __enter__(self):
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *error):
        for manager in reversed(self.managers):
            manager.__exit__(*error)
