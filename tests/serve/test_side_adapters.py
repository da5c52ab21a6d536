"""Several adapters beside one model: each row has the probabilities of the model that is merged with its adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from meshpar.errors import CheckpointError, ConfigError
from meshpar.interop.export import export
from meshpar.interop.open_folder import open_folder
from meshpar.interop.peft_params import adapter_params
from meshpar.models import GPT, Llama
from meshpar.serve import scheduler
from meshpar.serve.open_engine import open_engine
from meshpar.serve.pages import digests_of
from meshpar.serve.scheduler import Request, Scheduler
from meshpar.serve.side_adapters import adapter_folders, open_adapters
from meshpar.serve.source import open_source
from meshpar.tree import flatten_with_paths
from tests.interop.test_peft import DOWN, Q, our_logits, write_adapter
from tests.serve.client import serving

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 24, "vocab_size": 32}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NAMES = ("base", "small", "large")
ROOM: dict[str, Any] = {"slots": 2, "max_len": 16, "page_size": 4, "chunk": 8}


def drawn(seed: int, rank: int, size_in: int, size_out: int) -> tuple[Any, Any]:
    """Multiples of 1/8, whose products are exact in float32."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-4, 5, (rank, size_in)), rng.integers(-4, 5, (size_out, rank))
    return a.astype(np.float32) / 8, b.astype(np.float32) / 8


def write_base(folder: Path, model: Any) -> Path:
    params = flatten_with_paths(nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param)))
    export(folder, model, {path: 3 * np.asarray(x, np.float64) for path, x in params.items()})
    return folder


@pytest.fixture
def folders(float64, tmp_path) -> dict[str, Path]:
    """A model in float64, and adapters of other ranks, scales and modules."""
    base = write_base(tmp_path / "base", Llama(**SIZES))
    small = write_adapter(base, "small", {Q: drawn(0, 2, 16, 16)}, r=2, lora_alpha=4)
    matrices = {
        Q.replace("q_proj", "v_proj"): drawn(1, 4, 16, 16),
        Q.replace("0", "1"): drawn(2, 1, 16, 16),
        DOWN: drawn(3, 4, 24, 16),
    }
    large = write_adapter(base, "large", matrices, lora_alpha=8, rank_pattern={r"layers\.1\.self_attn\.q_proj": 1})
    return {"base": base, "small": small, "large": large}


def scores_of(engine: Any, adapters: list[int]) -> list[tuple[list[int], list[float]]]:
    """The answer to the prompt, and the log-probabilities of its tokens, by each of these adapters in one batch."""
    requests = [Request(prompt=PROMPT, max_tokens=3, scores=True, adapter=one) for one in adapters]
    queue = Scheduler(engine.decoding.capacity)
    queue.submit(requests)
    found: dict[Request, tuple[list[int], list[float]]] = {one: ([], []) for one in requests}
    while not queue.is_idle:
        plan = queue.plan()
        for request, token, score in queue.advance(plan, engine.run(plan)):
            tokens, logprobs = found[request]
            tokens.append(token)
            logprobs.append(score.logprob)
            if len(tokens) == request.max_tokens:
                queue.end(request)
    return [found[one] for one in requests]


def logprobs_of(folder: Path, answer: list[int]) -> np.ndarray:
    """The log-probabilities of an answer by the model of a folder, without a cache; an adapter is merged."""
    logits = our_logits(folder, np.array([[*PROMPT, *answer]]), np.float64)
    each = jax.nn.log_softmax(logits[0, len(PROMPT) - 1 : -1], axis=-1)
    assert each.argmax(-1).tolist() == answer
    return np.take_along_axis(np.asarray(each), np.array(answer)[:, None], 1)[:, 0]


ONE = ["mesh.data=1"]
MESH = ["mesh.data=2", "mesh.tensor=2", "rules=[megatron]"]
FLOAT64 = ["precision.params=float64", "precision.compute=float64"]


def opened(folders: dict[str, Path], overrides: list[str]) -> Any:
    source = open_source(folders["base"], [*overrides, *FLOAT64])
    return open_engine(source, **ROOM, adapters=open_adapters(source, {name: folders[name] for name in NAMES[1:]}))


@pytest.mark.parametrize(
    "layout", [pytest.param(ONE, id="one"), pytest.param(MESH, id="mesh", marks=pytest.mark.slow),
               pytest.param([*MESH, "lowering=auto"], id="auto", marks=pytest.mark.slow)],
)  # fmt: skip
def test_each_row_has_the_probabilities_of_its_merged_model(folders, layout, monkeypatch):
    """The prompt is the same for all rows, and there are more rows than slots. Without the adapter in a page's digest,
    a row reuses the pages of another model. Over HTTP a request chooses an adapter as its model."""
    devices = jax.devices()[: 1 if layout is ONE else 4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    engine = opened(folders, layout)
    order = [0, 2, 1, 0, 2, 1]
    found = scores_of(engine, order)
    for which, (answer, logprobs) in zip(order, found, strict=True):
        np.testing.assert_allclose(logprobs, logprobs_of(folders[NAMES[which]], answer), atol=1e-10)
    assert abs(np.diff([logprobs[0] for _, logprobs in found[:3]])).min() > 1e-3

    replies = asyncio.run(chosen(engine, open_source(folders["base"], ONE)))
    listed, small, base, other = (reply.json for reply in replies)
    assert [(one["id"], one.get("parent")) for one in listed["data"]] == [
        ("tiny", None), ("small", "tiny"), ("large", "tiny"),
    ]  # fmt: skip
    for reply, name, which in ((small, "small", 2), (base, "tiny", 0)):
        logprobs = reply["choices"][0]["logprobs"]["token_logprobs"]
        assert reply["model"] == name and np.allclose(logprobs, found[which][1], atol=1e-6)
    assert "only 'tiny', 'small', 'large'" in other["error"]["message"]

    monkeypatch.setattr(scheduler, "digests_of", lambda tokens, size, adapter=0: digests_of(tokens, size))
    _, wrong = scores_of(engine, [0] * 8 + [2])[-1]
    assert abs(np.subtract(wrong, found[1][1])).max() > 1e-6


async def chosen(engine: Any, source: Any) -> list[Any]:
    async with serving(engine, source, adapters=NAMES[1:]) as client:
        settings: Any = {"max_tokens": 3, "logprobs": 1, "temperature": 0}
        replies = [await client.complete(PROMPT, model=name, **settings) for name in ("small", "tiny", "other")]
        return [await client.get("/v1/models"), *replies]


def test_the_parts_of_a_fused_matrix_have_their_parts_of_an_update(float64, tmp_path):
    """GPT-2 stores q, k and v as one matrix [in, out]."""
    model = GPT(**SIZES, max_seq_len=8, tie_embeddings=True)
    base = write_base(tmp_path / "base", model)
    adapter = write_adapter(base, "fused", {"transformer.h.1.attn.c_attn": drawn(0, 4, 16, 48)}, lora_alpha=8)
    read = adapter_params(adapter, model, base)
    assert sorted(read.updates) == ["blocks.attn.k", "blocks.attn.q", "blocks.attn.v"] and read.rank == 4
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = {f"{path}.kernel": jax.ShapeDtypeStruct((2, 16, 4, 4), np.float64, sharding=one) for path in read.updates}
    plain, merged = (open_folder(folder).params(structs) for folder in (base, adapter))
    for path, layers in read.updates.items():
        update = layers[1,]
        want = np.asarray(plain[f"{path}.kernel"][1]) + np.tensordot(update.a, update.b, 1) * update.scale
        np.testing.assert_allclose(merged[f"{path}.kernel"][1], want, atol=1e-12)


def test_adapters_of_another_model_are_refused_by_name(folders, tmp_path):
    wide = write_adapter(folders["base"], "wide", {Q: drawn(0, 4, 32, 32)})
    head = write_adapter(folders["base"], "head", {"lm_head": drawn(0, 4, 16, 32)})
    source = open_source(folders["base"], ONE)
    with pytest.raises(CheckpointError) as raised:
        open_adapters(source, {"a": wide, "b": head, "c": tmp_path / "missing"})
    message = str(raised.value)
    assert "lora_A[4, 32] and lora_B[32, 4] of rank 4 do not fit the model's matrix[16, 16]" in message
    assert "lm_head\n" in message and "is no projection of its own" in message
    assert f"--adapter c={tmp_path / 'missing'}\n" in message
    with pytest.raises(ConfigError) as raised:
        adapter_folders(["x", "base=y", "a=z", "a=z"], "base")
    assert all(part in str(raised.value) for part in ("--adapter x\n", "'base' is the name of the model itself",
                                                      "'a' is the name of another adapter"))  # fmt: skip
