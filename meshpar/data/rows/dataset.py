"""Batches of rows by index: batch i is a function of the source, the seed and i, on any processes and workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from meshpar.data.order import Order
from meshpar.data.rows.block_order import BlockOrder
from meshpar.data.rows.skipped import Skipped
from meshpar.data.rows.source import CorruptRow, Indexed, Row, Stream, as_row
from meshpar.data.rows.spec import COUNTED, RowSpec
from meshpar.data.with_grain import read_ahead, shuffled
from meshpar.errors import DataError

Batch = dict[str, np.ndarray]
Transform = Callable[[Row, np.random.Generator], Row]
"""(row, random numbers) -> the row to train on."""


@dataclass(frozen=True)
class RowDataset:
    """Batches of rows that are read by index.

    Args:
      source: the rows.
      spec: of a row, after `transform`.
      batch_size: rows per batch, over all devices.
      seed: with a seed, the rows are shuffled anew in each epoch, without end. With None they are read once, in order,
        and rows that do not count fill the last batch.
      chosen: int[n]. The rows of the source that are read; None for all.
      order: where a run begins to read.
      transform: changes each row. Its random numbers follow from the seed, the epoch and the row.
      workers: processes that read; with 0 two threads do.
      skipped: counts the rows whose content is damaged, which do not count in the batch; None if they are errors.
    """

    source: Indexed
    spec: RowSpec
    batch_size: int
    seed: int | None
    chosen: np.ndarray | None = None
    order: Order = field(default_factory=Order)
    transform: Transform | None = None
    workers: int = 0
    skipped: Skipped | None = None

    @property
    def num_rows(self) -> int:
        return self.source.length if self.chosen is None else len(self.chosen)

    def __len__(self) -> int:
        """The number of batches; with a seed, more than a run can read."""
        return -(-self.num_rows // self.batch_size) if self.seed is None else 2**62 // self.batch_size

    def rows(self, index: int, rows: ArrayLike) -> Batch:
        """The given rows int[n] of batch `index`; no other rows are read.

        Raises:
          DataError: a row cannot be read, or differs from the first; it names the row.
        """
        return self.read(index, rows)[0]

    def read(self, index: int, rows: ArrayLike) -> tuple[Batch, list[str]]:
        """See `rows`; and what is wrong with each row that was left out."""
        at = self.order.first + index * self.batch_size + np.asarray(rows)
        is_counted = np.ones(len(at), np.int32) if self.seed is not None else (at < self.num_rows).astype(np.int32)
        wrong = []
        batch = {name: np.empty((len(at), *shape), dtype) for name, (shape, dtype) in self.spec.arrays.items()}
        for place, i in enumerate(at):
            try:
                row = self._row(int(i))
            except CorruptRow as error:
                if self.skipped is None:
                    raise
                row = self.spec.zeros()
                if is_counted[place]:
                    wrong.append(str(error))
                is_counted[place] = 0
            for name, x in row.items():
                batch[name][place] = x
        return batch | {COUNTED: is_counted}, wrong

    def batches(self, start: int = 0, rows: ArrayLike | None = None) -> Generator[Batch, None, None]:
        """Iterates over the batches from `start` on; threads or processes read ahead, and end with the generator.

        Args:
          rows: int[n]. The rows of each batch to read; default: all.
        """
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        if self.workers:
            self._check_sendable()
        with closing(read_ahead(_Read(self, chosen), start, len(self), self.workers)) as results:
            for found in results:
                if isinstance(found, str):
                    raise DataError(found)
                batch, wrong = found
                if self.skipped is not None:
                    self.skipped.add(wrong)
                yield batch

    def in_order(self, order: Order) -> RowDataset:
        """The same rows, each read when the order says."""
        return replace(self, order=order)

    def _row(self, at: int) -> Batch:
        """Row `at` of the endless sequence of all epochs, or of the single pass."""
        row = at if at < self.num_rows else 0
        row = row if self.seed is None else int(self._shuffled[at])
        index = row if self.chosen is None else int(self.chosen[row])
        where = self.source.where(index)
        try:
            found = self.source.row(index)
            if self.transform:
                epoch = at // self.num_rows
                found = _transformed(self.transform, found, (self.seed or 0, epoch, index), where)
        except CorruptRow as error:
            what = f"{error}\n    replace or remove it, or data.skip_corrupt=true"
            raise CorruptRow(f"{where}\n    {what}" if self.skipped is None else f"{where}: {error}") from None
        return self.spec.checked(found, where)

    @cached_property
    def _shuffled(self) -> Any:
        """Place in the endless sequence -> row."""
        if (blocks := self.source.blocks) is not None:
            ends = blocks if self.chosen is None else np.searchsorted(self.chosen, blocks)
            return BlockOrder(np.unique(ends), self.seed or 0)
        return shuffled([self.num_rows], self.seed or 0)[0]

    def _check_sendable(self) -> None:
        try:
            pickle.dumps((self.source, self.transform))
        except Exception as error:
            what = f"data.workers = {self.workers}: the rows of {self.source.name} cannot be sent to other processes"
            raise DataError(f"{what}: {type(error).__name__}: {error}; data.workers=0 reads with threads") from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_shuffled"}


@dataclass(frozen=True)
class _Read:
    """Reads a batch, in a thread or another process: an error comes back as its text, with the row that it names."""

    dataset: RowDataset
    rows: np.ndarray

    def __call__(self, index: int) -> tuple[Batch, list[str]] | str:
        try:
            return self.dataset.read(index, self.rows)
        except DataError as error:
            return str(error)


@dataclass(frozen=True)
class StreamDataset:
    """Batches of rows that are read from a stream, in its order. Each process reads all rows, and keeps its own.

    Args: see `RowDataset`. With a seed, the stream begins again when it ends.
    """

    source: Stream
    spec: RowSpec
    batch_size: int
    seed: int | None
    order: Order = field(default_factory=Order)
    transform: Transform | None = None
    skipped: ClassVar[None] = None

    def batches(self, start: int = 0, rows: ArrayLike | None = None) -> Generator[Batch, None, None]:
        """Iterates over the batches from `start` on, after the rows before them, which are read and dropped."""
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        own = {*chosen.tolist()}
        begin = self.order.first + start * self.batch_size
        held: list[Batch] = []
        place = 0
        for at, epoch, index, row in self._endless():
            if at < begin:
                continue
            if place in own:
                held.append(self._checked(row, epoch, index))
            place += 1
            if place == self.batch_size:
                yield self._stacked(held, len(held))
                held, place = [], 0
        if place:
            yield self._last(held, chosen)

    def in_order(self, order: Order) -> StreamDataset:
        return replace(self, order=order)

    def _endless(self) -> Iterator[tuple[int, int, int, Row]]:
        """(place, epoch, row within it, row): without end with a seed, else once."""
        at = 0
        epoch = 0
        while True:
            before = at
            for index, row in enumerate(self.source.rows()):
                yield at, epoch, index, row
                at += 1
            if at == before:
                raise DataError(f"{self.source.name} has no rows in pass {epoch + 1}: return a new iterator each time")
            if self.seed is None:
                return
            epoch += 1

    def _checked(self, row: Row, epoch: int, index: int) -> Batch:
        where = f"{self.source.name}, row {index}"
        if self.transform:
            row = _transformed(self.transform, row, (self.seed or 0, epoch, index), where)
        return self.spec.checked(row, where)

    def _last(self, held: list[Batch], chosen: np.ndarray) -> Batch:
        """A short last batch, with rows of zeros that do not count."""
        return self._stacked([*held, *[self.spec.zeros()] * (len(chosen) - len(held))], len(held))

    def _stacked(self, rows: list[Batch], num_counted: int) -> Batch:
        batch = {name: np.stack([row[name] for row in rows]) for name in self.spec.arrays}
        return batch | {COUNTED: (np.arange(len(rows)) < num_counted).astype(np.int32)}


Rows = RowDataset | StreamDataset


def _transformed(transform: Transform, row: Row, seed: tuple[int, ...], where: str) -> Row:
    try:
        return as_row(transform(row, np.random.default_rng(seed)), where)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where}: data.transform failed: {type(error).__name__}: {error}") from error


def first_row(source: Indexed | Stream) -> tuple[Mapping[str, Any], str]:
    """The first row of a source, and where it is.

    Raises:
      DataError: there is none.
    """
    where = f"{source.name}, row 0"
    if isinstance(source, Indexed):
        return source.row(0), source.where(0)
    for row in source.rows():
        return row, where
    raise DataError(f"{source.name} has no rows")
