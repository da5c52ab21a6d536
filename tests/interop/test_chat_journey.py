"""A chat model from its folder through convert, a training on conversations, LoRA and a server, as one journey.

The model is a Llama of random weights under the config of a small instruction model, with grouped heads and a tied
head, and a byte-level tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshpar.experiment.config import load
from meshpar.serve.open_engine import open_engine
from meshpar.serve.source import open_source
from tests.chats import CHATML, CITIES, write_lines, write_tokenizer
from tests.command import Said, exit_code
from tests.interop.pretrained import SIZES, loaded, saved_with, torch, transformers
from tests.serve.client import serving

jax.devices()

STOPS = [2, 0]
"""The ids of <|im_end|> and <|endoftext|>: two, as in Llama 3's files."""
CONFIG: dict[str, Any] = {
    **SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "bos_token_id": 0,
    "eos_token_id": 2, "tie_word_embeddings": True, "rope_theta": 1e4, "max_position_embeddings": 128,
}  # fmt: skip
LANGUAGE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MESH = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "rules=[fsdp,megatron]"]
DATA = ["data.kind=chat", "data.path=chats.jsonl", "data.batch_size=8", "data.seq_len=96", "data.held_out_fraction=0.1"]
OPTIM = ["optim.lr=0.005", "optim.b2=0.999", "optim.weight_decay=0", "optim.clip_norm=null"]
NUM_STEPS = 25


def conversations(number: int) -> list[dict[str, Any]]:
    cities = [*CITIES.items()]
    lines = []
    for i in range(number):
        country, city = cities[i % len(cities)]
        question = {"role": "user", "content": f"What is the capital of {country}?" + " Please." * (i // 6 % 3)}
        lines.append({"messages": [question, {"role": "assistant", "content": f"It is {city}."}], "id": i})
    return lines


def call(*words: object) -> Said:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code(*words)
    said = Said(code, out.getvalue(), err.getvalue())
    assert said.code == 0, said.err
    return said


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with the model `hf` and the run `run`, which was converted from it and trained on `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("journey")
    before = Path.cwd()
    os.chdir(folder)
    saved_with(CONFIG, Path("hf"))
    write_tokenizer(Path("hf"), CHATML)
    generation = {"bos_token_id": 0, "eos_token_id": STOPS, "do_sample": True, "temperature": 0.7, "top_p": 0.8}
    Path("hf/generation_config.json").write_text(json.dumps(generation))
    write_lines(Path("chats.jsonl"), conversations(200))
    call("convert", "run", *MESH, "--from-hf", "hf")
    steps = [f"num_steps={NUM_STEPS}", "log_every=1", "eval_every=5", "loggers=[]", "checkpoints.every=50"]
    call("train", "run/config.yaml", *DATA, *OPTIM, *steps)
    yield folder
    os.chdir(before)


def records(run: str, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def their_tokenizer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained("hf")


def their_losses(batches: list[list[list[int]]], num_steps: int) -> list[float]:
    """Each conversation in a row of its own, with transformers' mask, by torch on one device.

    Args:
      batches: for each step the tokens of its conversations, as far as they are inputs.
    """
    tokenizer, model = their_tokenizer(), loaded(Path("hf"))
    by_inputs = {}
    for line in conversations(200):
        made = tokenizer.apply_chat_template(line["messages"], return_assistant_tokens_mask=True, return_dict=True)
        last = max(np.flatnonzero(made["assistant_masks"]))
        by_inputs[tuple(made["input_ids"][:last])] = (made["input_ids"], made["assistant_masks"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    losses = []
    for batch in batches[:num_steps]:
        pairs = [tuple(map(torch.tensor, by_inputs[tuple(inputs)])) for inputs in batch]
        ids, mask = (torch.nn.utils.rnn.pad_sequence(list(one), batch_first=True) for one in zip(*pairs, strict=True))
        logits = model(ids).logits[:, :-1]  # attention is causal, so that padding on the right changes nothing
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (each * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_first_losses_are_those_of_transformers_and_torch(here):
    data = load("run/config.yaml", DATA).data.train(seed=0)
    batches = []
    for step in range(5):
        batch = data[step]
        rows = zip(batch["tokens"], batch["segments"], strict=True)
        batches.append([row[of == s].tolist() for row, of in rows for s in range(1, of.max() + 1)])
    assert max(map(len, batches)) > 8, "a row has several conversations"
    ours = [record["loss"] for record in records("run", "train")]
    np.testing.assert_allclose(ours[:5], their_losses(batches, 5), atol=1e-4)
    evals = [record["loss"] for record in records("run", "evaluation")]
    assert evals[-1] < 0.5 * evals[0]


def chat_with(run: str, messages: list[Any]) -> Any:
    """The answer that OpenAI's client gets of a server of the run."""
    import httpx2
    import openai

    source = open_source(Path(run))
    engine = open_engine(source, slots=2, max_len=96, page_size=8, chunk=16)

    async def scene() -> Any:
        async with serving(engine, source) as server:
            transport = httpx2.ASGITransport(app=server.app)
            async with openai.AsyncOpenAI(
                base_url="http://server/v1", api_key="none", http_client=httpx2.AsyncClient(transport=transport)
            ) as client:
                return await client.chat.completions.create(
                    model="tiny", messages=messages, temperature=0, max_tokens=24
                )

    return asyncio.run(scene())


def their_chat(folder: str, messages: list[Any]) -> tuple[str, int]:
    """The greedy answer of transformers, which stops by the folder's generation config; and its prompt's length."""
    tokenizer, model = their_tokenizer(), loaded(Path(folder))
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=24, do_sample=False, temperature=None, top_p=None, pad_token_id=0)
    return tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


@pytest.mark.parametrize("run", ["run", pytest.param("tuned", marks=pytest.mark.slow)])
def test_a_chat_with_the_trained_model_is_that_of_transformers_and_stops(run, here):
    if run == "tuned":
        train_lora()
    call("export", run, f"{run}-out", "--format", "hf")
    messages = [{"role": "user", "content": "What is the capital of Peru?"}]
    answer = chat_with(run, messages)
    text, prompt_tokens = their_chat(f"{run}-out", messages)
    choice = answer.choices[0]
    assert choice.message.content == text
    assert answer.usage.prompt_tokens == prompt_tokens
    assert choice.finish_reason == ("stop" if answer.usage.completion_tokens < 24 else "length")
    if run == "run":
        assert choice.finish_reason == "stop"
    for name in LANGUAGE:
        assert Path(f"{run}-out", name).read_bytes() == Path("hf", name).read_bytes(), name


def train_lora() -> None:
    words = ["run_dir=tuned", "init={from_checkpoint: run}", "lora={kind: lora, rank: 4, paths: ['blocks.**']}"]
    steps = ["num_steps=6", "log_every=1", "eval_every=3", "loggers=[]"]
    call("train", "run/config.yaml", *DATA, *OPTIM, *words, *steps)
    evals = [record["loss"] for record in records("tuned", "evaluation")]
    assert evals[-1] < evals[0]


SCRATCH = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 320}
data: {kind: chat, path: chats.jsonl, tokenizer: hf/tokenizer.json, batch_size: 8, seq_len: 96, held_out_fraction: 0.1}
optim: {kind: adamw, lr: 0.01}
num_steps: 2
run_dir: scratch
mesh: {data: 8}
loggers: []
"""


@pytest.mark.slow
def test_a_model_that_is_trained_on_conversations_from_the_beginning_has_their_template(here):
    Path("scratch.yaml").write_text(SCRATCH)
    call("train", "scratch.yaml")
    messages = [{"role": "user", "content": "What is the capital of Peru?"}]
    call("export", "scratch", "scratch-out", "--format", "hf")
    answer, (text, prompt_tokens) = chat_with("scratch", messages), their_chat("scratch-out", messages)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (text, prompt_tokens)
