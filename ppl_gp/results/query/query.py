"""A fit together with new inputs: what compiled prediction takes, and the posterior processes at
one draw.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers

from ppl_gp.deep.latents import LatentGuide
from ppl_gp.draws import Draws
from ppl_gp.errors import DataError, ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.kept import FromFunctions, Kept
from ppl_gp.kernels.pairs import kernels_differ
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky
from ppl_gp.reading.arguments import Leaves, argument_of
from ppl_gp.reading.dependence import sources
from ppl_gp.reading.predictor.collapsed import Collapsed
from ppl_gp.reading.predictor.levels import require_levels
from ppl_gp.reading.predictor.prior import PredictorGP
from ppl_gp.reading.tracing import annotated, run, set_gps
from ppl_gp.results.query.layout import Layout, layout
from ppl_gp.results.query.mixture import JointMoments, Moments, mixture, plain
from ppl_gp.results.query.new_inputs import (
    new_arguments,
    num_rows,
    numbers_explained,
    require_own_rows,
)
from ppl_gp.results.record import Record


class Query(eqx.Module):
    """Weighted draws with a leading axis S, the training arguments and the new ones.

    `root`: the posterior process's factor of the one GP site, made already, where the
    hyperparameters are one value.
    """

    model: Callable = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    draws: Draws
    root: Any
    args: tuple
    kwargs: dict[str, Any]
    new_args: tuple
    new_kwargs: dict[str, Any]
    local: dict[str, LatentGuide]  # q(h) that can be had without y

    @property
    def site(self) -> str | None:
        """The one GP site that is one function (N,), or `None` where there are several."""
        outer = [(k, v) for k, v in self.draws.kept.items() if k not in self.layout.inner]
        alone = len(outer) == 1 and outer[0][1].mean.ndim == 2 and not outer[0][1].coupled
        return outer[0][0] if alone else None

    @property
    def is_approximation(self) -> bool:
        """Whether q(f) is a local approximation (a pointwise likelihood, which was proved) rather
        than draws.
        """
        return not any(kept.is_draws for kept in self.draws.kept.values())

    def mixture(self, component: Callable, *beside):
        """component(draw), or component(draw, entry ...) of arrays with a leading axis S beside,
        mixed over the weighted draws.
        """
        return mixture(
            lambda entry: component(*entry), (self.draws, *beside), self.draws.log_weights
        )

    def draw_latents(self, draw: Draws, key) -> dict:
        """{latent site: a draw of q(h | x*)}, where there is one; the others are drawn from the
        prior as the model runs.
        """
        if not self.local:
            return {}
        sites = self.trace(draw, {})
        q = {
            k: guide.at(sites[k], None, self.new_args, self.new_kwargs)
            for k, guide in self.local.items()
        }
        return {k: q[k].sample(random.fold_in(key, i)) for i, k in enumerate(q)}

    def trace(self, draw: Draws, f: dict, key=None, **observations) -> dict:
        """The model at the new inputs with GP sites given; observed sites are drawn, or have the
        values given.

        Latents that were drawn in training stand for the training data, and are left out.
        """
        return run(
            self.model, self.new_args, {**self.new_kwargs, **observations}, draw.hyper, f, key
        )

    def conditionals(self, draw: Draws) -> dict[str, "Conditional"]:
        """The posterior processes at one draw. O(N^3) or, with inducing variables, O(M^3), unless
        factored already.
        """
        trace = run(self.model, self.args, self.kwargs, draw.known, draw.values)
        return {k: Conditional(unwrap(trace[k]["fn"]), v, self.root) for k, v in draw.kept.items()}


def query_at(fit: Record, X_new, args: tuple, kwargs: dict) -> Query:
    """Check the arguments of a prediction and lay it out."""
    fit.require_pairs()
    if fit.mixing:
        raise ModelError(
            f"site(s) {fit.mixing}: {fit.model.reading.why_mixed()}, so that a prediction would "
            "depend on which rows are asked for together. Compute it outside of the model, from "
            "the training data, and pass the result."
        )
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
        return Moments(
            *self.kept.at(self.prior, new, lambda process, new: process.marginals(new), self.root)
        )

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
    # The same number for all rows, each of which is judged alone: its answer may not depend on its
    # companions.
    return mean + jnp.sqrt(variance) * random.normal(key, (*mean.shape[:-1], 1), mean.dtype)


def drawn_trace(
    query: Query,
    draw: Draws,
    conditionals,
    key,
    *,
    joint: bool,
    latents: dict | None = None,
    marginals: dict | None = None,
    **observations,
) -> tuple[dict, dict]:
    """(trace, {GP site: Moments}) of the model at new inputs with GP sites, local latents and unset
    data drawn.

    `latents`: values of local latents to take instead; `marginals`: those of the GP sites, where
    nothing that is drawn moves their inputs, so that draws need not make them anew.
    """
    key_gps, key_rest = random.split(key)
    names, moments = list(conditionals), {}

    def value(name, new: GP):
        found = conditionals[name].marginals(new) if marginals is None else marginals[name]
        moments[name], own = plain(found), random.fold_in(key_gps, names.index(name))
        return conditionals[name].draw(own, new) if joint else _draw_rows(found, own)

    with handlers.block():
        known = draw.hyper | (query.draw_latents(draw, key_rest) if latents is None else latents)
        given = handlers.substitute(handlers.seed(query.model, key_rest), data=known)
        trace = handlers.trace(set_gps(given, value)).get_trace(
            *query.new_args, **{**query.new_kwargs, **observations}
        )
    return annotated(trace, query.model), moments


def require_same_kernels(fit: Record, new_args: tuple, new_kwargs: dict) -> dict[str, Any]:
    """{path: value} of the arguments without an axis of the data that have changed. Raises
    `DataError` if one of them changes a kernel, or the mean of the training rows: the training
    covariance, and what the data told, have the old one.

    A table that a linear predictor is computed from keeps the entries of training, and others may
    follow. Kernels and means are compared at the training inputs. Nothing is run unless something
    has changed.
    """
    new_leaves = Leaves(fit.model, new_args, new_kwargs)
    changed = {p: new_leaves.leaves[p] for p in _changed(fit, new_leaves)}
    if not changed:
        return {}
    first = fit.draws.at(0)
    trained = run(fit.model, fit.args, fit.kwargs, first.known, first.values)
    new = run(fit.model, new_args, new_kwargs, first.hyper)
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
                f"the prior mean of {what} at the training rows is another one with what is "
                f"given for {[*changed]} than in training: the data have told about the old one. "
                "Leave it out (it is remembered), or fit again."
            )
        if kernels_differ(prior.kernel, other.kernel, prior.X):
            raise DataError(
                f"the kernel of {what} is another one with what is given for "
                f"{[*changed]} than in training: training rows and new rows would have no common "
                "covariance. Leave it out (it is remembered), fit again, or, where it holds one "
                "entry per row, put it into the GP's inputs X as a column."
            )
    return changed


def _require_extended(fit: Record, prior: PredictorGP, changed: dict[str, Any]) -> None:
    """Raise `DataError` for a table that a linear predictor is computed from, if it lacks entries
    of training: those rows are computed from the table that is given.
    """
    kernel, trained = prior.kernel, Leaves(fit.model, fit.args, fit.kwargs).leaves

    def parts(tables):
        return jax.tree.leaves(kernel.model.loadings(prior.X[:2], tables, kernel.hyper))

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
    one, two = (p.kernel.model.site_shapes(p.kernel, p.X) for p in (prior, other))
    if longer := [k for k in one if one[k] != two[k]]:
        raise DataError(
            f"site(s) {longer} have shapes {[two[k] for k in longer]} with the tables of this "
            f"prediction, and {[one[k] for k in longer]} in training: "
            f"{type(fit.method).__name__} has inferred nothing about other members. Give the "
            "tables of training; for a new member, fit with its entry in them, where it needs no "
            "rows of its own, or take Laplace(), EP() or VI()."
        )


def _means_differ(prior: GP, other: GP) -> bool:
    """At the training rows; a mean that cannot be computed there (an array of one entry a new row)
    is not judged.
    """
    try:
        there = (
            PredictorGP(other.kernel, prior.X).mean
            if isinstance(other, PredictorGP)
            else GP(other.kernel, prior.X, other.mean_function).mean
        )
        return not np.allclose(prior.mean, there, rtol=1e-9, atol=1e-12)
    except (TypeError, ValueError):
        return False


def _changed(fit: Record, new: Leaves) -> list[str]:
    """Paths of what a kernel could be computed from, no row's and no observation, whose value is
    not the one of training.
    """
    reading, trained = fit.model.reading, Leaves(fit.model, fit.args, fit.kwargs).leaves
    skipped = {*reading.row_axes, *(p for p in new.arrays if p not in reading.shaping), "y"}
    others = {p: x for p, x in new.leaves.items() if not {p, argument_of(p)} & skipped}
    return [p for p, x in others.items() if p in trained and not _same(x, trained[p])]


def _same(a, b) -> bool:
    try:
        return a is b or (np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a == b))))
    except (TypeError, ValueError, jax.errors.JAXTypeError):  # an option that cannot be compared
        return False
