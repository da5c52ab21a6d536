"""What a family of encoders is: how its `config.json` is read with a head, and the names of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshpar.models.encoders.options import Attention, EncoderOptions, Layer, TwoTowers
from meshpar.models.families.keys import Keys
from meshpar.models.families.options import MLP, Norm
from meshpar.models.foreign import Foreign, Json, Names, Shape, linear, vector

HeadName = Literal["hidden", "masked_tokens", "classify", "pairs"]
Options = EncoderOptions | TwoTowers


@dataclass(frozen=True)
class Wanted:
    """The head that a model gets.

    Args:
      num: the number of classes.
      pooling: of pairs.
    """

    head: HeadName
    num: int = 2
    pooling: Literal["cls", "mean", "max"] = "mean"


@dataclass(frozen=True)
class EncoderFamily:
    """One `model_type` of Hugging Face.

    Args:
      read: the keys of its config, and the head -> options.
      names: tensor -> parameters, with the prefix that classes with a head have; `*` is the index of a layer. A name
        counts if the model has its parameters.
      prefix: which the class without a head leaves out.
      classes: head -> the class of transformers that has it, the first one of several; `hidden` and `pairs` have one.
      like: other classes of which a head is read.
      others: regular expressions of tensors of heads that are not read.
      without_effect: keys of its class that change nothing here: those of a training by transformers.
      neutral: keys of published files that its class does not have -> the value that asks for nothing.
      parts: keys with a config of their own -> the name of its class.
    """

    read: Callable[[Any, Wanted], Options]
    names: Callable[[Options], Names]
    prefix: str
    classes: Mapping[HeadName, str]
    like: Mapping[str, HeadName] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    without_effect: frozenset[str] = frozenset()
    neutral: Json = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    def names_of(self, options: Options) -> Names:
        return self.names(options)


@dataclass(frozen=True)
class Stored(Foreign):
    """A tensor with other dims than the matrix or vector that it is.

    Args:
      dims: of the tensor.
    """

    dims: Shape = ()

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        return self.dims

    @property
    def flat(self) -> Shape:
        """The shape of the matrix or vector."""
        if not self.inputs:
            return (math.prod(self.dims),)
        if self.outputs_first:
            return self.dims[0], math.prod(self.dims[1:])
        return math.prod(self.dims[:-1]), self.dims[-1]


def stored(foreign: Foreign, *dims: int) -> Stored:
    return Stored(foreign.parts, foreign.inputs, foreign.outputs_first, dims)


def normed(name: str, part: str, names: tuple[str, str] = ("weight", "bias")) -> Names:
    """The scale and the bias of a norm."""
    return {f"{name}.{names[0]}": vector(f"{part}.scale"), f"{name}.{names[1]}": vector(f"{part}.bias")}


def dense(name: str, part: str, inputs: int = 1) -> Names:
    """A projection and its bias."""
    return {f"{name}.weight": linear(f"{part}.kernel", inputs=inputs), f"{name}.bias": vector(f"{part}.bias")}


def layer_names(prefix: str, tower: str, called: Mapping[str, str]) -> Names:
    """The names of a layer: `called` has those of `q k v o up down attn_norm mlp_norm`."""
    layer = f"{tower}.layers.*"
    found: Names = {}
    for ours, theirs in called.items():
        name = f"{prefix}.*.{theirs}"
        if ours.endswith("norm"):
            found |= normed(name, f"{layer}.{ours}")
        else:
            path = f"{layer}.mlp.{ours}" if ours in ("up", "down") else f"{layer}.attn.{ours}"
            found |= dense(name, path, inputs=2 if ours == "o" else 1)
    return found


def plain_layers(
    keys: Keys, *, dropout: str | None, attention_dropout: str, is_normed_after: bool = False, **attention: Any
) -> tuple[Layer, ...]:
    """The layers of a config with the usual names of sizes: an MLP that is not gated, and biases everywhere.

    Args:
      dropout, attention_dropout: the keys of these numbers.
    """
    heads = keys.size("num_attention_heads")
    of = Attention(heads=heads, head_dim=keys.head_dim, dropout=rate(keys, attention_dropout), **attention)
    mlp = MLP(width=keys.size("intermediate_size"), act=keys.act(), is_gated=False, bias=True)
    layer = Layer(
        attention=of, mlp=mlp, is_normed_after=is_normed_after, dropout=rate(keys, dropout) if dropout else 0.0
    )
    return (layer,) * keys.num_layers


def rate(keys: Keys, key: str) -> float:
    """A rate of dropout."""
    value = keys.number(key)
    if not 0 <= value < 1:
        keys.wrong(key, f"is {value}, not a rate of dropout from 0 to 1")
        return 0.0
    return value


def norm_of(keys: Keys, key: str = "layer_norm_eps", has_bias: bool = True) -> Norm:
    return Norm(kind="layer", eps=keys.number(key), has_bias=has_bias)


def pair(keys: Keys, key: str, is_square: bool = False) -> tuple[int, int]:
    """Height and width, which one number may stand for; `is_square` allows nothing else."""
    value = keys.value(key)
    if isinstance(value, list) and len(value) == 2 and not is_square and all(_is_size(one) for one in value):
        return value[0], value[1]
    size = keys.size(key)
    return size, size


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 2**20
