"""Llama: RMSNorm, rotary positions, SwiGLU. Source: Touvron et al. 2023, arXiv:2302.13971.

Its options also give Mistral, Qwen 2, Qwen 3, SmolLM and Phi 3.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import pydantic

from meshpar.config import Count
from meshpar.models.foreign import Names, linear, rows, vector
from meshpar.nn.attention import Bias
from meshpar.nn.layers import RMSNorm, SwiGLU
from meshpar.nn.rotary import Scaling
from meshpar.nn.transformer import Decoder, Positive


class Llama(Decoder):
    """The sizes of a Llama; see `Decoder`."""

    kind: Literal["llama"] = "llama"
    norm: ClassVar = RMSNorm
    mlp: ClassVar = SwiGLU
    learned_positions: ClassVar = False

    attn_bias: Bias = "none"
    """Which attention projections have a bias: none, queries, keys and values (Qwen 2), or all four."""
    mlp_bias: bool = False
    head_norm: bool = False
    """Whether each head of queries and keys is normalized before rotary positions (Qwen 3)."""
    rotary_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    """The fraction of a head, from its first element, that rotary positions rotate."""
    rope_scaling: Scaling | None = None
    """How rotary frequencies are scaled for longer rows."""
    window: Positive | None = None
    """How many tokens a query sees, itself the last of them (Mistral). Default: all before it."""
    full_layers: tuple[Count, ...] = ()
    """Layers, counted from 0, that ignore `window`: their queries see all tokens before them."""

    @pydantic.model_validator(mode="after")
    def _layers_exist(self) -> Llama:
        if beyond := [layer for layer in self.full_layers if layer >= self.num_layers]:
            raise ValueError(f"full_layers: there is no layer {beyond[0]}, only 0 to {self.num_layers - 1}")
        return self


ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"

HUGGING_FACE: Names = {
    "model.embed_tokens.weight": rows("table"),
    "model.norm.weight": vector("norm.scale"),
    "lm_head.weight": linear("head"),
    "model.layers.*.input_layernorm.weight": vector("blocks.attn_norm.scale"),
    "model.layers.*.post_attention_layernorm.weight": vector("blocks.mlp_norm.scale"),
    **{f"{ATTENTION}.{x}_proj.weight": linear(f"blocks.attn.{x}.kernel") for x in "qkv"},
    f"{ATTENTION}.o_proj.weight": linear("blocks.attn.o.kernel", inputs=2),
    **{f"{ATTENTION}.{x}_proj.bias": vector(f"blocks.attn.{x}.bias") for x in "qkvo"},
    **{f"{ATTENTION}.{x}_norm.weight": vector(f"blocks.attn.{x}_norm.scale") for x in "qk"},
    **{f"{MLP}.{x}_proj.weight": linear(f"blocks.mlp.{x}.kernel") for x in ("gate", "up", "down")},
    **{f"{MLP}.{x}_proj.bias": vector(f"blocks.mlp.{x}.bias") for x in ("gate", "up", "down")},
}

_FUSED: Names = {
    f"{ATTENTION}.qkv_proj.weight": linear(*(f"blocks.attn.{x}.kernel" for x in "qkv")),
    f"{MLP}.gate_up_proj.weight": linear("blocks.mlp.gate.kernel", "blocks.mlp.up.kernel"),
}
_APART = {part for foreign in _FUSED.values() for part in foreign.parts}
PHI3: Names = {name: f for name, f in HUGGING_FACE.items() if not _APART & {*f.parts}} | _FUSED
"""Llama's names, where Hugging Face stores some projections as one."""
