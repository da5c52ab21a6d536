"""The errors of checkpoints that cannot be written, are damaged, or belong to another model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshpar.checkpoint import checksums
from meshpar.checkpoint.checkpoints import Checkpoints, checkpoints
from meshpar.checkpoint.retention import Retention
from meshpar.checkpoint.saved import Checkpoint, find
from meshpar.errors import CheckpointError, DamagedError, Problems
from tests.damage import flip_one_bit

# Noise does not compress, so that a flipped bit in a file flips a bit of a number, as with real weights.
NOISE = jax.random.normal(jax.random.key(0), (4, 256))
PARAMS = {"a": NOISE, "b": jnp.zeros(3), "c": jnp.ones(2)}
STATE = {"step": jnp.int32(1), "params": PARAMS, "opt_state": {"mu": PARAMS}}


def structs(tree: Any) -> Any:
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Checkpoints]:
    with checkpoints(tmp_path / "checkpoints") as opened:
        opened.save(1, STATE)
        opened.wait()
        yield opened


def message(saved: Checkpoints, abstract: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        saved.restore(abstract)
    return str(error.value)


def damage(saved: Checkpoints) -> str:
    """The problem that is reported for the only checkpoint: the file, and what is wrong with it."""
    with pytest.raises(DamagedError) as error:
        Checkpoint(saved.directory / "1").restore(structs(STATE))
    heading, _, problem = str(error.value).partition("\n")
    assert heading == f"the checkpoint {saved.directory}/1 is damaged; there is no whole one before it:"
    with pytest.raises(DamagedError) as error:
        saved.restore(structs(STATE))
    where = saved.directory
    fix = f"no checkpoint in {where} is whole; set another run_dir, or move {where} away to start over"
    assert str(error.value) == f"{heading}\n{problem}\n{fix}"
    return problem


def test_control_the_same_model_and_whole_files_raise_nothing(saved: Checkpoints):
    assert saved.restore(structs(STATE))["step"] == 1


def test_each_array_that_differs_is_listed(saved: Checkpoints):
    other = {"a": jnp.zeros((4, 128)), "b": jnp.zeros(3, jnp.bfloat16), "d": jnp.zeros(5)}
    assert (
        message(saved, structs({"step": jnp.int32(0), "params": other, "opt_state": {"mu": other}}))
        == f"""\
{saved.directory}/1 holds another model: 4 arrays differ; run_dir=... makes this a run of its own:
  params.a
    float32[4, 256] in the checkpoint, float32[4, 128] in this run
  params.b
    float32[3] in the checkpoint, bfloat16[3] in this run
  params.c
    float32[2] in the checkpoint, unknown to this run
  params.d
    float32[5] in this run, missing in the checkpoint"""
    )


def test_a_checkpoint_of_another_optimizer_is_refused(saved: Checkpoints):
    text = message(saved, structs(STATE | {"opt_state": {"mu": PARAMS | {"c": jnp.ones(2, jnp.bfloat16)}}}))
    assert (
        text
        == f"""\
{saved.directory}/1 holds another optimizer: 1 array differs; run_dir=... makes this a run of its own:
  opt_state.mu.c
    float32[2] in the checkpoint, bfloat16[2] in this run"""
    )


def arrays_file(saved: Checkpoints) -> Path:
    """The file that holds the values: the largest."""
    files = (path for path in (saved.directory / "1" / "state").rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def test_a_flipped_bit_is_refused(saved: Checkpoints):
    path = arrays_file(saved)
    flip_one_bit(path)
    assert damage(saved) == f"  {path}\n    does not match its checksum"


@pytest.mark.parametrize("name", ["meta.json", "state/_METADATA"])
def test_a_flipped_bit_in_metadata_is_refused(saved: Checkpoints, name: str):
    flip_one_bit(saved.directory / "1" / name)
    assert damage(saved).endswith(f"{name}\n    does not match its checksum")


def test_a_missing_file_is_refused(saved: Checkpoints):
    path = arrays_file(saved)
    path.unlink()
    assert damage(saved) == f"  {path}\n    is missing"


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_checkpoint_without_readable_checksums_is_refused(saved: Checkpoints, text: str):
    path = saved.directory / "1" / "sha256.json"
    path.write_text(text)
    assert damage(saved) == f"  {path}\n    is damaged, so no file can be verified"


def test_control_without_checksums_a_flipped_bit_is_restored(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    """This is what the checksums are for. If it fails, Orbax has learned to find the damage itself."""
    monkeypatch.setattr(checksums, "compare", lambda folder, files, names: Problems())
    flip_one_bit(arrays_file(saved))
    restored = saved.restore(structs(STATE))["params"]["a"]
    assert (restored != NOISE).sum() > 0


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path):
    with checkpoints(tmp_path) as empty:
        assert message(empty, structs(STATE)) == f"there is no checkpoint in {tmp_path}"


def test_a_step_is_never_overwritten(saved: Checkpoints):
    with pytest.raises(CheckpointError) as error:
        saved.save(1, STATE)
    assert str(error.value) == f"{saved.directory}/1 exists, and a checkpoint is never overwritten"


def test_a_run_directory_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "checkpoints"
    with pytest.raises(CheckpointError) as error:
        Checkpoints(directory)
    assert str(error.value) == f"run_dir: {directory} cannot be written: Not a directory"


def test_a_run_directory_without_permission_is_refused(tmp_path: Path, as_nobody: None):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot be written: Permission denied"):
        Checkpoints(tmp_path)


def test_a_checkpoint_in_a_read_only_folder_is_read(tmp_path: Path, as_nobody: None):
    with checkpoints(tmp_path / "checkpoints") as saved:
        saved.save(1, {"w": jnp.float32(3)})
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    try:
        assert find(tmp_path).restore({"w": jax.ShapeDtypeStruct((), jnp.float32)})["w"] == 3
        with pytest.raises(CheckpointError, match="cannot be written"):
            Checkpoints(tmp_path / "checkpoints")
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_checkpoint_of_another_optimizer_with_arrays_of_the_same_names_is_refused(saved: Checkpoints):
    """The checkpoint of `saved` does not name its optimizer, so the test adds it to its metadata."""

    def config(kind):
        return {"optim": {"kind": kind, "b1": 0.9}}

    meta = find(saved.directory).meta | {"config": config("sgd")}
    checkpoint = find(saved.directory)
    vars(checkpoint)["meta"] = meta
    assert checkpoint.select(structs(STATE), config=config("sgd")).restored
    assert checkpoint.select(structs(STATE), ["params.**"], config=config("lion")).restored
    with pytest.raises(CheckpointError) as error:
        checkpoint.select(structs(STATE), config=config("lion"))
    assert (
        str(error.value)
        == f"""\
{saved.directory}/1 holds another optimizer; run_dir=... makes this a run of its own:
  optim.kind
    sgd in the checkpoint, lion in this run"""
    )


# Selections ----------------------------------------------------------------------------------------------------------


def part_message(saved: Checkpoints, include: list[str], exclude: tuple[str, ...] = (), **changed: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        find(saved.directory).restore(structs(STATE | changed), include, exclude)
    return str(error.value)


def test_globs_that_match_nothing_are_refused(saved: Checkpoints):
    assert (
        part_message(saved, ["parms.**", "params.a"], ("params.head.**", "zzz"))
        == """\
cannot select what to restore:
  include: parms.**
    matches no array of the checkpoint, and none of the run
    did you mean params.**?
  exclude: params.head.**
    matches no array of the checkpoint, and none of the run
    did you mean params.**?
  exclude: zzz
    matches no array of the checkpoint, and none of the run
    there are opt_state, params, step"""
    )


def test_a_part_of_another_model_is_refused(saved: Checkpoints):
    new = {"a": jnp.zeros((4, 128)), "b": jnp.zeros(3), "new_head": jnp.zeros(2)}
    assert (
        part_message(saved, ["params.**"], params=new)
        == f"""\
{saved.directory}/1 holds another model: 3 arrays differ; exclude=... leaves out what this run initializes itself:
  params.a
    float32[4, 256] in the checkpoint, float32[4, 128] in this run
  params.c
    float32[2] in the checkpoint, unknown to this run
  params.new_head
    float32[2] in this run, missing in the checkpoint"""
    )


def test_control_excluded_arrays_may_differ(saved: Checkpoints):
    new = {"a": jnp.zeros((4, 128)), "b": jnp.ones(3), "new_head": jnp.zeros(2)}
    got = find(saved.directory).restore(
        structs(STATE | {"params": new}), ["params.**"], ["params.a", "params.c", "params.new*"]
    )
    assert (got["params"]["b"] == 0).all()


# Folders and metrics -------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "300.partial").mkdir()
    with pytest.raises(CheckpointError) as error:
        find(tmp_path)
    assert str(error.value) == f"{tmp_path} is no checkpoint, and holds none"
    with pytest.raises(CheckpointError) as error:
        find(tmp_path / "nothing")
    assert str(error.value) == f"{tmp_path}/nothing does not exist"


def test_a_truncated_file_is_refused(saved: Checkpoints):
    path = arrays_file(saved)
    path.write_bytes(path.read_bytes()[:-1])
    assert damage(saved) == f"  {path}\n    does not match its checksum"


def test_checksums_of_files_elsewhere_are_refused(saved: Checkpoints, tmp_path: Path):
    (tmp_path / "secret").write_text("")
    path = saved.directory / "1" / "sha256.json"
    path.write_text('{"../../secret": ""}')
    assert damage(saved) == f"  {path}\n    is damaged, so no file can be verified"


def test_a_metric_that_no_evaluation_has_is_refused(tmp_path: Path):
    """The first evaluation shows it; the checkpoint is written nevertheless."""
    with (
        pytest.raises(CheckpointError) as error,
        checkpoints(tmp_path, Retention(keep_best=1, metric="acuracy")) as opened,
    ):
        opened.save(1, STATE, {"loss": 1.0, "accuracy": 0.5})
    assert str(error.value) == "checkpoints.metric: an evaluation has no acuracy, but loss, accuracy"
    assert find(tmp_path).step == 1
