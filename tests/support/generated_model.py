"""`DeclaredModel`: a spec's NumPyro function, and its data for a pool of rows, of which the first N
train.

NumPy holds observations as (rows, R, P); `to_site` turns that into the shape that the model's site
has.
"""

import zlib
from contextlib import ExitStack

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from likelihood_families import FAMILIES
from model_generator import LAYOUTS, OUTPUTS, REPEATS, WITH_COLUMNS, Spec
from numpyro import handlers

import ppl_gp as pg

VARIANCE, LENGTHSCALE, JITTER = 1.3, 0.9, 1e-6
POOL = 24  # rows for which numbers are drawn


class DeclaredModel:
    """A spec's model, its hyperparameters and data, and the arguments of a call at rows of the
    pool.
    """

    def __init__(self, spec: Spec):
        self.spec, self.family, self.variance = spec, FAMILIES[spec.family], VARIANCE
        rng = np.random.default_rng(zlib.crc32(str(spec).encode()))
        self.R = spec.repeats if spec.layout in REPEATS else 1
        self.P = spec.outputs if spec.layout in OUTPUTS else 1
        self.D = spec.columns if spec.inputs in WITH_COLUMNS else 1
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
        e = np.broadcast_to(self.e[:, None, None], shape.shape)
        self.y = self.family.draw(rng, f[:, None, None] + shape, self.s + shape, e)
        self.v = rng.normal(2.0 * f, 0.5)

    def offset(self, rows):
        """What is added to f by effects with known coefficients, (len(rows),)."""
        if self.spec.effect == "groups":
            return self.b[self.group[rows]]
        return self.x[rows] @ self.b if self.spec.effect == "columns" else np.zeros(len(rows))

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

        by_name = {
            "none": plain,
            "zero_dim": keyword,
            "scalar": positional,
            "default_keyword": default,
        }
        return by_name.get(spec.exposure) or locals()[spec.exposure]

    def core(
        self, X, e, y, *, coords=None, table=None, group=None, z=None, weights=None, **observing
    ):
        """The model itself; arguments after y come where the spec has them, `observing` those of
        `_observe`.
        """
        spec = self.spec
        inputs = self._gp_inputs(X, coords)
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, LENGTHSCALE), inputs, jitter=JITTER))
        s = self._noise(table)
        eta = f + self._effect(inputs, group)
        if spec.factor == "shared":
            numpyro.factor("shared", -0.5 * jnp.log(variance) ** 2)
        if spec.second == "blanks":
            with numpyro.plate("blanks", spec.blanks):
                numpyro.sample("z", dist.Normal(0.0, s), obs=z)
        if spec.factor == "penalty":
            with numpyro.plate("data", f.shape[0]):
                numpyro.factor("penalty", -0.25 * f**2)
        weights = 2.0 if spec.scale == "constant" else weights
        with handlers.scale(scale=1.0 if weights is None else self._along(weights)):
            self._observe(f, eta, s, e, y, **observing)

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
                s = numpyro.sample(
                    "s", dist.LogNormal(0.0, 1.0).expand(self.hyper["s"].shape).to_event()
                )
                return s
            with numpyro.plate("outputs", self.P, dim=-2 if spec.layout == "outputs_outer" else -1):
                return numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        if spec.noise == "table":
            return table[:, None] if spec.layout in ("outputs_outer", "bare_outer") else table
        if spec.noise == "param":
            return numpyro.param("s", 1.0, constraint=dist.constraints.positive)
        return (
            numpyro.sample("s", dist.LogNormal(0.0, 1.0)) if spec.noise == "global" else self.s[0]
        )

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
        data = {"outputs_inner": -2, "repeats_inner": -2, "repeats_and_outputs": -2}.get(
            self.spec.layout, -1
        )
        without = ("no_plate", "one_event", "bare_inner", "bare_outer")
        plates = [] if self.spec.layout in without else [("data", n, data)]
        outputs = {"outputs_inner": -1, "outputs_outer": -2, "repeats_and_outputs": -1}.get(
            self.spec.layout
        )
        repeats = {"repeats_inner": -1, "repeats_outer": -2, "repeats_and_outputs": -3}.get(
            self.spec.layout
        )
        plates += [("outputs", self.P, outputs)] if outputs else []
        plates += [("repeats", self.R, repeats)] if repeats else []
        return [numpyro.plate(name, size, dim=dim) for name, size, dim in plates]

    def _observe(self, f, eta, s, e, y, v=None, mask=None, censored=None):
        spec, n = self.spec, f.shape[0]
        along = (
            (lambda a: a[:, None] if jnp.ndim(a) else a)
            if spec.layout == "event_inner"
            else self._along
        )
        fn = self.family.site(along(eta), s, along(e))
        if spec.layout not in ("plain", "no_plate", "one_event"):
            fn = fn.expand(LAYOUTS[spec.layout](np.zeros((n, self.R, self.P))).shape)
        if spec.layout in ("event_inner", "one_event"):
            fn = fn.to_event(1)
        if isinstance(y, dict | tuple):
            y, v = (y["y"], y["v"]) if isinstance(y, dict) else y
        with ExitStack() as stack:
            for plate in self._plates(n):
                stack.enter_context(plate)
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
        arrays = {
            "vector": x[:, 0],
            "stations": self.station[rows],
            "float32": x.astype(np.float32),
        }
        X = arrays.get(spec.inputs, x)
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
        """(positional, keyword) arguments of training that are not one entry per datum."""
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
        return containers.get(self.spec.second, y), {
            "v": v
        } if self.spec.second == "keyword" else {}

    def to_site(self, values):
        """(rows, R, P, ...) in the shape of the site y."""
        return LAYOUTS[self.spec.layout](values)
