"""What a family is: how its `config.json` is read, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshpar.models.families.keys import Keys
from meshpar.models.families.options import DecoderOptions
from meshpar.models.foreign import Foreign, Names, Shape, linear, rows, vector


@dataclass(frozen=True)
class Exact(Foreign):
    """A tensor with the dims of its parameter."""

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        return shapes[self.parts[0]]


def exact(part: str) -> Exact:
    """A tensor with the dims of its parameter, not joined."""
    return Exact((part,), inputs=0)


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    Args:
      read: the keys of its config -> the options of its decoder.
      names: tensor -> parameters; or a function of the options that returns it. A name counts if the model has its
        parameters. `*` is the index of a layer, `#` the index along the first dim of a parameter; `name[#]` is that
        index of one tensor.
      called: the `model_type` of the config class whose keys it has, if that is another one.
      computed: keys that the class computes from others, whatever a file says.
    """

    read: Callable[[Keys], DecoderOptions]
    names: Names | Callable[[DecoderOptions], Names]
    called: str | None = None
    computed: frozenset[str] = frozenset()

    def names_of(self, options: DecoderOptions) -> Names:
        return self.names(options) if callable(self.names) else self.names


LAYER = "layers.*"
_NORMS = ("attn_in", "attn_out", "mlp_in", "mlp_out")
_KERNELS = ("gate", "up", "down")
LLAMA: Names = {
    "model.embed_tokens.weight": rows("embedding"),
    "model.norm.weight": vector("norm.scale"),
    "model.norm.bias": vector("norm.bias"),
    "lm_head.weight": linear("head.kernel"),
    "lm_head.bias": vector("head.bias"),
    "model.layers.*.input_layernorm": vector(f"{LAYER}.attn_in"),
    "model.layers.*.post_attention_layernorm": vector(f"{LAYER}.mlp_in"),
    **{f"model.layers.*.self_attn.{x}_proj.weight": linear(f"{LAYER}.attn.{x}.kernel") for x in "qkv"},
    **{f"model.layers.*.self_attn.{x}_proj.bias": vector(f"{LAYER}.attn.{x}.bias") for x in "qkvo"},
    "model.layers.*.self_attn.o_proj.weight": linear(f"{LAYER}.attn.o.kernel", inputs=2),
    **{f"model.layers.*.self_attn.{x}_norm": vector(f"{LAYER}.attn.{x}_norm") for x in "qk"},
    **{f"model.layers.*.mlp.{x}_proj.weight": linear(f"{LAYER}.mlp.{x}.kernel") for x in _KERNELS},
    **{f"model.layers.*.mlp.{x}_proj.bias": vector(f"{LAYER}.mlp.{x}.bias") for x in _KERNELS},
}
"""The names that most families have. A norm has a `weight` and a `bias`, which are listed by `complete`."""


def experts(prefix: str, gate: str, up: str, down: str) -> Names:
    """The kernels of experts that are stored one by one."""
    parts = {"gate": gate, "up": up, "down": down}
    return {f"{prefix}.#.{theirs}.weight": linear(f"{LAYER}.mlp.experts.{ours}") for ours, theirs in parts.items()}


def named(changes: Mapping[str, str] | None = None, more: Names | None = None) -> Names:
    """The names of llama with parts of them replaced, in order, and others that replace or complete them.

    >>> named({"model.layers": "transformer.h"})["transformer.h.*.mlp.up_proj.weight"].parts
    ('layers.*.mlp.up.kernel',)
    """
    found: Names = {}
    for name, foreign in LLAMA.items():
        for old, new in (changes or {}).items():
            name = name.replace(old, new)
        found[name] = foreign
    others = complete(more or {})
    given = {part for foreign in others.values() for part in foreign.parts}
    return {name: foreign for name, foreign in complete(found).items() if not given & {*foreign.parts}} | others


def complete(names: Names) -> Names:
    """Lists the scale and the bias of each norm."""
    found: Names = {}
    for name, foreign in names.items():
        if foreign.parts[0].rpartition(".")[2] not in {*_NORMS, "q_norm", "k_norm", "embed_norm", "norm"}:
            found[name] = foreign
            continue
        for theirs, ours in {"weight": "scale", "bias": "bias"}.items():
            found[f"{name}.{theirs}"] = replace(foreign, parts=(f"{foreign.parts[0]}.{ours}",))
    return found
