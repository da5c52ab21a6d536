"""Selects an attention core by the platform that a program is compiled for, and by the length of its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float

from meshpar.config import Config
from meshpar.nn.attention.blocks import BLOCK_SIZE, Blocks, block_size
from meshpar.nn.attention.core import Window
from meshpar.nn.attention.cudnn import Cudnn
from meshpar.nn.attention.kernel import Kernel
from meshpar.nn.attention.reference import Reference
from meshpar.nn.attention.setting import Setting, of_arrays
from meshpar.nn.attention.splash import Splash

KERNELS: dict[str | None, Kernel] = {"gpu": Cudnn(), "tpu": Splash()}
"""The kernel of each platform."""


class Auto(Config):
    """Selects `cudnn` on GPUs, `splash` on TPUs, and `blocks` beyond their limits and elsewhere.

    On GPUs and TPUs it selects `reference` for rows of at most 128 tokens.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["auto"] = "auto"
    block_size: ClassVar[int] = BLOCK_SIZE

    def select(self, setting: Setting) -> tuple[Reference | Blocks | Kernel, str]:
        """Returns the core, and the reason for it."""
        kernel = KERNELS.get(setting.platform)
        if kernel is None:
            return Blocks(), "CPUs have no kernel"
        if setting.seq_len <= BLOCK_SIZE:
            return Reference(), f"rows have at most {BLOCK_SIZE} tokens"
        if limits := kernel.limits(setting):
            return Blocks(block_size=block_size(setting.platform)), f"{kernel.kind} {' and '.join(limits)}"
        return kernel, f"the kernel for a {kernel.device}, whose limits hold"

    def describe(self, setting: Setting) -> str:
        """Which core it selects, and why; without devices, also which it would select on a GPU and on a TPU."""
        core, why = self.select(setting)
        text = f"{core.describe(setting)}; {why}"
        if setting.platform is not None:
            return text
        for platform, kernel in KERNELS.items():
            other, why = self.select(replace(setting, platform=platform))
            if other == kernel:
                text += f"; on a {kernel.device} {kernel.describe(setting)}"
            else:
                text += f"; on a {kernel.device} {other.kind}{' too' if other == core else ''}: {why}"
        return text

    def reference(self, seq_len: int, small_seq_len: int) -> Blocks:
        """Returns the core for a small copy of a run, which computes on CPUs."""
        return Blocks().reference(seq_len, small_seq_len)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, window: Window) -> jax.Array:
        core, _ = self.select(of_arrays(q, segments, window))
        return core(q, k, v, segments, window)


def between(q: Float[Array, "B S H h"], k: Float[Array, "B T K h"], v: Float[Array, "B T K h"]) -> jax.Array | None:
    """Attention of all queries to all keys by the platform's kernel; None if it has none, or beyond its limits."""
    setting = of_arrays(q, None, None)
    kernel = KERNELS.get(setting.platform)
    if not isinstance(kernel, Cudnn) or setting.seq_len <= BLOCK_SIZE or kernel.limits(setting):
        return None
    return kernel.between(q, k, v)
