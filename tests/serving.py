"""A tiny decoder with random parameters: its tokens and cached logits on any layout, and its logits without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.mesh.layout import MeshLayout
from meshpar.models import GPT, Llama
from meshpar.nn.attention.codes import CacheFormat
from meshpar.nn.attention.paged import EmptyPages, PagedCache
from meshpar.nn.decoder import Decoder
from meshpar.nn.describe import functional
from meshpar.nn.experts import Experts
from meshpar.nn.rotary import Llama3
from meshpar.parallel.context import ParallelContext
from meshpar.serve.batch import requests_of
from meshpar.serve.drafts import Drafter
from meshpar.serve.engine import Engine
from meshpar.serve.on_mesh import for_tokens
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Capacity, Request, Scheduler
from meshpar.sharding.rules import AxisRules
from meshpar.train.state import structs

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 29,
    "pad_vocab_to_multiple": 8,
}
SCALING = Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8)
OPTIONS: dict[str, Any] = {
    "num_kv_heads": 2, "attn_bias": "qkv", "mlp_bias": True, "qk_norm": True, "head_dim": 8, "window": 5,
    "global_layers": (1,), "rotary_fraction": 0.5, "rope_scaling": SCALING,
}  # fmt: skip
MODELS: dict[str, Decoder] = {
    "llama": Llama(**SIZES),
    "llama_gqa_options": Llama(**SIZES, **OPTIONS),
    "llama_experts": Llama(**SIZES, experts=Experts(num=6, per_token=2, intermediate_size=12, balance="bias")),
    "llama_compressed": Llama(
        **SIZES, weights={"kind": "int4", "group": 4}, low_rank=[{"path": "blocks.mlp.up", "rank": 8}]
    ),
    "gpt_tied": GPT(**SIZES, max_seq_len=32, tie_embeddings=True, dropout=0.1, remat="full"),
}
# Two key heads cannot be sharded over four devices, so each device has both.
LAYOUTS = {
    "one": ({}, ["replicated"]),
    "data2": ({"data": 2}, ["replicated"]),
    "fsdp2": ({"fsdp": 2}, ["fsdp"]),
    "zero1": ({"fsdp": 2}, ["zero1"]),
    "tensor4": ({"tensor": 4}, ["megatron"]),
    "tensor4_sp": ({"tensor": 4}, ["megatron_sp"]),
    "data2_tensor4": ({"data": 2, "tensor": 4}, ["megatron"]),
    "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "expert2_fsdp2_tensor2": ({"expert": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron", "experts"]),
}
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [5, 8, 9, 7, 9]]
MAX_TOKENS = 8
FLOAT64 = np.dtype("float64")


@lru_cache
def params(model: str) -> Any:
    """Larger than initial parameters, so that greedy decoding does not repeat one token."""
    drawn = nnx.to_pure_dict(nnx.state(MODELS[model].build(nnx.Rngs(0)), nnx.Param))
    return jax.tree.map(lambda x: np.asarray(x) if x.dtype.kind in "iu" else 3 * np.asarray(x, np.float64), drawn)


def context(model: str, layout: str, lowering: str) -> ParallelContext:
    axes, presets = LAYOUTS[layout]
    more = {"kv_heads": ()} if "gqa" in model and axes.get("tensor") == 4 else {}
    rules = AxisRules(preset=tuple(presets), **more)
    sizes_of_axes = MeshLayout(**axes)
    mesh = sizes_of_axes.build(jax.devices()[: sizes_of_axes.requested()])
    return for_tokens(ParallelContext(mesh=mesh, rules=rules, manual=lowering == "manual", compute_dtype=FLOAT64))


def paged(
    model: str, layout: str, lowering: str, cache_format: CacheFormat | None = None, num_drafts: int = 0, **sizes: Any
) -> PagedDecoding:
    """With few and small pages."""
    ctx = context(model, layout, lowering)
    sizes = {"slots": 2, "pages": 10, "page_size": 4, "max_len": 16, "chunk": 4} | sizes
    capacity = Capacity(num_shards=ctx.shards("batch"), **sizes)
    return PagedDecoding(
        model=MODELS[model], ctx=ctx, dtype=FLOAT64, cache_format=cache_format, num_drafts=num_drafts, capacity=capacity
    )


def engine(model: str, layout: str, lowering: str, drafter: Drafter | None = None, **settings: Any) -> Engine:
    decoding = paged(model, layout, lowering, num_drafts=drafter.num_drafts if drafter else 0, **settings)
    return Engine(decoding, lambda structs: placed(params(model), structs), drafter)


def served(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of each answer, of requests that are submitted together."""
    scheduler = Scheduler(engine.decoding.capacity)
    scheduler.submit(requests)
    answers: dict[Request, list[int]] = {request: [] for request in requests}
    for request, token, _ in scheduler.answered(engine.run):
        answers[request].append(token)
        if len(answers[request]) == request.max_tokens:
            scheduler.end(request)
    assert not any(pool.num_held for pool in scheduler.pools)
    return list(answers.values())


def batch_decoding(
    model: str, layout: str, lowering: str, sampling: Sampling = Sampling(), *,  # noqa: B008
    num_rows: int = len(PROMPTS), longest: int = 6, max_tokens: int = MAX_TOKENS, **settings: Any,
) -> PagedDecoding:  # fmt: skip
    """The settings of `generate`."""
    ctx = context(model, layout, lowering)
    capacity = Capacity.of_rows(ctx.shards("batch"), num_rows, longest + max_tokens, chunk=longest, all_prompts=True)
    return PagedDecoding(model=MODELS[model], ctx=ctx, dtype=FLOAT64, sampling=sampling, capacity=capacity, **settings)


def batch_engine(
    model: str, layout: str, lowering: str, sampling: Sampling = Sampling(), drafter: Drafter | None = None,  # noqa: B008
    **settings: Any,
) -> Engine:  # fmt: skip
    num_drafts = drafter.num_drafts if drafter else 0
    decoding = batch_decoding(model, layout, lowering, sampling, num_drafts=num_drafts, **settings)
    return Engine(decoding, lambda structs: placed(params(model), structs), drafter)


def generated(
    model: str, layout: str, lowering: str, sampling: Sampling = Sampling(), *,  # noqa: B008
    prompts: Sequence[Sequence[int]] = PROMPTS, **settings: Any,
) -> np.ndarray:  # fmt: skip
    """int32[prompts, MAX_TOKENS]: the answers to a batch."""
    computed = batch_engine(model, layout, lowering, sampling, num_rows=len(prompts), **settings)
    return np.asarray(served(computed, requests_of(prompts, MAX_TOKENS, sampling)))


def placed(arrays: Any, structs: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), arrays, structs)


def cached_logits(model: str, layout: str, lowering: str, rows: np.ndarray) -> np.ndarray:
    """float64[prompts, MAX_TOKENS, vocab]: the logits after each row's prompt, and after each further token."""
    decode = batch_decoding(model, layout, lowering)
    arrays = placed(params(model), structs(decode.params))
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs(decode.cache))
    ends = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (len(rows), 6))
    extend = jax.jit(decode.logits)
    logits, cache = extend(arrays, _batch(rows[:, :6], positions, ends - 1), EmptyPages(*cache))
    cache = PagedCache(*cache)
    found = [logits]
    for turn in range(MAX_TOKENS - 1):
        at = (ends + turn)[:, None]
        logits, cache = extend(arrays, _batch(np.take_along_axis(rows, at, 1), at, np.zeros_like(ends)), cache)
        found.append(logits)
    return np.stack([np.asarray(x) for x in found], axis=1)[..., : SIZES["vocab_size"]]


def full_logits(model: str, row: Sequence[int] | np.ndarray) -> np.ndarray:
    """float64[seq, vocab] of one sequence, in one forward without a cache, on one device."""
    positions = np.arange(6 + MAX_TOKENS)[None]
    tokens = np.zeros_like(positions)
    tokens[0, : len(row)] = row
    batch = _batch(tokens, positions, np.zeros(1)) | {"segments": np.int32(positions < len(row))}
    return np.asarray(_forward(model)(params(model), batch))[0, : len(row), : SIZES["vocab_size"]]


@lru_cache
def _forward(model: str) -> Any:
    apply = functional(nnx.eval_shape(lambda: MODELS[model].build(nnx.Rngs(0))))
    return jax.jit(lambda params, batch: apply(params, batch, None))


def _batch(tokens: np.ndarray, positions: np.ndarray, last: np.ndarray) -> dict[str, np.ndarray]:
    batch = {"tokens": tokens, "positions": positions, "last": last, "rows": np.arange(len(tokens))}
    return {name: np.asarray(array, np.int32) for name, array in batch.items()}
