"""What happens when a checkpoint is damaged, cut short by a kill, renamed, or written by another meshpar."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshpar.checkpoint import checksums, durable, meta
from meshpar.checkpoint.checkpoints import CheckpointMetadata, checkpoints
from meshpar.checkpoint.retention import Retention
from meshpar.checkpoint.saved import Checkpoint, find, find_all, steps
from meshpar.config import changed
from meshpar.errors import CheckpointError, DamagedError, DamagedWarning
from tests.command import Said
from tests.damage import flip_one_bit

STRUCTS = {"params": {"w": jax.ShapeDtypeStruct((256,), jnp.float32)}, "step": jax.ShapeDtypeStruct((), jnp.int32)}


def state(step: int) -> dict[str, Any]:
    return {"params": {"w": jnp.sin(jnp.arange(256.0) + step)}, "step": jnp.int32(step)}


def save(folder: Path, *wanted: int, keep: int = 9) -> None:
    with checkpoints(folder, Retention(keep=keep), CheckpointMetadata({"seed": 0})) as saved:
        for step in wanted:
            saved.save(step, state(step))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save(folder, 10, 20, 30)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """The checkpoints of steps 10, 20 and 30."""
    return shutil.copytree(original, tmp_path / "checkpoints")


def chunk(folder: Path, step: int, path: str = "params.w") -> Path:
    return folder / str(step) / "state" / path / "0"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


def rewrite_meta(folder: Path, text: str) -> None:
    """Replaces `meta.json`, and makes `sha256.json` match it."""
    (folder / "meta.json").write_text(text)
    (folder / "sha256.json").unlink()
    checksums.write(folder)


# The newest whole checkpoint -----------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit in a chunk": lambda step: flip_one_bit(step / "state" / "params.w" / "0"),
    "a flipped bit in meta.json": lambda step: flip_one_bit(step / "meta.json"),
    "a flipped bit in sha256.json": lambda step: flip_one_bit(step / "sha256.json"),
    "an empty sha256.json, as after a power cut": lambda step: (step / "sha256.json").write_text(""),
    "no sha256.json": lambda step: (step / "sha256.json").unlink(),
    "no chunk": lambda step: (step / "state" / "params.w" / "0").unlink(),
    "no file": lambda step: [path.unlink() for path in step.rglob("*") if path.is_file()] and None,
    "wrong content with a right checksum": lambda step: rewrite_meta(step, "{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_checkpoint_is_restored_with_a_warning(damage: str, folder: Path):
    DAMAGES[damage](folder / "30")
    text = r"30 is damaged; the one before it is .*20"
    with checkpoints(folder) as saved, pytest.warns(DamagedWarning, match=text) as warned:
        assert saved.restore(STRUCTS)["step"] == 20
    assert str(warned[0].message).endswith(f"\n{folder}/20 is used instead")
    with pytest.warns(DamagedWarning, match="30 is damaged"):
        assert find(folder).step == 20


def test_two_damaged_checkpoints_are_both_reported(folder: Path):
    flip_one_bit(chunk(folder, 30))
    flip_one_bit(chunk(folder, 20))
    with pytest.warns(DamagedWarning) as warned:
        assert find(folder).step == 10
    assert [str(warning.message).partition(" is damaged")[0] for warning in warned] == [
        f"the checkpoint {folder}/{step}" for step in (30, 20)
    ]


def test_control_whole_checkpoints_warn_of_nothing(folder: Path):
    assert find(folder).restore(STRUCTS)["step"] == 30


def test_a_damaged_checkpoint_that_is_named_is_refused_with_the_one_before_it(folder: Path):
    flip_one_bit(chunk(folder, 30))
    with pytest.raises(DamagedError) as error:
        find(folder / "30").restore(STRUCTS)
    assert str(error.value) == (
        f"the checkpoint {folder}/30 is damaged; the one before it is {folder}/20:\n"
        f"  {chunk(folder, 30)}\n    does not match its checksum"
    )
    assert find(folder / "20").restore(STRUCTS)["step"] == 20  # the fix that was proposed


def test_the_proposed_checkpoint_looks_whole(folder: Path):
    flip_one_bit(chunk(folder, 30))
    chunk(folder, 20).write_bytes(b"")
    with pytest.raises(DamagedError, match=f"the one before it is {folder}/10"):
        find(folder / "30").restore(STRUCTS)


def test_damage_to_arrays_that_are_not_read_does_no_harm(folder: Path):
    flip_one_bit(chunk(folder, 30, "step"))
    assert find(folder, ["params.**"]).step == 30
    with pytest.warns(DamagedWarning):
        assert find(folder).step == 20


def test_another_model_is_refused_and_no_older_one_is_tried(folder: Path):
    other = STRUCTS | {"params": {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}}
    with checkpoints(folder) as saved, pytest.raises(CheckpointError, match="30 holds another model"):
        saved.restore(other)


def test_a_damaged_checkpoint_is_moved_aside_when_its_step_is_saved_again(folder: Path):
    flip_one_bit(chunk(folder, 30))
    before = {path.relative_to(folder / "30"): path.read_bytes() for path in (folder / "30").rglob("[!s]*.json")}
    with checkpoints(folder, Retention(keep=2)) as saved:
        with pytest.warns(DamagedWarning):
            assert saved.restore(STRUCTS)["step"] == 20
        assert names(folder) == {"10", "20", "30"}  # reading moves nothing
        saved.save(25, state(25))
        saved.wait()
        assert names(folder) == {"20", "25", "30.damaged"}  # a damaged checkpoint does not count among those kept
        saved.save(30, state(31))
    assert names(folder) == {"25", "30", "30.damaged"}
    assert all((folder / "30.damaged" / name).read_bytes() == content for name, content in before.items())
    assert find(folder).restore(STRUCTS)["step"] == 31


def test_the_latest_step_is_not_one_that_was_found_damaged(folder: Path):
    flip_one_bit(chunk(folder, 30))
    with checkpoints(folder) as saved:
        assert saved.latest() == 30
        with pytest.warns(DamagedWarning):
            saved.newest(STRUCTS)
        assert saved.latest() == 20


def test_a_save_that_failed_frees_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with checkpoints(tmp_path) as saved:
        saved.save(1, state(1))
        saved.wait()
        with monkeypatch.context() as patch:
            patch.setattr(checksums, "write", full)
            saved.save(2, state(2))
            with pytest.raises(OSError, match="No space left"):
                saved.wait()
        assert names(tmp_path) == {"1"}
        saved.save(2, state(2))
    assert find(tmp_path).step == 2


def test_a_step_that_is_damaged_twice_is_moved_aside_twice(folder: Path):
    for _ in range(2):
        flip_one_bit(chunk(folder, 30))
        with checkpoints(folder) as saved:
            with pytest.warns(DamagedWarning):
                saved.restore(STRUCTS)
            saved.save(30, state(30))
    assert {"30.damaged", "30.damaged-again"} < names(folder)


def test_control_a_whole_checkpoint_is_never_overwritten(folder: Path):
    with checkpoints(folder) as saved:
        saved.restore(STRUCTS)
        with pytest.raises(CheckpointError, match="exists, and a checkpoint is never overwritten"):
            saved.save(30, state(30))


# Kills and power cuts ------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_synced_before_it_is_renamed_and_only_then_are_older_ones_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[tuple[str, Path]] = []
    fsync = os.fsync
    rename = Path.rename

    def record_sync(file: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}"))))
        fsync(file)

    def record_rename(path: Path, target: Path) -> Path:
        events.append(("rename", path))
        return rename(path, target)

    save(tmp_path / "new" / "checkpoints", 1)
    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save(tmp_path / "new" / "checkpoints", 2, keep=1)
    directory = tmp_path / "new" / "checkpoints"
    partial = next(path for event, path in events if event == "rename")
    named = events.index(("rename", partial))
    written = {partial, *(partial / path.relative_to(directory / "2") for path in (directory / "2").rglob("*"))}
    assert {path for event, path in events[:named] if event == "sync"} >= written
    assert events[named + 1 : named + 4] == [("sync", directory), ("rename", directory / "1"), ("sync", directory)]
    assert names(directory) == {"2"}


def test_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync", synced.append)
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}


KILLED = """
import os, signal, shutil, sys
from pathlib import Path
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.retention import Retention
from tests.unit.test_damage import state

def die(folder):
    (folder / "meta.json").unlink()  # rmtree has begun
    os.kill(os.getpid(), signal.SIGKILL)

with checkpoints(Path(sys.argv[1]), Retention(keep=1)) as saved:
    saved.save(1, state(1))
    saved.wait()
    shutil.rmtree = die
    saved.save(2, state(2))
"""


def test_a_kill_while_an_old_one_is_removed_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert steps(tmp_path) == [2]
    assert len([*tmp_path.glob("1.*.partial")]) == 1
    save(tmp_path, 3)
    assert names(tmp_path) == {"2", "3"}


# Names and formats ---------------------------------------------------------------------------------------------------


def test_a_folder_with_the_number_of_another_step_is_refused(folder: Path):
    (folder / "30").rename(folder / "45")
    message = f"{folder}/45 holds step 30: rename it to {folder}/30, or move it away"
    with checkpoints(folder) as saved, pytest.raises(CheckpointError) as error:
        saved.restore(STRUCTS)
    assert str(error.value) == message
    with pytest.raises(CheckpointError) as error:
        find(folder)
    assert str(error.value) == message
    (folder / "45").rename(folder / "30")
    assert find(folder).step == 30


def test_a_copy_under_another_name_is_restored(folder: Path):
    (folder / "30").rename(folder / "best")
    assert find(folder / "best").restore(STRUCTS)["step"] == 30


def test_files_and_odd_folders_are_no_checkpoints(folder: Path):
    (folder / "99").touch()
    (folder / "007").mkdir()
    (folder / "50.partial").mkdir()
    assert [saved.step for saved in find_all(folder)] == [10, 20, 30]
    save(folder, 40)
    assert find(folder).step == 40
    save(folder, 99)
    assert find(folder).step == 99
    assert (folder / "99.damaged").is_file()


def as_first_format(folder: Path) -> None:
    """Rewrites a checkpoint in the first format, which had no number."""
    plain = json.loads((folder / "meta.json").read_text())
    del plain["format"]
    (folder / "meta.json").write_text(json.dumps(plain, indent=2))
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "sha256.json"]
    sums = {str(path.relative_to(folder)): checksums.sha256(path) for path in files}
    (folder / "sha256.json").write_text(json.dumps(sums, indent=2))


def test_the_first_format_is_read(folder: Path):
    as_first_format(folder / "30")
    checkpoint = find(folder)
    checkpoint.check_sizes()
    assert (checkpoint.meta["format"], checkpoint.restore(STRUCTS)["step"]) == (1, 30)
    flip_one_bit(chunk(folder, 30))
    with pytest.raises(DamagedError, match="does not match its checksum"):
        Checkpoint(folder / "30").restore(STRUCTS)


def test_a_newer_format_is_refused_and_no_older_one_is_used(folder: Path):
    plain = json.loads((folder / "30" / "meta.json").read_text())
    rewrite_meta(folder / "30", json.dumps({"format": meta.FORMAT + 1, "step": plain["step"]}))
    with pytest.raises(CheckpointError) as error:
        find(folder)
    assert str(error.value) == f"{folder}/30/meta.json has format 4, and this meshpar reads up to 3: update meshpar"


def mutated(plain: Any, chance: random.Random) -> Any:
    """The same content with one to three values or keys changed."""
    plain = json.loads(json.dumps(plain))
    for _ in range(chance.randint(1, 3)):
        places = list(_places(plain))
        holder, key = chance.choice(places)
        value = chance.choice(
            [None, [], {}, "", "x", -1, 1.5, 10**30, float("inf"), True, [[]], {"a": 1}, "\x00", [-1]]
        )
        kind = chance.choice(["change", "remove", "rename"])
        if kind == "change" or isinstance(holder, list):
            holder[key] = value
        elif kind == "remove":
            del holder[key]
        else:
            holder[f"{key}x"] = holder.pop(key)
    return plain


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def read_all(folder: Path) -> None:
    """Reads everything that meshpar reads from a checkpoint."""
    checkpoint = Checkpoint(folder)
    checkpoint.select(STRUCTS, config={"seed": 1})
    changed(checkpoint.meta["config"], {"seed": 1})
    Retention(keep_best=1).chosen({checkpoint.step: checkpoint.meta["metric"]["value"]})
    checkpoint.restore(STRUCTS)


TEXTS = ["", "[]", "null", "{", "1", '"x"', "[" * 10**5, "{}", "\ufeff{}", '{"format": 2}', '{"format": "2"}']


@pytest.mark.slow
def test_wrong_content_with_right_checksums_is_refused_without_a_traceback(
    original: Path, tmp_path: Path, command: Callable[..., Said]
):
    plain = json.loads((original / "30" / "meta.json").read_text())
    chance = random.Random(0)
    texts = [*TEXTS, *(json.dumps(mutated(plain, chance)) for _ in range(100))]
    refused = 0
    shutil.copytree(original / "30", tmp_path / "30")
    for text in texts:
        rewrite_meta(tmp_path / "30", text)
        try:
            read_all(tmp_path / "30")
        except CheckpointError:
            refused += 1
        assert command("checkpoint", "show", tmp_path / "30").code in (0, 2)
        assert command("checkpoint", "ls", tmp_path).code == 0
    assert refused > 80


def test_control_without_the_schema_of_meta_a_traceback_escapes(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(meta, "parse", lambda text, path: json.loads(text))
    shutil.copytree(original / "30", tmp_path / "30")
    rewrite_meta(tmp_path / "30", "{}")
    with pytest.raises(KeyError):
        read_all(tmp_path / "30")


def test_damage_to_the_checksums_names_their_file(folder: Path):
    path = folder / "30" / "sha256.json"
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(100):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            harmless = json.loads(data) == json.loads(whole)  # one blank became another
        except ValueError:
            harmless = False
        if not harmless:
            with pytest.raises(DamagedError) as error:
                Checkpoint(folder / "30").restore(STRUCTS)
            assert str(error.value).splitlines()[1] == f"  {path}"


# Commands ------------------------------------------------------------------------------------------------------------


def test_ls_reports_damage_that_shows_without_reading_arrays(folder: Path, command: Callable[..., Said]):
    chunk(folder, 20).write_bytes(b"")
    result = command("checkpoint", "ls", folder)
    assert result.code == 0
    assert [line.split()[:2] for line in result.out.splitlines()[1:4]][1] == ["20", "damaged"]
    size = json.loads((folder / "20" / "sha256.json").read_text())["files"]["state/params.w/0"]["bytes"]
    assert f"  {chunk(folder, 20)}\n    has 0 bytes instead of {size}\n" in result.out
    assert result.out.endswith("The arrays were not verified: `meshpar checkpoint verify` reads them.\n")


def test_verify_names_the_file_and_exits_with_1(folder: Path, command: Callable[..., Said]):
    result = command("checkpoint", "verify", folder)
    num_files = len([path for path in (folder / "10").rglob("*") if path.is_file()]) - 1
    lines = [f"{folder}/{step} is whole: {num_files} files" for step in (10, 20, 30)]
    assert (result.code, result.out.splitlines()) == (0, lines)
    flip_one_bit(chunk(folder, 20))
    result = command("checkpoint", "verify", folder)
    assert result.code == 1
    assert result.out.splitlines() == [
        lines[0],
        lines[2],
        f"the checkpoint {folder}/20 is damaged; the one before it is {folder}/10:",
        f"  {chunk(folder, 20)}",
        "    does not match its checksum",
    ]
    rows = json.loads(command("checkpoint", "verify", folder, "--json").out)
    assert ["damaged" in row for row in rows] == [False, True, False]
    assert command("checkpoint", "verify", folder / "10").code == 0
    assert command("checkpoint", "verify", folder / "nothing").code == 2
