"""What decides which core can compute the attention of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshpar.nn.attention.core import Window, known_window
from meshpar.parallel.context import ParallelContext, current, platform
from meshpar.sharding.resolve import platform_of

Capability = tuple[int, int]
"""The compute capability of an NVIDIA GPU: (9, 0) for an H100."""
ONE_WINDOW_PER_MODEL = "computes one window in all layers, and the layers of this model have different ones"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The attention that a program computes on each device.

    Args:
      seq_len: tokens of a row.
      head_dim: the width of a head.
      dtype: of queries, keys and values.
      window: how many tokens a query attends to, the same in all layers; None for all up to its own.
      window_varies: whether layers have different windows.
      has_documents: whether a row may contain several documents.
      platform: the platform that the program is compiled for; None without devices.
      capability: the compute capability of an NVIDIA GPU, such as (9, 0).
      is_local: whether the code computes local shards; False where GSPMD partitions it over several devices.
    """

    seq_len: int
    head_dim: int
    dtype: np.dtype
    window: int | None = None
    window_varies: bool = False
    has_documents: bool = True
    platform: str | None = None
    capability: Capability | None = None
    is_local: bool = True


def of_run(ctx: ParallelContext, **known: Any) -> Setting:
    """The setting of a run on its mesh."""
    return Setting(platform=platform_of(ctx.mesh), **of_mesh(ctx), **known)


def of_arrays(q: jax.Array, segments: jax.Array | None, window: Window) -> Setting:
    """The setting of the program that is being traced; see `Core` for the arguments."""
    ctx = current()
    return Setting(
        seq_len=q.shape[1],
        head_dim=q.shape[3],
        dtype=np.dtype(q.dtype),
        window=known_window(window),
        window_varies=not isinstance(window, int | None),
        has_documents=segments is not None,
        platform=platform(),
        **(of_mesh(ctx) if ctx else {}),
    )


def capability(stated: str) -> Capability:
    """A compute capability such as `9.0`, as numbers that can be compared."""
    major, minor = stated.split(".")
    return int(major), int(minor)


def of_mesh(ctx: ParallelContext) -> dict[str, Any]:
    """The fields of a setting that its mesh decides."""
    stated = getattr(ctx.mesh.devices.flat[0], "compute_capability", "") if isinstance(ctx.mesh, Mesh) else ""
    return {
        "capability": capability(stated) if stated else None,
        "is_local": ctx.is_local,
    }
