"""A user's own causal model with its parameters, mesh and rules: what `generate` and the server open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from meshpar.data.tokenizer import Tokenizer
from meshpar.errors import ConfigError
from meshpar.interop.causal import Causal, Decoding, causal, linen_dims
from meshpar.interop.declared import unboxed
from meshpar.interop.specs import Dims, check_axes, specs_of, with_axes
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.context import ParallelContext
from meshpar.serve.engine import Engine
from meshpar.serve.language import Language
from meshpar.serve.on_mesh import for_tokens
from meshpar.serve.own_model import OwnDecoding
from meshpar.serve.scheduler import Capacity
from meshpar.sharding.resolve import AnyMesh, with_largest
from meshpar.sharding.rules import AxisRules

REPLICATED = AxisRules(preset="replicated")


@dataclass(frozen=True, kw_only=True)
class CausalModel:
    """A causal language model of your own, for `generate`. `CausalModel.of` makes it of a Flax module.

    Args:
      functions: its forward, and how it decodes with a cache.
      params: tree of arrays.
      mesh, rules, dims: as in `training`; default: the rows are sharded over all devices.
      lowering: `manual`: the forward is partitioned by meshpar; `auto`: by XLA.
      dtype: in which parameters are stored and used.
      tokenizer: of prompts and answers; None if prompts are lists of ids.
      ends: ids that end an answer; default: those of the tokenizer.
      compute_dtype: the dtype in which the forward gets its parameters; default: `dtype`.
      init: key -> parameters like `params`, if these are not here yet.
      load: structs with shardings -> the parameters; default: `params`.
    """

    functions: Causal
    params: Any
    mesh: MeshLayout | AnyMesh | dict[str, Any] | str = "data=-1"
    rules: AxisRules | Sequence[str] | dict[str, Any] | str = REPLICATED
    dims: Dims = field(default_factory=dict)
    lowering: str = "manual"
    dtype: Any = jnp.float32
    tokenizer: Tokenizer | None = None
    ends: Collection[int] | None = None
    compute_dtype: Any = None
    init: Callable[[jax.Array], Any] | None = None
    load: Callable[[Any], Any] | None = None

    @classmethod
    def of(
        cls, model: Any, params: Any = None, *, cache: bool | Decoding = True, decoder: Any = None,
        dims: Dims | None = None, axes: Mapping[str, str] | None = None, **more: Any,
    ) -> CausalModel:  # fmt: skip
        """The causal model of a Flax module, or of a function (params, tokens) -> logits.

        A cache is used if the module offers one:

        - it has methods `init_cache(batch_size, length)` and `decode(tokens, cache)`;
        - in Linen, it has a field `decode`, with which its attention keeps a collection `cache`;
        - in NNX, it has `nnx.MultiHeadAttention`, which keeps variables of the kind `nnx.Cache`.

        Without one, each token recomputes its row.

        Args:
          model: a Linen module or an NNX module, called with int32[batch, seq] tokens, which returns their logits
            [batch, seq, vocab]; or a function (params, tokens) -> logits.
          params: its parameters; of an NNX module by default its own.
          cache: False to recompute each row; or an object with `init_cache(params, batch_size, length)` and
            `decode(params, tokens, cache)`.
          decoder: the Linen module that decodes, if `model.clone(decode=True)` is not it.
          dims: names of dims, as in `training`; they override those that the module declares.
          axes: the model's own name of a mesh axis -> meshpar's.
          more: the other fields.

        Raises:
          ConfigError: there are no parameters, or the model is of another kind.

        Examples:
          >>> table = jnp.roll(jnp.eye(8), 1, axis=1)
          >>> counting = CausalModel.of(lambda params, tokens: params["table"][tokens], {"table": table})
          >>> from meshpar import generate
          >>> generate(counting, [[3], [5, 6]], max_tokens=3).texts
          ['4 5 6', '7 0 1']
        """
        check_axes(axes or {})
        params, functions = causal(model, params, cache, decoder, axes or {})
        declared: Any = linen_dims(model) if isinstance(model, nn.Module) else {}
        return cls(functions=functions, params=params, dims={**(dims or {}), **declared}, **more)

    def decoding(self, num_rows: int, max_len: int, chunk: int, max_queue: int = 256) -> OwnDecoding:
        """The settings of a generation, rounded up to a multiple of the batch's shards."""
        layout = MeshLayout.of(self.mesh) if isinstance(self.mesh, (MeshLayout, dict, str)) else None
        mesh: Any = layout.build() if layout else self.mesh
        rules = AxisRules.model_validate(self.rules)
        specs, _, _ = specs_of(self.init or (lambda key: self.params), None, 0, self.dims, self.functions.axes)
        specs = with_largest(jax.tree.map(lambda spec: spec.stored_in(np.dtype(self.dtype)), specs), rules, mesh)
        rules = with_axes(rules, self.functions.axes, specs)
        ctx = for_tokens(
            ParallelContext(
                mesh=mesh, rules=rules, manual=self.lowering == "manual",
                compute_dtype=np.dtype(self.compute_dtype or self.dtype),
                activation_dims=(), reads_positions=False,
            )
        )  # fmt: skip
        # A page is a whole row, so that no request begins with the tokens of another one: they are in its slot's cache.
        chunk = max_len if self.functions.decoding is None else chunk
        shards = ctx.shards("batch")
        capacity = Capacity.of_rows(shards, num_rows, max_len, chunk=chunk, all_prompts=True, max_queue=max_queue)
        return OwnDecoding(model=self.functions, specs=specs, ctx=ctx, capacity=capacity)

    def restore(self, structs: Any) -> Any:
        """The parameters, placed as `structs`."""
        if self.load:
            return self.load(structs)
        arrays = jax.tree.unflatten(jax.tree.structure(structs), jax.tree.leaves(unboxed(self.params)))
        return jax.tree.map(lambda x, s: jax.device_put(jnp.asarray(x, s.dtype), s.sharding), arrays, structs)

    def engine(self, num_rows: int, max_len: int, chunk: int = 128, max_queue: int = 256) -> Engine:
        """Compiles the programs, and places the parameters.

        Args:
          num_rows: rows that are decoded together.
          max_len, chunk, max_queue: see `Capacity`.
        """
        return Engine(self.decoding(num_rows, max_len, chunk, max_queue), self.restore)

    def encode(self, prompt: str, parse_special: bool = True) -> list[int]:
        """The tokens of a prompt, with the one that opens it; see `Language.encode`."""
        if self.tokenizer is None:
            raise ConfigError(
                f"the prompt {prompt!r} is a text, and the model has no tokenizer; tokenizer=, or token ids"
            )
        return Language.of(self.tokenizer).encode(prompt, parse_special)
