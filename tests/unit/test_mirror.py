"""A run's copy in a store: whole checkpoints only, nothing lost where it fails, and a run that goes on elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from meshpar import CheckpointError, ConfigError, Retention, Run, checkpoints, fit, store
from meshpar.checkpoint import lock
from meshpar.checkpoint.mirror import Mirror, mirrored
from meshpar.checkpoint.saved import find, steps
from meshpar.tree import flatten_with_paths
from tests.config.keys import PLAIN

STATE = {"step": jnp.int32(3), "w": jnp.arange(4.0)}
SMALL = {
    "data": {"kind": "synthetic", "vocab_size": 64, "batch_size": 8, "seq_len": 16},
    "eval_every": 100, "log_every": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "FIRST_WAIT_S", 0.0)
    store._copied.cache_clear()


@pytest.fixture(scope="module")
def bucket():
    """A bucket of a server that speaks S3's protocol. s3fs keeps one connection, so the module has one server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (names | {"ENDPOINT_URL": f"http://{host}:{port}"}).items():
            patch.setenv(f"AWS_{name}", value)
        store.opened("s3://runs")[0].mkdir("runs")
        yield "s3://runs"
    server.stop()


def saved(folder: Path, address: str, last: int, first: int = 1, **retention):
    with (
        mirrored(address, folder) as mirror,
        checkpoints(folder / "checkpoints", Retention(**retention), after_save=mirror.push) as made,
    ):
        for step in range(first, last + 1):
            made.save(step, STATE | {"w": STATE["w"] + step})
            made.wait()
    return mirror


def weights(folder: Path):
    return find(folder).on_host("w")


def losses(folder: Path):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(one["step"], one["loss"]) for one in lines if one["kind"] == "train"]


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_store_where_its_directory_is_gone(where, tmp_path, request):
    address = f"file://{tmp_path}/store" if where == "file" else f"{request.getfixturevalue('bucket')}/whole"

    def trained(folder: str, num_steps: int, **checkpoints):
        given = {"run_dir": str(tmp_path / folder), "num_steps": num_steps, "checkpoints": {"every": 2, **checkpoints}}
        fit(Run(**PLAIN | SMALL | given), json=True)

    trained("unbroken", 6)
    trained("run", 4, mirror=address)
    shutil.rmtree(tmp_path / "run")
    trained("run", 6, mirror=address)
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")
    there = find(Path(address))
    assert there.step == 6
    given = PLAIN | SMALL | {"model": {}, "init": {"from_checkpoint": address}}
    assert Run(**given).model == Run(**PLAIN).model, "whose sizes are those of the checkpoint"
    mine = find(tmp_path / "unbroken")
    for path in there.described:
        np.testing.assert_array_equal(there.on_host(path), mine.on_host(path))


def test_an_object_store_has_the_checkpoints_that_the_directory_has(tmp_path, bucket):
    saved(tmp_path / "run", f"{bucket}/run", 4, keep=2)
    there = store.local(f"{bucket}/run")
    assert steps(there / "checkpoints") == steps(tmp_path / "run" / "checkpoints") == [3, 4]
    saved(tmp_path / "elsewhere", f"{bucket}/run", 5, first=5, keep=2)
    assert steps(tmp_path / "elsewhere" / "checkpoints") == [4, 5]
    np.testing.assert_array_equal(weights(tmp_path / "elsewhere"), np.arange(4.0) + 5)


def failing(monkeypatch, name: str, times: int):
    """Makes writing files with such a name fail so many times."""
    right, calls = LocalFileSystem.put_file, []

    def put_file(self, source, target, **more):
        if name in source:
            calls.append(source)
            if len(calls) <= times:
                raise ConnectionResetError("reset by peer")
        return right(self, source, target, **more)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)


def test_a_store_that_fails_once_is_complete_with_the_next_checkpoint(tmp_path, monkeypatch, capsys):
    failing(monkeypatch, "meta.json", store.TRIES)
    saved(tmp_path / "run", f"file://{tmp_path}/store", 2)
    assert "1/meta.json cannot be written, after 4 tries: ConnectionResetError" in capsys.readouterr().err
    assert steps(tmp_path / "store" / "checkpoints") == [1, 2]
    np.testing.assert_array_equal(weights(tmp_path / "store"), np.arange(4.0) + 2)


def test_a_checkpoint_that_was_cut_off_is_not_read_and_the_run_ends_in_an_error(tmp_path, monkeypatch):
    address = f"file://{tmp_path}/store"
    saved(tmp_path / "run", address, 1)
    failing(monkeypatch, "2/meta.json", 100)
    with pytest.raises(CheckpointError, match=r"the mirror is not complete.*2/meta.json cannot be written.*is whole"):
        saved(tmp_path / "run", address, 2, first=2)
    np.testing.assert_array_equal(weights(tmp_path / "run"), np.arange(4.0) + 2)
    assert (tmp_path / "store" / "checkpoints" / "2").is_dir()
    Mirror(address, tmp_path / "elsewhere").fetch()
    assert steps(tmp_path / "elsewhere" / "checkpoints") == [1]
    np.testing.assert_array_equal(weights(tmp_path / "elsewhere"), np.arange(4.0) + 1)


def test_planted_a_checkpoint_without_its_end_would_be_read_if_the_checksums_came_first(tmp_path, monkeypatch):
    right = Mirror._put
    monkeypatch.setattr(Mirror, "_put", lambda self, paths: right(self, sorted(paths, reverse=True)))
    failing(monkeypatch, "1/state", 100)
    with pytest.raises(CheckpointError):
        saved(tmp_path / "run", f"file://{tmp_path}/store", 1)
    assert not (tmp_path / "store" / "checkpoints" / "1" / "sha256.json").exists()


def test_a_store_that_lies_about_sizes_is_not_trusted(tmp_path, monkeypatch):
    right = LocalFileSystem.find

    def find(self, path, **more):
        return {name: info | {"size": info["size"] + 1} for name, info in right(self, path, **more).items()}

    monkeypatch.setattr(LocalFileSystem, "find", find)
    with pytest.raises(CheckpointError, match=r"has [0-9]+ bytes, not [0-9]+"):
        saved(tmp_path / "run", f"file://{tmp_path}/store", 1)
    assert not (tmp_path / "store" / "checkpoints" / "1" / "sha256.json").exists()


def test_a_directory_that_is_behind_its_store_is_not_overwritten(tmp_path):
    address = f"file://{tmp_path}/store"
    saved(tmp_path / "run", address, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "behind")
    saved(tmp_path / "run", address, 2, first=2)
    with pytest.raises(CheckpointError, match=r"has step 2, and .*behind ends at 1: another machine went on; move"):
        saved(tmp_path / "behind", address, 3, first=3)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    (tmp_path / "store" / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"has no checkpoint, but metrics.jsonl"):
        saved(tmp_path / "new", address, 3, first=3)


def test_a_start_beside_a_running_run_copies_nothing(tmp_path):
    """It would copy what the other writes, and both would write to the store."""
    given = {"run_dir": str(tmp_path / "run"), "checkpoints": {"mirror": f"file://{tmp_path}/store"}}
    with lock.hold_alone(tmp_path / "run"):
        (tmp_path / "run" / "notes.txt").write_text("of the other")
        with pytest.raises(CheckpointError, match="in use"):
            fit(Run(**PLAIN | SMALL | given), json=True)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("address", ["http://host/run", "runs/copy", "hf://me/run"])
def test_what_cannot_be_written_is_refused(address):
    with pytest.raises(ConfigError, match=r"is no address of a store that can be written: s3://, gs://, file://"):
        Run(**PLAIN, checkpoints={"mirror": address})


def test_verbs_read_a_run_of_a_store(tmp_path, command):
    saved(tmp_path / "run", f"file://{tmp_path}/store", 2)
    said = command("checkpoint", "show", f"file://{tmp_path}/store")
    assert said.code == 0 and "2" in said.out
    assert flatten_with_paths(STATE).keys() <= set(said.out.split())
