"""The settings of a decoder, which each model of `meshpar.models` extends: its sizes, and the parts of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.config import Coerced, Config, Positive, default
from meshpar.nn.attention import AnyCore, Auto
from meshpar.nn.attention.core import Window
from meshpar.nn.attention.layer import Bias, QKNorm
from meshpar.nn.compressed import LowRankKernel, store_compressed
from meshpar.nn.experts import Experts
from meshpar.nn.experts.layer import MixtureOfExperts
from meshpar.nn.quantized_kernel import Quantized
from meshpar.nn.remat import Activation, Remat
from meshpar.nn.rotary import Scaling
from meshpar.nn.transformer import BLOCKS, DENSE_BLOCKS, Transformer
from meshpar.parallel.xla import is_unrolled


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
