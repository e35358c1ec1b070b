"""SVGP on eight virtual devices, and on two processes, gives the fit of one device."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sharded_fits

import ppl_gp as pg
from ppl_gp.errors import DataError

LIMIT = 120  # seconds, after which a process that hangs is ended


@pytest.fixture(scope="module")
def one_device():
    return sharded_fits.figures(sharded_fits.fitted(None))


def start(num_devices, *args):
    """A process that sees so many CPU devices."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    )
    command = [sys.executable, sharded_fits.__file__, *map(str, args)]
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(Path(pg.__file__).parents[1]),
    }
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*processes):
    """Wait for all of them, and show what the first that failed wrote."""
    try:
        written = [p.communicate(timeout=LIMIT)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, text in zip(processes, written, strict=True):
        assert p.returncode == 0, text[-4000:]


def assert_same(found, want):
    for name in want:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_eight_devices(one_device, tmp_path):
    finish(start(8, "devices", tmp_path / "fit.npz"))
    found = np.load(tmp_path / "fit.npz")
    assert_same(found, one_device)
    assert found["shards"].tolist() == [sharded_fits.B // 8] * 8
    assert "a batch of 60 rows cannot be split evenly" in str(found["told"])


@pytest.mark.slow
def test_two_processes(one_device, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outs = [tmp_path / f"rank{rank}.npz" for rank in (0, 1)]
    finish(*(start(2, "process", out, port, rank) for rank, out in enumerate(outs)))
    first, second = map(np.load, outs)
    assert_same(first, one_device)
    for found in (first, second):
        np.testing.assert_array_equal(found["bounds"], first["bounds"])
        np.testing.assert_array_equal(found["again"], first["bounds"])


@pytest.mark.slow
def test_more_devices_than_there_are():
    with pytest.raises(DataError, match=r"devices=1000\): JAX sees \d+; on CPU ask for more"):
        sharded_fits.fitted(1000)
