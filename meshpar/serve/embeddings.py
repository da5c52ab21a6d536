"""Vectors of texts by an encoder, pooled as its folder declares, in batches of texts of about the same length."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.data import NoData
from meshpar.data.tokenizer import TokenizerFile
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop.encoder_model import EncoderModel
from meshpar.interop.folder import check_inside, read_json
from meshpar.interop.specs import specs_of
from meshpar.models.encoders.model import pooled
from meshpar.models.encoders.options import Text, TwoTowers
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.precision import computed_in
from meshpar.partition.function import PartitionedFunction
from meshpar.serve.on_mesh import ACTIVATION_DIMS, placements
from meshpar.serve.source import Source
from meshpar.train.program import on_shards, pspecs, structs

SHORTEST = 16
"""Tokens of the shortest rows that are compiled; others are longer by powers of two."""
MOST_ROWS = 32
"""Texts that are computed together on each shard of the batch."""
MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max"}
"""Keys of sentence-transformers' `Pooling` -> how they pool."""
PARTS = "modules.json"


@dataclass(frozen=True)
class Pooling:
    """How a vector is made of a text's hidden states, and whether it is divided by its length."""

    how: Literal["cls", "mean", "max"]
    is_normalized: bool


def declared_pooling(folder: Path) -> Pooling | None:
    """What the files of sentence-transformers in a folder declare; None if there is no `modules.json`.

    Raises:
      CheckpointError: a file cannot be read, or asks for what is not computed.
    """
    if not (folder / PARTS).exists():
        return None
    problems = Problems()
    listed = _list(folder)
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        what = f"has {', '.join(kinds) or 'nothing'}; Transformer, Pooling and Normalize are computed"
        raise CheckpointError(f"{folder / PARTS} {what}")
    own = Path(str(listed[1].get("path", "")), "config.json")
    config = read_json(folder, str(own), problems)
    problems.raise_any(CheckpointError, f"{folder} cannot be read:")
    if isinstance(config.get("pooling_mode"), str):
        asked = [config["pooling_mode"]]
    else:
        asked = [MODES.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(asked) != 1 or asked[0] not in MODES.values():
        what = f"pools by {', '.join(asked) or 'nothing'}; one of {', '.join(MODES.values())} is computed"
        raise CheckpointError(f"{folder / own} {what}")
    return Pooling(asked[0], kinds[2:] == ["Normalize"])  # pyright: ignore[reportArgumentType]


def _list(folder: Path) -> list[dict[str, Any]]:
    try:
        check_inside(folder, PARTS)
        found = json.loads((folder / PARTS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / PARTS} cannot be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise CheckpointError(f"{folder / PARTS} is no list of modules")
    return found


def pooling_of(source: Source, model: EncoderModel) -> Pooling:
    """The pooling of the run's config, or else of its folder.

    Raises:
      ConfigError: neither says how.
    """
    if model.pooling:
        return Pooling(model.pooling, False)
    if source.folder and (found := declared_pooling(source.folder)):
        return found
    if model.wanted.head == "pairs" and not isinstance(source.run.data, NoData):  # as it was trained
        return Pooling(model.wanted.pooling, False)
    what = f"{source.folder or source.run.run_dir} does not say how a text's vector is made of its tokens"
    raise ConfigError(f"model.pooling: {what}; model.head=pairs model.pooling=mean, cls or max")


@dataclass(frozen=True)
class Embedder:
    """An encoder on the mesh of its run.

    Raises:
      ConfigError: it reads no texts alone, or nothing says how it pools.
    """

    source: Source
    model: EncoderModel
    pooling: Pooling

    @classmethod
    def of(cls, source: Source) -> Embedder:
        """The embedder of a model, whose parameters are restored."""
        model = source.run.model
        assert isinstance(model, EncoderModel)
        if model.text is None or isinstance(model.options, TwoTowers):
            kind = model.config["model_type"]
            raise ConfigError(f"model.config.model_type = {kind}: only encoders of texts alone are served")
        made = cls(source, model, pooling_of(source, model))
        _ = made.params
        return made

    def __str__(self) -> str:
        kind, longest = self.model.config["model_type"], self.text.max_seq_len
        how = self.pooling.how + (", normalized" if self.pooling.is_normalized else "")
        return f"{kind}: vectors of {self.text.width} numbers, pooled by {how}; texts of up to {longest} tokens"

    @property
    def text(self) -> Text:
        assert self.model.text is not None
        return self.model.text

    @property
    def ctx(self) -> ParallelContext:
        return self.source.ctx

    @cached_property
    def _specs(self) -> Any:
        module = self.model.module()
        specs, _, _ = specs_of(lambda key: nnx.state(module(rngs=nnx.Rngs(key)), nnx.Param), None, 0, {})
        dtype = np.dtype(self.source.run.precision.params)
        return jax.tree.map(lambda spec: spec.stored_in(dtype), specs)

    @cached_property
    def params(self) -> Any:
        return self.source.restore(structs(self._placed))

    @cached_property
    def _placed(self) -> Any:
        return placements(self._specs, self.ctx, ACTIVATION_DIMS)

    @cached_property
    def _program(self) -> Callable[..., jax.Array]:
        module, ctx = self.model.module(), self.ctx
        with nnx.use_eager_sharding(False):
            graph = nnx.graphdef(nnx.eval_shape(lambda: module(rngs=nnx.Rngs(0))))

        def vectors(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
            params = jax.tree.map(lambda x: computed_in(x, ctx.compute_dtype), params)
            tower: Any = nnx.merge(graph, params).tower
            x = pooled(tower(tokens, mask, None, None), mask, self.pooling.how)
            if not self.pooling.is_normalized:
                return x
            return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

        rows = ((ctx.axes("batch"), ()),) * 2
        on_local = PartitionedFunction(vectors, self._specs, rows, rows[:1])
        pspec = ctx.pspec("batch")
        return jax.jit(on_shards(on_local, ctx, (pspecs(self._placed), pspec, pspec), pspec))

    def encode(self, text: str) -> list[int]:
        """The ids of a text with the tokens that open and close it.

        Raises:
          ConfigError: the model has no tokenizer.
        """
        tokenizer = self.source.tokenizer
        if not isinstance(tokenizer, TokenizerFile):
            raise ConfigError("input: the model has no tokenizer; send token ids")
        return tokenizer.encode_whole(text)

    def vectors(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """float32[rows, embed], of texts as ids. Texts of about the same length are computed together."""
        found = np.zeros((len(rows), self.text.width), np.float32)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        size = MOST_ROWS * self.ctx.shards("batch")
        for start in range(0, len(rows), size):
            chosen = order[start : start + size]
            found[chosen] = self._batch([rows[i] for i in chosen])
        return found

    def _batch(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        longest = len(rows[-1])
        length = min(self.text.max_seq_len, max(SHORTEST, 1 << (longest - 1).bit_length()))
        shards = self.ctx.shards("batch")
        num = shards * max(1, 1 << (-(-len(rows) // shards) - 1).bit_length())
        tokens = np.full((num, length), self.text.pad_id or 0, np.int32)
        mask = np.zeros((num, length), bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], mask[i, : len(row)] = row, True
        return np.asarray(self._program(self.params, tokens, mask))[: len(rows)].astype(np.float32)
