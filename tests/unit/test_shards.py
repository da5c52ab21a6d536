"""Shards give the rows that encoding in memory gives, to the bit; a build goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.data import Arrow, Jsonl, Parquet, Shards, Text
from meshpar.data.corpus import TextCorpus
from meshpar.data.dataset import Dataset
from meshpar.data.documents import Documents
from meshpar.data.shards import stored
from meshpar.data.shards.build import build
from meshpar.data.shards.manifest import HELD_OUT, MANIFEST, PLAN, TRAIN
from meshpar.data.shards.stored import SideWriter, StoredDocuments
from meshpar.data.tokenizer import Ids
from meshpar.errors import DataError, DataWarning
from tests.sources import BATCHES, texts, write_sources, write_tokenizer
from tests.waiting import is_alive, wait_for

SOURCES = ["text", "jsonl", "parquet", "parquet of ids", "arrow", "arrow of ids", "arrow stream of ids"]
SOURCES += ["webdataset", "array_record"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCorpus]:
    found = write_sources(tmp_path_factory.mktemp("sources"))
    return {name: one for name, one in found.items() if isinstance(one, TextCorpus)}


def built(corpus: TextCorpus, folder: Path, **options) -> Shards:
    build(corpus, folder, **options)
    return Shards(path=str(folder), **corpus.model_dump(include={*BATCHES}))


def assert_same(first: Dataset, second: Dataset, num: int) -> None:
    assert [first.num_rows, first.num_tokens, first.num_documents] == [
        second.num_rows, second.num_tokens, second.num_documents
    ]  # fmt: skip
    for i in range(min(num, len(first))):
        ours, theirs = first[i], second[i]
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype and np.array_equal(ours[name], theirs[name]), (i, name)


@pytest.mark.parametrize(("name", "shard_bytes"), [(name, 200) for name in SOURCES] + [("jsonl", 10**6)])
def test_the_rows_are_those_of_encoding_in_memory(
    name: str, shard_bytes: int, sources: dict[str, TextCorpus], tmp_path: Path
):
    corpus = sources[name]
    shards = built(corpus, tmp_path / "shards", shard_bytes=shard_bytes)
    assert (len(shards.manifest.shards) > 1) == (shard_bytes == 200)
    assert (shards.vocab_size, shards.tokenizer.bos) == (corpus.vocab_size, corpus.tokenizer.bos)
    for ours, theirs in zip(shards.datasets(seed=3), corpus.datasets(seed=3), strict=True):
        assert_same(ours, theirs, 15)
    joined = {"documents_in_row": "joined", "seq_len": 24}
    ours, theirs = (one.model_copy(update=joined).train(seed=1) for one in (shards, corpus))
    assert_same(ours, theirs, 10)


def test_control_one_changed_id_is_seen(sources: dict[str, TextCorpus], tmp_path: Path):
    corpus = sources["jsonl"]
    shards = built(corpus, tmp_path / "shards")
    path = next((tmp_path / "shards").glob("*/train.ids"))
    content = bytearray(path.read_bytes())
    content[2] ^= 1  # the first id of the first document
    path.write_bytes(content)
    with pytest.raises(AssertionError):
        assert_same(shards.train(seed=3), corpus.train(seed=3), 40)


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=2, max_size=20), st.data())
@settings(deadline=None, max_examples=40)
def test_any_positions_of_any_documents_are_those_in_memory(
    tmp_path_factory: pytest.TempPathFactory, ids: list[list[int]], data: st.DataObject
):
    """Also where a document has the id that opens documents in it, is longer than its shard, or crosses two."""
    folder = tmp_path_factory.mktemp("written")
    bodies = [np.array(one, np.int64) for one in ids if one] or [np.array([1])]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(bodies)), max_size=4)) | {0, len(bodies)})
    ends = []
    for i, (start, stop) in enumerate(pairwise(cuts)):
        with SideWriter(folder / f"{i}", np.dtype(np.uint8)) as writer:
            for body in bodies[start:stop]:
                writer.add(body)
        ends.append(writer.num_tokens)
    paths = tuple(folder / f"{i}" for i in range(len(ends)))
    bos = data.draw(st.sampled_from([9, 256]))
    stored = StoredDocuments(paths, np.cumsum(ends), len(bodies), np.dtype(np.uint8), bos=bos, vocab_size=10)
    memory = Documents.joined([(0.0, body) for body in bodies], bos=bos, dtype=np.uint8)
    first = data.draw(st.integers(0, memory.num_tokens + 3))
    at = first + np.arange(data.draw(st.integers(1, 30)))
    for ours, theirs in zip(stored.take(at[None]), memory.take(at[None]), strict=True):
        assert np.array_equal(ours, theirs)


def test_processes_write_the_same_files_as_one(sources: dict[str, TextCorpus], tmp_path: Path):
    for name, options in {"one": {}, "two": {"processes": 2}}.items():
        build(sources["jsonl"], tmp_path / name, shard_bytes=1500, **options)
    written = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("one", "two")
    ]
    assert written[0] == written[1] and len(written[0]) > 10


def test_parts_build_a_folder_together(sources: dict[str, TextCorpus], tmp_path: Path):
    first = build(sources["jsonl"], tmp_path / "shards", shard_bytes=800, part=(1, 2))
    assert first.missing and "other parts encode them" in str(first)
    with pytest.raises(DataError, match="its build has not ended"):
        Shards(path=str(tmp_path / "shards"), **BATCHES).train(seed=0)
    second = build(sources["jsonl"], tmp_path / "shards", shard_bytes=800, part=(2, 2))
    assert not second.missing and second.tokens == first.encoded + second.encoded
    shards = Shards(path=str(tmp_path / "shards"), **BATCHES)
    assert_same(shards.train(seed=0), sources["jsonl"].train(seed=0), 20)


def test_a_document_longer_than_a_shard_is_in_the_shard_in_which_it_begins(tmp_path: Path):
    lines = ["a", "b" * 5000, "c", *"defgh"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line * 3}) + "\n" for line in lines))
    corpus = Jsonl(path=str(path), seq_len=8, held_out_fraction=0.3)
    shards = built(corpus, tmp_path / "shards", shard_bytes=100)
    assert 0 in [one.train.tokens + one.held_out.tokens for one in shards.manifest.shards]
    whole = Shards(path=str(tmp_path / "shards"), seq_len=8, held_out_fraction=0.3)
    assert_same(whole.train(seed=0), corpus.train(seed=0), 100)


# A build that was stopped ---------------------------------------------------------------------------------------


BUILD = """
import sys, time
from pathlib import Path
from meshpar.data import Jsonl
from meshpar.data.shards import build as module

def slowly(line):
    print(line, flush=True)
    time.sleep(0.2)

corpus = Jsonl(path=sys.argv[1], field="body", tokenizer=sys.argv[2], seq_len=16, held_out_fraction=0.25)
if __name__ == "__main__":
    module.build(corpus, Path(sys.argv[3]), shard_bytes=300, processes=int(sys.argv[4]), say=slowly)
"""


def test_a_killed_build_goes_on_and_encodes_no_finished_shard_again(
    sources: dict[str, TextCorpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    corpus = sources["jsonl"]
    folder = tmp_path / "shards"
    tokenizer = corpus.tokenizer.path  # pyright: ignore
    command = [sys.executable, "-c", BUILD, corpus.path, tokenizer, str(folder), "1"]  # pyright: ignore
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _ in range(3):
            assert process.stdout.readline().startswith("shard ")
        os.kill(process.pid, signal.SIGKILL)
    (folder / "partial-left").mkdir()
    (folder / "partial-left" / "train.ids").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*-of-*/*")}
    assert len(kept) >= 15 and not (folder / MANIFEST).exists()
    with pytest.raises(DataError, match="its build has not ended"):
        Shards(path=str(folder), **BATCHES).train(seed=0)
    done = build(corpus, folder, shard_bytes=300)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert 0 < done.encoded < done.tokens and not list(folder.glob("partial-*"))
    assert_same(Shards(path=str(folder), **BATCHES).train(seed=0), corpus.train(seed=0), 40)
    again = build(corpus, folder, shard_bytes=300)
    assert again.encoded == 0


def test_a_killed_build_leaves_no_process_behind(sources: dict[str, TextCorpus], tmp_path: Path):
    corpus = sources["jsonl"]
    script = tmp_path / "build.py"  # which the processes of the build import again
    script.write_text(BUILD)
    command = [sys.executable, script, corpus.path, corpus.tokenizer.path, str(tmp_path / "shards"), "2"]  # pyright: ignore
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline().startswith("shard ")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid, signal.SIGKILL)
    assert len(children) >= 2
    wait_for(lambda: not any(is_alive(int(child)) for child in children))


def test_a_damaged_shard_is_built_again(sources: dict[str, TextCorpus], tmp_path: Path):
    corpus = sources["jsonl"]
    shards = built(corpus, tmp_path / "shards", shard_bytes=800)
    flipped = sorted((tmp_path / "shards").glob("*/train.ids"))[1]
    content = bytearray(flipped.read_bytes())
    content[4] ^= 1
    flipped.write_bytes(content)
    with pytest.warns(DataWarning, match=r"damaged \(train.ids\); it is encoded again"):
        done = build(corpus, tmp_path / "shards", shard_bytes=800)
    assert 0 < done.encoded < done.tokens
    assert_same(shards.train(seed=0), corpus.train(seed=0), 40)


@pytest.fixture
def lines(tmp_path: Path) -> Jsonl:
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "texts").mkdir()
    for name in "ab":
        written = [json.dumps({"text": f"{name} {text}"}) + "\n" for text in texts()]
        (tmp_path / "texts" / f"{name}.jsonl").write_text("".join(written))
    return Jsonl(path=str(tmp_path / "texts"), tokenizer=str(tmp_path / "tokenizer.json"), **BATCHES)


def rewritten(path: Path) -> None:
    path.write_text(path.read_text())
    os.utime(path, ns=(0, time.time_ns()))


CHANGED = {
    "time": (lambda path, data: rewritten(path / "texts/b.jsonl"), "  b.jsonl\n    was written to"),
    "size": (lambda path, data: (path / "texts/b.jsonl").write_text("{}"), "  b.jsonl\n    had "),
    "file": (lambda path, data: (path / "texts/c.jsonl").write_text(""), "  c.jsonl\n    is new"),
    "gone": (lambda path, data: (path / "texts/a.jsonl").unlink(), "  a.jsonl\n    is missing"),
    "tokenizer": (
        lambda path, data: write_tokenizer(path / "tokenizer.json", vocab_size=290), "  tokenizer: sha256\n    was "),
    "field": (lambda path, data: data.model_copy(update={"field": "body"}), "  field\n    was text, and is body"),
    "share": (
        lambda path, data: data.model_copy(update={"held_out_fraction": 0.5}),
        "  held_out_fraction\n    was 0.25, and is 0.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGED)
def test_a_build_does_not_go_on_with_other_sources(what: str, lines: Jsonl, tmp_path: Path):
    build(lines, tmp_path / "shards", part=(1, 2), shard_bytes=2000)
    change, message = CHANGED[what]
    changed = change(tmp_path, lines)
    with pytest.raises(DataError, match="build into another folder, or remove this one") as error:
        build(changed if isinstance(changed, Jsonl) else lines, tmp_path / "shards", shard_bytes=2000)
    assert message in str(error.value)


def test_sources_that_change_while_they_are_read_are_refused(lines: Jsonl, tmp_path: Path):
    with pytest.raises(DataError, match=r"a.jsonl\n    was written to(.|\n)*changed while they were read"):
        build(lines, tmp_path / "shards", say=lambda line: rewritten(tmp_path / "texts" / "a.jsonl"))
    assert not (tmp_path / "shards" / MANIFEST).exists()


# What is wrong --------------------------------------------------------------------------------------------------


def test_all_lines_that_are_wrong_are_named_by_file_and_line(lines: Jsonl, tmp_path: Path):
    for name, number in {"a": 30, "b": 3}.items():
        path = tmp_path / "texts" / f"{name}.jsonl"
        found = path.read_text().splitlines()
        found[number] = '{"txt": "a mesh"}'
        path.write_text("\n".join(found) + "\n")
    for options in ({"shard_bytes": 500}, {}, {"shard_bytes": 2000, "processes": 2}):
        with pytest.raises(DataError) as error:
            build(lines, tmp_path / f"shards{len(options)}", **options)
        for where in ("a.jsonl:31", "b.jsonl:4"):
            assert f"{where}\n    has no field 'text'\n    data.field=txt?" in str(error.value)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def of_version(path: Path, version: int) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))


FAULTS = {
    "cut off": (lambda path: cut_off(next(path.glob("00000*/train.ids"))), "train.ids\n    ends at token "),
    "without bits": (lambda path: cut_off(next(path.glob("00000*/train.opens"))), "train.opens\n    ends at token "),
    "longer": (
        lambda path: longer(next(path.glob("00000*/train.ids"))), "has more than its tokens: it has "),
    "missing": (
        lambda path: next(path.glob("00001*")).rename(path / "elsewhere"),
        "held_out.opens\n    cannot be read: No such file or directory\n    the command that built the shards"),
    "version": (
        lambda path: of_version(path / MANIFEST, 7),
        "manifest.json\n    is of version 7, and this meshpar reads version 1\n    build the shards again"),
    "no number": (lambda path: of_version(path / MANIFEST, None), "is of version None"),
    "cut manifest": (lambda path: cut_off(path / MANIFEST), "manifest.json\n    is damaged: is not JSON"),
    "other manifest": (lambda path: (path / MANIFEST).write_text('{"version": 1}'), "is damaged: dtype: "),
    "no list": (lambda path: (path / MANIFEST).write_text("[]"), "manifest.json\n    is damaged: "),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "its build has not ended"),
    "no plan": (lambda path: [(path / name).unlink() for name in (MANIFEST, PLAN)], "is no folder of shards"),
    "tokenizer": (
        lambda path: write_tokenizer(path / "tokenizer.json", vocab_size=290),
        "tokenizer.json\n    is not the tokenizer that encoded the shards"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_are_not_whole_are_refused(fault: str, sources: dict[str, TextCorpus], tmp_path: Path):
    shards = built(sources["jsonl"], tmp_path / "shards", shard_bytes=1500)
    assert shards.train(seed=0)[0]
    plant, message = FAULTS[fault]
    plant(tmp_path / "shards")
    with pytest.raises(DataError) as error:
        shards.train(seed=0)
    assert message in str(error.value)


def test_a_shard_that_is_cut_off_or_damaged_while_it_is_read(sources: dict[str, TextCorpus], tmp_path: Path):
    shards = built(sources["jsonl"], tmp_path / "shards")
    path = next((tmp_path / "shards").glob("*/train.ids"))
    content = path.read_bytes()
    train = shards.train(seed=0)
    path.write_bytes(content[:2] + b"\xff\xff" + content[4:])
    with pytest.raises(DataError, match=r"train.ids, token 1\n    has the token id 65535, outside of the vocabulary"):
        [train[i] for i in range(40)]
    path.write_bytes(content[:100])
    with pytest.raises(DataError, match=r"train.ids\n    ends at byte 100: it was cut off while the run read it"):
        [train[i] for i in range(40)]


def test_another_held_out_fraction_is_refused(sources: dict[str, TextCorpus], tmp_path: Path):
    shards = built(sources["jsonl"], tmp_path / "shards")
    with pytest.raises(DataError, match=r"data.held_out_fraction = 0.1\n    the shards were built with 0.25"):
        shards.model_copy(update={"held_out_fraction": 0.1}).train(seed=0)


def test_an_empty_corpus_is_refused_and_so_is_a_side_without_documents(tmp_path: Path):
    import pyarrow as pa

    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match="no document contains a token"):
        build(Jsonl(path=str(path)), tmp_path / "empty")
    pa.ipc.new_stream(tmp_path / "a.arrow", pa.schema({"x": pa.list_(pa.int8())})).close()
    with pytest.raises(DataError, match="no document contains a token"):
        build(Arrow(path=str(tmp_path), column="x"), tmp_path / "arrow")
    path.write_text('{"text": [1]}\n' * 9)
    ids = Jsonl(path=str(path), tokenizer=Ids(vocab_size=9, bos=8))
    with pytest.raises(DataError, match="none of 9 documents would be held out"):
        build(ids, tmp_path / "sided")
    with pytest.raises(DataError, match="matches no file"):
        build(Text(path=str(tmp_path)), tmp_path / "none")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a.parquet\n    cannot be read"):
        build(Parquet(path=str(tmp_path / "a.parquet")), tmp_path / "damaged")


def test_a_folder_with_other_files_is_left_alone(lines: Jsonl, tmp_path: Path):
    with pytest.raises(DataError, match="has other files than shards"):
        build(lines, tmp_path / "texts")
    assert sorted(path.name for path in (tmp_path / "texts").iterdir()) == ["a.jsonl", "b.jsonl"]


def test_only_the_rows_that_are_asked_for_are_read(sources: dict[str, TextCorpus], tmp_path: Path, monkeypatch):
    shards = built(sources["jsonl"], tmp_path / "shards")
    train = shards.train(seed=0)
    right, read = os.pread, []
    monkeypatch.setattr(os, "pread", lambda file, size, at: read.append(size) or right(file, size, at))
    train.rows(0, [1, 2])
    itemsize = np.dtype(shards.manifest.dtype).itemsize
    assert sum(read) <= 2 * (17 * itemsize + 17 // 8 + 2)
    assert {TRAIN, HELD_OUT} == {path.stem for path in (tmp_path / "shards").glob("*/*.ids")}


@pytest.fixture
def two_files(tmp_path: Path) -> StoredDocuments:
    for i in range(2):
        with SideWriter(tmp_path / f"{i}", np.dtype(np.uint8)) as writer:
            writer.add(np.array([i + 1, i + 2, i + 3]))
    paths = (tmp_path / "0", tmp_path / "1")
    return StoredDocuments(paths, np.array([4, 8]), 2, np.dtype(np.uint8), bos=9, vocab_size=9)


def test_threads_that_open_a_file_at_once_both_read_it(two_files: StoredDocuments, monkeypatch: pytest.MonkeyPatch):
    """The cache of open files keeps one of them."""
    both, right = threading.Barrier(2), stored.open_regular
    monkeypatch.setattr(stored, "open_regular", lambda path: (both.wait(timeout=30), right(path))[1])
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: two_files.take(np.arange(4)[None])[0].tolist(), range(2)))
    assert found == [[[9, 1, 2, 3]]] * 2


def test_a_file_that_the_cache_forgets_is_read_to_the_end(two_files: StoredDocuments, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored, "_MOST_OPEN", 1)
    right, is_other_read = os.pread, threading.Event()

    def slow(file: int, size: int, at: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            assert is_other_read.wait(timeout=30)
        return right(file, size, at)

    monkeypatch.setattr(os, "pread", slow)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: two_files.take(np.arange(4)[None])[0].tolist())
        wait_for(lambda: two_files._opened.cache_info().currsize)  # pyright: ignore
        other = two_files.take(4 + np.arange(4)[None])[0].tolist()
        is_other_read.set()
        assert (found.result(timeout=30), other) == ([[9, 1, 2, 3]], [[9, 2, 3, 4]])


# From the command line ------------------------------------------------------------------------------------------

CONFIG = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 320}
data: {kind: jsonl, path: texts, tokenizer: tokenizer.json, seq_len: 16, batch_size: 8, held_out_fraction: 0.25}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: -1}
num_steps: 2
run_dir: run
"""


def test_a_run_trains_on_what_the_command_built(lines: Jsonl, tmp_path: Path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    said = command("data", "build", "config.yaml", "--output", "shards", "--shard-bytes", "2000")
    assert said.code == 0, said.err
    assert said.err.startswith("shard 1 of 6: 14 documents, ")
    assert "shards: 80 documents, " in said.out and "data: {kind: shards, path: shards}" in said.out
    again = json.loads(
        command("data", "build", "config.yaml", "--output", "shards", "--shard-bytes", "2000", "--json").out
    )
    assert (again["encoded"], again["documents"], again["shards"]) == (0, 80, 6)
    shards = "data={kind: shards, path: shards, seq_len: 16, batch_size: 8, held_out_fraction: 0.25}"
    losses = []
    for run in ([], [shards, "run_dir=other"]):
        said = command("train", "config.yaml", *run)
        assert said.code == 0, said.err
        records = Path("other" if run else "run", "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in records])
    assert losses[0] == losses[1] and any(losses[0])
    assert command("data", "show", "config.yaml").out == command("data", "show", "config.yaml", shards).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "3/2"], "--part 3/2: is no part"),
        (["data={kind: synthetic}"], "data.kind = synthetic: only text is encoded in shards; train on it as it is"),
        (
            ["data={kind: mixture, parts: [{weight: 1, data: {kind: synthetic}}]}"],
            "data.kind = mixture: only text is encoded in shards; build each part alone, and mix the folders",
        ),
        (["data.path=elsewhere"], "there is no such file or folder"),
    ],
)
def test_what_cannot_be_built_exits_with_2(arguments: list[str], message: str, tmp_path: Path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    write_tokenizer(tmp_path / "tokenizer.json")
    said = command("data", "build", "config.yaml", "--output", "shards", *arguments)
    assert said.code == 2 and message in said.err and not Path("shards").exists()
