"""What a user reads when there is no data where the config says, or too little of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshpar.errors import DataError
from meshpar.train.data import Synthetic, Text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: `corpus` and in it two texts, one on each side of a split in halves."""
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("one")
    (corpus / "b.txt").write_text("two")
    return corpus


def message(**settings) -> str:
    data = Text(**{"path": "corpus", "held_out_fraction": 0.5} | settings)
    with pytest.raises(DataError) as error:
        data.train(seed=0)
    with pytest.raises(DataError) as other:
        data.held_out()
    assert str(error.value) == str(other.value)
    return str(error.value)


def test_control_the_same_folder_without_a_fault_raises_nothing(folder: Path):
    data = Text(path="corpus", held_out_fraction=0.64)
    assert data.train(seed=0).num_documents + data.held_out().num_documents == 2


def test_no_folder(folder: Path):
    assert (
        message(path="corpsu")
        == f"""\
there is no data to train on:
  data.path = 'corpsu'
    there is no such folder
    it is relative to the working directory, {folder.parent}"""
    )


def test_all_that_is_wrong_with_path_and_glob_is_said_at_once(folder: Path):
    assert (
        message(path="corpus/a.txt", glob="../*.txt")
        == f"""\
there is no data to train on:
  data.path = 'corpus/a.txt'
    is a file, not a folder
    it is relative to the working directory, {folder.parent}
  data.glob = '../*.txt'
    is empty or leads out of data.path
    give a pattern below data.path, like '**/*.txt'"""
    )


@pytest.mark.parametrize("glob", ["", "/etc/*", "../*", "a/../../*"])
def test_a_glob_stays_inside_its_folder(folder: Path, glob: str):
    assert f"data.glob = {glob!r}\n    is empty or leads out of data.path\n" in message(glob=glob)


def test_no_file_matches(folder: Path):
    assert (
        message(glob="**/*.md")
        == """\
there is no data to train on:
  data.glob = '**/*.md'
    matches no file below 'corpus'
    data.glob='**/*.txt' matches 2"""
    )


def test_a_folder_without_files(folder: Path):
    (folder / "empty" / "deeper").mkdir(parents=True)
    assert (
        message(path="corpus/empty")
        == """\
there is no data to train on:
  data.glob = '**/*.txt'
    matches no file below 'corpus/empty'
    the folder holds no file at all"""
    )


def test_files_that_cannot_be_read_are_all_named(folder: Path):
    (folder / "c.txt").symlink_to("nowhere")
    (folder / "d.txt").symlink_to("nowhere")
    said = message()
    for name in ("c", "d"):
        assert (
            f"""
  corpus/{name}.txt
    cannot be read: No such file or directory
    make it readable, or narrow data.glob"""
            in said
        )


def test_a_file_without_permission(folder: Path, as_nobody: None):
    (folder / "a.txt").chmod(0)
    assert "corpus/a.txt\n    cannot be read: Permission denied" in message()


def test_all_files_are_empty(folder: Path):
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("")
    assert (
        message()
        == """\
there is no data to train on:
  data
    no document has a token in it
    give documents with text in them"""
    )


def test_one_document_cannot_be_split(folder: Path):
    (folder / "b.txt").write_text("")
    assert (
        message()
        == """\
there is no data to train on:
  data
    only one document is not empty: nothing is left for the other side of the split
    give at least two documents: cut this one into two"""
    )


def test_the_fix_for_a_split_with_an_empty_side_works():
    data = Synthetic(num_documents=3)
    for fraction, share, effect in ((1e-9, "none", "holds out 1"), (0.999999, "all", "leaves 1 to train on")):
        data = data.model_copy(update={"held_out_fraction": fraction})
        with pytest.raises(DataError) as error:
            data.train(seed=0)
        lines = str(error.value).splitlines()
        fix = lines[-1].split()[0].removeprefix("data.held_out_fraction=")
        assert lines == [
            "there is no data to train on:",
            f"  data.held_out_fraction = {fraction:g}",
            f"    {share} of 3 documents would be held out",
            f"    data.held_out_fraction={fix} {effect}",
        ]
        mended = data.model_copy(update={"held_out_fraction": float(fix)})
        one = mended.held_out() if share == "none" else mended.train(seed=0)
        assert one.num_documents == 1
