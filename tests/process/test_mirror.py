"""A run that is killed goes on from an object store to the bit; one that fails keeps the checkpoint before.

The store is moto's server of S3's protocol, behind a door that fails, waits, or keeps only a part of what it is sent.
"""

from __future__ import annotations

import io
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshpar import store
from meshpar.checkpoint.saved import find
from tests.process.test_launch import ends, launch, losses, meshpar
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 16}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2}
checkpoints: {every: 2, keep: 9}
num_steps: 6
log_every: 1
eval_every: 100
loggers: []
"""


class Door:
    """Does to each write below `/checkpoints/4/` what `fault` says."""

    def __init__(self, app):
        self.app, self.fault, self.met, self.address = app, "", 0, ""

    def __call__(self, environ, start_response):
        if self.fault and environ["REQUEST_METHOD"] == "PUT" and "/checkpoints/4/" in environ["PATH_INFO"]:
            self.met += 1
            if self.fault == "500s":
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return [b""]
            if self.fault == "slow":
                time.sleep(0.5)
            if self.fault == "truncated":
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                kept = b"cut"
                environ |= {"wsgi.input": io.BytesIO(kept), "CONTENT_LENGTH": str(len(kept))}
                for name in [name for name in environ if "CHECKSUM" in name or "AMZ_TRAILER" in name]:
                    del environ[name]
                environ.pop("HTTP_CONTENT_ENCODING", None)
                environ["HTTP_X_AMZ_CONTENT_SHA256"] = "UNSIGNED-PAYLOAD"
        return self.app(environ, start_response)


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    door = Door(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, door, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1", "MAX_ATTEMPTS": "1"}
    for name, value in (names | {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    store.opened("s3://runs")[0].makedirs("runs", exist_ok=True)  # a process has one store of moto
    door.address = f"s3://runs/{tmp_path.name}"
    yield door
    server.shutdown()


def words(run_dir: str, *more: str) -> list[str]:
    return ["train", "config.yaml", f"run_dir={run_dir}", *more]


def is_there(address: str, name: str) -> bool:
    system, root = store.opened(address)
    system.invalidate_cache()
    return system.exists(f"{root}/{name}")


def same(run: Path, whole: Path) -> None:
    one, other = find(run), find(whole)
    assert one.step == other.step == 6
    for path in other.described:
        np.testing.assert_array_equal(one.on_host(path), other.on_host(path))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_killed_goes_on_from_the_store_to_the_bit(door, processes):
    def begin(*given: str):
        return launch(2, *given) if processes == 2 else meshpar(*given, "--devices=2")

    ends(begin(*words("whole")))
    running = begin(*words("run", f"checkpoints.mirror={door.address}", "num_steps=1000"))
    wait_for(lambda: is_there(door.address, "checkpoints/4/sha256.json") or running.poll() is not None)
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=LIMIT_S)  # the workers of a launcher end with it
    shutil.rmtree("run")
    system, root = store.opened(door.address)
    system.invalidate_cache()
    for path in system.ls(f"{root}/checkpoints"):  # what came after, before the kill did
        if int(path.rpartition("/")[2]) > 4:
            system.rm(path, recursive=True)
    said = ends(begin(*words("run", f"checkpoints.mirror={door.address}")))
    assert f"copies the checkpoints 2, 4 of {door.address}" in said
    assert {step: loss for step, loss in losses(Path("run")).items() if step <= 6} == losses(Path("whole"))
    same(Path("run"), Path("whole"))
    same(store.local(door.address), Path("whole"))


@pytest.mark.parametrize("fault", ["500s", "slow", "truncated"])
def test_a_store_that_fails_in_a_checkpoint_loses_nothing(door, fault):
    ends(meshpar(*words("whole"), "--devices=2"))
    door.fault = fault
    mirror = f"checkpoints.mirror={door.address}"
    said = ends(meshpar(*words("run", mirror, "num_steps=4"), "--devices=2"), 0 if fault == "slow" else 2)
    assert door.met
    whole = [step for step in (2, 4) if is_there(door.address, f"checkpoints/{step}/sha256.json")]
    assert whole == ([2, 4] if fault == "slow" else [2])
    if fault != "slow":
        assert "the mirror is not complete" in said and "run is whole: start again" in said
        assert "Traceback" not in said
    door.fault = ""
    shutil.copytree("run", "kept")
    shutil.rmtree("run")
    said = ends(meshpar(*words("run", mirror), "--devices=2"))
    assert f"copies the checkpoints {'2, 4' if fault == 'slow' else '2'} of {door.address}" in said
    same(Path("run"), Path("whole"))
    said = ends(meshpar(*words("kept"), "--devices=2"))  # the directory itself lost nothing
    same(Path("kept"), Path("whole"))
