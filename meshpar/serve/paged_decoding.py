"""Decodes with one of meshpar's decoders, whose cache is in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import Problems, ShardingError
from meshpar.mesh.layout import describe_sizes
from meshpar.nn.attention.codes import CacheFormat, Codes
from meshpar.nn.attention.paged import PAGES_DIMS, EmptyPages, PagedCache
from meshpar.nn.decoder import Decoder
from meshpar.nn.describe import describe, functional
from meshpar.nn.experts.balance import RouterState
from meshpar.nn.side_adapters import SideAdapters
from meshpar.nn.transformer import Batch, Transformer
from meshpar.parallel.precision import computed_in, stored_in
from meshpar.partition.function import PartitionedFunction
from meshpar.serve.decoding import Decoding, RowArrays
from meshpar.serve.on_mesh import placements
from meshpar.sharding.resolve import Placement
from meshpar.sharding.spec import ArraySpec
from meshpar.train.program import on_shards, pspecs
from meshpar.tree import human_bytes


class Pages(NamedTuple):
    """The arrays of a `PagedCache` that a turn writes."""

    keys: Any
    values: Any


@dataclass(frozen=True, kw_only=True)
class PagedDecoding(Decoding):
    """A decoder on a mesh: its parameters, its pages, and its logits with them.

    Args:
      model: the decoder's config.
      dtype: the dtype in which parameters are stored.
      cache_format: the format of cached keys and values; None for the dtype of the computation.
      adapters: those beside the model, of which each row uses one or none.

    Raises:
      ShardingError: the rules shard the sequence or the layers, which generation does not support.
    """

    model: Decoder
    dtype: np.dtype
    cache_format: CacheFormat | None = None
    adapters: SideAdapters | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        for dim in ("seq", "residual_seq", "layers"):
            if axes := dim in self.ctx.rules.table and self.ctx.axes(dim):
                fix = f"mesh.{axes[0]}=1, or rules.{dim}=[]: a checkpoint is restored to any mesh"
                problems.add(f"rules.{dim}", f"one token cannot be divided over {', '.join(axes)}", fix)
        problems.raise_any(ShardingError, "the rules do not fit generation:")

    def __str__(self) -> str:
        """What is served, in one line."""
        capacity = self.capacity
        pages = f"{capacity.num_shards * capacity.pages} pages of {capacity.page_size} tokens"
        drafts = f", {self.num_drafts} drafts a row" if self.num_drafts else ""
        cache = f"cache {human_bytes(self.cache_bytes)} a device"
        return f"{describe_sizes(dict(self.ctx.mesh.shape))}: {capacity.num_rows} slots, {pages}, {cache}{drafts}"

    @property
    def logits_struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.model.vocab_size,), self.ctx.compute_dtype)

    @property
    def abstract(self) -> Transformer:
        """The decoder with shapes and dtypes in place of arrays."""
        return self.adapters.abstract(self.model) if self.adapters else self.model.abstract()

    @cached_property
    def params(self) -> Any:
        experts = self.model.experts
        wide_paths = RouterState(experts).paths if experts else ()
        return placements(stored_in(describe(self.abstract), self.dtype, wide_paths), self.ctx)

    @cached_property
    def pages(self) -> Pages:
        """Placements of keys and values, by the same rules as the heads that fill them.

        Memory: 2 layers pages page_size kv_heads head_dim elements in each shard of the batch; in int8 of a byte, with
          a scale for each token of a head in the dtype of the computation.
        """
        model, capacity = self.model, self.capacity
        a_page = (capacity.page_size, model.kv_heads, model.head_size)
        shape = (capacity.num_shards, model.num_layers, capacity.pages, *a_page)
        placed: Any = self._placed(shape, self.cache_format or self.ctx.compute_dtype, PAGES_DIMS)
        if self.cache_format is not None:
            placed = Codes(placed, self._placed(shape[:-1], self.ctx.compute_dtype, PAGES_DIMS[:-1]))  # pyright: ignore
        return Pages(placed, placed)

    @property
    def cache(self) -> PagedCache:
        """Placements of a `PagedCache`."""
        capacity = self.capacity
        table = self._placed((capacity.num_rows, capacity.pages_of_row), jnp.int32, ("batch", "seq"))
        return PagedCache(*self.pages, None if self.is_batch else table)  # pyright: ignore[reportArgumentType]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, its keys and its values, on one device."""
        return self.cache_bytes // self.capacity.pages

    def extended(self, params: Any, batch: Batch, rows: RowArrays, pages: Any, is_first: bool) -> tuple[jax.Array, Any]:
        if self.adapters:
            batch = {**batch, "adapters": self.adapters.used(rows.adapters)}
        held = PagedCache(pages.keys, pages.values, rows.table)
        logits, cache = self.logits(params, batch, EmptyPages(*held) if is_first else held)
        return logits, Pages(cache.keys, cache.values)

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

    def _logits(self, params: Any, batch: Batch, cache: Any) -> tuple[jax.Array, Any]:
        """`Transformer.decode` on whole arrays."""
        return self._apply(jax.tree.map(lambda x: computed_in(x, self.ctx.compute_dtype), params), batch, cache)

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        return functional(self.abstract, "decode")

    def _placed(self, shape: tuple[int, ...], dtype: Any, dims: tuple[str, ...]) -> Placement:
        """The placement of an activation, by the rules of its dims."""
        return Placement(ArraySpec(shape, np.dtype(dtype), dims), self.ctx.mesh, tuple(map(self.ctx.axes, dims)))
