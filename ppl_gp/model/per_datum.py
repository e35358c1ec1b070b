"""What a site says of each datum: where its axis of the data is, and sums of all other axes."""

import jax.numpy as jnp

from ppl_gp.wrappers import bare, hidden_axes, mask_of


def log_prob_per_datum(site, num: int | None = None):
    """A site's log-probability with `scale` and `mask`, summed to one number per datum; to () where
    it has no axis of data, nats.
    """
    fn, value = site["fn"], site["value"]
    # `to_event` took the data axis
    hidden = site["data_axis"] is not None and site["data_axis"] >= 0
    log_prob = (
        jnp.where(mask_of(fn), bare(fn).log_prob(value), 0.0) if hidden else fn.log_prob(value)
    )
    if site["scale"] is not None:
        log_prob = site["scale"] * log_prob
    return sum_per_datum(site, log_prob)


def sum_per_datum(site, values, num: int | None = None):
    """Values of a site's batch shape (with or without what `to_event` took) summed to (N,); to ()
    where there is no axis of data.
    """
    axis = data_axis(site, jnp.ndim(values))
    if axis is None:
        return jnp.sum(values)
    return jnp.sum(
        values, tuple(i for i in range(jnp.ndim(values)) if i != axis + jnp.ndim(values))
    )


def data_axis(site, ndim: int) -> int | None:
    """The axis of the data, negative, in an array of the site's batch shape, without or with what
    `to_event` took.
    """
    axis, hidden = site["data_axis"], hidden_axes(site["fn"])
    if axis is None:
        return None
    if ndim == len(site["fn"].batch_shape):
        return axis if axis < 0 else None
    return axis - hidden


def without_wrappers(site: dict) -> dict:
    """The site with its distribution without masks and `to_event`, at its full batch shape."""
    axis = site["data_axis"]
    moved = axis if axis is None else axis - hidden_axes(site["fn"])
    return {**site, "fn": bare(site["fn"]), "data_axis": moved}
