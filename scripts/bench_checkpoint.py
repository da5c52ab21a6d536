"""Measures what it costs a checkpoint to survive a power cut: seconds of a save, with and without syncing its files.

    python scripts/bench_checkpoint.py FOLDER [--saves 20]

FOLDER is on the disk to measure. Saves with and without sync alternate, so that both see the same load. The numbers are
medians of a save with the wait for it, and of the time in sync. Orbax syncs the arrays' chunks in both cases.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax

from meshpar import Checkpoints, checkpoints
from meshpar.checkpoint import checkpoints as writing
from meshpar.checkpoint.durable import sync_tree
from meshpar.tree import human_bytes

STATES = {"small": (40, (16, 16)), "large": (25, (1024, 1024))}
"""The number of float32 arrays, and the shape of each."""


def seconds(saved: Checkpoints, step: int, state: dict[str, jax.Array]) -> float:
    began = time.perf_counter()
    saved.save(step, state)
    saved.wait()
    return time.perf_counter() - began


def measure(folder: Path, name: str, num_saves: int) -> None:
    num_arrays, shape = STATES[name]
    state = {f"w{i}": jax.random.normal(jax.random.key(i), shape) for i in range(num_arrays)}
    size = human_bytes(sum(x.nbytes for x in jax.block_until_ready(state).values()))
    synced: list[float] = []
    unsynced: list[float] = []
    syncing: list[float] = []

    def timed_sync(folder: Path) -> None:
        began = time.perf_counter()
        sync_tree(folder)
        syncing.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory(dir=folder) as run_dir, checkpoints(Path(run_dir)) as saved:
        seconds(saved, 0, state)
        for step in range(1, 2 * num_saves, 2):
            with mock.patch.object(writing, "sync_tree", timed_sync):
                synced.append(seconds(saved, step, state))
            with mock.patch.multiple(writing, sync=lambda path: None, sync_tree=lambda folder: None):
                unsynced.append(seconds(saved, step + 1, state))
    on, off, part = map(statistics.median, (synced, unsynced, syncing))
    print(f"{name}: {num_arrays} arrays, {size}")
    print(f"  {on:.3f} s synced, of which the sync {part:.3f} s; {off:.3f} s not synced; ratio {on / off:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saves", type=int, default=20)
    given = parser.parse_args()
    for name in STATES:
        measure(given.folder, name, given.saves)


if __name__ == "__main__":
    main()
