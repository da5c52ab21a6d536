"""The only hardware numbers of meshpar: what the makers' data sheets say."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Args:
      flops: dense bfloat16 operations a second, per JAX device.
      memory_bytes: high-bandwidth memory, per JAX device.
      memory_bytes_per_s: its bandwidth.
    """

    flops: float
    memory_bytes: float
    memory_bytes_per_s: float


# Keys are lower-case parts of `jax.Device.device_kind`, the longer before those that they contain.
CHIPS = {
    # cloud.google.com/tpu/docs: v4, v5e, v5p, v6e system pages
    "tpu v4": Chip(275e12, 32e9, 1228e9),
    "tpu v5 lite": Chip(197e12, 16e9, 819e9),
    "tpu v5e": Chip(197e12, 16e9, 819e9),
    "tpu v5p": Chip(459e12, 95e9, 2765e9),
    "tpu v5": Chip(459e12, 95e9, 2765e9),
    "tpu v6 lite": Chip(918e12, 32e9, 1640e9),
    "tpu v6e": Chip(918e12, 32e9, 1640e9),
    # nvidia.com data sheets, SXM versions, without sparsity
    "a100": Chip(312e12, 80e9, 2039e9),
    "h200": Chip(989e12, 141e9, 4800e9),
    "h100": Chip(989e12, 80e9, 3350e9),
    "b200": Chip(2250e12, 180e9, 7700e9),
}


def chip_of(device: jax.Device) -> Chip | None:  # pyright: ignore[reportInvalidTypeForm]
    """The chip of a device; None where no data sheet says its speed, as for a CPU."""
    kind = device.device_kind.lower()
    return next((chip for name, chip in CHIPS.items() if name in kind), None)
