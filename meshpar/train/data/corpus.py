"""Corpora, and how a run reads them: batch i is a function of config, seed and i, and of nothing else."""

from __future__ import annotations

import sysconfig
from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from meshpar.config import Config
from meshpar.train.data.documents import Document, find, split
from meshpar.train.data.packing import Batch, Rows, pack
from meshpar.train.data.tokenizer import Bytes, Ids, Tokenizer


@dataclass(frozen=True)
class Dataset:
    """Batches by index: to resume at step k, on whatever devices, is to start at k.

    Args:
      rows: what the batches are made of.
      batch_size: rows a batch, over all devices.
      seed: orders the rows anew for each epoch, without end; None reads them once, in order, and fills
        the last batch with rows of padding.
      num_empty: documents of the corpus without a token, which are in no row.
    """

    rows: Rows
    batch_size: int
    seed: int | None
    num_empty: int

    @property
    def num_documents(self) -> int:
        return self.rows.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens an epoch, with those that open a document, and without padding."""
        return len(self.rows.tokens)

    @property
    def num_rows(self) -> int:
        """Rows an epoch. An epoch may end within a batch; the next begins there."""
        return len(self.rows)

    def __len__(self) -> int:
        """The number of batches; with a seed, more than a run can read."""
        return len(self._pipeline)

    def __getitem__(self, index: int) -> Batch:
        """Batch `index`, see `Rows.batch`.

        Raises:
          IndexError: it is negative, or at or beyond the length.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        return self._pipeline[index]

    def __iter__(self) -> Generator[Batch, None, None]:
        return self.batches()

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """Batches from `start` on, read ahead by two threads.

        They end with the generator: when it is exhausted, closed or dropped.
        """
        import grain

        reads = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        iterator = iter(self._pipeline.slice(slice(start, None)).to_iter_dataset(reads))
        try:
            yield from iterator
        finally:
            iterator.close()

    @cached_property
    def _pipeline(self) -> Any:
        """Grain orders the indices of rows; each batch is then cut at once."""
        import grain

        if self.seed is None:
            num_batches = -(-self.num_rows // self.batch_size)
            indices = grain.MapDataset.range(num_batches * self.batch_size)
        else:
            # Grain adds the epoch to the seed: as it stands, seeds 0 and 1 would share all orders but one.
            seed = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
            indices = grain.MapDataset.range(self.num_rows).shuffle(seed=seed).repeat()
        # There is no remainder; but unless told so, Grain's length overflows for a batch_size of 1.
        return indices.batch(self.batch_size, drop_remainder=True).map(self.rows.batch)


class Corpus(Config):
    """Documents, and how they become batches. The run's seed orders them, and changes nothing in them."""

    batch_size: int = Field(default=16, gt=0)
    """Rows a batch, over all devices."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens a row."""
    held_out_fraction: float = Field(default=0.05, gt=0, lt=1)
    """About this part of the documents is for evaluation: those whose name has a small checksum."""

    @abstractmethod
    def documents(self) -> list[Document]:
        """All documents, in their order.

        Raises:
          DataError: they are not there, or cannot be read.
        """

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """What made the tokens, and reads them."""

    @property
    def bos(self) -> int:
        """The token that opens each document."""
        return self.tokenizer.bos

    def train(self, seed: int) -> Dataset:
        """The documents to train on, shuffled by rows, without end.

        Args:
          seed: not negative.

        Raises:
          DataError: see `documents`; or one side of the split would be empty.
        """
        return self._dataset(0, seed)

    def held_out(self) -> Dataset:
        """The documents held out, once and in order. Raises as `train` does."""
        return self._dataset(1, None)

    def _dataset(self, side: int, seed: int | None) -> Dataset:
        documents = self.documents()
        chosen = split(documents, self.held_out_fraction)[side]
        rows = pack((document.read() for document in chosen), self.bos, self.seq_len)
        return Dataset(rows, self.batch_size, seed, num_empty=sum(not document.size for document in documents))


class _Files(Corpus):
    """Files, byte by byte."""

    vocab_size: ClassVar[int] = 257
    """The bytes, and the token that opens a document."""

    @property
    def tokenizer(self) -> Tokenizer:
        return Bytes()


class Text(_Files):
    """Files of a folder.

    >>> Text(path="corpus", glob="**/*.md", seq_len=1024).vocab_size
    257
    """

    kind: Literal["text"] = "text"
    path: str
    """The folder, relative to the working directory."""
    glob: str = "**/*.txt"
    """Which files below `path`; `**` stands for any number of folders."""

    def documents(self) -> list[Document]:
        return find(Path(self.path), self.glob)


class StandardLibrary(_Files):
    """The Python source of the interpreter's standard library, without its tests.

    Every machine has it; it differs from one version of Python to the next.
    """

    kind: Literal["stdlib"] = "stdlib"

    def documents(self) -> list[Document]:
        without = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
        return find(Path(sysconfig.get_paths()["stdlib"]), "**/*.py", without)


class Synthetic(Corpus):
    """Documents out of nothing, with a rule to learn: they count upwards in a circle, but for noise.

    >>> document = Synthetic(vocab_size=8, document_len=10, noise=0.0).documents()[0].read()
    >>> (np.diff(document) % 7).tolist()
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
        return Ids(vocab_size=self.vocab_size, bos=self.vocab_size - 1)

    def documents(self) -> list[Document]:
        return [Document(str(i), self.document_len, partial(self._document, i)) for i in range(self.num_documents)]

    def _document(self, index: int) -> np.ndarray:
        draw = np.random.Generator(np.random.Philox(key=index))
        symbols = draw.integers(self.bos, size=self.document_len).tolist()
        noisy = (draw.random(self.document_len) < self.noise).tolist()
        for t in range(1, self.document_len):
            symbols[t] = symbols[t] if noisy[t] else (symbols[t - 1] + 1) % self.bos
        return np.array(symbols)
