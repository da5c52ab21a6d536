"""GPT-2: LayerNorm, learned positions, GELU, biases. Source: Radford et al. 2019."""

from __future__ import annotations

from typing import ClassVar, Literal

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
