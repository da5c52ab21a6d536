"""Llama: RMSNorm, rotary positions, SwiGLU, no biases. Source: Touvron et al. 2023, arXiv:2302.13971."""

from __future__ import annotations

from typing import ClassVar, Literal

from meshpar.nn.layers import RMSNorm, SwiGLU
from meshpar.nn.transformer import Decoder


class Llama(Decoder):
    """The sizes of a Llama; see `Decoder`."""

    kind: Literal["llama"] = "llama"
    norm: ClassVar = RMSNorm
    mlp: ClassVar = SwiGLU
    bias: ClassVar = False
    learned_positions: ClassVar = False
