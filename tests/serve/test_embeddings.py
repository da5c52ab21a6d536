"""`/v1/embeddings`: the vectors are those of transformers' hidden states, pooled as the folder declares."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import jax
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from meshpar.errors import CheckpointError, ConfigError
from meshpar.serve.embeddings import Embedder, declared_pooling
from meshpar.serve.http.embeddings import EmbeddingEndpoints
from meshpar.serve.open_engine import open_engine
from meshpar.serve.source import open_source
from tests.interop.encoders import saved

MESH = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "rules=[fsdp,megatron]"]
TEXTS = ["a cat sat", "the dog", "a " * 20, "mat"]


def written(folder: Path, pooling: dict[str, Any], normalizes: bool) -> Any:
    """A BERT of random weights with a tokenizer and the files of sentence-transformers. Returns transformers' model."""
    model = saved("bert", "hidden", folder)
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "a", "cat", "sat", "the", "dog", "mat"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    template = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"idx": i, "path": paths[i], "type": f"sentence_transformers.models.{x}"} for i, x in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    return model


def expected(model: Any, rows: list[list[int]], how: str, normalizes: bool) -> np.ndarray:
    """Each text alone, by transformers."""
    found = []
    with torch.no_grad():
        for row in rows:
            hidden = model(torch.tensor([row])).last_hidden_state[0].numpy()
            found.append({"cls": hidden[0], "mean": hidden.mean(0), "max": hidden.max(0)}[how])
    vectors = np.stack(found)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) if normalizes else vectors


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = written(folder, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, normalizes=True)
    with jax.numpy_dtype_promotion("standard"):
        yield Embedder.of(open_source(folder, MESH)), model


def ask(embedder: Embedder, scene: Any) -> Any:
    async def inside() -> Any:
        app = EmbeddingEndpoints(embedder, "tiny").app()
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
        async with openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="none", http_client=client, max_retries=0
        ) as asking:
            return await scene(asking)

    return asyncio.run(inside())


def test_vectors_on_a_mesh_are_transformers_pooled_as_the_folder_says(served):
    """Of texts of several lengths, by the client of OpenAI, as base64, which it asks for, and as floats."""
    embedder, model = served
    rows = [embedder.encode(text) for text in TEXTS]
    assert rows[0] == [1, 5, 6, 7, 2]
    want = expected(model, rows, "mean", True)
    answer = ask(embedder, lambda client: client.embeddings.create(model="tiny", input=TEXTS))
    np.testing.assert_allclose([one.embedding for one in answer.data], want, rtol=0, atol=1e-5)
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, rows))
    floats = ask(embedder, lambda client: client.embeddings.create(model="tiny", input=rows, encoding_format="float"))
    np.testing.assert_allclose([one.embedding for one in floats.data], want, rtol=0, atol=1e-5)
    alone = ask(embedder, lambda client: client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=32))
    np.testing.assert_allclose(alone.data[0].embedding, want[0], rtol=0, atol=1e-5)
    assert np.abs(want - expected(model, rows, "cls", True)).max() > 1e-2


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"input": TEXTS[0], "dimensions": 8}, "have 32 numbers"),
        ({"input": ""}, "is empty"),
        ({"input": []}, "0 texts"),
        ({"input": [[5, 96]]}, "outside of the vocabulary of 96"),
        ({"input": [[5] * 33]}, "the model reads 32 at most"),
    ],
)
def test_what_is_not_computed_is_refused(served, body, what):
    with pytest.raises(openai.BadRequestError, match=what):
        ask(served[0], lambda client: client.embeddings.create(model="tiny", **body))


def test_other_endpoints_say_what_the_model_is(served):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match=r"tiny is an encoder \(bert\), which generates no text"):
        ask(served[0], lambda client: client.chat.completions.create(model="tiny", messages=messages))
    with pytest.raises(openai.NotFoundError, match="there is no model 'other', only 'tiny'"):
        ask(served[0], lambda client: client.embeddings.create(model="other", input="a"))
    listed = ask(served[0], lambda client: client.models.list())
    assert [one.id for one in listed.data] == ["tiny"]
    with pytest.raises(ConfigError, match=r"bert reads whole rows, and generates no text"):
        open_engine(served[0].source)


@pytest.mark.parametrize(
    ("pooling", "how"),
    [({"pooling_mode_cls_token": True, "include_prompt": True}, "cls"), ({"pooling_mode": "max"}, "max")],
)
def test_pooling_is_what_the_folder_declares(pooling, how, tmp_path):
    model = written(tmp_path / "m", pooling, normalizes=False)
    with jax.numpy_dtype_promotion("standard"):
        embedder = Embedder.of(open_source(tmp_path / "m", ["mesh.data=8"]))
        rows = [embedder.encode(text) for text in TEXTS]
        found = embedder.vectors(rows)
    np.testing.assert_allclose(found, expected(model, rows, how, False), rtol=0, atol=1e-5)


def test_a_folder_that_does_not_say_how_it_pools_is_refused(tmp_path):
    saved("bert", "hidden", tmp_path)
    with pytest.raises(
        ConfigError, match=r"model.pooling: .* does not say how .*; model.head=pairs model.pooling=mean"
    ):
        Embedder.of(open_source(tmp_path))


def test_pooling_that_is_not_computed_is_refused(tmp_path):
    written(tmp_path / "m", {"pooling_mode_weightedmean_tokens": True}, normalizes=False)
    with pytest.raises(CheckpointError, match="pools by pooling_mode_weightedmean_tokens; one of cls, mean, max"):
        declared_pooling(tmp_path / "m")


def test_an_option_that_only_decoders_have_is_refused_also_with_its_default(tmp_path, command):
    written(tmp_path / "tiny", {"pooling_mode_mean_tokens": True}, normalizes=False)
    said = command("serve", str(tmp_path / "tiny"), "--port=0", "--slots=16", "--max-len", "8", "--devices=8")
    assert said.code == 2
    assert "--slots, --max-len: " in said.err and "is an encoder, which generates nothing; leave it out" in said.err
