"""What distinguishes the encoders: towers of layers over tokens or patches, and the heads on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshpar.models.families.options import MLP, Activation, Norm, Rope
from meshpar.models.foreign import Shape


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of all tokens of a row to each other.

    Args:
      rope: rotary positions; None if positions are added to the embedding.
      reach: how far a token attends to each side, its own place not counted; None for the whole row.
      is_causal: whether a token attends only to those up to its own (CLIP's text).
      dropout: of the weights, in a training.
    """

    heads: int
    head_dim: int
    qkv_bias: bool = True
    o_bias: bool = True
    rope: Rope | None = None
    reach: int | None = None
    is_causal: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Args:
      is_normed_after: whether a norm follows each sum, as in BERT; otherwise one precedes attention and MLP.
      has_attn_norm: whether there is a norm for attention.
      dropout: of what attention and MLP return.
      attn_dropout: of what attention returns, in place of `dropout`.
      inner_dropout: inside the MLP, after its activation.
    """

    attention: Attention
    mlp: MLP
    is_normed_after: bool = False
    has_attn_norm: bool = True
    dropout: float = 0.0
    attn_dropout: float | None = None
    inner_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Text:
    """A tower over tokens.

    Args:
      positions: rows of the table of learned positions; 0 for none.
      pad_id: the token that fills rows; None if there is none.
      counts_tokens: whether positions count the tokens that are no padding, from `pad_id + 1` on (RoBERTa).
      types: rows of the table of token types; 0 for none.
      has_embed_norm, has_norm: whether a norm follows the embedding, and the last layer.
    """

    vocab_size: int
    width: int
    layers: tuple[Layer, ...]
    norm: Norm
    max_seq_len: int
    positions: int = 0
    pad_id: int | None = None
    counts_tokens: bool = False
    types: int = 0
    has_embed_norm: bool = True
    has_norm: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A tower over the patches of a picture [height, width, channels], with a class token before them.

    Args:
      size, patch: height and width of the picture and of a patch.
      has_embed_norm: whether a norm follows the embedding (CLIP).
    """

    size: tuple[int, int]
    patch: tuple[int, int]
    channels: int
    width: int
    layers: tuple[Layer, ...]
    norm: Norm
    patch_bias: bool = True
    has_embed_norm: bool = False
    dropout: float = 0.0

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.size[0] // self.patch[0], self.size[1] // self.patch[1]

    @property
    def positions(self) -> int:
        return self.grid[0] * self.grid[1] + 1

    @property
    def patch_shape(self) -> Shape:
        """The shape of a patch as it is stored."""
        return (self.channels, *self.patch)


@dataclass(frozen=True, kw_only=True)
class Transform:
    """`norm(act(x @ kernel + bias))`, with or without the norm."""

    act: Activation | Literal["tanh"]
    width: int
    bias: bool = True
    norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """No head: the hidden states, and the first one transformed, if there is a pooler."""

    pooler: Transform | None = None


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Logits of the token at each place, by the embedding (masked tokens)."""

    transform: Transform
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Logits of classes.

    Args:
      pooling: which vector stands for the row: that of the first token, or the mean.
      dropout: before the last projection; `input_dropout` before the transform.
    """

    num: int
    pooling: Literal["cls", "mean"] = "cls"
    transform: Transform | None = None
    dropout: float = 0.0
    input_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Vectors of two texts, or of two pictures, which the contrastive loss compares."""

    pooling: Literal["cls", "mean", "max"] = "mean"


Head = Hidden | Vocabulary | Classes | Pairs


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """A tower and a head."""

    tower: Text | Picture
    head: Head

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.tower.layers


@dataclass(frozen=True, kw_only=True)
class TwoTowers:
    """CLIP: a picture and a text as vectors of one space.

    Args:
      end_id: the token whose vector stands for the text, at its first place; None for the token with the largest id.
    """

    picture: Picture
    text: Text
    width: int
    end_id: int | None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the deeper tower."""
        return max(self.picture.layers, self.text.layers, key=len)
