"""Only regular files inside a downloaded folder are read or copied."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshpar.errors import Problems
from meshpar.interop.export import copy_companions, whole_or_not
from meshpar.interop.folder import check_inside
from meshpar.regular_files import open_regular
from tests.interop.pretrained import saved

NAMES = ("config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved("smollm", tmp_path_factory.mktemp("smollm"), "bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def hf(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original, tmp_path / "hf")
    (tmp_path / "secret").write_text("not for others")
    (tmp_path / "secret").chmod(0o600)
    return tmp_path / "hf"


def outside(path: Path) -> None:
    path.symlink_to("../secret")


def whole_folder_outside(path: Path) -> None:
    path.parent.joinpath("up").symlink_to("..")
    path.symlink_to("up/secret")


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "outside": (outside, "it is a link that leads out of the folder, to "),
    "through a folder outside": (whole_folder_outside, "it is a link that leads out of the folder, to "),
    "nowhere": (nowhere, "No such file or directory"),
    "circle": (circle, "Symlink loop" if sys.version_info < (3, 13) else os.strerror(errno.ELOOP)),
    "device": (device, "it is a link that leads out of the folder, to /dev/zero"),
    "pipe": (os.mkfifo, "it is a pipe, not a regular file"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_leads_out_of_its_folder_is_refused(name: str, fault: str, hf: Path, command):
    (hf / name).unlink()
    make, problem = FAULTS[fault]
    make(hf / name)
    result = command("convert", "run", "--from-hf", "hf")
    assert result.code == 2
    assert f"hf/{name}\n    cannot be {'copied' if 'tokenizer' in name else 'read'}: {problem}" in result.err
    assert sorted(path.name for path in hf.parent.iterdir()) == ["hf", "secret"]


def test_a_shard_that_is_a_pipe_is_not_waited_for(hf: Path, command):
    (hf / "model.safetensors").unlink()
    os.mkfifo(hf / "a.safetensors")
    (hf / "b.safetensors").symlink_to("../secret")
    (hf / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    result = command("convert", "run", "--from-hf", "hf")
    assert result.code == 2
    assert "hf/a.safetensors\n    cannot be read: it is a pipe, not a regular file" in result.err
    assert "hf/b.safetensors\n    cannot be read: it is a link that leads out of the folder" in result.err


def test_an_export_copies_no_file_from_outside_the_run(hf: Path, tmp_path: Path, command):
    """An older version may have copied links into the run. Control: a link inside the folder is followed."""
    assert command("convert", "run", "--from-hf", "hf", "mesh.data=8").code == 0
    companion = tmp_path / "run/hugging_face/tokenizer_config.json"
    companion.unlink()
    companion.symlink_to(tmp_path / "secret")
    result = command("convert", "run", "--to-hf", "out")
    assert result.code == 2 and "it is a link that leads out of the folder" in result.err
    assert not (tmp_path / "out").exists()
    companion.unlink()
    companion.symlink_to("tokenizer.json")  # within the folder
    assert command("convert", "run", "--to-hf", "out").code == 0
    assert (tmp_path / "out/tokenizer_config.json").read_text() == "{}"


def test_a_snapshot_in_the_cache_of_the_hub_is_read(hf: Path, tmp_path: Path):
    snapshot = tmp_path / "model/snapshots/1a2b"
    blobs = tmp_path / "model/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "3c4d").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/3c4d")
    check_inside(snapshot, "tokenizer.json")
    (tmp_path / "to").mkdir()
    copy_companions(snapshot, tmp_path / "to")
    assert (tmp_path / "to/tokenizer.json").read_text() == "{}"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="leads out of the folder"):
        check_inside(snapshot, "tokenizer.json")


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o700), (0o022, 0o755), (0o002, 0o775)])
def test_written_files_have_the_modes_of_the_umask(mask: int, mode: int, tmp_path: Path):
    before = os.umask(mask)
    try:
        with whole_or_not(tmp_path / "made") as made:
            (made / "file").write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "made/file").stat().st_mode) == mode & 0o666


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_only_regular_files_are_opened(make: Callable[[Path], None], tmp_path: Path):
    make(tmp_path / "x")
    with pytest.raises(OSError, match=r"it is a (folder|pipe), not a regular file"):
        open_regular(tmp_path / "x")


def test_a_file_that_is_no_json_is_a_problem(tmp_path: Path):
    from meshpar.interop.folder import read_json

    for content in (b"", b"{", b"[1]", b"\xff", b"9" * 5000, b"[" * 10**5, b"NaN"):
        (tmp_path / "x.json").write_bytes(content)
        problems = Problems()
        assert read_json(tmp_path, "x.json", problems) == {} and len(problems) == 1, content
