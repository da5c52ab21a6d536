"""What distinguishes the decoders of the families: one table of options, which `decoder.Decoder` computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PARTS = "rank"
"""The name of dims that count parts of a kernel: no preset shards it."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "xielu", "gpt_oss"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm over the last dim.

    Args:
      kind: `rms`, or `layer`, which subtracts the mean.
      offset: is added to the scale: 1 for a scale that is stored around 0.
      has_scale, has_bias: whether it has these parameters.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    offset: float = 0.0
    has_scale: bool = True
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions.

    Args:
      dim: the number of elements of a head that are rotated, from its first.
      kind: how frequencies are scaled: `default`, `linear`, `dynamic`, `yarn`, `longrope` or `llama3`.
      numbers: the numbers of this scaling, in Hugging Face's names.
      limit: tokens per row up to which frequencies of `dynamic` and `longrope` are those of short rows.
      is_interleaved: whether the pairs are neighbours (2i, 2i + 1), and not halves (i, i + dim / 2).
      is_unzipped: whether interleaved pairs are stored as halves after their rotation.
    """

    dim: int
    theta: float
    kind: str = "default"
    numbers: tuple[tuple[str, float | tuple[float, ...]], ...] = ()
    limit: int = 0
    is_interleaved: bool = False
    is_unzipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of queries to keys, which several query heads may share.

    Args:
      scale: of the scores.
      form: `split`: three kernels. `fused`: one kernel `[embed, kv_heads, group + 2, head_dim]`, whose last two of a
        group are key and value.
      qk_norm: the norm of queries and keys; `norm_over` says over what: each head with one scale, each head with a
        scale of its own, or all heads of a token.
      norms_rotated: whether the norm follows the rotation.
      clip: the largest absolute value of projections.
      cap: scores are `cap * tanh(score / cap)`.
      window: how many tokens a query attends to, its own included; None for all up to its own.
      has_sinks: whether each head has a score that takes weight and has no value (gpt-oss).
      alibi: scores grow with the key's position, by a slope of each head: before they are scaled, or after.
      position_scale: (beta, length): queries grow with `1 + beta * log(1 + floor(position / length))`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    form: Literal["split", "fused"] = "split"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Norm | None = None
    norm_over: Literal["head", "each_head", "all_heads"] = "head"
    norms_rotated: bool = False
    clip: float | None = None
    cap: float | None = None
    window: int | None = None
    rope: Rope | None = None
    has_sinks: bool = False
    alibi: Literal["scaled", "after"] | None = None
    position_scale: tuple[float, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values are made of one small vector of each token (DeepSeek-V2).

    Args:
      q_rank: the size of the small vector of a query; None if queries are projected at once.
      kv_rank: the size of the small vector of keys and values.
      nope_dim: elements of a head that are not rotated. `rope.dim` others are, and all heads share those of a key.
      value_dim: the size of a head's values.
      norm: of the small vectors.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    scale: float
    rope: Rope
    norm: Norm
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MLP:
    """An MLP, or a gated one; `form` is `fused` if gate and up are one kernel `[embed, 2, mlp]`."""

    width: int
    act: Activation = "silu"
    is_gated: bool = True
    form: Literal["split", "fused"] = "split"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP.

    Args:
      mlp: one expert; `fused_last` is the form `[experts, embed, mlp, 2]` of gpt-oss.
      num, per_token: experts, and how many of them a token uses.
      router: how logits become weights: `softmax` over all experts, `softmax_chosen` over the chosen ones, `sigmoid`,
        or `sparsemixer` (phimoe).
      normalize: whether a token's weights are divided by their sum.
      scale: multiplies the weights.
      groups, groups_per_token: a token chooses among the experts of its best groups.
      group_score: what ranks groups: the sum of their two best scores, or the best one.
      has_choice_bias: whether a bias is added to the scores for choosing, and not for weighing.
      router_bias: whether the logits have a bias.
      jitter: the threshold of `sparsemixer`.
      weighs_inputs: whether the weight multiplies the expert's input (Llama 4).
      shared: width of an MLP that all tokens use.
      shared_gate: whether the shared MLP's result is multiplied by a sigmoid of the token.
    """

    mlp: MLP
    num: int
    per_token: int
    router: Literal["softmax", "softmax_chosen", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["two_best", "best"] = "two_best"
    has_choice_bias: bool = False
    router_bias: bool = False
    jitter: float = 0.0
    weighs_inputs: bool = False
    shared: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Args:
      style: `sequential`; `parallel`: attention and MLP read the same input; `after`: a norm follows each sum.
      norms: which of `attn_in`, `attn_out`, `mlp_in` and `mlp_out` there are.
      residual_scale: multiplies what is added to the residual stream.
    """

    attention: Attention | Latent
    mlp: MLP | Experts
    style: Literal["sequential", "parallel", "after"] = "sequential"
    norms: tuple[str, ...] = ("attn_in", "mlp_in")
    residual_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """A decoder.

    Args:
      norm: every norm of the residual stream.
      embed_scale: multiplies the embedding.
      positions: rows of the table of learned positions, of which the first `position_offset` belong to no position.
      has_embed_norm: whether a norm follows the embedding.
      has_norm: whether one precedes the output projection.
      logit_scale: multiplies the logits.
      cap: logits are `cap * tanh(logit / cap)`.
    """

    vocab_size: int
    width: int
    layers: tuple[Layer, ...]
    norm: Norm
    max_seq_len: int
    embed_scale: float = 1.0
    positions: int = 0
    position_offset: int = 0
    has_embed_norm: bool = False
    has_norm: bool = True
    is_tied: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    cap: float | None = None
