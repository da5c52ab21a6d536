"""Corpora: the sources of documents, and the settings by which they become batches."""

from __future__ import annotations

import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from meshpar.config import Coerced, Config, DataPath, Positive, default
from meshpar.data.cache import cached
from meshpar.data.dataset import Dataset, Rows
from meshpar.data.documents import Documents, no_data, share
from meshpar.data.encode import Content, encode
from meshpar.data.file_ranges import FileRange
from meshpar.data.files import find, find_or_take, named
from meshpar.data.fingerprint import fingerprint
from meshpar.data.packing import PackedRows, TokenSequence
from meshpar.data.tokenizer import Bytes, Ids, Tokenizer, TokenizerFile
from meshpar.data.weights import FROM_ONE_PART, Phase
from meshpar.errors import DataError, Problem
from meshpar.store import local
from meshpar.tree import human_bytes

BYTES_A_TOKEN = 16
"""A batch has four int32 arrays."""
BATCHES_AHEAD = 10
"""Eight batches are prefetched while two threads read two more."""


class Batching(Config):
    """How documents become batches. The run's seed determines the order of the rows, not their content."""

    batch_size: Positive = 16
    """Rows per batch, over all devices."""
    seq_len: Positive = 256
    """Tokens per row."""
    held_out_fraction: float = Field(default=0.05, gt=0, lt=1)
    """About this fraction of the documents is held out for evaluation, by a checksum."""
    held_out_rows: Positive | None = None
    """How many of the first held-out rows are evaluated; of a mixture, of each part. Default: all."""
    documents_in_row: Literal["separate", "joined"] = "separate"
    """Whether a token attends to its own document only, or to all earlier tokens of its row."""
    if_changed: Literal["refuse", "allow"] = "refuse"
    """Whether a run may resume if the data files have changed."""

    @property
    @abstractmethod
    def corpora(self) -> list[Corpus]:
        """The parts."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The weights of the parts, from a step on."""
        return FROM_ONE_PART

    def array_specs(self) -> None:
        """The arrays of a batch: those of packed tokens, which the model says."""

    @property
    def omitted(self) -> frozenset[str]:
        """The arrays that a batch does not contain: joined rows have no segments."""
        return frozenset({"segments"} if self.is_joined else ())

    @property
    def is_joined(self) -> bool:
        """Whether a token attends to all earlier tokens of its row."""
        return self.documents_in_row == "joined"

    def datasets(self, seed: int, bounds: Mapping[str, int] | None = None) -> tuple[Dataset, Dataset]:
        """The training documents, in shuffled rows without end, and the held-out documents, once and in order.

        Args:
          seed: not negative.
          bounds: of other data, see `RowData`.

        Raises:
          DataError: the documents do not exist or cannot be read; one side of the split would be empty; the batches
            do not fit into memory.
        """
        self._check_memory()
        try:
            splits = [corpus.rows() for corpus in self.corpora]
        except OSError as error:  # a disk or a network failed while a file was read
            raise no_data(str(error.filename or "data"), f"cannot be read: {error.strerror}") from None
        train, held_out = zip(*splits, strict=True)
        trained = Dataset(train, self.batch_size, seed, self.phases)
        return trained, Dataset(held_out, self.batch_size, None, first_rows=self.held_out_rows)

    def _check_memory(self) -> None:
        """Refuses batches that no memory can hold, which would take forever to read."""
        row_bytes = self.seq_len * BYTES_A_TOKEN * BATCHES_AHEAD
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.batch_size * row_bytes <= memory:
            return
        import jax  # process_count starts the backend; each process reads only its own rows

        if self.batch_size * row_bytes > memory * jax.process_count():
            size = human_bytes(self.batch_size * row_bytes)
            what = f"{BATCHES_AHEAD} batches of {self.seq_len} tokens a row take {size} of {human_bytes(memory)}"
            problem = Problem(f"data.batch_size = {self.batch_size}", what, f"at most {memory // row_bytes} fit")
            raise DataError(f"the batches do not fit into memory:\n{problem}")

    def fingerprint(self) -> dict[str, str]:
        """The checksum of each data file and tokenizer file, by name; empty for data without files.

        Raises:
          DataError: the files do not exist or cannot be read.
        """
        if len(self.corpora) == 1:
            return fingerprint(self.corpora[0].named_files())
        of_parts = [(f"parts.{i}", corpus.named_files()) for i, corpus in enumerate(self.corpora)]
        return fingerprint({f"{part}: {name}": path for part, files in of_parts for name, path in files.items()})

    def train(self, seed: int) -> Dataset:
        """The training half of `datasets`."""
        return self.datasets(seed)[0]

    def held_out(self) -> Dataset:
        """The held-out half of `datasets`."""
        return self.datasets(0)[1]


class Corpus(Batching):
    """A single source of rows."""

    @abstractmethod
    def rows(self) -> tuple[Rows, Rows]:
        """The rows of the training documents, and of the held-out ones.

        Raises:
          DataError: the documents do not exist or cannot be read; one side of the split would be empty.
        """

    def named_files(self) -> dict[str, Path]:
        """The files of the corpus, by names that do not depend on their folder."""
        return {}

    @property
    def corpora(self) -> list[Corpus]:
        return [self]

    def packed(self, documents: TokenSequence) -> PackedRows:
        """Documents in rows of `seq_len` tokens."""
        return PackedRows(documents, self.seq_len, self.is_joined)


class DocumentCorpus(Corpus):
    """A source of documents, whose tokens are all learned."""

    @abstractmethod
    def documents(self) -> Documents:
        """All documents, in order.

        Raises:
          DataError: they do not exist or cannot be read.
        """

    def rows(self) -> tuple[Rows, Rows]:
        train, held_out = self.documents().split(self.held_out_fraction)
        return self.packed(train), self.packed(held_out)


class FileCorpus(DocumentCorpus):
    """Documents in files, and the tokenizer of their token ids."""

    tokenizer: Coerced[Tokenizer, str | dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    @abstractmethod
    def root(self) -> Path:
        """The folder that contains the files, or the only file."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files, in the order in which they are read."""

    def named_files(self) -> dict[str, Path]:
        files = named(self.files(), self.root)
        if isinstance(self.tokenizer, TokenizerFile):
            files["data.tokenizer"] = Path(self.tokenizer.path)
        return files


class AtPath(Config):
    """Files at a path of the user's choice."""

    path: DataPath
    """A file, a folder, or an address such as `s3://bucket/texts`."""
    glob: str
    """The pattern of the files below a folder."""

    @property
    def root(self) -> Path:
        return local(self.path)

    def files(self) -> list[Path]:
        return find_or_take(self.root, self.glob, type(self).model_fields["glob"].default)


class TextCorpus(FileCorpus):
    """Documents that a tokenizer encodes."""

    tokenizer: Coerced[Tokenizer, str | dict[str, Any]] = default(Bytes())
    """`path/to/tokenizer.json`, in the format of the tokenizers library. Default: bytes."""
    cache: Coerced[str | None, Path] = default(None)
    """A local folder for the token ids, which later starts map into memory. Default: each start encodes again."""

    @abstractmethod
    def read(self, part: FileRange) -> Iterator[Content]:
        """The documents of a range of the files, in order.

        Raises:
          DataError: lists the documents that cannot be read.
        """

    def units(self, path: Path) -> int:
        """The number of units into which a file can be cut, see `FileRange`."""
        return 1

    @property
    def ids_dtype(self) -> np.dtype:
        """The dtype of stored token ids. The id that opens a document is not stored, so bytes need no room for it."""
        return np.dtype(np.uint8) if isinstance(self.tokenizer, Bytes) else np.min_scalar_type(self.vocab_size - 1)

    @property
    def encoding(self) -> dict[str, Any]:
        """The keys on which the tokens of the files depend."""
        return self.model_dump(mode="json", exclude={"cache", *Corpus.model_fields})

    def encoded(self, part: FileRange) -> Iterator[tuple[float, np.ndarray]]:
        """(share, token ids) of each document of a range, see `encode`."""
        return encode(self.read(part), self.tokenizer)

    def documents(self) -> Documents:
        files = self.files()
        make = partial(self.encoded, FileRange(tuple(files)))
        if self.cache is None:
            return Documents.joined(make(), self.tokenizer.bos, self.ids_dtype)
        return cached(Path(self.cache), self.encoding, files, self.tokenizer, make, self.ids_dtype)


class WholeFiles(TextCorpus):
    """Files that are a document each. `Bytes` can encode text that is not UTF-8; a tokenizer file cannot."""

    def read(self, part: FileRange) -> Iterator[Content]:
        root = self.root
        for path in part.files:
            name = path.relative_to(root).as_posix()
            yield Content(str(path), path.read_bytes().decode("utf-8", "surrogateescape"), name)


class Text(WholeFiles):
    """Files of a folder; each file is a document.

    >>> Text(path="corpus", glob="**/*.md", seq_len=1024).vocab_size
    257
    """

    kind: Literal["text"] = "text"
    path: DataPath
    """The folder, or an address such as `s3://bucket/texts`."""
    glob: str = "**/*.txt"
    """The pattern of the files below `path`; `**` matches any folders."""

    @property
    def root(self) -> Path:
        return local(self.path)

    def files(self) -> list[Path]:
        return find(self.root, self.glob)


class StandardLibrary(WholeFiles):
    """The Python source of the interpreter's standard library, without its tests.

    It is available on every machine, and differs between versions of Python.
    """

    kind: Literal["stdlib"] = "stdlib"

    @property
    def root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    def files(self) -> list[Path]:
        without = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
        return find(self.root, "**/*.py", without)


class NoData(DocumentCorpus):
    """No documents: the config of a converted model, which trains as soon as `data` names some.

    >>> NoData().documents()
    Traceback (most recent call last):
        ...
    meshpar.errors.DataError: there is no data to train on:
      data
        is not set: the model was converted, and trains on no data but yours
        data.kind=jsonl data.path=FILE, or another kind
    """

    kind: Literal["none"] = "none"
    tokenizer: Coerced[Tokenizer, str | dict[str, Any]] = default(Bytes())
    """The tokenizer of the model, which another `kind` of data keeps."""

    @property
    def vocab_size(self) -> int:
        """One: there is no token, so the data fit every model."""
        return 1

    def named_files(self) -> dict[str, Path]:
        raise _no_data_named()

    def documents(self) -> Documents:
        raise _no_data_named()


def _no_data_named() -> DataError:
    what = "is not set: the model was converted, and trains on no data but yours"
    return no_data("data", what, "data.kind=jsonl data.path=FILE, or another kind")


class Synthetic(DocumentCorpus):
    """Generated documents with a rule to learn: a symbol is its predecessor plus 1, modulo their number, or noise.

    >>> first = Synthetic(vocab_size=8, document_len=10, noise=0.0).documents().take(np.arange(1, 11))[0]
    >>> (np.diff(first) % 7).tolist()
    [1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    kind: Literal["synthetic"] = "synthetic"
    vocab_size: Positive = Field(default=64, ge=3)
    """The number of symbols, and one id that opens a document."""
    num_documents: Positive = 512
    """The number of documents, held-out ones included."""
    document_len: Positive = 500
    """Symbols per document."""
    noise: float = Field(default=0.1, ge=0, le=1)
    """The fraction of symbols that are drawn uniformly."""

    @property
    def tokenizer(self) -> Tokenizer:
        return Ids(vocab_size=self.vocab_size, bos=self._num_symbols)

    def documents(self) -> Documents:
        generated = ((share(str(i).encode()), self._document(i)) for i in range(self.num_documents))
        return Documents.joined(generated, self._num_symbols, np.min_scalar_type(self._num_symbols))

    @property
    def _num_symbols(self) -> int:
        return self.vocab_size - 1

    def _document(self, index: int) -> np.ndarray:
        draw = np.random.Generator(np.random.Philox(key=index))
        symbols = draw.integers(self._num_symbols, size=self.document_len).tolist()
        noisy = (draw.random(self.document_len) < self.noise).tolist()
        for t in range(1, self.document_len):
            symbols[t] = symbols[t] if noisy[t] else (symbols[t - 1] + 1) % self._num_symbols
        return np.array(symbols)
