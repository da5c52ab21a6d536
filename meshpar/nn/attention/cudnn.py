"""The attention core of NVIDIA's cuDNN, as `jax.nn.dot_product_attention` calls it.

This file depends on JAX's internals where a program is compiled for a GPU that this machine does not have: when it
traces cuDNN's attention, JAX asks the process for its cuDNN library and its GPU, in
`jax._src.cudnn.fused_attention_stablehlo`. The program does not depend on the answers. Run
tests/unit/test_attention_kernels.py on each supported version of JAX.

Shapes: B batch, S seq, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, Literal

import jax
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jaxtyping import Array, Float, Int

from meshpar.nn.attention.core import Window
from meshpar.nn.attention.kernel import Kernel
from meshpar.nn.attention.setting import ONE_WINDOW_PER_MODEL, Capability, Setting, capability, of_arrays, of_mesh
from meshpar.parallel.context import constrain, current
from meshpar.sharding.resolve import is_compile_only

AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)
CUDNN_VERSION = 90_800
"""The version of cuDNN that targets are assumed to have, see `mesh.hardware`."""


class Cudnn(Kernel):
    """cuDNN's flash attention, for NVIDIA GPUs. It does not hold the scores.

    Limits: bfloat16 or float16; heads of a multiple of 8 elements, at most 256 (128 before Hopper); one document per
    row; one window in all layers.

    Memory: in addition to the result, the log of the softmax's sum, B H S in float32.
    Source: docs.nvidia.com/deeplearning/cudnn (attention); Dao 2023 (FlashAttention-2), arXiv:2307.08691.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["cudnn"] = "cudnn"
    device: ClassVar = "GPU"

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        positions: Int[Array, "B S"], segments: Int[Array, "B S"] | None, window: Window,
    ) -> tuple[Float[Array, "B S H h"], None]:  # fmt: skip
        setting = of_arrays(q, segments, window)
        self.require(setting)
        k = constrain(k, "batch", "seq", "kv_heads", "head_dim")
        v = constrain(v, "batch", "seq", "kv_heads", "head_dim")
        _ask_target()
        return _attend(q, k, v, setting.window, "cudnn"), None

    def limits(self, setting: Setting) -> list[str]:
        has = setting.capability or HOPPER
        most = 256 if has >= HOPPER else 128
        found: list[str] = []
        if setting.platform not in (None, "gpu"):
            found.append(f"needs an NVIDIA GPU, and this program is for a {setting.platform.upper()}")
        if has < AMPERE:
            found.append(f"needs compute capability 8.0 or higher, and this GPU has {has[0]}.{has[1]}")
        if setting.dtype.name not in ("bfloat16", "float16"):
            found.append(f"computes bfloat16 and float16, and this model computes {setting.dtype.name}")
        if setting.head_dim % 8 or setting.head_dim > most:
            found.append(f"needs heads of at most {most} elements, a multiple of 8, and these have {setting.head_dim}")
        if setting.has_documents:
            found.append("does not separate documents, and a row may contain several (data.documents_in_row=separate)")
        if setting.window_varies:
            found.append(ONE_WINDOW_PER_MODEL)
        return found

    def describe(self, setting: Setting) -> str:
        return "cudnn: the visible scores, in tiles of cuDNN's choice"


def _attend(
    q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
    window: int | None, implementation: Literal["cudnn", "xla"],
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Causal attention of whole rows. JAX's window counts the tokens before a query, without its own."""
    before = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=before, implementation=implementation
    )


@cache
def _ask_target() -> None:
    """Makes JAX's checks of cuDNN describe the GPUs that a program is compiled for, if this machine has none.

    JAX checks again when it differentiates, so the answers depend on the context at that time.
    """
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda target: CUDNN_VERSION,
        "check_compute_capability": lambda target, least: target >= capability(least),
        "is_cuda_compute_capability_equal": lambda target, other: target == capability(other),
    }
    for name, answer in answers.items():
        setattr(jax_cudnn, name, partial(_answer, getattr(jax_cudnn, name), answer))


def _answer(of_process: Callable[..., Any], of_target: Callable[..., Any], *args: str) -> Any:
    ctx = current()
    if ctx is None or not is_compile_only(ctx.mesh):
        return of_process(*args)
    return of_target(of_mesh(ctx)["capability"] or HOPPER, *args)
