"""GPT-2: LayerNorm, learned positions, GELU, biases. Source: Radford et al. 2019."""

from __future__ import annotations

from typing import ClassVar, Literal

from meshpar.models.foreign import Names, linear, rows, vector
from meshpar.nn.layers import GELU, LayerNorm
from meshpar.nn.transformer import Decoder


class GPT(Decoder):
    """The sizes of a GPT-2; see `Decoder`."""

    kind: Literal["gpt"] = "gpt"
    norm: ClassVar = LayerNorm
    mlp: ClassVar = GELU
    learned_positions: ClassVar = True
    attn_bias: ClassVar = "all"
    mlp_bias: ClassVar = True
    head_norm: ClassVar = False
    rotary_fraction: ClassVar = 0.0
    rope_scaling: ClassVar = None
    window: ClassVar = None
    full_layers: ClassVar = ()


HUGGING_FACE: Names = {
    "transformer.wte.weight": rows("table"),
    "transformer.wpe.weight": rows("positions"),
    "transformer.ln_f.weight": vector("norm.scale"),
    "transformer.ln_f.bias": vector("norm.bias"),
    "lm_head.weight": linear("head"),
    "transformer.h.*.ln_1.weight": vector("blocks.attn_norm.scale"),
    "transformer.h.*.ln_1.bias": vector("blocks.attn_norm.bias"),
    "transformer.h.*.ln_2.weight": vector("blocks.mlp_norm.scale"),
    "transformer.h.*.ln_2.bias": vector("blocks.mlp_norm.bias"),
    "transformer.h.*.attn.c_attn.weight": rows(*(f"blocks.attn.{x}.kernel" for x in "qkv")),
    "transformer.h.*.attn.c_attn.bias": vector(*(f"blocks.attn.{x}.bias" for x in "qkv")),
    "transformer.h.*.attn.c_proj.weight": rows("blocks.attn.o.kernel", inputs=2),
    "transformer.h.*.attn.c_proj.bias": vector("blocks.attn.o.bias"),
    "transformer.h.*.mlp.c_fc.weight": rows("blocks.mlp.up.kernel"),
    "transformer.h.*.mlp.c_fc.bias": vector("blocks.mlp.up.bias"),
    "transformer.h.*.mlp.c_proj.weight": rows("blocks.mlp.down.kernel"),
    "transformer.h.*.mlp.c_proj.bias": vector("blocks.mlp.down.bias"),
}
