"""Batches with two documents per row and an uneven number of targets, which reveal more faults than plain tokens."""

from __future__ import annotations

import numpy as np


def token_batch(rng: np.random.Generator, batch_size: int, seq_len: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Draws the arrays of a decoder's batch, int32[batch, seq].

    Later rows have fewer targets, so that the mean of the devices' means is not the mean. The second document starts
    after the middle of the row, so that it does not start with a shard.

    >>> batch = token_batch(np.random.default_rng(0), 2, 8, 5)
    >>> batch["positions"][0].tolist()
    [0, 1, 2, 3, 4, 0, 1, 2]
    """
    column = np.arange(seq_len)
    shape = (batch_size, seq_len)
    second = column > seq_len // 2
    targets = rng.integers(0, vocab_size, shape)
    targets[rng.random(shape) < np.linspace(0, 0.9, batch_size)[:, None]] = -1
    arrays = {
        "tokens": rng.integers(0, vocab_size, shape),
        "targets": targets,
        "segments": np.broadcast_to(1 + second, shape),
        "positions": np.broadcast_to(np.where(second, column - seq_len // 2 - 1, column), shape),
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}
