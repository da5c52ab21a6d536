"""The errors of data that are missing, unreadable, or too few."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from meshpar.data import Arrow, Data, Jsonl, Numpy, Parquet, Synthetic, Text
from meshpar.errors import DataError
from tests.command import Said
from tests.sources import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `corpus` in the working directory, with two texts, one on each side of a split in halves."""
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


def test_a_folder_that_does_not_exist_is_refused(folder: Path):
    assert (
        message(path="corpsu")
        == f"""\
there is no data to train on:
  data.path = 'corpsu'
    there is no such folder
    it is relative to the working directory, {folder.parent}; did you mean corpus?"""
    )


def test_all_problems_of_path_and_glob_are_reported_at_once(folder: Path):
    assert (
        message(path="corpus/a.txt", glob="../*.txt")
        == f"""\
there is no data to train on:
  data.path = 'corpus/a.txt'
    is a file, not a folder
    it is relative to the working directory, {folder.parent}
  data.glob = '../*.txt'
    is empty or leads out of data.path
    use a pattern below data.path, like '**/*.txt'"""
    )


@pytest.mark.parametrize("glob", ["", "/etc/*", "../*", "a/../../*"])
def test_a_glob_stays_inside_its_folder(folder: Path, glob: str):
    assert f"data.glob = {glob!r}\n    is empty or leads out of data.path\n" in message(glob=glob)


def test_a_glob_that_matches_no_file_is_refused(folder: Path):
    assert (
        message(glob="**/*.md")
        == """\
there is no data to train on:
  data.glob = '**/*.md'
    matches no file below 'corpus'
    data.glob='**/*.txt' matches 2"""
    )


@pytest.mark.parametrize("kind", [Jsonl, Parquet, Arrow, Numpy])
def test_a_glob_beside_a_single_file_is_refused(folder: Path, kind):
    """It would select nothing. A file may have any name, which the default glob need not match."""
    assert Jsonl(path="corpus/a.txt").files() == [Path("corpus/a.txt")]
    more = {"tokenizer": {"kind": "ids", "vocab_size": 9, "bos": 0}} if kind is Numpy else {}
    with pytest.raises(DataError) as error:
        kind(path="corpus/a.txt", glob="a*", **more).files()
    assert (
        str(error.value)
        == """\
there is no data to train on:
  data.glob = 'a*'
    selects files below a folder, and data.path = 'corpus/a.txt' is a file
    remove it, or data.path='corpus'"""
    )


def test_a_folder_without_files_is_refused(folder: Path):
    (folder / "empty" / "deeper").mkdir(parents=True)
    assert (
        message(path="corpus/empty")
        == """\
there is no data to train on:
  data.glob = '**/*.txt'
    matches no file below 'corpus/empty'
    the folder contains no files"""
    )


def test_files_that_cannot_be_read_are_all_named(folder: Path):
    (folder / "c.txt").symlink_to("nowhere")
    (folder / "d.txt").symlink_to("nowhere")
    text = message()
    for name in ("c", "d"):
        assert (
            f"""
  corpus/{name}.txt
    cannot be read: No such file or directory
    make it readable, or narrow data.glob"""
            in text
        )


def test_a_file_without_permission_is_refused(folder: Path, as_nobody: None):
    (folder / "a.txt").chmod(0)
    assert "corpus/a.txt\n    cannot be read: Permission denied" in message()


def test_files_that_are_all_empty_are_refused(folder: Path):
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("")
    assert (
        message()
        == """\
there is no data to train on:
  data
    no document contains a token
    provide documents that contain text"""
    )


def test_a_single_document_cannot_be_split(folder: Path):
    (folder / "b.txt").write_text("")
    assert (
        message()
        == """\
there is no data to train on:
  data
    only one document is not empty, and each side of the split needs one
    provide at least two documents, for example by splitting this one"""
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
        side = mended.held_out() if share == "none" else mended.train(seed=0)
        assert side.num_documents == 1


# Files of every kind --------------------------------------------------------------------------------------------


def refusal(data: dict) -> str:
    """The error of reading this data."""
    with pytest.raises(DataError) as error:
        TypeAdapter(Data).validate_python({"held_out_fraction": 0.5} | data).datasets(seed=0)
    return str(error.value)


def test_lines_that_are_no_documents_are_all_named(folder: Path):
    lines = ['{"text": "good"}', '{"text": "cut', '["text"]', '{"txt": "a", "id": 1}', '{"text": 3}', "", '{"id": 1}']
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.jsonl").write_bytes(b'{"text": "\xff"}\n' + b"[" * 100_000)
    assert (
        refusal({"kind": "jsonl", "path": "corpus"})
        == """\
there is no data to train on:
  corpus/a.jsonl:2
    is not JSON: Unterminated string starting at column 10
  corpus/a.jsonl:3
    is a list, not a JSON object
    write {"text": ...}
  corpus/a.jsonl:4
    has no field 'text'
    data.field=txt?
  corpus/a.jsonl:5
    its field 'text' is a number, neither text nor a list of token ids
  corpus/a.jsonl:7
    has no field 'text'
    it has ['id']
  corpus/b.jsonl:1
    is not UTF-8: invalid start byte at byte 10
  corpus/b.jsonl:2
    is not readable JSON: it is nested too deeply"""
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "array_record", "webdataset", "numpy"])
def test_a_path_that_does_not_exist_is_refused(folder: Path, kind: str):
    tokenizer = {"tokenizer": IDS} if kind == "numpy" else {}
    assert (
        refusal({"kind": kind, "path": "corpsu", **tokenizer})
        == f"""\
there is no data to train on:
  data.path = 'corpsu'
    there is no such file or folder
    it is relative to the working directory, {folder.parent}; did you mean corpus?"""
    )


def test_at_most_ten_bad_lines_are_reported(folder: Path):
    (folder / "a.jsonl").write_text("{\n" * 1000)
    assert refusal({"kind": "jsonl", "path": "corpus/a.jsonl"}).count("is not JSON") == 10


def test_lines_that_no_tokenizer_can_read_are_refused(folder: Path):
    (folder / "a.jsonl").write_text('{"text": "a\\ud800"}\n{"text": [256, 257]}\n{"text": "good"}\n')
    expected = """\
there is no data to train on:
  corpus/a.jsonl:1
    the text is not valid Unicode: surrogates not allowed at character 1
  corpus/a.jsonl:2
    has the token id 257, outside of the vocabulary of 257"""
    assert refusal({"kind": "jsonl", "path": "corpus"}) == expected
    assert refusal({"kind": "jsonl", "path": "corpus", "cache": "cache"}) == expected
    assert list(Path("cache").iterdir()) == []


def test_text_that_is_no_utf_8_is_read_as_bytes_only(folder: Path):
    write_tokenizer(folder / "tokenizer.json")
    (folder / "a.txt").write_bytes(b"one\xff")
    data = {"kind": "text", "path": "corpus", "held_out_fraction": 0.64}
    assert TypeAdapter(Data).validate_python(data).train(seed=0).num_documents == 1
    assert (
        refusal(data | {"tokenizer": {"kind": "file", "path": "corpus/tokenizer.json"}})
        == """\
there is no data to train on:
  corpus/a.txt
    the text is not valid Unicode: surrogates not allowed at character 3"""
    )


@pytest.fixture
def tables(folder: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"content": ["one", None], "score": [0.5, 1.0], "ids": [[1, 300], [2]]})
    parquet.write_table(table, folder / "a.parquet")
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table)
    return folder


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_is_missing_or_holds_no_documents_is_refused(tables: Path, kind: str):
    file = f"corpus/a.{kind}"
    data = {"kind": kind, "path": "corpus"}
    for column, problem, fix in [
        ("text", "has no column 'text'", "\n    It has content, score, ids"),
        ("contents", "has no column 'contents'", "\n    data.column=content? It has content, score, ids"),
        ("score", "its column 'score' is double, neither text nor lists of token ids", ""),
        (
            "content",
            "its column 'content' has 1 null values",
            "\n    remove those rows, or write an empty text",
        ),
    ]:
        assert refusal(data | {"column": column}) == f"there is no data to train on:\n  {file}\n    {problem}{fix}"
    assert "has the token id 300, outside of the vocabulary of 257" in refusal(data | {"column": "ids"})


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"not a table" * 100])
def test_a_file_that_is_no_table_is_refused(folder: Path, kind: str, content: bytes):
    (folder / f"a.{kind}").write_bytes(content)
    assert refusal({"kind": kind, "path": "corpus"}).startswith(
        f"there is no data to train on:\n  corpus/a.{kind}\n    cannot be read: "
    )


IDS = {"kind": "ids", "vocab_size": 300, "bos": 0}


def test_arrays_that_hold_no_token_ids_are_refused(folder: Path):
    for name, array in {
        "a": np.ones(3, np.float32),
        "b": np.array([1, 300]),
        "c": np.array([1, -1]),
        "d": np.zeros((2, 2, 2), int),
        "e": np.array([{}]),
    }.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=True)
    np.savez(folder / "f.npz", good=np.array([1]), bad=np.array(["x"]))
    (folder / "g.npy").write_bytes(b"\x93NUMPY no more")
    (folder / "h.npz").write_bytes(b"PK\x03\x04 no archive")
    text = refusal({"kind": "numpy", "path": "corpus", "tokenizer": IDS})
    assert text == (
        """\
there is no data to train on:
  corpus/a.npy
    is float32, not token ids, which are integers
  corpus/b.npy
    has the token id 300, outside of the vocabulary of 300
  corpus/c.npy
    has the token id -1, outside of the vocabulary of 300
  corpus/d.npy
    has the shape (2, 2, 2): token ids are a vector or a matrix
  corpus/e.npy
    is not a readable array: Array can't be memory-mapped: Python objects in dtype.
  corpus/f.npz
    is <U1, not token ids, which are integers
  corpus/g.npy
    is not a readable array: we only support format version (1,0), (2,0), and (3,0), not (32, 110)
  corpus/h.npz
    is not a readable array: File is not a zip file"""
    )


def test_a_tokenizer_that_cannot_be_used_is_refused(folder: Path):
    (folder / "broken.json").write_text("{}")
    write_tokenizer(folder / "good.json")
    tokenizer = {"kind": "file", "path": "corpus/none.json"}
    text = {"kind": "text", "path": "corpus"}
    assert (
        refusal(text | {"tokenizer": tokenizer})
        == f"""\
the tokenizer cannot be used:
  data.tokenizer = 'corpus/none.json'
    cannot be read: No such file or directory
    it is relative to the working directory, {folder.parent}; did you mean corpus/broken.json?"""
    )
    assert refusal(text | {"tokenizer": tokenizer | {"path": "corpus/broken.json"}}).startswith(
        "the tokenizer cannot be used:\n  data.tokenizer = 'corpus/broken.json'\n    is not a tokenizer: "
    )
    assert (
        refusal(text | {"tokenizer": tokenizer | {"path": "corpus/good.json", "bos_token": "<S>"}})
        == """\
the tokenizer cannot be used:
  data.tokenizer.bos_token = '<S>'
    corpus/good.json has no such token
    did you mean '<s>'?"""
    )


@pytest.mark.parametrize("library", ["tokenizers", "pyarrow"])
def test_a_library_that_is_missing_is_named_with_its_extra(tables: Path, monkeypatch: pytest.MonkeyPatch, library: str):
    write_tokenizer(tables / "tokenizer.json")
    needed_for = {"tokenizers": "a tokenizer file", "pyarrow": "a Parquet or Arrow file"}[library]
    for name in [name for name in sys.modules if name.partition(".")[0] == library] + [library]:
        monkeypatch.setitem(sys.modules, name, None)
    data = {"kind": "parquet", "path": "corpus", "column": "content"}
    if library == "tokenizers":
        data = {"kind": "text", "path": "corpus", "tokenizer": {"kind": "file", "path": "corpus/tokenizer.json"}}
    assert refusal(data) == f"{needed_for} needs {library}, which is not installed: pip install 'meshpar[data]'"


def test_a_cache_that_cannot_be_written_is_refused(folder: Path):
    data = {"kind": "text", "path": "corpus", "held_out_fraction": 0.64, "cache": "corpus/a.txt/cache"}
    assert refusal(data) == (
        "there is no data to train on:\n  data.cache = 'corpus/a.txt/cache'\n    cannot be written: Not a directory"
    )


def test_a_cache_on_a_full_disk_is_refused_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    data = {"kind": "text", "path": "corpus", "held_out_fraction": 0.64, "cache": "cache"}
    assert "data.cache = 'cache'\n    cannot be written: No space left on device" in refusal(data)
    assert list(Path("cache").iterdir()) == []


# From the command line ------------------------------------------------------------------------------------------

CONFIG = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 64}
data: DATA
optim: {kind: adamw, lr: 1e-2}
num_steps: 2
run_dir: run
"""
PART = "{weight: 1, data: {kind: synthetic}}"


def refused(data: str, command: Callable[..., Said], *overrides: str) -> str:
    Path("config.yaml").write_text(CONFIG.replace("DATA", data))
    result = command("train", "config.yaml", "mesh.data=8", *overrides)
    assert result.code == 2
    return result.err


REFUSED = {
    "{kind: text, path: corpus, tokenizer: corpus/tokenizer.json}": """\
meshpar: the parts of this config do not fit each other:
  model.vocab_size
    the data has 291 token ids, the model 64
    model.vocab_size=291
""",
    "{kind: mixture, parts: [{weight: 0, data: {kind: synthetic}}, {weight: -1, data: {kind: sinthetic}}]}": """\
meshpar: 3 problems in config.yaml:
  data.parts.0.weight (config.yaml:2)
    must be greater than 0.0, got 0
  data.parts.1.weight (config.yaml:2)
    must be greater than 0.0, got -1
  data.parts.1.data (config.yaml:2)
    no kind is called 'sinthetic'
    did you mean synthetic? There are text, stdlib, synthetic, jsonl, chat, parquet, arrow, \
array_record, webdataset, numpy, shards
""",
    f"{{kind: mixture, seq_len: 32, parts: [{PART}, {{weight: 1, data: {{kind: synthetic, seq_len: 16}}}}]}}": """\
meshpar: 1 problem in config.yaml:
  data (config.yaml:2)
    parts.1.data.seq_len is 16, but 32 for the mixture: set it only for the mixture
""",
    f"{{kind: mixture, parts: [{PART}, {{weight: 1, data: {{kind: stdlib}}}}]}}": """\
meshpar: 1 problem in config.yaml:
  data (config.yaml:2)
    parts.1.data.tokenizer differs from that of parts.0.data: all parts share one vocabulary
""",
    f"{{kind: mixture, parts: [{PART}, {{weight: 0.12345, data: {{kind: synthetic}}}}]}}": """\
meshpar: 1 problem in config.yaml:
  data (config.yaml:2)
    weights have too many digits: they repeat every 22469 rows, more than 10000
    round them, for example to 890, 110
""",
    "{kind: numpy, path: corpus, tokenizer: {kind: ids, vocab_size: 64, bos: 64}}": """\
meshpar: 1 problem in config.yaml:
  data.tokenizer (config.yaml:2)
    the id 64 is outside of the vocabulary of 64
""",
    "{kind: mixture, parts: []}": """\
meshpar: 1 problem in config.yaml:
  data (config.yaml:2)
    a mixture needs at least one part
""",
    "{kind: jsonl, path: corpus, feild: body}": """\
meshpar: 1 problem in config.yaml:
  data.feild (config.yaml:2)
    unknown key
    did you mean data.field?
""",
}


@pytest.mark.parametrize("data", REFUSED)
def test_data_that_do_not_fit_are_refused_on_the_command_line(data: str, folder: Path, command):
    write_tokenizer(folder / "tokenizer.json")
    assert refused(data, command) == REFUSED[data]


def test_data_that_cannot_be_read_end_with_exit_code_2(folder: Path, command):
    (folder / "a.jsonl").write_text("{")
    text = refused("{kind: jsonl, path: corpus, batch_size: 8}", command, "model.vocab_size=257")
    assert "corpus/a.jsonl:1\n    is not JSON: " in text and "Traceback" not in text
