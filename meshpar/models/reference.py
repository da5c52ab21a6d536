"""Shrinks a model without changing its structure: which dims are divisible, repeated or padded stays the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshpar.mesh.layout import AXES
from meshpar.nn.decoder import Decoder
from meshpar.sharding.rules import AxisRules

HEAD_DIM = 4
SEQ_LEN = 16
VOCAB_MULTIPLE = 8


def least_factor(number: int) -> int:
    """The smallest prime factor of a number; 1 for 1.

    >>> [least_factor(n) for n in (1, 2, 8, 9, 35)]
    [1, 2, 2, 3, 5]
    """
    return next((d for d in range(2, number + 1) if number % d == 0), 1)


@dataclass(frozen=True)
class Scale:
    """How many shards each dim has, in a run and in its small copy for `verify`.

    Args:
      rules: the run's sharding rules.
      before, after: axis -> size, of the run's mesh and of the small mesh.
      seq_len: tokens per row of the run.
      chunks_per_stage: chunks per stage of the run's pipeline; None without a pipeline.
    """

    rules: AxisRules
    before: Mapping[str, int]
    after: Mapping[str, int]
    seq_len: int
    chunks_per_stage: int | None

    def was(self, dim: str) -> int:
        """Shards of a dim in the run."""
        return self._shards(dim, self.before)

    def now(self, dim: str) -> int:
        """Shards of a dim in the small run."""
        return self._shards(dim, self.after)

    def small(self, dim: str, size: int) -> int:
        """The small size of a dim: a shard has as many elements as the smallest prime factor of its size in the run."""
        return self.now(dim) * least_factor(max(1, size // self.was(dim)))

    @property
    def small_seq_len(self) -> int:
        shards = self.now("seq") * self.now("residual_seq")
        return math.lcm(SEQ_LEN, 2 * shards if self.now("seq") > 1 else shards)  # zigzag shards have two chunks

    def _shards(self, dim: str, sizes: Mapping[str, int]) -> int:
        return math.prod(sizes[axis] for axis in self.rules.table.get(dim, ()) if axis in AXES)


def decoder_sizes(model: Decoder, scale: Scale) -> dict[str, Any]:
    """The fields in which the small decoder differs."""
    heads, kv_heads = _heads(model, scale)
    hidden_size = math.lcm(HEAD_DIM * heads, scale.now("embed"))
    intermediate_size = scale.now("mlp") * (hidden_size // scale.now("mlp") + 1)
    pad_vocab_to_multiple = VOCAB_MULTIPLE * scale.now("vocab")
    is_padded = model.padded_vocab > model.vocab_size
    has_padded_layers = any(len(layers) % model.pad_layers_to_multiple for layers in model.stacks.values())
    is_longer = model.learned_positions and model.max_seq_len > scale.seq_len
    return (
        _window(model)
        | _experts(model, scale)
        | {
            "num_layers": _num_layers(model, scale),
            "attention": model.attention.reference(scale.seq_len, scale.small_seq_len).model_dump(),
            "weights": None,
            "pad_layers_to_multiple": scale.now("layers") if has_padded_layers else 1,
            "num_heads": heads,
            "num_kv_heads": model.num_kv_heads and kv_heads,
            "head_dim": model.head_dim and HEAD_DIM,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "vocab_size": 4 * pad_vocab_to_multiple - 3 * is_padded,
            "pad_vocab_to_multiple": pad_vocab_to_multiple if is_padded else 1,
            "max_seq_len": math.lcm(scale.small_seq_len, scale.now("positions")) * (1 + is_longer),
        }
    )


def _num_layers(model: Decoder, scale: Scale) -> int:
    """Two; in a pipeline one per chunk, and one more if the run's chunks have different sizes."""
    if scale.chunks_per_stage is None:
        return min(model.num_layers, 2)
    chunks = scale.chunks_per_stage
    return scale.now("stage") * chunks + (model.num_layers % (scale.was("stage") * chunks) > 0)


def _window(model: Decoder) -> dict[str, Any]:
    if model.window is None:
        return {}
    global_layers = tuple(layer for layer in model.global_layers if layer < 2)
    return {"window": min(model.window, SEQ_LEN // 2), "global_layers": global_layers}


def _experts(model: Decoder, scale: Scale) -> dict[str, Any]:
    """At least two experts on a device, so that `verify` notices a token that reaches the neighbouring expert."""
    if model.experts is None:
        return {}
    experts = model.experts
    groups = min(experts.groups, 2)
    groups_per_token = min(experts.groups_per_token, groups)
    num = math.lcm(scale.now("experts") * 2, 2 * groups)
    per_token = min(experts.per_token, 2, num // groups * groups_per_token)
    small = {
        "num": num,
        "first_dense": min(experts.first_dense, 1),
        "every": min(experts.every, 2),
        "per_token": per_token,
        "intermediate_size": scale.small("mlp", experts.intermediate_size),
        "groups": groups,
        "groups_per_token": groups_per_token,
        "capacity_factor": max(experts.capacity_factor, num / (per_token * scale.small_seq_len)),
    }
    return {"experts": experts.model_dump() | small}


def _heads(model: Decoder, scale: Scale) -> tuple[int, int]:
    """Query heads and key heads. There are fewer key heads than shards of queries if the run has fewer."""
    group = least_factor(model.num_heads // model.kv_heads)
    if scale.was("kv_heads") == scale.was("heads"):
        kv_heads = scale.small("kv_heads", model.kv_heads)
        return kv_heads * group, kv_heads
    heads = math.lcm(scale.small("heads", model.num_heads), group)
    return heads, math.gcd(heads, max(1, model.kv_heads * scale.now("heads") // scale.was("heads")))
