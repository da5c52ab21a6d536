"""A trained decoder on a mesh: the placements of its parameters, and its logits as a function of global arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError
from meshpar.nn.attention.codes import CacheFormat, Codes
from meshpar.nn.describe import describe, functional
from meshpar.nn.experts.balance import RouterState
from meshpar.nn.transformer import Batch, Decoder, Transformer
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.precision import computed_in, stored_in
from meshpar.parallel.strategies import Parallel
from meshpar.partition.function import PartitionedFunction
from meshpar.sharding.resolve import Placement, resolve
from meshpar.sharding.rules import UNNAMED, AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.program import on_shards, pspecs
from meshpar.train.state import stored

ACTIVATION_DIMS = ("batch", "seq", "residual_seq", UNNAMED)
"""The dims that a user's own model may have in its activations only, whose rules need no parameter."""


@dataclass(frozen=True, kw_only=True)
class ModelOnMesh(ABC):
    """A decoder on a mesh: its parameters, and its logits with a cache.

    Args:
      model: the decoder's config.
      ctx: mesh, rules, lowering and compute dtype; see `for_tokens`.
      dtype: the dtype in which parameters are stored.
      cache_format: the format of cached keys and values; None for the dtype of the computation.

    Raises:
      ShardingError: the rules shard the sequence or the layers, which generation does not support.
    """

    model: Decoder
    ctx: ParallelContext
    dtype: np.dtype
    cache_format: CacheFormat | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        for dim in ("seq", "residual_seq", "layers"):
            if axes := dim in self.ctx.rules.table and self.ctx.axes(dim):
                fix = f"mesh.{axes[0]}=1, or rules.{dim}=[]: a checkpoint is restored to any mesh"
                problems.add(f"rules.{dim}", f"one token cannot be divided over {', '.join(axes)}", fix)
        problems.raise_any(ShardingError, "the rules do not fit generation:")

    @property
    def abstract(self) -> Transformer:
        """The decoder with shapes and dtypes in place of arrays."""
        return self.model.abstract()

    @cached_property
    def params(self) -> Any:
        """Tree of `Placement` of the parameters."""
        experts = self.model.experts
        wide_paths = RouterState(experts).paths if experts else ()
        specs = stored_in(describe(self.abstract), self.dtype, wide_paths)
        return stored(resolve(specs, self.ctx.rules, self.ctx.mesh), self.ctx.rules)

    @property
    @abstractmethod
    def cache(self) -> Any:
        """Placements of a `Cache`."""

    def logits(self, params: Any, batch: Batch, cache: Any) -> tuple[jax.Array, Any]:
        """`Transformer.decode` on global arrays, in either lowering."""
        cache_pspecs = type(cache)(*pspecs(self.cache))
        in_specs = (pspecs(self.params), self.ctx.pspec("batch"), cache_pspecs)
        out_specs = (self.logits_pspec(batch["last"]), cache_pspecs)
        rows, vocab = self.ctx.axes("batch"), self.ctx.axes("vocab")
        of_cache = [placement.axes for placement in jax.tree.leaves(self.cache)]
        of_batch = [(rows, *[()] * (x.ndim - 1)) for x in jax.tree.leaves(batch)]
        of_logits = (rows, *[()] * (batch["last"].ndim - 1), vocab)
        specs = jax.tree.map(lambda placement: placement.spec, self.params)
        local = PartitionedFunction(self._logits, specs, [*of_batch, *of_cache], [of_logits, *of_cache])
        return on_shards(local, self.ctx, in_specs, out_specs)(params, batch, cache)

    def logits_pspec(self, last: jax.Array) -> PartitionSpec:
        """The sharding of the logits after one token or after several tokens of each row, see `Transformer.decode`."""
        return self.ctx.pspec("batch", "vocab") if last.ndim == 1 else self.ctx.pspec("batch", "seq", "vocab")

    def _logits(self, params: Any, batch: Batch, cache: Any) -> tuple[jax.Array, Any]:
        """`Transformer.decode` on whole arrays."""
        return self._apply(jax.tree.map(lambda x: computed_in(x, self.ctx.compute_dtype), params), batch, cache)

    def placed(self, shape: tuple[int, ...], dtype: Any, dims: tuple[str, ...]) -> Placement:
        """The placement of an activation, by the rules of its dims."""
        return Placement(ArraySpec(shape, np.dtype(dtype), dims), self.ctx.mesh, tuple(map(self.ctx.axes, dims)))

    def placed_cache(self, shape: tuple[int, ...], dims: tuple[str, ...]) -> Any:
        """The placements of cached keys or values [..., kv_heads, head_dim], in the format of the cache."""
        dtype = self.ctx.compute_dtype
        if self.cache_format is None:
            return self.placed(shape, dtype, dims)
        codes: Any = self.placed(shape, self.cache_format, dims)
        scales: Any = self.placed(shape[:-1], dtype, dims[:-1])
        return Codes(codes, scales)

    def per_row(self, num_rows: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """The struct of an array [rows, *shape]."""
        sharding = NamedSharding(self.ctx.mesh, self.ctx.pspec("batch"))  # pyright: ignore
        return jax.ShapeDtypeStruct((num_rows, *shape), dtype, sharding=sharding)

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        return functional(self.abstract, "decode")


def for_tokens(ctx: ParallelContext) -> ParallelContext:
    """The context of a training without sequence parallelism, microbatches and strategies, for one token per row.

    The axes that sharded the sequence shard the batch instead.
    """
    rules = ctx.rules
    tokens = {"batch": rules["batch"] + rules["seq"], "seq": (), "residual_seq": ()}
    whole = AxisRules(preset=rules.preset, zero=rules.zero, **rules.explicit | tokens)  # pyright: ignore
    return replace(ctx, rules=whole, parallel=Parallel(), num_microbatches=1)
