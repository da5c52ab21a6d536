"""The decoder-only transformer behind each model of `meshpar.models`, whose settings select its parts.

Shapes: B batch, S seq, R residual_seq, D embed, V vocab.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meshpar.nn.attention.core import Cache, CachedCore, Core, Window
from meshpar.nn.attention.layer import Attention
from meshpar.nn.experts.layer import MixtureOfExperts
from meshpar.nn.layers import dropout, normal
from meshpar.nn.low_rank import use_adapters
from meshpar.nn.remat import named
from meshpar.nn.rotary import RopeAngles, rope_angles
from meshpar.nn.stacks import scan_layers, stacked
from meshpar.parallel.context import constrain
from meshpar.parallel.outputs import Auxiliary, OutputProjection, Outputs, with_auxiliary

if TYPE_CHECKING:
    from meshpar.nn.decoder import Decoder

Batch = dict[str, Int[Array, "..."] | Bool[Array, "..."]]
BLOCKS = "blocks"
DENSE_BLOCKS = "dense_blocks"
"""The stacks of layers in the tree of parameters. If only some layers have experts, `blocks` contains those with
experts, and `dense_blocks` the others."""


class Block(nnx.Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`. The MLP may return (output, `Auxiliary`)."""

    def __init__(self, model: Decoder, stack: str, rngs: nnx.Rngs):
        out_std = (2 * model.num_layers * model.hidden_size) ** -0.5
        self.attn_norm = model.norm(model.hidden_size, eps=model.norm_eps)
        self.attn = Attention(
            model.hidden_size, model.num_heads, model.kv_heads, model.head_size,
            bias=model.attn_bias, out_std=out_std, rngs=rngs,
            qk_norm=model.qk_norm, eps=model.norm_eps,
        )  # fmt: skip
        self.mlp_norm = model.norm(model.hidden_size, eps=model.norm_eps)
        self.mlp = model.build_mlp(stack, out_std, rngs)
        self.dropout = model.dropout

    def __call__(
        self, x_BRD: Float[Array, "B R D"], core: Core | CachedCore, batch: Batch, rope: RopeAngles | None,
        key: PRNGKeyArray | None, window: Window = None,
    ) -> tuple[Float[Array, "B R D"], Auxiliary, Any]:  # fmt: skip
        def drop(y: Float[Array, "B R D"], which: int) -> Float[Array, "B R D"]:
            return dropout(y, self.dropout, _fold(key, which), batch["rows"])

        x_BRD = named(x_BRD, "input")
        places = batch["positions"], batch.get("segments")
        attended, cache = self.attn(self.attn_norm(x_BRD), core, *places, rope, window)
        x_BRD = named(x_BRD + drop(attended, 0), "residual")
        mlp_out_BRD, auxiliary = self._mlp(self.mlp_norm(x_BRD), batch)
        x_BRD += drop(mlp_out_BRD, 1)
        return constrain(x_BRD, "batch", "residual_seq", "embed"), auxiliary, cache

    def _mlp(self, x_BRD: Float[Array, "B R D"], batch: Batch) -> tuple[Float[Array, "B R D"], Auxiliary]:
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(x_BRD, batch.get("targets"))
        return with_auxiliary(self.mlp(x_BRD))


class Transformer(nnx.Module):
    """Embedding, a scan over stacked blocks, a norm and an output projection.

    The blocks' parameters have a leading dim `layers`. If only some layers have experts, the others are a stack of
    their own, `dense_blocks`. A call returns logits [batch, seq, vocab].

    A batch contains int32 [batch, seq] `tokens`, `positions` and `segments`, and int32 [batch] `rows`, the indices of
    its rows in the global batch.
    """

    def __init__(self, model: Decoder, rngs: nnx.Rngs):
        self.model = model
        self.embedding = normal(rngs, (model.padded_vocab, model.hidden_size), 0.02, ("vocab", "embed"))
        if model.learned_positions:
            self.positions = normal(rngs, (model.max_seq_len, model.hidden_size), 0.02, ("positions", "embed"))
        self.blocks = _stacked_blocks(model, BLOCKS, rngs)
        if DENSE_BLOCKS in model.stacks:
            self.dense_blocks = _stacked_blocks(model, DENSE_BLOCKS, rngs)
        self.norm = model.norm(model.hidden_size, eps=model.norm_eps)
        if not model.tie_embeddings:
            self.head = normal(
                rngs, (model.hidden_size, model.padded_vocab), model.hidden_size**-0.5, ("embed", "vocab")
            )

    def __call__(self, batch: Batch, key: PRNGKeyArray | None = None) -> Float[Array, "B S V"]:
        return self.forward(batch, key).logits

    def forward(self, batch: Batch, key: PRNGKeyArray | None = None) -> Outputs:
        """Returns the projection of the logits, and the auxiliary losses and metrics of all layers."""
        x_BRD, auxiliary, _ = self._layers(self._embed(batch, key), batch, key)
        return Outputs(self._project(x_BRD), *auxiliary)

    def decode(self, batch: Batch, cache: Cache) -> tuple[Float[Array, "B *seq V"], Cache]:
        """Computes tokens that follow the cached tokens: a prompt, a part of a prompt, or one token per row.

        Args:
          batch: int32 [batch, seq] `tokens` and their consecutive `positions`; int32 [batch] `rows`; and `last`, int32
            [batch], the index of the last token in each row, before its padding, or int32 [batch, n], several indices;
            and where rows use different adapters `adapters`, see `SideAdapters.used`.

        Returns:
          Logits [batch, vocab] of the token after the last one, or [batch, n, vocab] of those after several; and the
          cache with these tokens.
        """
        x_BRD, _, cache = self._layers(self._embed(batch, None), batch, None, cache)
        last = batch["last"]
        at_BN = last[:, None] if last.ndim == 1 else last
        x_BND = jnp.take_along_axis(x_BRD, at_BN[..., None], axis=1)
        logits = self._project(x_BND).logits()
        return logits.reshape(*last.shape, -1), cache

    def _embed(self, batch: Batch, key: PRNGKeyArray | None) -> Float[Array, "B R D"]:
        # GSPMD partitions this gather well only when the table is not sharded in embed.
        x_BRD = constrain(self.embedding[...], "vocab", "embed")[batch["tokens"]]
        if self.model.learned_positions:
            x_BRD += self.positions[...][batch["positions"]]
        x_BRD = dropout(x_BRD, self.model.dropout, _fold(key, self.model.num_layers), batch["rows"])
        return constrain(x_BRD, "batch", "residual_seq", "embed")

    def _layers(
        self, x_BRD: Float[Array, "B R D"], batch: Batch, key: PRNGKeyArray | None, cache: Cache | None = None
    ) -> tuple[Float[Array, "B R D"], Auxiliary, Any]:
        """The residual stream after all layers, their losses and metrics, and the cache with the tokens."""
        model = self.model
        rope = self._rope(batch, x_BRD)

        def layer(block: Block, index: Int[Array, ""], carry: Any) -> tuple[Any, Auxiliary]:
            x_BRD, cache = carry
            use_adapters(block, batch.get("adapters"))
            core = model.attention if cache is None else cache.layer(index, model.attention)
            window = model.window_of(index)
            x_BRD, auxiliary, cache = block(x_BRD, core, batch, rope, _fold(key, index), window)
            return (x_BRD, cache), auxiliary

        stacks = {stack: getattr(self, stack) for stack in model.stacks}
        (x_BRD, cache), auxiliary = scan_layers(model, stacks, layer, (x_BRD, cache))
        return x_BRD, auxiliary, cache

    def _rope(self, batch: Batch, x_BRD: Float[Array, "B R D"]) -> RopeAngles | None:
        """The rotary angles, which all layers share; None for learned positions."""
        model = self.model
        if model.learned_positions:
            return None
        return rope_angles(batch["positions"], model.rotary_dim, model.rope_theta, x_BRD.dtype, model.rope_scaling)

    def _project(self, x_BRD: Float[Array, "B R D"]) -> OutputProjection:
        hidden_BRD = self.norm(x_BRD)
        return OutputProjection(hidden_BRD, self.embedding[...].T if self.model.tie_embeddings else self.head[...])


def _stacked_blocks(model: Decoder, stack: str, rngs: nnx.Rngs) -> Any:
    num_layers = len(model.layers_in(stack))
    padding = -num_layers % model.pad_layers_to_multiple
    return stacked(lambda rngs: Block(model, stack, rngs), num_layers, padding, rngs)


def _fold(key: PRNGKeyArray | None, index: int | Int[Array, ""]) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, index)
