"""Llama and its kin: RMSNorm, rotary positions, SwiGLU. Source: Touvron et al. 2023, arXiv:2302.13971.

With the options below it is also Mistral, Qwen 2, Qwen 3, SmolLM and Phi 3.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import pydantic

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
    """Of attention's projections: none, those of queries, keys and values (Qwen 2), or all four."""
    mlp_bias: bool = False
    head_norm: bool = False
    """Whether each head of queries and keys is normed before it is turned (Qwen 3)."""
    rotary_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    """The part of a head, from its beginning, that rotary positions turn."""
    rope_scaling: Scaling | None = None
    """How rotary frequencies are changed for longer rows."""
    window: Positive | None = None
    """How many positions a query sees, its own the last of them (Mistral). Default: all before it."""
    full_layers: tuple[Annotated[int, pydantic.Field(ge=0)], ...] = ()
    """Layers, counted from 0, in which queries see all before them, whatever `window` says."""

    @pydantic.model_validator(mode="after")
    def _layers_exist(self) -> Llama:
        if beyond := [layer for layer in self.full_layers if layer >= self.num_layers]:
            raise ValueError(f"full_layers: there is no layer {beyond[0]}, only 0 to {self.num_layers - 1}")
        return self
