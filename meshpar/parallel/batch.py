"""The arrays of a batch: arrays with rows of tokens, and arrays that all rows share."""

from __future__ import annotations

import jax

Batch = dict[str, jax.Array]

TEACHER = "teacher"
"""The array of a batch that contains the output of a teacher's last norm, [batch, seq, embed]."""
TEACHER_HEAD = "teacher_head"
"""The array of a batch that contains a teacher's output projection, [embed, vocab]. It has no rows."""


def split_off_shared(batch: Batch) -> tuple[Batch, Batch]:
    """The arrays of a batch that have rows, and those that all microbatches share."""
    shared = {name: x for name, x in batch.items() if name == TEACHER_HEAD}
    return {name: x for name, x in batch.items() if name not in shared}, shared
