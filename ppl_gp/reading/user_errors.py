"""What a user's model raises while it is run for him, as errors of this package that say what to
change.
"""

import functools
import traceback
from collections.abc import Callable

import jax
from numpyro.distributions import Distribution

from ppl_gp.errors import DataError, ModelError

VALUE_WANTED = (
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
# methods of a distribution that NumPyro's base class, or a user's, leaves to others
_WANTED = {
    "sample": (
        ", and what was asked for is drawn: give the class sample(self, key, sample_shape=()); or "
        "leave `sample` out of it, for answers that need no draw"
    ),
    "log_prob": ": give the class log_prob(self, value), the log density of each entry",
}
_OURS = "ppl_gp jax jaxlib numpyro equinox numpy functools contextlib threading".split()


def of_the_model(function: Callable) -> Callable:
    """The same function; NumPy on a traced array becomes a `ModelError`, a mask of numbers, a
    distribution's parameter out of range, or a plate of size zero, a `DataError`.
    """

    @functools.wraps(function)
    def told(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise DataError(
                f"{function.__name__} was given an array that jax.jit, jax.vmap or jax.grad "
                "traces, and it needs numbers: call it outside of them, as it compiles its own "
                "work. Inside of them a model with a GP has fit.posterior(X_new).mean and "
                ".variance, of f."
            )
        try:
            return function(*args, **kwargs)
        except VALUE_WANTED as error:
            raise ModelError(
                f"the model asks for the values of an array while it is compiled{_line(error)}: "
                "NumPy was applied to an argument or a site's value, or `if`, a loop or an index "
                "depends on one. Use jax.numpy there: jnp.asarray(table)[index] for "
                "table[index], jnp.where for np.where and `if`."
            ) from error
        except jax.errors.UnexpectedTracerError as error:
            raise ModelError(
                f"the model keeps an array of an earlier run{_line(error)}: a function, or a "
                "method of a distribution's class, encloses it. Keep each array that a "
                "distribution uses as an attribute, self.loc = loc."
            ) from error
        except NotImplementedError as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            name, own = frame.f_code.co_name, frame.f_locals.get("self")
            if name not in _WANTED or not isinstance(own, Distribution):
                raise
            raise ModelError(
                f"{type(own).__name__}, the distribution of a site{_line(error)}, has no `{name}`"
                f"{_WANTED[name]}."
            ) from error
        except TypeError as error:
            if (told := integers_wanted(error)) is None:
                raise
            raise told from error
        except ValueError as error:
            if "should be a bool array" in str(error):
                raise DataError(
                    f"a mask of the model holds numbers, or is left out{_line(error)}: make it "
                    "boolean there, mask=seen.astype(bool) or obs_mask=seen.astype(bool)."
                ) from error
            if "distribution got invalid" not in str(error):
                raise
            raise DataError(
                f"{error}: a distribution of the model refuses it{_line(error)}; check the "
                "arguments of the model."
            ) from error
        except AssertionError as error:
            if "size of plate" not in str(error):
                raise
            raise DataError(
                f"a plate of the model has size zero{_line(error)}: give it at least one element "
                "(a row of the data, a group, a component), or leave it out where there is none."
            ) from error

    return told


def integers_wanted(error: Exception) -> DataError | None:
    """What to say of an index that is not of integers, the model's own or NumPyro's binomial's."""
    if "Indexer must have integer" not in str(error):
        return None
    frames = traceback.walk_tb(error.__traceback__)
    if any(f.f_code.co_name == "_binomial_dispatch" for f, _ in frames):
        told = "NumPyro draws from a binomial whose total_count is of integers alone"
        return DataError(f"{told}{_line(error)}: write total_count=n.astype(int) in the model.")
    return DataError(
        f"the model looks something up by numbers that are no integers{_line(error)}: "
        f"{str(error).split('.')[0]}. Give an index of integers, group.astype(int)."
    )


def _line(error: Exception) -> str:
    """Where in the user's code it happened."""
    own = [
        f" ({f.f_code.co_name}, line {line})"
        for f, line in traceback.walk_tb(error.__traceback__)
        if f.f_globals.get("__name__", "").split(".")[0] not in _OURS
    ]
    return own[-1] if own else ""
