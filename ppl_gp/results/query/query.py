"""A fit with new inputs, which compiled prediction takes, and the posterior processes at a draw."""

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.core import Tracer
from jaxtyping import Array
from numpyro import handlers

from ppl_gp.deep.latents import LatentGuide
from ppl_gp.draws import Draws, JointMoments, Moments, mixture, plain
from ppl_gp.errors import DataError, ModelError, warn
from ppl_gp.gp import GP, unwrap
from ppl_gp.kept import FromFunctions, Kept
from ppl_gp.kernels.pairs import kernels_differ
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky
from ppl_gp.quick import quick_jit
from ppl_gp.reading.arguments import Leaves, argument_of
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.predictor.collapsed import Collapsed, require_levels
from ppl_gp.reading.predictor.predictor import Rest
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.tracing import annotated, is_valid, reading_of, run, set_gps
from ppl_gp.results.query.layout import Layout, ObservedSite, layout
from ppl_gp.results.query.new_inputs import (
    new_arguments,
    num_rows,
    numbers_explained,
    require_own_rows,
)
from ppl_gp.results.record import Record, first_trace


class Integration(Enum):
    """How y is integrated over f at new inputs."""

    given = "a draw decides y's distribution: the model has no function"
    quadrature = "one f_n decides y_n"
    functions = "several functions decide y_n, row by row, all of them Gaussian given a draw"
    layers = "as one of these, at inputs that are drawn: latents, or layers below"
    joint_draws = "rows of y depend on several rows of f"


BY_DRAWS = (Integration.layers, Integration.joint_draws)


class Query(eqx.Module):
    """Weighted draws with a leading axis S, the training arguments and the new ones.

    `root`: the factor of the one GP site's process, if the hyperparameters are one value.
    """

    model: Any = eqx.field(static=True)  # as declared
    layout: Layout = eqx.field(static=True)
    draws: Draws
    root: Any
    args: tuple
    kwargs: dict[str, Any]
    new_args: tuple
    new_kwargs: dict[str, Any]
    local: dict[str, LatentGuide]  # q(h) that can be had without y
    # new arguments that are observations: their sites are scored, and not drawn
    observed: tuple[str, ...] = eqx.field(static=True, default=())

    @property
    def site(self) -> str | None:
        """The one GP site that is one function (N,), or `None` where there are several."""
        outer = [(k, v) for k, v in self.draws.kept.items() if k not in self.layout.inner]
        alone = len(outer) == 1 and outer[0][1].mean.ndim == 2 and not outer[0][1].coupled
        return outer[0][0] if alone else None

    @property
    def integration(self) -> Integration:
        """The cheapest way that is right for this model."""
        kept, plan, reading = self.draws.kept, self.layout, reading_of(self.model)
        pointwise = all(site.axis is not None for site in plan.sites)
        if not kept and pointwise:
            return Integration.layers if plan.local_latents else Integration.given
        # a local approximation has a pointwise likelihood, which was proved
        is_approximation = not any(v.is_draws for v in kept.values())
        alone = not reading.coupled and kept.keys().isdisjoint(reading.looked_up)
        if not (pointwise and (is_approximation or alone)):
            return Integration.joint_draws
        if plan.local_latents or plan.inner:
            return Integration.layers
        return Integration.functions if self.site is None else Integration.quadrature

    def mixture(self, component: Callable, *beside):
        """component(draw, entry of each array beside ...), mixed over the weighted draws."""
        entries = self.draws, *beside
        return mixture(lambda entry: component(*entry), entries, self.draws.log_weights)

    def encoded(self, draw: Draws) -> dict:
        """{latent site: q(h | x*)} where an encoder that sees x alone gives one."""
        sites = self.trace(draw, {}) if self.local else {}
        new = self.new_args, self.new_kwargs
        return {k: guide.at(sites[k], None, *new) for k, guide in self.local.items()}

    def observing(self, observations: dict) -> "Query":
        """With {argument: value} observed at the new inputs."""
        new = {**self.new_kwargs, **observations}
        return dataclasses.replace(self, new_kwargs=new, observed=tuple(observations))

    def trace(self, draw: Draws, f: dict) -> dict:
        """The model at the new inputs with GP sites given; sites are drawn that nothing observes.

        Latents that were drawn in training stand for the training data, and are left out.
        """
        return run(self.model, self.new_args, self.new_kwargs, draw.hyper, f)

    def valid(self) -> Array:
        """Whether NumPyro takes all parameters at each draw, GPs at their prior means, (S,)."""
        return lax.map(lambda draw: is_valid(self._at_means(draw)), self.draws)

    def _at_means(self, draw: Draws) -> dict:
        """`trace` with the sites that are integrated, at their prior means."""
        if not isinstance(self.model, Collapsed):
            return self.trace(draw, {})
        _, arrays = self.model.completed(self.new_args, self.new_kwargs)
        moved, rest = self.model.moved, Rest(arrays, draw.hyper)
        return moved.trace(moved.zero(rest), rest)

    def require_valid(self, valid=None) -> None:
        """Raise NumPyro's `ValueError` where it takes none, and warn where it takes some."""
        valid = _valid(self) if valid is None else valid
        if isinstance(valid, Tracer) or np.all(valid := np.asarray(valid)):
            return
        if not np.any(valid):
            self._at_means(self.draws.at(0))
        warn(
            f"NumPyro refuses parameters of the model at the new inputs at {np.mean(~valid):.0%} "
            "of the draws, and what is computed from these is not a distribution. Look at what a "
            "scale, rate or probability is there, and map it into its range (softplus, sigmoid)."
        )

    def ask(self, site: ObservedSite, question: Callable):
        """question(distribution of the site at the new inputs), whose values are abstract."""
        found = []

        def look(draw):
            found.append(question(self.trace(draw, {})[site.name]["fn"]))
            return 0

        jax.eval_shape(look, self.draws.at(0))
        return found[0]

    def conditionals(self, draw: Draws) -> dict[str, "Conditional"]:
        """The posterior processes at one draw. O(N^3) or O(M^3), unless factored already."""
        if not draw.kept:
            return {}
        trace = run(self.model, self.args, self.kwargs, draw.known, draw.values)
        return {k: Conditional(unwrap(trace[k]["fn"]), v, self.root) for k, v in draw.kept.items()}

    def marginals(self, draw: Draws) -> dict[str, Moments | JointMoments]:
        """f at the new inputs of every GP site, none of which depends on another."""
        conditionals = self.conditionals(draw)
        new = self.trace(draw, {}) if conditionals else {}
        return {k: c.marginals(unwrap(new[k]["fn"])) for k, c in conditionals.items()}


_valid = quick_jit(Query.valid)


def query_at(fit: Record, X_new, args: tuple, kwargs: dict) -> Query:
    """Check the arguments of a prediction and lay it out."""
    reading = fit.model.reading
    fit.require_untied()
    if any(what == "kernel" for _, what, _ in reading.mixing):
        fit.require_pairs()
    if fit.mixing or (reading.shared and fit.unpaired):  # an effect's prior is in the predictor's
        raise ModelError(reading.why_mixed(True))
    fit.require_pairs()
    new_args, new_kwargs = new_arguments(fit, X_new, args, kwargs)
    require_own_rows(fit, new_args)
    draws = fit.draws
    latents = (*draws.latents, *fit.local)
    with numbers_explained(fit, new_args, new_kwargs):
        num = num_rows(fit, new_args, new_kwargs)
        plan = layout(fit.model, new_args, new_kwargs, draws, num, latents)
    changed = require_same_kernels(fit, new_args, new_kwargs)
    args, kwargs = fit.args, fit.kwargs
    if isinstance(fit.model, Collapsed):
        require_levels(fit.model, new_args, new_kwargs, draws.at(0).hyper)
        args, kwargs = Leaves(fit.model, args, kwargs).replaced(changed)
    stays = not (changed or fit.sampled or len(fit.latent) > 1)
    root = fit.process.root if stays else None  # pyright: ignore[reportAttributeAccessIssue]
    local = {k: q for k, q in fit.local.items() if not q.needs_y}
    return Query(fit.model, plan, draws, root, args, kwargs, new_args, new_kwargs, local)


class Conditional(eqx.Module):
    """p(f(X*) | one draw) of one GP site; several functions (C, N) share the process."""

    prior: GP
    kept: Kept
    root: Any = None

    def marginals(self, new: GP) -> Moments | JointMoments:
        """Mean and variance of f at the rows of `new`, (M,) or (C, M)."""
        if self.kept.coupled:
            process: Any = self.kept.process(self.prior, self.root)
            return JointMoments.of(*process.within(new))
        ask = lambda process, new: process.marginals(new)  # noqa: E731
        return Moments(*self.kept.at(self.prior, new, ask, self.root))

    def draw(self, key, new: GP):
        """One joint draw of f at the rows of `new`, O(M^3) for a factor."""
        if isinstance(self.kept, FromFunctions):
            return self.kept.process(self.prior, self.root).sample(key, new, 1)[0]
        unit = default_jitter(new.variance)

        def factored(posterior, new):
            mean, covariance = posterior.joint(new)
            factor = lambda c: robust_cholesky(c, unit)[0]  # noqa: E731
            for _ in covariance.shape[:-2]:
                factor = jax.vmap(factor)
            return mean, factor(covariance)

        mean, factor = self.kept.at(self.prior, new, factored, self.root)
        white = random.normal(key, mean.shape, mean.dtype)
        drawn = mean + jnp.einsum("...ij,...j->...i", factor, white)
        return jnp.reshape(drawn, new.shape()) if isinstance(new, PredictorGP) else drawn


def _draw_rows(found: Moments | JointMoments, key):
    """A draw of f row by row, from the marginals."""
    if isinstance(found, JointMoments):
        return found.at(random.normal(key, (len(found.mean), 1), found.mean.dtype))
    mean, variance = found
    # the same number for all rows: the answer of one may not depend on its companions
    return mean + jnp.sqrt(variance) * random.normal(key, (*mean.shape[:-1], 1), mean.dtype)


def drawn_runs(query: Query, draw: Draws, joint: bool | None = None) -> Callable:
    """(key, latents) -> (trace, {GP site: Moments}) of the model at new inputs with GP sites, local
    latents that are not given, and unset data drawn.

    `joint`: f at all rows together, by default where rows of y depend on several of f.
    """
    joint = query.integration is Integration.joint_draws if joint is None else joint
    conditionals = query.conditionals(draw)
    # where nothing that is drawn moves the inputs of the GPs, once for all draws
    fixed = query.integration is Integration.functions and not joint
    names, marginals = list(conditionals), query.marginals(draw) if fixed else {}

    def one(key, latents: dict | None = None):
        key_gps, key_rest, key_latents = random.split(key, 3)
        moments = {}

        def value(name, new: GP):
            found = marginals[name] if fixed else conditionals[name].marginals(new)
            moments[name], own = plain(found), random.fold_in(key_gps, names.index(name))
            return conditionals[name].draw(own, new) if joint else _draw_rows(found, own)

        with handlers.block():
            if latents is None:
                pairs = enumerate(query.encoded(draw).items())
                latents = {k: q.sample(random.fold_in(key_latents, i)) for i, (k, q) in pairs}
            seeded = handlers.seed(query.model, key_rest)
            given = set_gps(handlers.substitute(seeded, data=draw.hyper | latents), value)
            trace = handlers.trace(given).get_trace(*query.new_args, **query.new_kwargs)
        return annotated(trace, query.model), moments

    return one


def require_same_kernels(fit: Record, new_args: tuple, new_kwargs: dict) -> dict[str, Any]:
    """{path: value} of the arguments without an axis of the data that have changed. Raises
    `DataError` if one of them changes a kernel, or the mean of the training rows: the training
    covariance, and what the data told, have the old one.

    A table that a linear predictor is computed from keeps the entries of training, and others may
    follow. Kernels and means are compared at the training inputs, if something has changed.
    """
    if not (changed := _changed(fit, Leaves(fit.model, new_args, new_kwargs))):
        return {}
    trained, hyper = first_trace(fit), fit.draws.at(0).hyper
    new = run(fit.model, new_args, new_kwargs, hyper)
    for name in fit.latent:
        prior, other = unwrap(trained[name]["fn"]), unwrap(new[name]["fn"])
        what = f"GP site '{name}'"
        if isinstance(prior, PredictorGP):
            what = "the linear predictor"
            _require_extended(fit, prior, changed)
            if not fit.draws.kept[name].has_sites:
                _require_same_members(fit, prior, other)
        if _means_differ(prior, other):
            raise DataError(
                f"the prior mean of {what} at the training rows changes with {[*changed]}, and was "
                "fitted to the old value. Leave it out (it is remembered), or fit again."
            )
        if kernels_differ(prior.kernel, other.kernel, prior.X):
            raise DataError(
                f"the kernel of {what} changes with {[*changed]}: training rows and new rows would "
                "have no common covariance. Leave it out (it is remembered), fit again, or, if it "
                "has one entry per row, put it into the GP's inputs X as a column."
            )
    return changed


def _require_extended(fit: Record, prior: PredictorGP, changed: dict[str, Any]) -> None:
    """Raise `DataError` for a table that a linear predictor is computed from, if it lacks entries
    of training: those rows are computed from the table that is given.
    """
    kernel, trained = prior.kernel, Leaves(fit.model, fit.args, fit.kwargs).leaves

    def parts(tables):
        return jax.tree.leaves(dataclasses.replace(kernel, tables=tables).at(prior.X[:2]))

    seen = frozenset().union(*sources(parts, kernel.tables))
    for path in (p for p in changed if p in seen):
        old, new = np.asarray(trained[path]), np.asarray(changed[path])
        if old.ndim != new.ndim or any(n < m for n, m in zip(new.shape, old.shape, strict=True)):
            where = f"it has shape {new.shape}, and in training {old.shape}"
        elif (differing := np.argwhere(new[tuple(map(slice, old.shape))] != old)).size:
            at = differing[0]
            where = f"entry {at.tolist()} is {new[tuple(at)]}, and was {old[tuple(at)]}"
        else:
            continue
        more = " New entries may follow those of training: give an index that points to them."
        raise DataError(
            f"argument '{path}' is not that of training: {where}. The linear predictor of the "
            "training rows is computed from it, and the fit knows it at the old values alone. "
            f"Give what was given in training.{more * bool(old.ndim)}"
        )


def _require_same_members(fit: Record, prior: PredictorGP, other: PredictorGP) -> None:
    """Raise `DataError` where an integrated site gets longer, of a q that has its members."""
    one, two = ({k: x.shape for k, x in p.behind.zero.items()} for p in (prior, other))
    if longer := [k for k in one if k not in prior.behind.axes and one[k] != two[k]]:
        raise DataError(
            f"site(s) {longer} have shapes {[two[k] for k in longer]} with the tables of this "
            f"prediction, and {[one[k] for k in longer]} in training: "
            "nothing was inferred about other members. Give the tables of training; for a new "
            "member, fit with its entry in them, where it needs no "
            "rows of its own, or take Laplace(), EP() or VI()."
        )


def _means_differ(prior: GP, other: GP) -> bool:
    """At the training rows; a mean that cannot be computed there is not judged."""
    try:
        there = (
            PredictorGP(other.kernel, prior.X).mean
            if isinstance(other, PredictorGP)
            else GP(other.kernel, prior.X, other.mean_function).mean
        )
        return not np.allclose(prior.mean, there, rtol=1e-9, atol=1e-12)
    except (TypeError, ValueError):
        return False


def _changed(fit: Record, new: Leaves) -> dict[str, Any]:
    """{path: value} of what a kernel could be computed from, if it is not the one of training."""
    reading, trained = fit.model.reading, Leaves(fit.model, fit.args, fit.kwargs).leaves
    skipped = {*reading.row_axes, *(p for p in new.arrays if p not in reading.shaping), "y"}
    others = {p: x for p, x in new.leaves.items() if not {p, argument_of(p)} & skipped}
    return {p: x for p, x in others.items() if p in trained and not _same(x, trained[p])}


def _same(a, b) -> bool:
    try:
        return a is b or (np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a == b))))
    except (TypeError, ValueError, jax.errors.JAXTypeError):  # an option that cannot be compared
        return False
