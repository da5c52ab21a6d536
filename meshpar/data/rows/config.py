"""The settings of data in rows of named arrays, whatever they are read from."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from meshpar.config import Config, Count, Positive
from meshpar.data.rows.dataset import RowDataset, Rows, StreamDataset, Transform, first_row
from meshpar.data.rows.skipped import Skipped
from meshpar.data.rows.source import Indexed, Source
from meshpar.data.rows.spec import RowSpec
from meshpar.data.tokenizer import Ids
from meshpar.errors import DataError
from meshpar.sharding.spec import ArraySpec

HELD_OUT = 0.05


class RowData(Config):
    """Rows of named arrays. The run's seed determines their order."""

    seq_len: ClassVar[int] = 1
    """A row has no tokens: the planner and the records count rows."""
    vocab_size: ClassVar[int] = 1
    documents_in_row: ClassVar[Literal["separate", "joined"]] = "joined"
    omitted: ClassVar[frozenset[str]] = frozenset()
    held_out_key: ClassVar[str]
    """The key that names rows of their own for evaluations."""
    tokenizer: ClassVar[Ids] = Ids(vocab_size=1, bos=0)

    batch_size: Positive = 16
    """Rows per batch, over all devices."""
    held_out_fraction: float | None = Field(default=None, gt=0, lt=1)
    """About this fraction of the rows is held out for evaluation. Default: 0.05, unless the evaluation has rows of its
    own."""
    held_out_rows: Positive | None = None
    """How many of the first held-out rows are evaluated. Default: all."""
    dims: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Array -> a name for each of its dims in a row, by which rules shard it. Default: only the rows are sharded."""
    workers: Count = 0
    """Processes that read rows ahead. Default: two threads."""
    if_changed: Literal["refuse", "allow"] = "refuse"
    """Whether a run may resume if the rows have changed: their number, the first or the last."""

    @model_validator(mode="after")
    def _hold_out_once(self) -> Self:
        if getattr(self, self.held_out_key) is not None and self.held_out_fraction is not None:
            what = f"held_out_fraction = {self.held_out_fraction}: {self.held_out_key} names the rows of evaluations"
            raise ValueError(f"{what}, so that no fraction is drawn; leave one of them out")
        return self

    @property
    @abstractmethod
    def sources(self) -> tuple[Source, Source | None]:
        """The rows, and the held-out rows; None if they are a part of the rows."""

    def row_transform(self, chosen: np.ndarray | None) -> Transform | None:
        """What changes each row that is trained on.

        Args:
          chosen: int[n], the rows that are trained on; None for all.
        """
        return None

    @property
    def held_out_transform(self) -> Transform | None:
        """What changes each row that is evaluated."""
        return None

    @property
    def skips_corrupt(self) -> bool:
        """Whether rows whose content is damaged are left out."""
        return False

    @property
    @abstractmethod
    def label(self) -> str:
        """Names the data in messages."""

    @cached_property
    def row_spec(self) -> RowSpec:
        """The arrays of the first row, after the transformation.

        Raises:
          DataError: there is no row, or it has other values than arrays of numbers.
        """
        row, where = first_row(self.sources[0])
        if transform := self.row_transform(None):
            row = transform(row, np.random.default_rng(0))
        return RowSpec.of(row, where)

    def array_specs(self) -> dict[str, ArraySpec]:
        """The arrays of a batch, and `counted`, see `spec.COUNTED`."""
        return self.row_spec.batch_specs(self.batch_size, self.dims)

    def datasets(self, seed: int, bounds: Mapping[str, int] | None = None) -> tuple[Rows, Rows]:
        """The rows to train on, without end, and the held-out rows, once and in order.

        Args:
          bounds: array of labels -> the number of classes.

        Raises:
          DataError: the rows do not exist or cannot be read, or one side of the split is empty.
        """
        source, held_out = self.sources
        trained, evaluated = self._split(source) if held_out is None else (None, None)
        held_out = held_out or source
        if self.workers and not isinstance(source, Indexed):
            what = f"data.workers = {self.workers}: {source.name} is a stream, which one process reads in order"
            raise DataError(f"{what}; data.workers=0, or rows by index")
        if self.held_out_rows:
            if not isinstance(held_out, Indexed):
                what = f"data.held_out_rows = {self.held_out_rows}: {held_out.name} is a stream"
                raise DataError(f"{what}; let the stream end there")
            evaluated = (np.arange(held_out.length) if evaluated is None else evaluated)[: self.held_out_rows]
        spec = replace(self.row_spec, bounds=bounds or {})
        train = self._rows(source, spec, seed, trained, self.row_transform(trained), self.workers)
        return train, self._rows(held_out, spec, None, evaluated, self.held_out_transform, 0)

    def _split(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """The rows that are trained on, and those that are held out."""
        if not isinstance(source, Indexed):
            what = f"{source.name} is a stream, of which no fraction can be held out"
            raise DataError(f"{what}; data.held_out={{...}} names the arguments of the held-out rows")
        fraction = self.held_out_fraction or HELD_OUT
        is_held_out = np.random.default_rng(0).random(source.length) < fraction
        trained, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
        if not len(held_out) or not len(trained):
            what = f"{source.length} rows cannot be split: data.held_out_fraction = {fraction}"
            raise DataError(f"{source.name}: {what} holds out {len(held_out)} of them; another fraction")
        return trained, held_out

    def _rows(
        self, source: Source, spec: RowSpec, seed: int | None, chosen: np.ndarray | None, transform: Transform | None,
        workers: int,
    ) -> Rows:  # fmt: skip
        if not isinstance(source, Indexed):
            return StreamDataset(source, spec, self.batch_size, seed, transform=transform)
        skipped = Skipped() if self.skips_corrupt else None
        return RowDataset(
            source, spec, self.batch_size, seed, chosen, transform=transform, workers=workers, skipped=skipped
        )

    def fingerprint(self) -> dict[str, str]:
        """Checksums of the first and last row, and the number of rows: what a run that resumes is compared with."""
        source = self.sources[0]
        if not isinstance(source, Indexed):
            return {f"{self.label}, first row": _checksum(first_row(source)[0])}
        rows = {"first row": _checksum(source.row(0)), "last row": _checksum(source.row(source.length - 1))}
        return {f"{self.label}, {name}": value for name, value in (rows | {"number": str(source.length)}).items()}


def _checksum(row: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(row.items()):
        x = np.asarray(value)
        digest.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
    return digest.hexdigest()[:32]
