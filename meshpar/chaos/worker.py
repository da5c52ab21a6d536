"""Trains a run under test: every process logs the batches that it reads, and flips a bit on request."""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from meshpar.data.dataset import Dataset
from meshpar.data.order import Order
from meshpar.experiment.actions import fit
from meshpar.experiment.config import Run
from meshpar.train.replicas import copied_over
from meshpar.train.state import TrainState

FLIP = "flip"
"""The file, in the run's folder, that names the process whose memory loses a bit at the next evaluation."""
BATCHES = "batches-*.jsonl"
BIT = 20
"""The bit of a float32 that is flipped. It is in the mantissa, and changes the number by an eighth or less."""


def train(run: Run) -> None:
    """Trains, or resumes. Every process appends its batches to its own file of `BATCHES`."""
    process = jax.process_index()
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with (run.run_dir / BATCHES.replace("*", str(process))).open("a", buffering=1) as log:
        watched = run.model_copy(update={"data": watch(run.data, log)})
        fit(watched, callbacks=[flips(run.run_dir / FLIP, process)], signals=True)


def watch(data: Any, log: IO[str]) -> Any:
    """The data of a run, with a log of its training batches."""

    class Watched(type(data)):
        def datasets(self, seed: int, bounds: Any = None) -> tuple[Any, Any]:
            training, held_out = super().datasets(seed, bounds)
            return WatchedDataset(training, log), held_out

    return Watched.model_construct(**dict(data))


@dataclass(frozen=True)
class WatchedDataset:
    """A data set that writes a line for each batch: its step, and the CRC-32 of each row."""

    dataset: Dataset
    log: IO[str]

    def in_order(self, order: Order) -> WatchedDataset:
        return replace(self, dataset=self.dataset.in_order(order))

    def batches(self, start: int, rows: np.ndarray) -> Iterator[Any]:
        with closing(self.dataset.batches(start, rows)) as batches:
            for step, batch in enumerate(batches, start + 1):
                checksums = {int(row): _row_checksum(batch, i) for i, row in enumerate(rows)}
                self.log.write(json.dumps({"step": step, "rows": checksums}) + "\n")
                yield batch


def seen(run_dir: Path) -> dict[tuple[int, int], set[int]]:
    """(step, row) -> the checksums of that row in all attempts; only one, if all attempts read the same batch."""
    found: dict[tuple[int, int], set[int]] = {}
    for file in sorted(run_dir.glob(BATCHES)):
        for line in file.read_text().split("\n"):
            if not line.endswith("}}"):  # a process was killed while it wrote
                continue
            record = json.loads(line)
            for row, checksum in record["rows"].items():
                found.setdefault((record["step"], int(row)), set()).add(checksum)
    return found


def flips(request: Path, process: int) -> Callable[[TrainState, int], Mapping[str, float]]:
    """A callback that flips a bit in this process's copy of the state, once the file names the process."""

    def flip(state: TrainState, step: int) -> Mapping[str, float]:
        if request.exists() and request.read_text() == str(process):
            request.unlink()
            flip_bit(state)
        return {}

    return flip


def flip_bit(state: Any) -> None:
    """Flips a bit of the largest replicated array, in the memory of this process's first CPU device."""
    copied = [x for x in jax.tree.leaves(state) if copied_over(x.sharding)]
    if not copied:
        return
    shard = max(copied, key=lambda x: x.nbytes).addressable_shards[0].data
    shard.block_until_ready()
    number = ctypes.c_uint32.from_address(shard.unsafe_buffer_pointer())
    number.value ^= 1 << BIT


def _row_checksum(batch: Mapping[str, np.ndarray], row: int) -> int:
    checksum = 0
    for name in sorted(batch):
        checksum = zlib.crc32(np.ascontiguousarray(batch[name][row]).tobytes(), checksum)
    return checksum
