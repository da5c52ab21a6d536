"""Granite 3: llama with multipliers; and with experts, of which one tensor a layer holds all."""

from __future__ import annotations

from meshpar.models.families.family import Family, named
from meshpar.models.families.keys import Keys
from meshpar.models.families.llama_like import attention, biases, decoder, mlp, rms
from meshpar.models.families.options import MLP, DecoderOptions, Experts, Layer
from meshpar.models.foreign import linear


def _granite(keys: Keys) -> DecoderOptions:
    return _with(keys, mlp(keys, bias=keys.flag("mlp_bias")))


def _granitemoe(keys: Keys) -> DecoderOptions:
    return _with(
        keys,
        Experts(
            mlp=mlp(keys, form="fused"), num=keys.num_experts("num_local_experts"),
            per_token=keys.per_token("num_local_experts"), router="softmax_chosen",
        ),
    )  # fmt: skip


def _with(keys: Keys, inner: MLP | Experts) -> DecoderOptions:
    of = attention(keys, scale=keys.number("attention_multiplier"), **biases(keys))
    layer = Layer(attention=of, mlp=inner, residual_scale=keys.number("residual_multiplier"))
    return decoder(
        keys, layer, rms(keys), embed_scale=keys.number("embedding_multiplier"),
        logit_scale=1 / (keys.number("logits_scaling") or 1.0),
    )  # fmt: skip


_MOE = "model.layers.*.block_sparse_moe"
FAMILIES = {
    "granite": Family(_granite, named()),
    "granitemoe": Family(
        _granitemoe,
        named(
            more={
                f"{_MOE}.router.layer.weight": linear("layers.*.mlp.router.kernel"),
                f"{_MOE}.input_linear.weight[#]": linear("layers.*.mlp.experts.gate_up"),
                f"{_MOE}.output_linear.weight[#]": linear("layers.*.mlp.experts.down"),
            }
        ),
    ),
}
