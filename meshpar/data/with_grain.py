"""What Grain does for the data: it shuffles rows, reads them ahead, and opens ArrayRecord files.

It is imported when the first row is read, because it imports Orbax, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def shuffled(lengths: Sequence[int], seed: int) -> list[Any]:
    """For each number of rows, an endless sequence by index: all rows in each epoch, each time in another order.

    Grain computes a row's place without storing a permutation.

    >>> (order,) = shuffled([3], seed=0)
    >>> sorted(order[i] for i in range(3)), sorted(order[i] for i in range(3, 6))
    ([0, 1, 2], [0, 1, 2])
    """
    import grain

    # Grain adds the epoch to the seed, so seeds 0 and 1 used directly would share all orders but one.
    seeds = np.random.SeedSequence(seed).generate_state(len(lengths))
    return [
        grain.MapDataset.range(length).shuffle(seed=int(one)).repeat()
        for length, one in zip(lengths, seeds, strict=True)
    ]


def read_ahead(read: Callable[[int], T], start: int, stop: int, workers: int = 0) -> Generator[T, None, None]:
    """What `read` returns for each index from `start` up to `stop`, in order, read ahead by two threads.

    The threads or processes end when the generator is exhausted, closed or dropped.

    Args:
      workers: processes that read instead; `read` is pickled then.
    """
    import grain

    indices = grain.MapDataset.range(start, stop) if start < stop else grain.MapDataset.source([])
    threads, buffer = (1, 2) if workers else (2, 8)
    results = indices.map(read).to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer))
    if workers:
        _allow_workers()
        results = results.mp_prefetch(grain.MultiprocessingOptions(workers, per_worker_buffer_size=2))
    iterator = iter(results)
    try:
        yield from iterator
    finally:
        iterator.close()


def array_records(path: Path) -> Any:
    """The records of an ArrayRecord file, by index."""
    import grain

    return grain.sources.ArrayRecordDataSource([str(path)])


def _allow_workers() -> None:
    """Grain reads absl's flags before it starts processes, and only programs with absl's `app.run` parse them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
