"""The model FLOPs utilization of a run."""

from __future__ import annotations

from collections.abc import Callable

import jax

from meshpar.data import Preferences, Prompts
from meshpar.data.rows.config import RowData
from meshpar.errors import MeshparError
from meshpar.experiment.prepare import Prepared
from meshpar.mesh.hardware import chip_of
from meshpar.progress import say


def mfu_of(prepared: Prepared) -> Callable[[float], float] | None:
    """tokens/s -> model FLOPs utilization; None if the chip's speed is unknown or the operations cannot be counted."""
    chip = chip_of(jax.devices()[0])
    if chip is None or isinstance(
        prepared.run.data, (RowData, Preferences, Prompts)
    ):  # whose losses count rows, or parts
        return None
    try:
        flops = prepared.model_flops / (prepared.run.data.batch_size * prepared.run.data.seq_len)
    except MeshparError as error:
        if jax.process_index() == 0:
            say(f"meshpar: MFU is not recorded, as the model's operations cannot be counted: {error}")
        return None
    return lambda tokens_per_s: tokens_per_s * float(flops) / (chip.flops * prepared.mesh.size)
