"""Fits on several devices, in processes of their own: `python sharded_fits.py devices OUT`, or
`process OUT PORT RANK`.
"""

import sys

import jax
import numpy as np

N, B = 150, 64
X_NEW = np.random.default_rng(2).normal(size=(5, 2))


def data():
    """X (150, 2), y in {0, 1}."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(N, 2))
    return X, (np.sin(2 * X[:, 0]) + X[:, 1] + 0.5 * rng.normal(size=N) > 0).astype(int)


def fitted(devices, folder=None, batch_size=B):
    """The classifier on minibatches spread over some devices."""
    from small_fits import classifier

    import ppl_gp as pg

    X, y = data()
    checkpoint = None if folder is None else pg.Checkpoint(folder, every=10)
    method = pg.SVGP(
        num_inducing=8, batch_size=batch_size, max_steps=20, devices=devices, checkpoint=checkpoint
    )
    return pg.fit(classifier, method, 0, X, y=y)


def figures(fit) -> dict:
    """What must not depend on the devices."""
    found = {
        "bounds": fit.stats["bounds"],
        "log_evidence": fit.log_evidence,
        "probs": fit.predict(X_NEW).probs,
    }
    return {k: np.asarray(v) for k, v in {**found, **fit.hyper, "Z": fit.inducing.Z}.items()}


def on_devices(out):
    """One process with eight devices; `shards`: the rows that each device held. Saves what a bad
    batch size says, too.
    """
    from ppl_gp.errors import DataError
    from ppl_gp.infer.svgp.problem import Placement

    seen, real = [], Placement.batch

    def followed(self, batch, axis=0):
        placed = real(self, batch, axis)
        if axis:
            shards = placed.args[0].addressable_shards
            seen.append({s.device.id: s.data.shape[1] for s in shards})
        return placed

    Placement.batch = followed
    found = figures(fitted(8))
    try:
        fitted(8, batch_size=60)
        told = "nothing"
    except DataError as error:
        told = str(error)
    np.savez(out, shards=[seen[0][k] for k in range(8)], told=told, **found)


def as_process(out, port, rank):
    """One of two processes, with two devices each; saves to `out`, and resumes from checkpoints
    beside it.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=2, process_id=rank, initialization_timeout=60
    )
    assert jax.device_count() == 4 and jax.local_device_count() == 2
    first, again = fitted(4, f"{out}.checkpoints"), fitted(4, f"{out}.checkpoints")
    # Predictions are each process' own: only one makes them.
    found = figures(first) if rank == 0 else {"bounds": first.stats["bounds"]}
    np.savez(out, again=again.stats["bounds"], **found)


if __name__ == "__main__":
    command, out, *rest = sys.argv[1:]
    on_devices(out) if command == "devices" else as_process(out, *map(int, rest))
