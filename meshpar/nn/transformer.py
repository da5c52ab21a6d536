"""The decoder-only transformer behind each model of `meshpar.models`, which select its parts.

Shapes: B batch, S seq, R residual_seq, D embed, V vocab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meshpar.config import Coerced, Config, Positive, default
from meshpar.nn.attention import AnyCore, Auto
from meshpar.nn.attention.core import Cache, CachedCore, Core, Window
from meshpar.nn.attention.layer import Attention, Bias, QKNorm
from meshpar.nn.compressed import LowRankKernel, store_compressed
from meshpar.nn.experts import Experts
from meshpar.nn.experts.layer import MixtureOfExperts
from meshpar.nn.layers import dropout, normal
from meshpar.nn.low_rank import use_adapters
from meshpar.nn.quantized_kernel import Quantized
from meshpar.nn.remat import Activation, Remat, named
from meshpar.nn.rotary import RopeAngles, Scaling, rope_angles
from meshpar.parallel.context import constrain, planned, platform
from meshpar.parallel.data import gathering_again
from meshpar.parallel.outputs import Auxiliary, OutputProjection, Outputs, with_auxiliary
from meshpar.parallel.xla import is_unrolled

Batch = dict[str, Int[Array, "..."] | Bool[Array, "..."]]
Layer = Callable[[Any, Any], tuple[Any, Auxiliary]]
"""(carry, a row of a stack) -> (the next carry, the layer's share of the model's `Auxiliary`)."""
BLOCKS = "blocks"
DENSE_BLOCKS = "dense_blocks"
"""The stacks of layers in the tree of parameters. If only some layers have experts, `blocks` contains those with
experts, and `dense_blocks` the others."""


class NormClass(Protocol):
    """The class of a decoder's norms."""

    def __call__(self, width: int, *, eps: float) -> Callable[[Float[Array, "B R D"]], Float[Array, "B R D"]]: ...


class MLPClass(Protocol):
    """The class of a decoder's MLPs.

    `num_matrices` is the number of products of width x intermediate size; `activations` are those that `remat` can
    select.
    """

    @property
    def num_matrices(self) -> int: ...
    @property
    def activations(self) -> tuple[Activation, ...]: ...
    def __call__(self, width: int, mlp: int, *, bias: bool, out_std: float, rngs: nnx.Rngs) -> nnx.Module: ...


class Decoder(Config):
    """The sizes of a decoder.

    A subclass sets the parts below as class variables, or declares them as fields.
    """

    norm: ClassVar[NormClass]
    mlp: ClassVar[MLPClass]
    learned_positions: ClassVar[bool]
    attn_bias: ClassVar[Bias]
    mlp_bias: ClassVar[bool]
    qk_norm: ClassVar[QKNorm]
    rotary_fraction: ClassVar[float]
    rope_scaling: ClassVar[Scaling | None]
    window: ClassVar[int | None]
    global_layers: ClassVar[tuple[int, ...]]
    experts: ClassVar[Experts | None]

    vocab_size: Positive = 257
    """Number of token ids. The default is 256 bytes, and an id that begins a document."""
    pad_vocab_to_multiple: Positive = 1
    """Pads the rows of the embedding to a multiple that the mesh divides. Padded ids have probability 0."""
    num_layers: Annotated[Positive, pydantic.Field(le=10_000)]
    """Number of transformer blocks."""
    pad_layers_to_multiple: Positive = 1
    """Pads each stack of layers to a multiple that pipeline stages divide. The padding is never computed."""
    hidden_size: Positive
    """Width of the residual stream."""
    num_heads: Positive
    """Query heads of each attention layer."""
    num_kv_heads: Positive | None = None
    """Heads of keys and values. Default: num_heads."""
    head_dim: Positive | None = None
    """Width of a head. Default: hidden_size / num_heads."""
    intermediate_size: Positive
    """Width of the MLP's hidden layer."""
    max_seq_len: Positive = 2048
    """Rows of the learned position embedding; rotary positions have no limit."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square, or the variance, in each norm."""
    tie_embeddings: bool = False
    """Whether the output projection uses the weights of the embedding."""
    dropout: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    """Rate of dropout on embeddings, and on the output of each attention and MLP."""
    attention: Coerced[Annotated[AnyCore, pydantic.Field(discriminator="kind")], str | dict[str, Any]] = default(Auto())
    """How tokens attend to each other."""
    remat: Coerced[Remat, str | dict[str, Any]] = default(Remat(policy="none"))
    """Which activations of a block the backward recomputes: a policy, or `{save: [...], offload: [...]}`."""
    unroll: Literal["auto", "all"] | Positive = "auto"
    """Layers that an iteration of the loop over layers computes: `auto`, `all` for no loop, or a number."""

    low_rank: Coerced[tuple[LowRankKernel, ...], Sequence[dict[str, Any]]] = default(())
    """Projections that are products of two thin matrices, as `meshpar compress` writes them."""
    weights: Coerced[Quantized | None, str | dict[str, Any]] = default(None)
    """How the kernels of projections are stored, beside which only LoRA trains. Default: as floats."""

    @pydantic.model_validator(mode="after")
    def _heads_divide(self) -> Decoder:
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.kv_heads}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size = {self.hidden_size} is not a multiple of num_heads = {self.num_heads}")
        return self

    @pydantic.model_validator(mode="after")
    def _some_layers_have_experts(self) -> Decoder:
        if not self.layers_in(BLOCKS):
            raise ValueError(f"experts: first_dense and every leave none of {self.num_layers} layers with experts")
        return self

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head are rotated by rotary positions, an even number."""
        return int(self.head_size * self.rotary_fraction) // 2 * 2

    def window_of(self, layer: Int[Array, ""]) -> Window:
        """How many tokens a query of this layer attends to."""
        if self.window is None or not self.global_layers:
            return self.window
        unlimited = np.iinfo(np.int32).max
        each = [unlimited if i in self.global_layers else self.window for i in range(self.num_layers)]
        return jnp.asarray(each, jnp.int32)[layer]

    def layers_in(self, stack: str) -> list[int]:
        """The indices of the layers whose parameters are in this stack, in the order of its rows."""
        has_experts = [self.experts is None or self.experts.are_in(layer) for layer in range(self.num_layers)]
        return [layer for layer, has in enumerate(has_experts) if has == (stack == BLOCKS)]

    @property
    def stacks(self) -> dict[str, list[int]]:
        """Stack -> `layers_in` it, of those that have layers."""
        return {stack: layers for stack in (DENSE_BLOCKS, BLOCKS) if (layers := self.layers_in(stack))}

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops that compute all layers, in their order.

        Equal layers are one loop. With `experts.every`, an iteration computes layers up to the next one with experts.
        """
        sparse = self.layers_in(BLOCKS)
        period = self.experts.every if self.experts else 1
        loops = (
            Loop((DENSE_BLOCKS,), sparse[0] + 1 - period),
            Loop((DENSE_BLOCKS,) * (period - 1) + (BLOCKS,), len(sparse)),
            Loop((DENSE_BLOCKS,), self.num_layers - 1 - sparse[-1]),
        )
        return tuple(loop for loop in loops if loop.repeats)

    @property
    def mlp_width(self) -> int:
        """How many hidden elements a token needs: those of the MLP, or of the experts that the token uses."""
        if self.experts is None:
            return self.intermediate_size
        return (self.experts.per_token + self.experts.shared) * self.experts.intermediate_size

    @property
    def weights_of_a_layer(self) -> int:
        """Weights of the products in one layer that are computed for a token."""
        attention = 2 * (self.num_heads + self.kv_heads) * self.head_size
        return self.hidden_size * (attention + self.mlp.num_matrices * self.mlp_width)

    def layers_of_an_iteration(self, platform: str, recomputes: bool) -> int:
        """How many layers one iteration of the loop over layers computes.

        `auto` removes the loop where `is_unrolled` says so.

        Args:
          recomputes: whether the backward recomputes activations.
        """
        if self.unroll != "auto":
            return self.num_layers if self.unroll == "all" else min(self.unroll, self.num_layers)
        unrolled = is_unrolled(platform, self.weights_of_a_layer, self.num_layers, recomputes)
        return self.num_layers if unrolled else 1

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding, including padding."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple) * self.pad_vocab_to_multiple

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The activations of a block that `remat` can select."""
        return ("input", "q", "k", "v", "attn", "log_mass", "residual", *self.mlp_class.activations)

    @property
    def mlp_class(self) -> Any:
        """The class of the MLPs, or of the experts that replace them; it has `activations`."""
        return MixtureOfExperts if self.experts else self.mlp

    def build_mlp(self, stack: str, out_std: float, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the MLP of a layer in a stack. `out_std` is the standard deviation of its initial output weights."""
        if self.experts and stack == BLOCKS:
            return MixtureOfExperts(self.hidden_size, self.experts, out_std=out_std, rngs=rngs)
        return self.mlp(self.hidden_size, self.intermediate_size, bias=self.mlp_bias, out_std=out_std, rngs=rngs)

    def build(self, rngs: nnx.Rngs) -> Transformer:
        built = Transformer(self, rngs)
        store_compressed(built, self.low_rank, self.weights, rngs)
        return built

    def abstract(self) -> Transformer:
        """The decoder with shapes and dtypes in place of arrays."""
        return nnx.eval_shape(lambda: self.build(nnx.Rngs(0)))


class Loop(NamedTuple):
    """A loop over consecutive layers.

    Args:
      stacks: the stack of each layer of an iteration.
      repeats: the number of iterations.
    """

    stacks: tuple[str, ...]
    repeats: int


TRAINING_FIELDS = (
    "pad_vocab_to_multiple", "pad_layers_to_multiple", "dropout", "attention", "remat", "unroll", "weights",
)  # fmt: skip
"""The fields that a folder of Hugging Face does not have: those of training, and how kernels are stored."""


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

    def shared(self, batch: Batch, x_BRD: Float[Array, "B R D"]) -> RopeAngles | None:
        """Returns the rotary angles, which all blocks share; None for learned positions."""
        model = self.model
        if model.learned_positions:
            return None
        return rope_angles(batch["positions"], model.rotary_dim, model.rope_theta, x_BRD.dtype, model.rope_scaling)

    def __call__(self, batch: Batch, key: PRNGKeyArray | None = None) -> Float[Array, "B S V"]:
        return self.forward(batch, key).logits

    def forward(self, batch: Batch, key: PRNGKeyArray | None = None) -> Outputs:
        """Returns the projection of the logits, and the auxiliary losses and metrics of all layers."""
        embedding_VD = self.embedding[...]
        x_BRD, auxiliary, _ = self._scan(self._embed(embedding_VD, batch, key), batch, key)
        return Outputs(self._project(x_BRD, embedding_VD if self.model.tie_embeddings else None), *auxiliary)

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
        embedding_VD = self.embedding[...]
        x_BRD, _, cache = self._scan(self._embed(embedding_VD, batch, None), batch, None, cache)
        last = batch["last"]
        at_BN = last[:, None] if last.ndim == 1 else last
        x_BND = jnp.take_along_axis(x_BRD, at_BN[..., None], axis=1)
        logits = self._project(x_BND, embedding_VD if self.model.tie_embeddings else None).logits()
        return logits.reshape(*last.shape, -1), cache

    def _embed(
        self, embedding_VD: Float[Array, "V D"], batch: Batch, key: PRNGKeyArray | None
    ) -> Float[Array, "B R D"]:
        # GSPMD partitions this gather well only when the table is not sharded in embed.
        x_BRD = constrain(embedding_VD, "vocab", "embed")[batch["tokens"]]
        if self.model.learned_positions:
            x_BRD += self.positions[...][batch["positions"]]
        x_BRD = dropout(x_BRD, self.model.dropout, _fold(key, self.model.num_layers), batch["rows"])
        return constrain(x_BRD, "batch", "residual_seq", "embed")

    def _scan(
        self, x_BRD: Float[Array, "B R D"], batch: Batch, key: PRNGKeyArray | None, cache: Cache | None = None
    ) -> tuple[Float[Array, "B R D"], Auxiliary, Any]:
        """Computes all layers. A stack's parameters have a row for each of its layers, and then those of padding."""
        loops = self.model.loops
        unroll = self.model.layers_of_an_iteration(platform(), self.model.remat.recomputes)
        if planned() and self.model.unroll == "auto":
            unroll = 1  # the partitioner decides
        # XLA does not merge the recomputation with the forward across a loop; without a loop it needs barriers.
        needs_barriers = unroll > 1 or [len(loop.stacks) for loop in loops] != [1]
        rope = self.shared(batch, x_BRD)
        stacks, layers = {}, {}
        for stack, indices in self.model.stacks.items():
            graph, params = nnx.split(getattr(self, stack))
            stacks[stack] = (params, jnp.asarray(indices, jnp.int32), jnp.arange(len(indices), dtype=jnp.int32))
            layers[stack] = self._layer(graph, len(indices), batch, rope, key, needs_barriers)
        carry = x_BRD, cache
        total = Auxiliary({}, {})
        begin = dict.fromkeys(stacks, 0)
        for loop in loops:
            rows = {}
            for stack, num in Counter(loop.stacks).items():
                rows[stack] = jax.tree.map(partial(_rows, begin[stack], loop.repeats, num), stacks[stack])
                begin[stack] += loop.repeats * num
            times = max(1, min(unroll // len(loop.stacks), loop.repeats))
            carry, shares = jax.lax.scan(partial(_iteration, loop.stacks, layers), carry, rows, unroll=times)
            for share in shares:
                total = total.plus(jax.tree.map(lambda x: x.sum(0), share))
        return carry[0], total, carry[1]

    def _layer(
        self, graph: Any, num_rows: int, batch: Batch, rope: RopeAngles | None, key: PRNGKeyArray | None,
        needs_barriers: bool,
    ) -> Layer:  # fmt: skip
        """The function of a layer of a stack of `num_rows` layers."""

        def layer(carry: Any, row: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, Auxiliary]:
            x, cache = carry
            params, index, place = row
            block = nnx.merge(graph, params)
            use_adapters(block, batch.get("adapters"))
            core = self.model.attention if cache is None else cache.layer(index, self.model.attention)
            window = self.model.window_of(index)
            x, auxiliary, cache = block(x, core, batch, rope, _fold(key, index), window)
            return (x, cache), auxiliary.share(num_rows, place)

        if not self.model.remat.recomputes:
            return layer
        policy = gathering_again(self.model.remat.checkpoint_policy())
        return jax.checkpoint(layer, policy=policy, prevent_cse=needs_barriers)

    def _project(self, x_BRD: Float[Array, "B R D"], tied_VD: Float[Array, "V D"] | None) -> OutputProjection:
        return OutputProjection(self.norm(x_BRD), self.head[...] if tied_VD is None else tied_VD.T)


def _rows(begin: int, repeats: int, num: int, x: jax.Array) -> jax.Array:
    """[repeats, num, ...], rows of a stack from `begin`; without the second dim if an iteration has one row."""
    rows = x[begin : begin + repeats * num]
    return rows if num == 1 else rows.reshape(repeats, num, *x.shape[1:])


def _iteration(
    stacks: Sequence[str], layers: Mapping[str, Layer], carry: Any, rows: Mapping[str, Any]
) -> tuple[Any, list[Auxiliary]]:
    shares = []
    for i, stack in enumerate(stacks):
        row = rows[stack]
        if stacks.count(stack) > 1:
            row = jax.tree.map(itemgetter(stacks[:i].count(stack)), row)
        carry, share = layers[stack](carry, row)
        shares.append(share)
    return carry, shares


def _stacked_blocks(model: Decoder, stack: str, rngs: nnx.Rngs) -> Any:
    """Returns the blocks of a stack as one module, whose parameters are stacked along a leading dim `layers`.

    Memory: layers are initialized one after the other, so temporary arrays have the size of one layer.
    """
    num_layers = len(model.layers_in(stack))
    padding = -num_layers % model.pad_layers_to_multiple
    graphs: list[Any] = []

    def init(key: jax.Array) -> Any:
        graph, params = nnx.split(Block(model, stack, nnx.Rngs(params=key)))
        graphs.append(graph)  # it has no arrays, and is the same for all layers
        return params

    def pad(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.zeros((padding, *x.shape[1:]), x.dtype)]) if padding else x

    keys = jax.random.split(rngs.params(), num_layers)
    params = jax.tree.map(pad, jax.lax.map(init, keys))
    stacked = nnx.merge(graphs[0], params)
    for _, param in nnx.to_flat_state(nnx.state(stacked, nnx.Param)):
        param.set_metadata(dims=("layers", *param.get_metadata()["dims"]))
    return stacked


def _fold(key: PRNGKeyArray | None, index: int | Int[Array, ""]) -> PRNGKeyArray | None:
    return None if key is None else jax.random.fold_in(key, index)
