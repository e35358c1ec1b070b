"""A fit together with new inputs: what compiled prediction takes, and the posterior processes at one draw."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers

from ppl_gp.deep.latents import LatentGuide
from ppl_gp.errors import ModelError
from ppl_gp.gp import GP, unwrap
from ppl_gp.numerics.linalg import default_jitter, robust_cholesky
from ppl_gp.posterior import Latent, Posterior, condition_on_values, process
from ppl_gp.results.layout import Layout, layout
from ppl_gp.results.mixing import Moments
from ppl_gp.results.new_inputs import new_arguments, num_rows, require_own_rows
from ppl_gp.results.record import Record
from ppl_gp.sparse.process import SparseLatent, SparseProcess
from ppl_gp.tracing import annotated, run, set_gps


class Case(eqx.Module):
    """Draws of (hyperparameters, q(f)) with a leading axis S, the training arguments and the new ones.

    `root`: the posterior process's factor of the one GP site, made already, where the hyperparameters are one value.
    """

    model: Callable = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    draws: tuple[dict, Mapping[str, Latent | SparseLatent]]
    root: Any
    args: tuple
    kwargs: dict[str, Any]
    new_args: tuple
    new_kwargs: dict[str, Any]
    local: dict[str, LatentGuide]  # q(h) that can be had without y

    @property
    def num_draws(self) -> int:
        """S."""
        return next(iter(self.draws[1].values())).num_draws

    @property
    def site(self) -> str | None:
        """The one GP site that is one function (N,), or `None` where there are several functions."""
        latents = self.draws[1]
        outer = [(k, v) for k, v in latents.items() if k not in self.layout.inner]
        return outer[0][0] if len(outer) == 1 and outer[0][1].mean.ndim == 2 else None

    @property
    def is_approximation(self) -> bool:
        """Whether q(f) is a local approximation (a pointwise likelihood, which was proved) rather than draws."""
        return not any(latent.is_draws for latent in self.draws[1].values())

    def new_hyper(self, hyper: dict) -> dict:
        """Hyperparameters that hold at new inputs too: all but local latents."""
        return {k: v for k, v in hyper.items() if k not in self.layout.local_latents}

    def draw_latents(self, hyper: dict, key) -> dict:
        """{latent site: a draw of q(h | x*)}, where there is one; the others are drawn from the prior as the model runs."""
        if not self.local:
            return {}
        sites = self.trace(hyper, {})
        q = {k: guide.at(sites[k], None, self.new_args, self.new_kwargs) for k, guide in self.local.items()}
        return {k: q[k].sample(random.fold_in(key, i)) for i, k in enumerate(q)}

    def trace(self, hyper: dict, latent: dict, key=None, **observations) -> dict:
        """The model at the new inputs with GP sites given; observed sites are drawn, or have the values given."""
        return run(self.model, self.new_args, {**self.new_kwargs, **observations}, self.new_hyper(hyper), latent, key)

    def conditionals(self, hyper: dict, latents: dict) -> dict[str, "Conditional"]:
        """The posterior processes at one draw. O(N^3) or, with inducing variables, O(M^3), unless factored already."""
        dense = {k: v.mean for k, v in latents.items() if isinstance(v, Latent)}
        trace = run(self.model, self.args, self.kwargs, hyper, dense)
        return {k: Conditional(unwrap(trace[k]["fn"]), v, self.root) for k, v in latents.items()}


def case_at(fit: Record, X_new, args: tuple, kwargs: dict) -> Case:
    """Check the arguments of a prediction and lay it out."""
    if fit.mixing:
        raise ModelError(
            f"site(s) {fit.mixing}: a row sees more than its own arguments (X or y standardised inside the model, a length scale "
            "from the median of distances, the row's number, the number of rows ...), so that a prediction would depend on which "
            "rows are asked for together. Compute it outside of the model, from the training data, and pass the result."
        )
    new_args, new_kwargs = new_arguments(fit, X_new, args, kwargs)
    require_own_rows(fit, new_args)
    hyper = fit.hyper if fit.sampled else jax.tree.map(lambda x: x[None], fit.hyper)
    first = jax.tree.map(lambda x: x[0], hyper)
    plan = layout(fit.model, new_args, new_kwargs, first, num_rows(fit, new_args), tuple(fit.local))
    root = None if fit.sampled or len(fit.latent) > 1 else fit.posterior.root  # pyright: ignore[reportAttributeAccessIssue]
    local = {k: q for k, q in fit.local.items() if not q.needs_y}
    return Case(fit.model, plan, (hyper, fit.latent), root, fit.args, fit.kwargs, new_args, new_kwargs, local)


class Conditional(eqx.Module):
    """p(f(X*) | one draw) of one GP site; several functions (C, N) share the process."""

    prior: GP
    latent: Latent | SparseLatent
    root: Any = None

    def _each(self, new: GP, moments):
        """moments(process, new): one array or more whose first is a mean, with an axis of functions where there are several."""
        latent = self.latent
        if isinstance(latent, SparseLatent):  # several functions are rows of one process
            root = latent.inducing.root(self.prior) if self.root is None else self.root
            at_site = SparseProcess(self.prior, latent.inducing, root, latent.mean, latent.reduction, latent.basis)
            return moments(at_site, new)
        if self.root is not None:
            return moments(Posterior(self.prior, latent.alpha, self.root), new)  # pyright: ignore[reportArgumentType]
        if latent.mean.ndim == 1:
            return moments(process(self.prior, latent), new)
        return self._several(new, moments)

    def _several(self, new: GP, moments):
        """Draws of several functions, whose means may differ: each is conditioned about its mean."""
        one = lambda f: moments(condition_on_values(_centred(self.prior), f), _centred(new))  # noqa: E731
        for _ in range(self.latent.mean.ndim - 1):
            one = jax.vmap(one)
        mean, *rest = one(self.latent.mean - self.prior.mean)
        return mean + new.mean, *rest

    def marginals(self, new: GP) -> Moments:
        """Mean and variance of f at the rows of `new`, (M,) or (C, M)."""
        return Moments(*self._each(new, lambda posterior, new: posterior.marginals(new)))

    def draw(self, key, new: GP, joint: bool):
        """One draw of f at the rows of `new`: jointly, O(M^3) for a factor, or row by row from the marginals."""
        if not joint:
            mean, variance = self.marginals(new)
            # The same number for all rows, each of which is judged alone: its answer may not depend on its companions.
            return mean + jnp.sqrt(variance) * random.normal(key, (*mean.shape[:-1], 1), mean.dtype)
        unit = default_jitter(new.variance)

        def factored(posterior, new):
            mean, covariance = posterior.joint(new)
            factor = lambda c: robust_cholesky(c, unit)[0]  # noqa: E731
            for _ in covariance.shape[:-2]:
                factor = jax.vmap(factor)
            return mean, factor(covariance)

        mean, factor = self._each(new, factored)
        white = random.normal(key, mean.shape, mean.dtype)
        return mean + jnp.einsum("...ij,...j->...i", factor, white)


def _centred(gp: GP) -> GP:
    return GP(gp.kernel, gp.X, None, gp.jitter)


def drawn_trace(
    case: Case, hyper, conditionals, key, *, joint: bool, latents: dict | None = None, **observations
) -> tuple[dict, dict]:
    """(trace, {GP site: Moments}) of the model at new inputs with GP sites, local latents and unset data drawn.

    `latents`: values of local latents to take instead.
    """
    key_gps, key_rest = random.split(key)
    names, moments = list(conditionals), {}

    def value(name, new: GP):
        moments[name] = conditionals[name].marginals(new)
        return conditionals[name].draw(random.fold_in(key_gps, names.index(name)), new, joint)

    with handlers.block():
        known = case.new_hyper(hyper) | (case.draw_latents(hyper, key_rest) if latents is None else latents)
        given = handlers.substitute(handlers.seed(case.model, key_rest), data=known)
        trace = handlers.trace(set_gps(given, value)).get_trace(*case.new_args, **{**case.new_kwargs, **observations})
    return annotated(trace, case.model), moments
