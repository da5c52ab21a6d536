"""Corpora: documents, and how they become batches."""

from __future__ import annotations

import sysconfig
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from meshpar.config import Config
from meshpar.train.data.cache import cached
from meshpar.train.data.dataset import Dataset
from meshpar.train.data.documents import Documents, share
from meshpar.train.data.encode import Content, encode
from meshpar.train.data.files import find
from meshpar.train.data.packing import Rows
from meshpar.train.data.tokenizer import AnyTokenizer, Bytes, Ids, Tokenizer


class Batching(Config):
    """How documents become batches. The run's seed orders them, and changes nothing in them."""

    batch_size: int = Field(default=16, gt=0)
    """Rows a batch, over all devices."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens a row."""
    held_out_fraction: float = Field(default=0.05, gt=0, lt=1)
    """About this part of the documents is for evaluation: those whose name or content has a small checksum."""

    @property
    @abstractmethod
    def sources(self) -> list[tuple[int, Corpus]]:
        """(weight, corpus), in whole numbers."""

    def datasets(self, seed: int) -> tuple[Dataset, Dataset]:
        """The documents to train on, shuffled by rows, without end; and those held out, once and in order.

        Args:
          seed: not negative.

        Raises:
          DataError: the documents are not there, or cannot be read; or one side of the split would be empty.
        """
        weights = tuple(weight for weight, _ in self.sources)
        splits = [corpus.documents().split(self.held_out_fraction) for _, corpus in self.sources]
        train, held_out = (tuple(Rows(side, self.seq_len) for side in sides) for sides in zip(*splits, strict=True))
        return Dataset(train, self.batch_size, seed, weights), Dataset(held_out, self.batch_size, None)

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

    def files(self) -> list[Path]:
        return find(Path(self.path), self.glob)

    def read(self, files: list[Path]) -> Iterator[Content]:
        return _whole(files, Path(self.path))


class StandardLibrary(Texts):
    """The Python source of the interpreter's standard library, without its tests.

    Every machine has it; it differs from one version of Python to the next.
    """

    kind: Literal["stdlib"] = "stdlib"

    def files(self) -> list[Path]:
        without = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
        return find(self._folder, "**/*.py", without)

    def read(self, files: list[Path]) -> Iterator[Content]:
        return _whole(files, self._folder)

    @property
    def _folder(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])


class Synthetic(Corpus):
    """Documents out of nothing, with a rule to learn: they count upwards in a circle, but for noise.

    >>> first = Synthetic(vocab_size=8, document_len=10, noise=0.0).documents().take(np.arange(1, 11))[0]
    >>> (np.diff(first) % 7).tolist()
    [1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    kind: Literal["synthetic"] = "synthetic"
    vocab_size: int = Field(default=64, ge=3)
    """Symbols, and the token that opens a document."""
    num_documents: int = Field(default=512, gt=0)
    document_len: int = Field(default=500, gt=0)
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
