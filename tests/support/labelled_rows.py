"""A mixture of two labelled components, as mean field reads it."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random

from ppl_gp.infer.probes import first_trace
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.mean_field.structure import find_structure, start_of
from ppl_gp.reading.reading import declare

sample = numpyro.sample


def looked_at(kind, X):
    """(structure, trace, a start) of two labels a row, with weights."""

    def model(X):
        share = sample("share", dist.Dirichlet(jnp.ones(2)))

        def rows(of_label):
            with numpyro.plate("data", X.shape[0]):
                z = sample("z", dist.Categorical(share))
                own = of_label(z)
                sample("x", own if own.event_dim else own.to_event(1), obs=X)

        kind(rows, X)

    args = (jnp.asarray(X),)
    model = declare(model, args, {})
    trace = first_trace(model, args, {})
    structure = find_structure(log_joint_of(model, trace, args, {}), trace, None, True)
    return structure, trace, start_of({}, structure, trace, random.key(2))
