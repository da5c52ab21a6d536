"""The attention core of JAX's Pallas kernel for TPUs, "splash attention".

This file depends on two internal functions of JAX's, `_splash_attention_bwd_dq` and `_splash_attention_bwd_dkv`: JAX
differentiates its kernel only where types do not name the axes over which they vary, and so not in the manual lowering.
Run tests/unit/test_attention_kernels.py on each supported version of JAX.

Shapes: B batch, S seq, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jaxtyping import Array, Float, Int

from meshpar.config import Positive
from meshpar.mesh.varying import unchecked, varying_alike
from meshpar.nn.attention.core import Window, needed_scores
from meshpar.nn.attention.kernel import Kernel
from meshpar.nn.attention.setting import ONE_WINDOW_PER_MODEL, Setting, of_arrays
from meshpar.nn.remat import named
from meshpar.parallel.scopes import declared, needed

LANES = 128
"""Elements of a TPU's vector register along its last dim. Blocks are multiples of it."""
_Blocks = tuple[int, int | None, bool]
"""Block size, window, and whether the kernel is interpreted."""


class Splash(Kernel):
    """JAX's Pallas kernel "splash attention", for TPUs. It computes only blocks with a visible score.

    Limits: rows of a multiple of 128 tokens; bfloat16 or float32; one window in all layers; `lowering: manual`, because
    XLA does not partition Pallas kernels.

    Memory: in addition to the result, the log of the softmax's sum, B H S 128 in float32 forward and B H S saved. The
      kernel does not hold the scores.
    Source: jax.experimental.pallas.ops.tpu.splash_attention; Dao 2023 (FlashAttention-2), arXiv:2307.08691.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["splash"] = "splash"
    device: ClassVar = "TPU"
    block_size: Annotated[Positive, pydantic.Field(multiple_of=LANES)] = 512
    """The largest number of tokens in a block, a multiple of 128."""
    interpret: bool = False
    """Whether JAX interprets the kernel, slowly, on any device."""

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        segments: Int[Array, "B S"] | None, window: Window,
    ) -> Float[Array, "B S H h"]:  # fmt: skip
        setting = of_arrays(q, segments, window)
        # Validation has refused runs under GSPMD. FLOPs are counted in a GSPMD program, which is traced, not compiled.
        self.require(replace(setting, is_local=True))
        size = self.size(setting.seq_len)
        q, k, v = varying_alike(q * jnp.asarray(setting.head_dim**-0.5, q.dtype), k, v)
        computed = num_pairs(setting.seq_len, setting.window, size) * size**2
        with needed(needed_scores(setting.seq_len, setting.window) / computed):
            out_BHSh: jax.Array = _attend(
                (size, setting.window, self.interpret), q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), segments
            )
        return out_BHSh.swapaxes(1, 2)

    def limits(self, setting: Setting) -> list[str]:
        found: list[str] = []
        if setting.platform not in (None, "tpu") and not self.interpret:
            found.append(f"needs a TPU, and this program is for a {setting.platform.upper()}")
        if not setting.is_local:
            found.append("is a Pallas kernel, which XLA does not partition: it needs lowering=manual")
        if setting.dtype.name not in ("bfloat16", "float32"):
            found.append(f"computes bfloat16 and float32, and this model computes {setting.dtype.name}")
        if setting.seq_len % LANES:
            found.append(f"needs rows of a multiple of {LANES} tokens, and these have {setting.seq_len}")
        if setting.window_varies:
            found.append(ONE_WINDOW_PER_MODEL)
        return found

    def describe(self, setting: Setting) -> str:
        if setting.seq_len % LANES:
            return "splash"
        size = self.size(setting.seq_len)
        pairs = num_pairs(setting.seq_len, setting.window, size)
        return f"splash: {pairs} of {(setting.seq_len // size) ** 2} pairs of blocks of {size} tokens"

    def size(self, seq_len: int) -> int:
        """Tokens of a block: the largest size that divides the row."""
        return next(size for size in range(self.block_size, 0, -LANES) if seq_len % size == 0)


def num_pairs(seq_len: int, window: int | None, size: int) -> int:
    """Pairs of blocks of `size` tokens with a visible score, which the kernel computes."""
    blocks = seq_len // size
    depth = blocks if window is None else min(blocks, -(-(window - 1) // size) + 1)
    return sum(min(block + 1, depth) for block in range(blocks))


@lru_cache
def _kernel(num_heads: int, seq_len: int, blocks: _Blocks, saves_residuals: bool) -> Any:
    """JAX's kernel, with the tables of blocks that it computes as NumPy arrays."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    size, window, interpret = blocks
    shape = (seq_len, seq_len)
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * num_heads), block_sizes=sizes, head_shards=1, q_seq_shards=1,
            save_residuals=saves_residuals, interpret=interpret,
        )  # fmt: skip
        return jax.tree.map(np.asarray, kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    blocks: _Blocks, q: Float[Array, "B H S h"], k: Float[Array, "B K S h"], v: Float[Array, "B K S h"],
    segments: Int[Array, "B S"] | None,
) -> Float[Array, "B H S h"]:  # fmt: skip
    """Causal attention of whole rows; q is already divided by the square root of head_dim."""
    return _forward(blocks, False, q, k, v, segments)


def _forward(blocks: _Blocks, saves_residuals: bool, q: Any, k: Any, v: Any, segments: Any) -> Any:
    kernel = _kernel(*q.shape[1:3], blocks, saves_residuals)

    def of_row(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return kernel(q, k, v, _both(segments))

    with declared(_flops(2, q, blocks)):
        return unchecked(jax.vmap(of_row))(q, k, v, segments)


def _forward_with_residuals(blocks: _Blocks, q: Any, k: Any, v: Any, segments: Any) -> Any:
    out, (log_mass,) = _forward(blocks, True, q, k, v, segments)
    out = named(out, "attn")
    return out, (q, k, v, segments, out, named(log_mass, "log_mass"))


def _backward(blocks: _Blocks, saved: Any, grad: jax.Array) -> Any:
    q, k, v, segments, out, log_mass = saved
    kernel = _kernel(*q.shape[1:3], blocks, False)
    # The gradient of a score is its weight times (the gradient of the weight - their mean over the keys).
    mean = (grad.astype(log_mass.dtype) * out.astype(log_mass.dtype)).sum(-1)
    rows = (q, k, v, segments, log_mass, grad, mean)
    # Each kernel computes the scores and the gradients of weights again.
    with declared(_flops(3, q, blocks)):
        of_q = unchecked(jax.vmap(partial(_of_queries, kernel)))(*rows)
    with declared(_flops(4, q, blocks)):
        of_k, of_v = unchecked(jax.vmap(partial(_of_keys, kernel)))(*rows)
    return of_q, of_k, of_v, None


_attend.defvjp(_forward_with_residuals, _backward)


def _of_queries(kernel: Any, q: Any, k: Any, v: Any, segments: Any, log_mass: Any, grad: Any, mean: Any) -> Any:
    """The gradient of the queries of one row."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    sizes = kernel.kwargs["block_sizes"]
    return splash_attention_kernel._splash_attention_bwd_dq(
        q, k, v, _both(segments), None, log_mass, grad, mean, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq,
        mask_info=kernel.dq_mask_info, **_options(kernel),
    )  # fmt: skip


def _of_keys(kernel: Any, q: Any, k: Any, v: Any, segments: Any, log_mass: Any, grad: Any, mean: Any) -> Any:
    """The gradients of the keys and values of one row."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    sizes = kernel.kwargs["block_sizes"]
    _, of_k, of_v = splash_attention_kernel._splash_attention_bwd_dkv(
        q, k, v, _both(segments), None, log_mass, grad, mean, bq=sizes.block_q_dkv, bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute, mask_info=kernel.dkv_mask_info, use_fused_bwd_kernel=False,
        **_options(kernel),
    )  # fmt: skip
    return of_k, of_v


def _options(kernel: Any) -> dict[str, Any]:
    """The arguments that both backward kernels share with the forward kernel."""
    sizes = kernel.kwargs["block_sizes"]
    shared = ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
    layouts = {f"{name}_layout": getattr(sizes, f"{name}_layout") for name in "qkv"}
    return {name: kernel.kwargs[name] for name in shared} | layouts


def _both(segments: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    return None if segments is None else SegmentIds(segments, segments)


def _flops(num_products: int, q_BHSh: jax.Array, blocks: _Blocks) -> int:
    """The FLOPs of a kernel that computes `num_products` matrix products for each pair of blocks."""
    batch, heads, seq_len, head_dim = q_BHSh.shape
    size, window, _ = blocks
    return 2 * num_products * batch * heads * head_dim * num_pairs(seq_len, window, size) * size**2
