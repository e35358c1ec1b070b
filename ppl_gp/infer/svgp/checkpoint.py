"""Checkpoints of a long run: its arrays in one file, of which no reader ever sees half."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ppl_gp.errors import StoreError, warn
from ppl_gp.reading.fingerprint import digest, fingerprint
from ppl_gp.results.store.archive import read_archive, write_archive
from ppl_gp.results.store.save import qualified_name
from ppl_gp.sparse.svgp import Checkpoint

FORMAT, FORMAT_VERSION = "ppl_gp.checkpoint", 5


class _OtherRun(StoreError):
    """A checkpoint that is whole, and of another run: none that is older is looked for."""


class Checkpoints:
    """The checkpoints of one run, whose state is any tree. `identity` says what run it is."""

    def __init__(self, config: Checkpoint, identity: dict):
        self.config, self.identity = config, identity
        self.folder = Path(config.folder)
        self.saved, self.error = 0, None
        self.files: list[Path] = []  # of this run, in the order of their steps

    def save(self, state: Any, bounds: np.ndarray, step: int, last: bool = False) -> None:
        """Write a checkpoint if one is due. A full disk ends no run: it warns, `error` says so."""
        if step == self.saved or not (last or step - self.saved >= self.config.every):
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step-{step:09d}.ckpt"
            arrays = {**_arrays(jax.tree.leaves(state)), "bounds": bounds}
            write_archive(path, FORMAT, FORMAT_VERSION, self.identity, arrays)
            self.saved, self.error = step, None
            self.files = [*self.files, path][-self.config.keep :]
            # Those of an earlier run (resume=False) go as well: the next start would take them for
            # this one's.
            for old in set(self._files()) - set(self.files):
                if old.is_file():
                    old.unlink(missing_ok=True)
        except OSError as error:
            self.error = f"step {step}: {error}"
            warn(f"cannot write a checkpoint to {self.folder}: {error}. The run goes on.")

    def restore(self, state: Any) -> tuple[Any, np.ndarray]:
        """(state, bounds so far) of the newest checkpoint that can be read, with a warning that
        names those that cannot; `state` as it is where there is none. Raises `StoreError` where it
        belongs to another model, method, data or version, or none can be read.
        """
        for half_written in self.folder.glob(".step-*.ckpt.*"):  # by a run that was killed
            half_written.unlink(missing_ok=True)
        files, self.files = self._files() if self.config.resume else [], []
        if not files:
            return state, np.zeros(0)
        leaves, structure = jax.tree.flatten(state)
        path, arrays = self._newest(files, leaves)
        self.files = files[: files.index(path) + 1]
        restored = [
            jnp.asarray(arrays[f"leaf-{i}"]) if eqx.is_array(x) else x for i, x in enumerate(leaves)
        ]
        self.saved = len(arrays["bounds"])
        return jax.tree.unflatten(structure, restored), arrays["bounds"]

    def _newest(self, files: list[Path], leaves) -> tuple[Path, dict]:
        damaged: list[str] = []
        for path in reversed(files):
            try:
                check = functools.partial(self._require_same, _arrays(leaves))
                _, arrays = read_archive(path, FORMAT, FORMAT_VERSION, check)
            except _OtherRun:
                raise
            except StoreError as error:
                damaged.append(str(error))
            else:
                if damaged:
                    warn(
                        f"{' '.join(damaged)} The run goes on from {path}, at step "
                        f"{len(arrays['bounds'])}, with the numbers that it would have had."
                    )
                return path, arrays
        raise StoreError(f"{damaged[0]} {_REMEDY}")

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.ckpt"))

    def _require_same(self, own: dict, header: dict) -> None:
        other = {k: (header.get(k), v) for k, v in self.identity.items() if header.get(k) != v}
        if other:
            told = "; ".join(f"{k} was {a!r} and is {b!r}" for k, (a, b) in other.items())
            raise _OtherRun(f"belongs to another run: {told}. {_REMEDY}")
        found = {k: claim[:2] for k, claim in header["arrays"].items() if k != "bounds"}
        wanted = {k: [x.dtype.str, list(x.shape)] for k, x in own.items()}
        for k in sorted({*found, *wanted}):
            if found.get(k) != wanted.get(k):
                raise StoreError(
                    f"is of another state: array '{k}' is {found.get(k)}, and should be "
                    f"{wanted.get(k)}."
                )


_REMEDY = "Give another folder, delete this one, or pass Checkpoint(..., resume=False)."


def _arrays(leaves) -> dict[str, np.ndarray]:
    return {f"leaf-{i}": np.asarray(x) for i, x in enumerate(leaves) if eqx.is_array(x)}


def identity(method: Any, model: Callable, data: tuple, num_data: int, key) -> dict:
    """What run a checkpoint belongs to: the model's code and all that it reads, the settings,
    `data` (of a stream the first batch), the key; by contents, never by address, so that it is the
    same in every process. Schedules count by their values at some steps as well.
    """
    settings = {k: v for k, v in vars(method).items() if k not in ("checkpoint", "devices")}
    steps = np.linspace(0, method.max_steps, 7).astype(int)
    rates = {
        k: [float(cast(Callable, v)(s)) for s in steps]
        for k, v in settings.items()
        if k in _SCHEDULES and callable(v)
    }
    return {
        "model": f"{_name(model)} {fingerprint(model)}",
        "method": ", ".join(f"{k}={_told(v)}" for k, v in settings.items())
        + (f", {rates}" if rates else ""),
        "num_data": num_data,
        "data": digest(data),
        "key": np.asarray(jax.random.key_data(key)).tolist(),
    }


_SCHEDULES = ("learning_rate", "natural_rate")


def _name(function) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return qualified_name(function)


def _told(value) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"{_name(value) if callable(value) else type(value).__name__} {digest(value)}"
