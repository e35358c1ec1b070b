"""Guides of the hyperparameters: what an autoguide is built on, which sites it holds at points, and
which guides are refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax import random
from numpyro import handlers
from numpyro.infer.autoguide import AutoDAIS, AutoGuide, AutoSemiDAIS
from numpyro.primitives import Messenger

from ppl_gp.errors import DataError, PplGpError
from ppl_gp.infer.probes.guides import is_auxiliary, require_guide
from ppl_gp.model.tracing import sample_hyper
from ppl_gp.proofs.dependence import reached

_REMEDY = "MAP() is a point, AutoNormal and AutoMultivariateNormal are distributions."


class _WithoutPlates(Messenger):
    """Sites with the batch shape that their plates gave them, and without the plates, which stay
    hidden from the guide.
    """

    def process_message(self, msg):
        """Stands outside of the model's plates."""
        if msg["type"] == "sample":
            msg["cond_indep_stack"] = []


def hyper_model(model: Callable) -> Callable:
    """The model with GP sites pinned and hidden, and observations hidden: what an autoguide is
    built on.

    An autoguide's set-up evaluates its model's density and gradient; on the model itself that would
    factor an N x N matrix.
    """

    def hyper_only(*args, **kwargs):
        with _WithoutPlates():
            sample_hyper(model, args, kwargs, local=False)

    return hyper_only


def make_guide(make: Callable, model: Callable) -> Any:
    """`make`'s guide of the hyperparameters, not set up yet. `DataError` for what makes none, and
    for annealed guides.
    """
    # They run Hamiltonian steps on the density of the model that they see, here the prior alone,
    # and score them by a factor.
    if isinstance(make, type) and issubclass(make, AutoDAIS | AutoSemiDAIS):
        raise DataError(
            f"hyper={make.__name__} anneals towards the model's density, of which a guide of the "
            f"hyperparameters sees the prior alone; {_REMEDY}"
        )
    with set_up(make):
        guide = make(hyper_model(model))
    if not callable(guide):
        raise DataError(
            f"hyper={guide_name(make)} is called with a model and has to return a guide, a "
            f"function; {_REMEDY}"
        )
    return guide


def is_auto(make: Any) -> bool:
    """Whether `make` is a class of NumPyro's autoguides, which guide whatever sites there are."""
    return isinstance(make, type) and issubclass(make, AutoGuide)


@contextmanager
def set_up(make: Callable) -> Iterator[None]:
    """What a guide raises while it is made and first run, with the argument's name."""
    try:
        yield
    except PplGpError:
        raise
    except Exception as error:  # autoguides raise whatever they like
        raise DataError(
            f"hyper={guide_name(make)} makes no guide of this model's hyperparameters "
            f"({type(error).__name__}: {error}); give a NumPyro autoguide class, or a function of "
            f"a model that returns a guide: {_REMEDY}"
        ) from error


def points_of(guide: Callable, trace: dict, make: Callable, own: dict, args, kwargs) -> tuple:
    """The hyperparameters that a guide, set up already, does not draw: their values depend on no
    key, a proof by its jaxpr.

    Raises `ModelError` where its sites are not the model's `own`, `DataError` where its training
    distribution is another than the one it stands for: a joint vector held at a point, as
    AutoLaplaceApproximation's, or weights of its own.
    """
    drawn = {k: s for k, s in trace.items() if s["type"] == "sample"}
    require_guide(trace, own, f"hyper={guide_name(make)}")
    params = {k: s["value"] for k, s in trace.items() if s["type"] == "param"}

    def values(key):
        with handlers.block():
            again = handlers.trace(
                handlers.substitute(handlers.seed(guide, key), data=params)
            ).get_trace(*args, **kwargs)
        return {k: again[k]["value"] for k in drawn}

    random_sites = reached(values, random.key(0))
    for name, site in drawn.items():
        if site["is_observed"]:
            raise DataError(
                f"hyper={guide_name(make)}: the guide scores itself by '{name}', a factor, which "
                f"no bound here counts; {_REMEDY}"
            )
        if is_auxiliary(site) and not random_sites[name]:
            raise DataError(
                f"hyper={guide_name(make)} is trained as a point ('{name}' is not random) in "
                "unconstrained coordinates, and would stand for a distribution afterwards that "
                f"no bound was computed for; {_REMEDY}"
            )
    return tuple(k for k in own if not random_sites[k])


def log_q(site):
    """log q of what a guide drew; a flow without an inverse knows what it was drawn from."""
    extra = site.get("intermediates")
    return (
        site["fn"].log_prob(site["value"], extra) if extra else site["fn"].log_prob(site["value"])
    )


def guide_name(make) -> str:
    """How a `hyper=` argument is named in messages."""
    return getattr(make, "__name__", repr(make))
