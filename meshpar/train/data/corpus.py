"""Corpora: documents, and how they become batches."""

from __future__ import annotations

import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from meshpar.config import Config, Positive
from meshpar.errors import DataError, Problem
from meshpar.train.data.cache import cached
from meshpar.train.data.dataset import Dataset
from meshpar.train.data.documents import HEADING, Documents, share
from meshpar.train.data.encode import Content, encode
from meshpar.train.data.files import find, named
from meshpar.train.data.fingerprint import fingerprint
from meshpar.train.data.packing import Rows
from meshpar.train.data.tokenizer import AnyTokenizer, Bytes, Ids, Tokenizer, tokenizer_file
from meshpar.tree import human_bytes

BYTES_A_TOKEN = 16
"""The arrays of a batch have four numbers for each."""
BATCHES_AHEAD = 10
"""Eight are read ahead while two threads cut two more."""


class Batching(Config):
    """How documents become batches. The run's seed orders them, and changes nothing in them."""

    batch_size: Positive = 16
    """Rows a batch, over all devices."""
    seq_len: Positive = 256
    """Tokens a row."""
    held_out_fraction: float = Field(default=0.05, gt=0, lt=1)
    """About this part of the documents is for evaluation: those whose name or content has a small checksum."""
    if_changed: Literal["refuse", "allow"] = "refuse"
    """What becomes of a run that would go on from a checkpoint with files that are not those that it began with."""

    @property
    @abstractmethod
    def sources(self) -> list[tuple[int, Corpus]]:
        """(weight, corpus), in whole numbers."""

    def datasets(self, seed: int) -> tuple[Dataset, Dataset]:
        """The documents to train on, shuffled by rows, without end; and those held out, once and in order.

        Args:
          seed: not negative.

        Raises:
          DataError: the documents are not there, or cannot be read; one side of the split would be empty; or the
            batches are larger than memory.
        """
        self._check_memory()
        weights = tuple(weight for weight, _ in self.sources)
        try:
            splits = [corpus.documents().split(self.held_out_fraction) for _, corpus in self.sources]
        except OSError as error:  # in the midst of a file: a disk or a network that fails
            problem = Problem(str(error.filename or "data"), f"cannot be read: {error.strerror}")
            raise DataError(f"{HEADING}\n{problem}") from None
        train, held_out = (tuple(Rows(side, self.seq_len) for side in sides) for sides in zip(*splits, strict=True))
        return Dataset(train, self.batch_size, seed, weights), Dataset(held_out, self.batch_size, None)

    def _check_memory(self) -> None:
        """Cutting a batch that no memory can hold would not end."""
        each = self.seq_len * BYTES_A_TOKEN * BATCHES_AHEAD
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.batch_size * each <= memory:
            return
        import jax  # which looks for the devices then; each process cuts its own rows

        if self.batch_size * each > memory * jax.process_count():
            size = human_bytes(self.batch_size * each)
            where = f"data.batch_size = {self.batch_size}"
            what = f"{BATCHES_AHEAD} batches of {self.seq_len} tokens a row take {size}"
            problem = Problem(where, f"{what}, and there are {human_bytes(memory)}", f"at most {memory // each} fit")
            raise DataError(f"the batches do not fit into memory:\n{problem}")

    def fingerprint(self) -> dict[str, str]:
        """A checksum of each file that is read, that of the tokenizer included; of none, where none is read.

        Raises:
          DataError: the files are not there, or cannot be read.
        """
        corpora = [corpus for _, corpus in self.sources]
        if len(corpora) == 1:
            return fingerprint(corpora[0].named_files())
        of_parts = [(f"parts.{i}", corpus.named_files()) for i, corpus in enumerate(corpora)]
        return fingerprint({f"{part}: {name}": path for part, files in of_parts for name, path in files.items()})

    def train(self, seed: int) -> Dataset:
        """The first of `datasets`."""
        return self.datasets(seed)[0]

    def held_out(self) -> Dataset:
        """The second of `datasets`."""
        return self.datasets(0)[1]


class Corpus(Batching):
    """Documents."""

    @abstractmethod
    def documents(self) -> Documents:
        """All documents, in their order.

        Raises:
          DataError: they are not there, or cannot be read.
        """

    def named_files(self) -> dict[str, Path]:
        """The files that are read, by names that do not depend on where they lie."""
        return {}

    @property
    def sources(self) -> list[tuple[int, Corpus]]:
        return [(1, self)]


class Texts(Corpus):
    """Files, and what a tokenizer makes of them."""

    tokenizer: AnyTokenizer = Bytes()
    """`path/to/tokenizer.json` of the tokenizers library. Default: bytes."""
    cache: str | None = None
    """A folder that keeps the tokens, for the next start to map into memory; default: they are made anew."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @abstractmethod
    def files(self) -> list[Path]:
        """What is read, in its order."""

    @property
    @abstractmethod
    def root(self) -> Path:
        """The folder that holds the files, or the one file."""

    def named_files(self) -> dict[str, Path]:
        return named(self.files(), self.root) | tokenizer_file(self.tokenizer)

    @abstractmethod
    def read(self, files: list[Path]) -> Iterator[Content]:
        """The documents of the files, one after the other.

        Raises:
          DataError: lists what cannot be read.
        """

    def documents(self) -> Documents:
        files, dtype = self.files(), np.min_scalar_type(self.vocab_size - 1)
        make = lambda: encode(self.read(files), self.tokenizer)
        if self.cache is None:
            return Documents.joined(make(), self.tokenizer.bos, dtype)
        what = self.model_dump(mode="json", exclude={"cache", *Corpus.model_fields})
        return cached(Path(self.cache), what, files, self.tokenizer, make, dtype)


class Text(Texts):
    """Files of a folder, each a document.

    >>> Text(path="corpus", glob="**/*.md", seq_len=1024).vocab_size
    257
    """

    kind: Literal["text"] = "text"
    path: str
    """The folder, relative to the working directory."""
    glob: str = "**/*.txt"
    """Which files below `path`; `**` stands for any number of folders."""

    @property
    def root(self) -> Path:
        return Path(self.path)

    def files(self) -> list[Path]:
        return find(self.root, self.glob)

    def read(self, files: list[Path]) -> Iterator[Content]:
        return _whole(files, self.root)


class StandardLibrary(Texts):
    """The Python source of the interpreter's standard library, without its tests.

    Every machine has it; it differs from one version of Python to the next.
    """

    kind: Literal["stdlib"] = "stdlib"

    def files(self) -> list[Path]:
        without = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
        return find(self.root, "**/*.py", without)

    def read(self, files: list[Path]) -> Iterator[Content]:
        return _whole(files, self.root)

    @property
    def root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])


class Synthetic(Corpus):
    """Documents out of nothing, with a rule to learn: they count upwards in a circle, but for noise.

    >>> first = Synthetic(vocab_size=8, document_len=10, noise=0.0).documents().take(np.arange(1, 11))[0]
    >>> (np.diff(first) % 7).tolist()
    [1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    kind: Literal["synthetic"] = "synthetic"
    vocab_size: Positive = Field(default=64, ge=3)
    """Symbols, and the token that opens a document."""
    num_documents: Positive = 512
    document_len: Positive = 500
    """Symbols a document."""
    noise: float = Field(default=0.1, ge=0, le=1)
    """How often a symbol is drawn from all alike, whatever precedes it."""

    @property
    def tokenizer(self) -> Tokenizer:
        return Ids(vocab_size=self.vocab_size, bos=self._num_symbols)

    def documents(self) -> Documents:
        made = ((share(str(i).encode()), self._document(i)) for i in range(self.num_documents))
        return Documents.joined(made, self._num_symbols, np.min_scalar_type(self._num_symbols))

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


def _whole(files: list[Path], folder: Path) -> Iterator[Content]:
    """Each file is a document; what is no UTF-8 in it is still bytes."""
    for path in files:
        name = path.relative_to(folder).as_posix()
        yield Content(str(path), path.read_bytes().decode("utf-8", "surrogateescape"), name)
