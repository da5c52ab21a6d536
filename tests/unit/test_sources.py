"""Every source gives the documents that were written, once; batches resume anywhere; mapped arrays are not copied."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.data import ArrayRecord, Arrow, Jsonl, Numpy, WebDataset
from meshpar.data.corpus import Batching, Corpus
from meshpar.data.dataset import Dataset
from meshpar.data.documents import Documents
from meshpar.data.encode import Content, encode
from meshpar.data.tokenizer import Ids, TokenizerFile
from meshpar.errors import DataError
from tests.sources import BATCHES, mixture, texts, write_records, write_sources, write_tars, write_tokenizer

SAME = ["text", "jsonl", "parquet", "parquet of ids", "arrow", "arrow of ids", "arrow stream of ids", "npy", "npz"]
SAME += ["webdataset", "array_record", "array_record of texts"]
ALL = [*SAME, "matrix", "synthetic", "mixture"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Batching]:
    folder = tmp_path_factory.mktemp("sources")
    found = write_sources(folder)
    return found | {"mixture": mixture(folder, found)}


def bodies(documents: Documents) -> Counter[tuple[int, ...]]:
    """The tokens of each document."""
    return Counter(
        tuple(documents.arrays[which][start : start + size].tolist())
        for which, start, size in zip(documents.array, documents.start, documents.size, strict=True)
    )


@pytest.mark.parametrize("name", SAME)
def test_a_source_gives_every_document_once(name: str, sources: dict[str, Batching]):
    corpus = sources[name]
    assert isinstance(corpus, Corpus)
    tokenizer = sources["text"].tokenizer  # pyright: ignore
    written = Counter((*tokenizer.encode(text).tolist(), tokenizer.eos) for text in texts())
    assert bodies(corpus.documents()) == written
    train, held_out = corpus.documents().split(corpus.held_out_fraction)
    assert bodies(train) + bodies(held_out) == written
    assert not bodies(train) & bodies(held_out)


@pytest.mark.parametrize("name", ALL)
def test_each_token_of_a_source_is_once_a_token_and_once_a_target(name: str, sources: dict[str, Batching]):
    for part in (part for side in sources[name].datasets(seed=0) for part in side.parts):
        documents = part.documents
        ranges = zip(documents.array, documents.start, documents.size, strict=True)
        written = np.concatenate([documents.arrays[which][start : start + size] for which, start, size in ranges])
        batch = part.batch(range(len(part)))
        assert np.array_equal(batch["targets"][batch["targets"] >= 0], written)
        assert np.array_equal(
            batch["tokens"][batch["segments"] > 0], documents.take(np.arange(documents.num_tokens))[0]
        )
        assert (batch["segments"] > 0).sum() == len(written) + len(documents)


def test_sources_with_the_same_documents_hold_out_the_same_rows(sources: dict[str, Batching]):
    of_ids = [sources[name].held_out() for name in ("npy", "npz", "arrow of ids", "parquet of ids")]
    of_text = [sources[name].held_out() for name in ("jsonl", "parquet", "arrow")]
    for alike in (of_ids, of_text):
        assert all(same(alike[0][0], other[0]) for other in alike)


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def datasets(sources: dict[str, Batching]) -> dict[str, Dataset]:
    return {name: source.train(seed=3) for name, source in sources.items()}


@given(st.sampled_from(ALL), st.integers(0, 10**6), st.sets(st.integers(0, 7), min_size=1))
@settings(deadline=None, max_examples=60)
def test_selected_rows_equal_those_of_the_whole_batch(
    datasets: dict[str, Dataset], name: str, index: int, rows: set[int]
):
    chosen = sorted(rows)
    whole = datasets[name][index]
    part = datasets[name].rows(index, chosen)
    assert same(part, {key: array[chosen] for key, array in whole.items()})
    assert not same(whole, datasets[name][index + 1])


@pytest.mark.parametrize("name", ALL)
def test_batches_resume_at_any_step(name: str, sources: dict[str, Batching]):
    start = int(np.random.default_rng(len(name)).integers(1, 1000))
    batches = sources[name].train(seed=3).batches(start, rows=[1, 6])
    again = sources[name].train(seed=3)
    for index in range(start, start + 3):
        assert same(next(batches), {key: array[[1, 6]] for key, array in again[index].items()})
    batches.close()


def test_arrays_stay_in_their_files(sources: dict[str, Batching]):
    (mapped,) = sources["npy"].documents().arrays  # pyright: ignore
    assert isinstance(mapped.base, np.memmap) or isinstance(mapped, np.memmap)
    chunks = sources["arrow of ids"].documents().arrays  # pyright: ignore
    assert len(chunks) == 6 and not any(chunk.flags.owndata or chunk.flags.writeable for chunk in chunks)


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary", "large_list", "list", "fixed", "stream"])
def test_a_column_may_have_any_type_that_holds_text_or_ids(kind: str, tmp_path: Path):
    import pyarrow as pa

    types = {
        "large_string": pa.large_string(), "string_view": pa.string_view(),
        "dictionary": pa.dictionary(pa.int8(), pa.string()), "large_list": pa.large_list(pa.uint16()),
        "list": pa.list_(pa.int64()), "fixed": pa.list_(pa.int8(), 2), "stream": pa.string(),
    }  # fmt: skip
    of_text = kind not in ("large_list", "list", "fixed")
    values = pa.array(["ab", "cd", "ef"] if of_text else [[97, 98], [99, 100], [101, 102]], types[kind])
    table = pa.table({"x": values}).slice(1)  # a slice that does not begin with its buffers
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with new(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    documents = Arrow(path=str(tmp_path), column="x").documents()
    assert bodies(documents) == Counter([(99, 100), (101, 102)])


def test_files_without_a_document_in_them_are_no_data(tmp_path: Path):
    import pyarrow as pa

    pa.ipc.new_stream(tmp_path / "a.arrow", pa.schema({"x": pa.list_(pa.int8())})).close()
    np.savez(tmp_path / "a.npz")
    (tmp_path / "a.jsonl").write_text("\n")
    ids = Ids(vocab_size=9, bos=8)
    path = str(tmp_path)
    for data in (Arrow(path=path, column="x"), Numpy(path=path, tokenizer=ids), Jsonl(path=path)):
        with pytest.raises(DataError, match="no document contains a token"):
            data.train(seed=0)


# The cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path) -> Jsonl:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts()))
    return Jsonl(path=str(tmp_path / "a.jsonl"), tokenizer=tokenizer, cache=str(tmp_path / "cache"), **BATCHES)


def entries(data: Jsonl) -> list[Path]:
    return sorted(Path(str(data.cache)).iterdir())


def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of texts of each further call of the tokenizer."""
    calls: list[int] = []
    right = TokenizerFile.encode_all

    def watched(self: TokenizerFile, texts: list[str]) -> list[np.ndarray]:
        calls.append(len(texts))
        return right(self, texts)

    monkeypatch.setattr(TokenizerFile, "encode_all", watched)
    return calls


def test_a_second_start_maps_the_cache_and_tokenizes_nothing(cached: Jsonl, monkeypatch: pytest.MonkeyPatch):
    calls = encoded(monkeypatch)
    first = cached.documents()
    assert calls == [40]
    second = cached.model_copy(update={"seq_len": 32, "held_out_fraction": 0.5}).documents()
    assert calls == [40] and len(entries(cached)) == 1
    without = cached.model_copy(update={"cache": None}).documents()
    assert bodies(first) == bodies(second) == bodies(without)
    assert np.array_equal(first.share, without.share)
    assert isinstance(second.arrays[0], np.memmap) and second.arrays[0].dtype == without.arrays[0].dtype == np.uint16


def test_a_changed_file_or_tokenizer_is_never_read_from_the_cache(cached: Jsonl, tmp_path: Path):
    before = cached.documents()
    file = tmp_path / "a.jsonl"
    file.write_text(file.read_text().replace("mesh", "mush"))  # of the same size
    assert bodies(cached.documents()) != bodies(before)
    other = write_tokenizer(tmp_path / "tokenizer.json", vocab_size=270)
    assert bodies(cached.documents()) == bodies(
        cached.model_copy(update={"cache": None, "tokenizer": other}).documents()
    )
    assert len(entries(cached)) == 3
    named = cached.tokenizer.model_copy(update={"eos_token": "<s>"})
    assert bodies(cached.model_copy(update={"tokenizer": named}).documents()) != bodies(cached.documents())


def test_an_interrupted_start_leaves_nothing_in_the_cache(cached: Jsonl, monkeypatch: pytest.MonkeyPatch):
    def interrupted(self: TokenizerFile, texts: list[str]) -> list[np.ndarray]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenizerFile, "encode_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached.documents()
    assert entries(cached) == []
    assert len(cached.documents()) == 40


def test_another_process_may_write_the_entry_first(cached: Jsonl, monkeypatch: pytest.MonkeyPatch):
    ready = cached.documents()
    (entry,) = entries(cached)
    aside = entry.rename(entry.with_name("aside"))
    right = TokenizerFile.encode_all

    def overtaken(self: TokenizerFile, texts: list[str]) -> list[np.ndarray]:
        shutil.copytree(aside, entry)
        return right(self, texts)

    monkeypatch.setattr(TokenizerFile, "encode_all", overtaken)
    assert bodies(cached.documents()) == bodies(ready)
    assert entries(cached) == sorted([entry, aside])


def test_files_that_change_while_they_are_read_are_refused(cached: Jsonl, monkeypatch: pytest.MonkeyPatch):
    right = TokenizerFile.encode_all

    def meddling(self: TokenizerFile, texts: list[str]) -> list[np.ndarray]:
        Path(cached.path).write_text('{"text": "other"}\n')
        return right(self, texts)

    monkeypatch.setattr(TokenizerFile, "encode_all", meddling)
    with pytest.raises(DataError, match="changed while they were read"):
        cached.documents()
    assert entries(cached) == []


def test_a_vector_without_bos_is_one_document_and_an_opening_bos_is_not_doubled(tmp_path: Path):
    for name, tokens in {"a": [5, 6], "b": [9, 5, 9, 9, 6], "c": [], "d": [9]}.items():
        np.save(tmp_path / f"{name}.npy", np.array(tokens, np.int64))
    np.save(tmp_path / "e.npy", np.array([[9, 5, 9], [5, 6, 9]], np.int64))
    data = Numpy(path=str(tmp_path), tokenizer=Ids(vocab_size=10, bos=9))
    assert bodies(data.documents()) == Counter([(5, 6), (5,), (6,), (5, 9), (5, 6, 9)])
    (tmp_path / "e.jsonl").write_text('{"text": [9, 5, 9]}\n{"text": [5, 6, 9]}\n{"text": [9]}\n{"text": []}\n')
    lines = Jsonl(path=str(tmp_path), tokenizer=data.tokenizer).documents()
    assert bodies(lines) == Counter([(5, 9), (5, 6, 9)])
    alone = Numpy(path=str(tmp_path / "e.npy"), tokenizer=data.tokenizer).documents()
    assert np.array_equal(lines.share, alone.share)


# Tars, records, and folders of the library datasets --------------------------------------------------------------


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-600])


WRONG = {
    "suffix": (
        "webdataset", {"suffix": "md"},
        "0.tar\n    has no member with the suffix 'md'\n    data.suffix is one of json, txt"),
    "feature": (
        "array_record", {"feature": "txt"},
        "row 0\n    has no feature 'txt'\n    data.feature=text?\n  {}/0.array_record, row 1\n    has no feature"),
    "texts": (
        "array_record of texts", {"feature": "text"},
        "row 0\n    it is no tf.train.Example\n    data.feature=null"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_document_that_is_elsewhere_is_named(what: str, sources: dict[str, Batching]):
    name, update, message = WRONG[what]
    corpus = sources[name].model_copy(update=update)
    with pytest.raises(DataError) as error:
        corpus.documents()  # pyright: ignore
    assert message.format(corpus.path) in str(error.value)  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "message"), [(WebDataset, "0.tar\n    does not end as a tar file does: it was cut off"),
                          (ArrayRecord, "0.array_record\n    is no whole ArrayRecord file")]
)  # fmt: skip
def test_a_file_that_is_cut_off_is_named(kind: type, message: str, tmp_path: Path):
    write_tars(tmp_path / "tars", texts())
    write_records(tmp_path / "records", texts())
    path = tmp_path / ("tars/0.tar" if kind is WebDataset else "records/examples/0.array_record")
    if kind is WebDataset:
        path.write_bytes(path.read_bytes()[: 512 * 5])
    else:
        cut_off(path)
    with pytest.raises(DataError) as error:
        kind(path=str(path)).documents()
    assert message in str(error.value)


def data_set(folder: Path, content: list[str]) -> Path:
    """A data set as `save_to_disk` of the library datasets 5.2 writes it, and the cache of a `map`."""
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "cache-8a1f.arrow"):
        table = pa.table({"text": content})
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "8a", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_folder_of_datasets_is_read_without_its_caches_and_split_by_split(tmp_path: Path):
    folder = data_set(tmp_path / "all" / "train", ["ab", "c"])
    data_set(tmp_path / "all" / "test", ["d"])
    assert sum(bodies(Arrow(path=str(folder)).documents()).values()) == 2
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"has several splits: test, train\n    data.path=.*/all/test"):
        Arrow(path=str(tmp_path / "all")).documents()
    (folder / "state.json").write_text("[]")
    with pytest.raises(DataError, match="is no state of a data set"):
        Arrow(path=str(folder)).documents()


def test_special_tokens_are_looked_for_once_and_not_for_each_document(
    sources: dict[str, Batching], monkeypatch: pytest.MonkeyPatch
):
    """The files beside a tokenizer's are read each time: it took as long as the encoding."""
    right, asked = TokenizerFile._beside, []
    monkeypatch.setattr(TokenizerFile, "_beside", lambda self, key: asked.append(key) or right(self, key))
    tokenizer = sources["text"].tokenizer  # pyright: ignore
    assert len(list(encode([Content(i, f"document {i}") for i in range(50)], tokenizer))) == 50
    assert 0 < len(asked) < 5
