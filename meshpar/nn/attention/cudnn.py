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
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jaxtyping import Array, Bool, Float, Int

from meshpar.config import Positive
from meshpar.mesh.varying import varying_alike
from meshpar.nn.attention.blocks import GPU_BLOCK_SIZE, Blocks
from meshpar.nn.attention.core import Window
from meshpar.nn.attention.kernel import Kernel
from meshpar.nn.attention.setting import ONE_WINDOW_PER_MODEL, Capability, Setting, capability, of_arrays, of_mesh
from meshpar.parallel.context import constrain, current
from meshpar.parallel.scopes import taken
from meshpar.sharding.resolve import is_compile_only

AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)
MOST_BYTES = 2 << 30
"""The most memory of the backward of one call that takes several rows of several documents."""
CUDNN_VERSION = 90_800
"""The version of cuDNN that targets are assumed to have, see `mesh.hardware`."""


class Cudnn(Kernel):
    """cuDNN's flash attention, for NVIDIA GPUs. It does not hold the scores.

    Limits: bfloat16 or float16; heads of a multiple of 8 elements, at most 256 (128 before Hopper); one window in all
    layers; several documents per row only since Hopper, and on local shards.

    Memory: in addition to the result, the log of the softmax's sum, B H S in float32. For rows of several documents M
    times as much, with M = most_documents, and M H S h in float32 for each row of a call in the backward: one row, or
    as many as need at most MOST_BYTES.
    Source: docs.nvidia.com/deeplearning/cudnn (attention); Dao 2023 (FlashAttention-2), arXiv:2307.08691.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["cudnn"] = "cudnn"
    device: ClassVar = "GPU"
    most_documents: Positive = 16
    """The most documents of a row. Batches with more are computed by `blocks`, which is slow on GPUs."""

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        segments: Int[Array, "B S"] | None, window: Window,
    ) -> Float[Array, "B S H h"]:  # fmt: skip
        setting = of_arrays(q, segments, window)
        self.require(setting)
        k = constrain(k, "batch", "seq", "kv_heads", "head_dim")
        v = constrain(v, "batch", "seq", "kv_heads", "head_dim")
        _ask_target()
        if segments is None:
            return _attend(q, k, v, setting.window, "cudnn")
        most = min(self.most_documents, q.shape[1])
        opens = _opens(segments)
        num_documents = opens.sum(axis=1)
        in_one_piece = num_documents == _opens(jnp.sort(segments, axis=1)).sum(axis=1)
        with taken(0, 1, of=1):  # counts of operations take the branch of cuDNN as always taken
            return lax.cond(
                (in_one_piece & (num_documents <= most)).all(),
                lambda q, k, v: _by_rows(q, k, v, *_documents(opens, most), setting.window),
                lambda q, k, v: Blocks(block_size=GPU_BLOCK_SIZE)(q, k, v, segments, setting.window),
                *varying_alike(q, k, v),
            )

    def between(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B T K h"], v: Float[Array, "B T K h"]
    ) -> Float[Array, "B S H h"]:
        """Attention of all queries to all keys."""
        _ask_target()
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

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
        several = "a row may contain several documents (data.documents_in_row=separate)"
        if setting.has_documents and has < HOPPER:
            found.append(f"separates documents since compute capability 9.0, and {several}")
        if setting.has_documents and not setting.is_local:
            found.append(f"separates documents with lowering=manual alone, and {several}")
        if setting.window_varies:
            found.append(ONE_WINDOW_PER_MODEL)
        return found

    def describe(self, setting: Setting) -> str:
        text = "cudnn: the visible scores, in tiles of cuDNN's choice"
        most = self.most_documents
        return f"{text} (blocks if a row has more than {most} documents)" if setting.has_documents else text


def _opens(segments: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """Whether a token is the first one of its document. The padding after the last document is one as well."""
    return jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def _documents(opens: Bool[Array, "B S"], most: int) -> tuple[Int[Array, "B M"], Int[Array, "B M+1"]]:
    """The sizes of documents, and where they begin in their row; -1 after the last one, as cuDNN's call expects."""
    length = opens.shape[1]
    starts = jnp.sort(jnp.where(opens, jnp.arange(length, dtype=jnp.int32), length), axis=1)[:, :most]
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    exists = starts < length
    offsets = jnp.pad(jnp.where(exists, starts, -1), ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(exists, ends - starts, -1), offsets


def _by_rows(
    q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
    sizes: Int[Array, "B M"], offsets: Int[Array, "B M+1"], window: int | None,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Causal attention within each document, some rows at a time."""
    num_rows = q.shape[0]
    row_bytes = 4 * sizes.shape[1] * q[0].size
    most = max(1, MOST_BYTES // row_bytes)
    at_once = max(rows for rows in range(1, min(most, num_rows) + 1) if num_rows % rows == 0)
    if at_once == num_rows:
        return _packed(q, k, v, sizes, offsets, window)
    parts = [x.reshape(num_rows // at_once, at_once, *x.shape[1:]) for x in (q, k, v, sizes, offsets)]
    attend: Any = partial(_packed, window=window)
    return lax.map(lambda part: attend(*part), parts).reshape(q.shape)


def _packed(
    q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
    sizes: Int[Array, "B M"], offsets: Int[Array, "B M+1"], window: int | None,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Causal attention within each document."""
    # JAX 0.10 takes the offsets of the keys from the number of queries' heads.
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    out: Any = jax_cudnn.dot_product_attention(
        q, k, v, q_seqlen=sizes, kv_seqlen=sizes, q_offsets=offsets, kv_offsets=offsets,
        scale=q.shape[-1] ** -0.5, mask_type=jax_cudnn.MaskType.CAUSAL, sliding_window_length=window,
    )  # fmt: skip
    return out


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
