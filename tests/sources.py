"""The same forty documents in every form that a run can read."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np

from meshpar.data import ArrayRecord, Arrow, Jsonl, Mixture, Numpy, Parquet, Synthetic, Text, WebDataset
from meshpar.data.corpus import Batching
from meshpar.data.tokenizer import Ids, TokenizerFile

SPECIAL = ("<s>", "</s>")
WORDS = ("a", "mesh", "and", "name", "for", "each", "dim", "of", "tensor", "axes", "1", "2", "3")
BATCHES = {"batch_size": 8, "seq_len": 16, "held_out_fraction": 0.25}


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 40))) + f" {i}" for i in range(40)]


def write_tokenizer(path: Path, special: tuple[str, ...] = SPECIAL, vocab_size: int = 300) -> TokenizerFile:
    """Trains a byte-level BPE on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet)
    library.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    library.enable_truncation(2)
    library.enable_padding()
    library.save(str(path))
    return TokenizerFile(path=str(path))


def write_sources(folder: Path) -> dict[str, Batching]:
    """Name -> config. Each source has the tokens of `texts`, except the synthetic one."""
    tokenizer = write_tokenizer(folder / "tokenizer.json")
    ids = [[*tokenizer.encode(text).tolist(), tokenizer.eos] for text in texts()]
    return {
        **_texts(folder, tokenizer),
        **_arrow(folder, tokenizer, ids),
        **_numpy(folder, tokenizer, ids),
        "synthetic": Synthetic(**BATCHES, num_documents=60, document_len=20),
    }


def mixture(folder: Path, sources: dict[str, Batching]) -> Mixture:
    """A mixture of a memory-mapped source, a cached one and one in memory."""
    names = {"npy": 0.5, "jsonl": 0.3, "parquet": 0.2}
    parts = [{"weight": w, "data": sources[name].model_dump(exclude={"cache"})} for name, w in names.items()]
    parts[1]["data"]["cache"] = str(folder / "cache")
    return Mixture.model_validate({**BATCHES, "parts": parts})


def _texts(folder: Path, tokenizer: TokenizerFile) -> dict[str, Batching]:
    (folder / "texts").mkdir()
    for i, text in enumerate(texts()):
        (folder / "texts" / f"{i:02}.txt").write_text(text)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"id": 1, "body": text}) + "\n\n" for text in texts()))
    write_tars(folder / "tars", texts())
    write_records(folder / "records", texts())
    records = ArrayRecord(path=str(folder / "records" / "examples"), tokenizer=tokenizer, **BATCHES)
    plain = {"path": str(folder / "records" / "plain"), "feature": None}
    return {
        "webdataset": WebDataset(path=str(folder / "tars"), tokenizer=tokenizer, **BATCHES),
        "array_record": records,
        "array_record of texts": records.model_copy(update=plain),
        "text": Text(path=str(folder / "texts"), tokenizer=tokenizer, **BATCHES),
        "jsonl": Jsonl(path=str(folder / "texts.jsonl"), field="body", tokenizer=tokenizer, **BATCHES),
    }


def write_tars(folder: Path, documents: list[str]) -> None:
    """Two files, with a member of JSON beside each text."""
    folder.mkdir()
    for part in range(2):
        with tarfile.open(folder / f"{part}.tar", "w") as tar:
            for i, text in list(enumerate(documents))[part::2]:
                for suffix, content in {"json": b'{"id": %d}' % i, "txt": text.encode()}.items():
                    member = tarfile.TarInfo(f"a/{i:03}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def write_records(folder: Path, documents: list[str]) -> None:
    """Two files of `tf.train.Example` with the feature `text`, and two whose records are the texts."""
    from array_record.python.array_record_module import ArrayRecordWriter

    examples = [field(1, field(1, field(1, b"text") + field(2, field(1, field(1, t.encode()))))) for t in documents]
    for name, records in {"examples": examples, "plain": [text.encode() for text in documents]}.items():
        (folder / name).mkdir(parents=True)
        for part in range(2):
            writer = ArrayRecordWriter(str(folder / name / f"{part}.array_record"), "group_size:1")
            for record in records[part::2]:
                writer.write(record)
            writer.close()


def field(number: int, content: bytes) -> bytes:
    """A field of bytes in the wire format of protocol buffers."""
    size, length = len(content), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def _arrow(folder: Path, tokenizer: TokenizerFile, ids: list[list[int]]) -> dict[str, Batching]:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"text": texts(), "ids": pa.array(ids, pa.list_(pa.int32()))})
    parquet.write_table(table, folder / "table.parquet", row_group_size=7)
    with pa.ipc.new_file(folder / "file.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=7)
    with pa.ipc.new_stream(folder / "stream.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    common = {"tokenizer": tokenizer, **BATCHES}
    return {
        "parquet": Parquet(path=str(folder / "table.parquet"), **common),
        "parquet of ids": Parquet(path=str(folder / "table.parquet"), column="ids", **common),
        "arrow": Arrow(path=str(folder / "file.arrow"), **common),
        "arrow of ids": Arrow(path=str(folder / "file.arrow"), column="ids", **common),
        "arrow stream of ids": Arrow(path=str(folder / "stream.arrow"), column="ids", **common),
    }


def _numpy(folder: Path, tokenizer: TokenizerFile, ids: list[list[int]]) -> dict[str, Batching]:
    """A vector in which `bos` begins each document, the same vector as two arrays of an archive, and a matrix with a
    document a row."""
    line = [token for document in ids for token in (tokenizer.bos, *document)]
    np.save(folder / "line.npy", np.array(line, np.uint16))
    np.savez(folder / "archive.npz", a=np.array(line[: line.index(0, 900)]), b=np.array(line[line.index(0, 900) :]))
    short = min(map(len, ids))
    np.save(folder / "matrix.npy", np.array([document[:short] for document in ids], np.int32))
    common = {"tokenizer": Ids(vocab_size=tokenizer.vocab_size, bos=tokenizer.bos), **BATCHES}
    return {
        "npy": Numpy(path=str(folder / "line.npy"), **common | {"tokenizer": tokenizer}),
        "npz": Numpy(path=str(folder / "archive.npz"), **common),
        "matrix": Numpy(path=str(folder / "matrix.npy"), **common),
    }
