"""GPT-2: LayerNorm, learned positions, GELU, biases. Source: Radford et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from meshpar.errors import Problems, excerpt
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import Architecture, Given, Json, Names, linear, rows, vector
from meshpar.nn.layers import GELU, LayerNorm


class GPT(DecoderModel):
    """A decoder with LayerNorm, learned positions, GELU and biases.

    >>> GPT(num_layers=3, hidden_size=32, num_heads=4, intermediate_size=64, pad_layers_to_multiple=2).layer_stack()
    LayerStack(counts=(3,), multiple=2, can_pad=True)
    """

    kind: Literal["gpt"] = "gpt"
    norm: ClassVar = LayerNorm
    mlp: ClassVar = GELU
    learned_positions: ClassVar = True
    attn_bias: ClassVar = "all"
    mlp_bias: ClassVar = True
    qk_norm: ClassVar = False
    rotary_fraction: ClassVar = 0.0
    rope_scaling: ClassVar = None
    window: ClassVar = None
    experts: ClassVar = None
    global_layers: ClassVar = ()

    @classmethod
    def architectures(cls) -> Mapping[str, Architecture]:
        return ARCHITECTURES


HUGGING_FACE: Names = {
    "transformer.wte.weight": rows("embedding"),
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

GPT2_KEYS = {
    "vocab_size": "vocab_size", "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_layers",
    "n_head": "num_heads", "n_positions": "max_seq_len", "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip


def _gpt2(given: Given, found: Problems) -> Json:
    if given.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        what = f"{excerpt(repr(given.activation_function))} is not supported for this model, only gelu_new"
        found.add("activation_function", what)
    return {} if given.n_inner else {"intermediate_size": 4 * given.n_embd}


WRITTEN: Json = {"activation_function": "gelu_new", "bos_token_id": None, "eos_token_id": None}

ARCHITECTURES = {"gpt2": Architecture("GPT2LMHeadModel", HUGGING_FACE, GPT2_KEYS, _gpt2, lambda model: WRITTEN)}
