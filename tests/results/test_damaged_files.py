"""Damaged files of fits and of checkpoints: a `StoreError` that names the file, or the answer of
the whole file. A small file takes little memory.
"""

import io
import json
import warnings
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from small_fits import HYPER, classification, classifier, made_fit

import ppl_gp as pg
from ppl_gp.errors import StoreError
from ppl_gp.infer.svgp.run import Checkpoints
from ppl_gp.results.store import archive as archive_module
from ppl_gp.results.store.archive import digest_of

X, Y, X_NEW = classification()
MIB = 2**20


@pytest.fixture(scope="module")
def fit():
    return made_fit(classifier, HYPER, X, y=Y)


@pytest.fixture(scope="module")
def fit_file(fit, tmp_path_factory):
    return fit.save(tmp_path_factory.mktemp("fits") / "good.fit")


STATE = {"q": jnp.arange(40.0), "points": jnp.arange(40.0)[::-1], "count": jnp.asarray(3)}


def checkpoints(folder, **settings):
    return Checkpoints(pg.Checkpoint(folder, every=1, **settings), {"model": "m", "key": [0, 1]})


def as_checkpoints(folder, steps=(10,)):
    """The files of a run that was at these steps, with a bound of -step at each."""
    run = checkpoints(folder)
    for step in steps:
        run.save({**STATE, "count": jnp.asarray(step)}, -np.arange(float(step)), step)
    return run.files


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {m: archive.read(m) for m in archive.namelist()}


def write(path, content, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in content.items():
            with archive.open(name, "w") as member:
                for part in data if isinstance(data, list) else [data]:
                    member.write(part if isinstance(part, bytes) else part.encode())
    return path


def npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def claiming(shape, data=b"\0" * 80, descr="<f8"):
    """A member whose own header claims a shape."""
    file = io.BytesIO()
    claim = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, claim)
    return file.getvalue() + data


def with_header(path, change):
    content = members(path)
    header = json.loads(content["header.json"])
    change(header)
    return write(path, {**content, "header.json": json.dumps(header)})


ZEROS = [bytes(MIB)] * 256
ARRAY = {"fit": "draws/kept/f/mean", "checkpoint": "leaf-0"}


def _padded(path):
    content = members(path)
    return {**content, "header.json": [content["header.json"], *[b" " * MIB] * 256]}


def deflated_header(path, array):
    write(path, _padded(path), zipfile.ZIP_DEFLATED)


def deflated_extra(path, array):
    write(path, {**members(path), "more.npy": ZEROS}, zipfile.ZIP_DEFLATED)


def deflated_array(path, array):
    write(path, {**members(path), f"{array}.npy": ZEROS}, zipfile.ZIP_DEFLATED)


def hidden_size(path, array):
    """The directory says that a compressed member is small, and stored."""
    write(path, {**members(path), f"{array}.npy": ZEROS}, zipfile.ZIP_DEFLATED)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{array}.npy")
    sizes = [n.to_bytes(4, "little") for n in (info.compress_size, info.file_size)]
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(f"{array}.npy".encode()))
    entry = data[at:].replace(sizes[1], sizes[0], 1).replace(b"\x08\x00", b"\x00\x00", 1)
    path.write_bytes(data[:at] + entry)


def claimed_shape(path, array):
    write(path, {**members(path), f"{array}.npy": claiming((10**13,))})


def many_members(path, array):
    """Members that share their bytes."""
    content = members(path)
    big = npy(np.zeros(MIB // 8))
    content |= {f"more-{i}.npy": big if i == 0 else b"" for i in range(400)}
    write(path, content)
    with zipfile.ZipFile(path, "a") as archive:
        first = archive.getinfo("more-0.npy")
        for i in range(1, 400):
            other = archive.getinfo(f"more-{i}.npy")
            for field in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(other, field, getattr(first, field))
        archive.writestr("last", b"")


def used_often(path, array):
    """One array of .8 MB that the header uses 4000 times: 3 GB. All digests are right."""
    content, big = members(path), np.zeros(100_000)
    header = json.loads(content["header.json"])
    del header["digest"]
    header["arrays"]["big"] = ["<f8", [100_000], archive_module._of(big)]
    header["stats"] = {str(i): {"$array": "big"} for i in range(4000)}
    header["digest"] = digest_of(header)
    write(path, {**content, "header.json": json.dumps(header), "big.npy": npy(big)})


def long_header(path, array):
    content = members(path)
    write(path, {**content, "header.json": b'{"a": [' + b"[]," * 500_000 + b"[]]}"})


BOMBS = [
    deflated_header,
    deflated_extra,
    deflated_array,
    hidden_size,
    claimed_shape,
    many_members,
    used_often,
    long_header,
]


def _resident(field):
    """MiB of this process, now ("VmRSS") or at the most ("VmHWM")."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if field in x]
    return int(line.split()[1]) / 1024


def _raises_within(load, name):
    """A `StoreError`, and less than 100 MiB on the way."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the most so far
    except OSError:
        pytest.skip("the system does not say how much memory was taken")
    before = _resident("VmRSS")
    with pytest.raises(StoreError, match=name):
        load()
    assert _resident("VmHWM") - before < 100


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_takes_little_memory(bomb, fit_file, tmp_path):
    path = tmp_path / "bomb.fit"
    path.write_bytes(fit_file.read_bytes())
    bomb(path, ARRAY["fit"])
    assert path.stat().st_size < 12 * MIB
    _raises_within(lambda: pg.load(path, classifier), "bomb.fit")
    folder = tmp_path / "run"
    (path,) = as_checkpoints(folder)
    bomb(path, ARRAY["checkpoint"])
    _raises_within(lambda: checkpoints(folder).restore(STATE), "step-0+10.ckpt")


def test_a_header_that_would_not_be_read_is_not_written(fit, tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "MAX_HEADER", 100)
    with pytest.raises(StoreError, match="a.fit: its header has .*Pass long lists"):
        fit.save(tmp_path / "a.fit")
    assert list(tmp_path.iterdir()) == []


def variants(path, array):
    """{what: content of a damaged file, `None` for a folder}."""
    data, content = path.read_bytes(), members(path)
    rng = np.random.default_rng(0)
    found: dict = {"a folder": None, "empty": b"", "text": b"PK of another program"}
    for i in range(40):
        at = int(rng.integers(len(data)))
        found[f"bit {i}"] = data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :]
    for i in range(20):
        found[f"first part {i}"] = data[: int(rng.integers(len(data)))]
    for i in range(5):
        at = int(rng.integers(len(data)))
        found[f"a part is zero {i}"] = (
            data[:at] + bytes(min(200, len(data) - at)) + data[at + 200 :]
        )
    found["doubled"], found["in front"] = data + data, b"#!/bin/sh\n" + data
    arrays = sorted(k for k in content if k.endswith(".npy"))
    pairs = [(a, b) for a in arrays for b in arrays if a < b]
    for a, b in pairs:  # swapped members, and exchanged references in the header
        found[f"swapped {a} {b}"] = {**content, a: content[b], b: content[a]}
        header = content["header.json"].decode()
        names = [json.dumps(k.removesuffix(".npy")) for k in (a, b)]
        for old, new in ((names[0], '"\\u0001"'), (names[1], names[0]), ('"\\u0001"', names[1])):
            header = header.replace(f'": {old}', f'": {new}')
        found[f"exchanged {a} {b}"] = {**content, "header.json": header.encode()}
    for a in arrays:
        others = {k: v for k, v in content.items() if k != a}
        found[f"renamed {a}"] = {**others, f"other-{a}": content[a]}
        found[f"without {a}"] = others
    name = f"{array}.npy"
    for shape in ((10**13,), (2**32, 2**32), (-1,), (0,), (2**62, 4), (10**400,)):
        found[f"shape {str(shape)[:30]}"] = {**content, name: claiming(shape)}
    for descr in ("|V0", "|O", "|S0", "<U0", "<c16", ">f8"):
        found[f"type {descr}"] = {**content, name: claiming((10,), descr=descr)}
    found["header: a list"] = {**content, "header.json": b"[]"}
    found["header: deep"] = {**content, "header.json": b"[" * 100_000 + b"]" * 100_000}
    found["header: not text"] = {**content, "header.json": b"\xff\xfe\0"}
    found["no header"] = {k: v for k, v in content.items() if k != "header.json"}
    return found


def damaged(path, content):
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    elif isinstance(content, dict):
        write(path, content)
    else:
        path.write_bytes(content)


@pytest.mark.filterwarnings("ignore:.*claimed")
def test_a_hundred_damaged_fits(fit, fit_file, tmp_path):
    want = fit.predict(X_NEW)
    cases, loaded = variants(fit_file, ARRAY["fit"]), []
    assert len(cases) > 100
    for what, content in cases.items():
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.fit"
        damaged(path, content)
        try:
            again = pg.load(path, classifier)
        except StoreError as error:
            assert path.name in str(error), what
            continue
        loaded.append(what)
        for name in ("f_mean", "f_variance", "probs"):
            np.testing.assert_array_equal(
                getattr(again.predict(X_NEW), name), getattr(want, name), err_msg=what
            )
    assert not [w for w in loaded if w[:3] in ("swa", "exc", "ren", "sha", "wit")], loaded


@pytest.mark.parametrize("steps", [(10,), (5, 10)])
def test_a_hundred_damaged_checkpoints(steps, tmp_path):
    """The older one, with a warning that names the damaged, or `StoreError` where there is none."""
    cases = variants(as_checkpoints(tmp_path / "good", steps)[-1], ARRAY["checkpoint"])
    assert len(cases) > 100
    for i, (what, content) in enumerate(cases.items()):
        path = as_checkpoints(tmp_path / str(i), steps)[-1]
        damaged(path, content)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                state, bounds = checkpoints(path.parent).restore(STATE)
            except StoreError as error:
                assert len(steps) == 1 and path.name in str(error), what
                continue
        words = [str(w.message) for w in told if path.name in str(w.message)]
        assert len(bounds) == (5 if words else 10), what
        assert not words or "goes on from" in words[0], what
        for k in ("q", "points"):
            np.testing.assert_array_equal(state[k], STATE[k], err_msg=what)
        assert int(state["count"]) == len(bounds), what
        np.testing.assert_array_equal(bounds, -np.arange(float(len(bounds))), err_msg=what)


def test_after_a_fallback_the_damaged_file_goes(tmp_path):
    files = as_checkpoints(tmp_path, (5, 10))
    files[-1].write_bytes(b"")
    run = checkpoints(tmp_path)
    with pytest.warns(
        UserWarning, match="step-0+10.ckpt.*goes on from .*step-0+05.ckpt, at step 5"
    ):
        run.restore(STATE)
    run.save(STATE, np.zeros(7), 7)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [f"step-{n:09d}.ckpt" for n in (5, 7)]


def test_another_runs_checkpoint_is_no_damage(tmp_path):
    """The older one is not looked at: the folder belongs to another run."""
    as_checkpoints(tmp_path, (5, 10))
    other = Checkpoints(pg.Checkpoint(tmp_path), {"model": "n", "key": [0, 1]})
    with pytest.raises(StoreError, match="step-0+10.ckpt belongs to another run: model was 'm'"):
        other.restore(STATE)


def test_a_folder_is_named(tmp_path):
    with pytest.raises(StoreError, match=f"{tmp_path} is a folder"):
        pg.load(tmp_path, classifier)
