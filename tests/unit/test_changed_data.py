"""A resumed run reads the data that it read before, or reports which files changed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from meshpar.data import Jsonl, Mixture, Numpy, StandardLibrary, Synthetic, Text
from meshpar.data import fingerprint as prints
from meshpar.data.fingerprint import changed_files, changes, fingerprint
from meshpar.errors import DataError, DataWarning
from tests.sources import write_sources, write_tokenizer

RUN = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: text, path: corpus, batch_size: 8, seq_len: 8, held_out_fraction: 0.5}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 8}
num_steps: 2
run_dir: run
loggers: []
"""


def test_a_run_resumes_with_the_same_data_and_names_the_files_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command
):
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(8):
        (corpus / f"{i}.txt").write_text(f"document {i} " * 20)
    Path("config.yaml").write_text(RUN)
    assert command("train", "config.yaml").code == 0
    meta = json.loads(Path("run/checkpoints/2/meta.json").read_text())
    assert meta["data"]["files"] == Text(path="corpus").fingerprint()
    os.utime(corpus / "0.txt", (0, 0))  # only the time changes
    corpus.rename("moved")
    assert command("train", "config.yaml", "data.path=moved", "num_steps=3").code == 0

    moved = Path("moved")
    (moved / "0.txt").write_text("document X " * 20)  # of the same size
    (moved / "1.txt").unlink()
    (moved / "9.txt").write_text("new")
    result = command("train", "config.yaml", "data.path=moved", "num_steps=4")
    assert result.code == 2
    assert result.err.endswith(
        f"""\
the data differ from those of {tmp_path}/run/checkpoints/3:
  0.txt
    has changed
  1.txt
    is missing
  9.txt
    is new
  data.if_changed = refuse
    the next batches would differ from those of the stopped run
    restore the files, or resume with the files as they are now: data.if_changed=allow
"""
    )
    with pytest.warns(DataWarning, match=r"(?s)differ from those of .*1.txt\n    is missing"):
        result = command("train", "config.yaml", "data.path=moved", "num_steps=4", "data.if_changed=allow")
    assert result.code == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    restored = [record for record in records if record["kind"] == "restored"]
    assert [record.get("data_changed") for record in restored] == [None, ["0.txt", "1.txt", "9.txt"]]
    # The next checkpoint has the checksums of the changed files.
    assert command("train", "config.yaml", "data.path=moved", "num_steps=4").code == 0


def test_a_checkpoint_without_checksums_reports_no_change(tmp_path: Path):
    for before in (None, "x", []):
        assert changed_files(before, {"a": "1"}, tmp_path, allowed=False) == []


def test_many_changes_are_counted(tmp_path: Path):
    now = {f"{i:02}": "1" for i in range(30)}
    with pytest.raises(DataError, match=r"  09\n    is new\n  20 more files\n    have changed\n"):
        changed_files({}, now, tmp_path, allowed=False)


def test_every_source_names_its_files_and_its_tokenizer(tmp_path: Path):
    sources = write_sources(tmp_path)
    assert Synthetic().fingerprint() == {}
    assert len(StandardLibrary().fingerprint()) > 300
    num_files = {"text": 40, "synthetic": 0, "webdataset": 2, "array_record": 2, "array_record of texts": 2}
    for name, data in sources.items():
        with_tokenizer = name not in ("synthetic", "npz", "matrix")
        assert len(data.fingerprint()) == num_files.get(name, 1) + with_tokenizer, name
    before = sources["text"].fingerprint()
    write_tokenizer(tmp_path / "tokenizer.json", vocab_size=270)
    assert changes(before, sources["text"].fingerprint()) == {"data.tokenizer": "has changed"}
    parts = [{"weight": 1, "data": sources[name].model_dump()} for name in ("jsonl", "arrow")]
    mixture = Mixture.model_validate({"batch_size": 8, "seq_len": 16, "held_out_fraction": 0.25, "parts": parts})
    names = ["parts.0: texts.jsonl", "parts.0: data.tokenizer", "parts.1: file.arrow", "parts.1: data.tokenizer"]
    assert list(mixture.fingerprint()) == names


def test_very_many_files_have_one_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prints, "MOST_FILES", 3)
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("x")
    before = Text(path=str(tmp_path)).fingerprint()
    assert list(before) == ["4 files"]
    (tmp_path / "0.txt").write_text("y")
    assert changes(before, Text(path=str(tmp_path)).fingerprint()) == {"4 files": "has changed"}


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[Path] = []
    right = prints.open_regular
    monkeypatch.setattr(prints, "open_regular", lambda path: opened.append(path) or right(path))
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    data = Jsonl(path=str(file))
    first = data.fingerprint()
    assert data.fingerprint() == first and len(opened) == 2  # it was written a moment ago
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)
    assert data.fingerprint() == data.fingerprint() == first and len(opened) == 3
    file.write_text('{"text": "b"}\n')
    assert data.fingerprint() != first and len(opened) == 4


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="gone\n    cannot be read: No such file or directory"):
        fingerprint({"a": tmp_path / "gone"})


def test_a_missing_folder_is_reported_before_run_dir_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(RUN)
    result = command("train", "config.yaml")
    assert result.code == 2 and "data.path = 'corpus'\n    there is no such folder" in result.err
    assert not Path("run").exists()


def test_arrays_have_a_checksum_though_they_are_only_mapped(tmp_path: Path):
    path = write_sources(tmp_path)["npy"].path  # pyright: ignore
    data = Numpy(path=path, tokenizer={"kind": "ids", "vocab_size": 65536, "bos": 0})
    before = data.fingerprint()
    content = bytearray(Path(path).read_bytes())
    content[-1] ^= 1
    Path(path).write_bytes(content)
    assert changes(before, data.fingerprint()) == {"line.npy": "has changed"}
