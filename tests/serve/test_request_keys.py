"""Each key of OpenAI's API acts or is refused by its name; log-probabilities are those of transformers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chats

from meshpar.serve.engine import Engine
from meshpar.serve.http.bodies import IGNORED, NEUTRAL, CompletionBody
from meshpar.serve.http.chat_bodies import ChatBody
from meshpar.serve.open_engine import open_engine
from meshpar.serve.source import Source, open_source
from tests.chats import UNMARKED, write_tokenizer
from tests.serve.client import Client, serving

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PROMPT = [23, 21, 24, 21, 25, 29, 22, 26, 25]
MESSAGES = [{"role": "user", "content": "Is it Paris ?"}]
TOKENS = 6


class Served:
    """A tiny Llama of transformers, and a server of it."""

    def __init__(self, folder: Any):
        write_tokenizer(folder, UNMARKED + "{{ greeting }}")
        source: Source = open_source(folder, ["mesh.data=2", "mesh.tensor=4", "rules=megatron"])
        self.theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        engine = open_engine(source, slots=4, max_len=48, page_size=4, chunk=4, ngrams=1, num_drafts=2)
        assert isinstance(engine, Engine)
        self.engine = engine
        self.source = source

    def run(self, scene: Any) -> Any:
        async def inside() -> Any:
            async with serving(self.engine, self.source) as client:
                return await scene(client)

        return asyncio.run(inside())

    def complete(self, prompt: Any = PROMPT, **settings: Any) -> Any:
        """The body of the answer to a greedy request."""

        async def scene(client: Client) -> Any:
            reply = await client.complete(prompt, **{"temperature": 0, "max_tokens": TOKENS} | settings)
            assert reply.status == 200, reply
            return reply.json

        return self.run(scene)

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """float64 [tokens, vocab] of transformers: of what follows each token."""
        with torch.no_grad():
            return torch.log_softmax(self.theirs(torch.tensor([tokens])).logits[0].double(), -1).numpy()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder, UNMARKED)
    vocab_size = len(transformers.AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, vocab_size=vocab_size, initializer_range=0.4)
    config.eos_token_id = None
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return Served(folder)


def test_echoed_log_probabilities_are_those_of_transformers(served):
    """As `lm-eval` asks for them, and with several prompts at once, whose chunks share turns."""
    prompts = [PROMPT, PROMPT[:5], [7, 7]]
    reply = served.complete(prompts, max_tokens=1, echo=True, logprobs=3, seed=1234)
    plain = served.complete(prompts, max_tokens=1)
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for prompt, choice, other in zip(prompts, reply["choices"], plain["choices"], strict=True):
        found = choice["logprobs"]
        want = served.logprobs(prompt)
        next_token = int(want[-1].argmax())
        assert choice["text"].endswith(other["text"])
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        given = [*prompt[1:], next_token]
        np.testing.assert_allclose(found["token_logprobs"][1:], want[np.arange(len(prompt)), given], atol=1e-4, rtol=0)
        for ranked, row in zip(found["top_logprobs"][1:], want, strict=True):
            best = sorted(ranked.values(), reverse=True)[:3]
            np.testing.assert_allclose(best, np.sort(row)[::-1][:3], atol=1e-4, rtol=0)
            assert len(ranked) <= 4  # the given token, if it is none of the three
        for i, (at, text) in enumerate(zip(found["text_offset"], found["tokens"], strict=True)):
            assert at == len(served.source.tokenizer.decode([prompt[0], *given][:i]))
            if served.source.tokenizer.decode([[prompt[0], *given][i]]) == text:  # no part of a character
                assert choice["text"].startswith(text, at)
    only = served.complete(PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["tokens"]) == len(PROMPT)


def test_a_prompt_whose_pages_are_in_the_cache_is_scored_too(served):
    first = served.complete(PROMPT, max_tokens=1, echo=True, logprobs=1)["choices"]
    assert served.complete(PROMPT, max_tokens=1, echo=True, logprobs=1)["choices"] == first


def test_log_probabilities_of_an_answer_are_those_of_transformers_streamed_or_whole(served):
    async def scene(client: Client) -> Any:
        settings: Any = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
        settings |= {"logprobs": True, "top_logprobs": 2}
        whole = await client.post("/v1/chat/completions", **settings)
        return whole.json, (await client.post("/v1/chat/completions", **settings, stream=True)).events

    whole, events = served.run(scene)
    content = whole["choices"][0]["logprobs"]["content"]
    streamed = [one["choices"][0]["logprobs"] for one in events if one["choices"]]
    assert [token for part in streamed if part for token in part["content"]] == content
    tokenizer = transformers.AutoTokenizer.from_pretrained(served.source.folder)
    tokens = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    for one in content:
        want = served.logprobs(tokens)[-1]
        np.testing.assert_allclose(one["logprob"], want.max(), atol=1e-4, rtol=0)
        np.testing.assert_allclose(
            [other["logprob"] for other in one["top_logprobs"]], np.sort(want)[::-1][:2], atol=1e-4, rtol=0
        )
        assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]
        tokens = [*tokens, int(want.argmax())]
    assert len(content) == TOKENS


def test_penalties_and_biases_give_the_tokens_of_the_formula(served):
    """OpenAI's: logits[j] - count[j] * frequency - (count[j] > 0) * presence + bias[j], of the answer's tokens."""
    asked = {"presence_penalty": 1.5, "frequency_penalty": 0.75, "logit_bias": {"80": 8.0, "3": -100}}
    tokens = list(PROMPT)
    for _ in range(12):
        logits = served.logprobs(tokens)[-1].copy()
        for token, count in Counter(tokens[len(PROMPT) :]).items():
            logits[token] -= 0.75 * count + 1.5
        logits[80] += 8
        logits[3] -= 100
        tokens.append(int(logits.argmax()))
    want = tokens[len(PROMPT) :]
    found = served.complete(**asked, logprobs=0, max_tokens=12)["choices"][0]
    np.testing.assert_allclose(
        found["logprobs"]["token_logprobs"],
        [served.logprobs(tokens[: len(PROMPT) + i])[-1][token] for i, token in enumerate(want)], atol=1e-4, rtol=0,
    )  # fmt: skip
    assert (
        found["text"] == served.source.tokenizer.decode([*PROMPT, *want])[len(served.source.tokenizer.decode(PROMPT)) :]
    )
    assert want.count(80) > 1
    assert want != [80] * 12
    assert (
        served.complete(logit_bias={"7": 100}, max_tokens=2, logprobs=0)["choices"][0]["logprobs"]["tokens"]
        == [served.source.tokenizer.decode([1, 7])[len(served.source.tokenizer.decode([1])) :]] * 2
    )


def test_a_penalty_of_repetition_gives_the_tokens_of_transformers(served):
    """It is of tokens of the prompt too, and in a batch with a row that has drafts."""
    plain = served.theirs.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0]
    want = served.theirs.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, repetition_penalty=1.7)[0]
    assert len({*want.tolist()} - {*PROMPT}) > len({*plain.tolist()} - {*PROMPT})
    decode = served.source.tokenizer.decode

    async def scene(client: Client) -> Any:
        asked: Any = {"temperature": 0, "max_tokens": 12}
        requests = (client.complete(PROMPT, **asked, repetition_penalty=penalty) for penalty in (1.7, 1))
        return [reply.json["choices"][0]["text"] for reply in await asyncio.gather(*requests)]

    assert served.run(scene) == [decode(one.tolist())[len(decode(PROMPT)) :] for one in (want, plain)]


WORKS: dict[str, Any] = {
    "echo": True, "frequency_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": {"7": 100}, "logprobs": 1,
    "max_tokens": 2, "max_completion_tokens": 2, "n": 2, "temperature": 1.0, "top_p": 0.5, "seed": 3, "stop": ["x"],
    "stream": True, "stream_options": {"include_usage": True}, "top_logprobs": 1, "model": "other", "prompt": [5],
    "messages": [{"role": "user", "content": "Thanks"}], "top_k": 1, "min_p": 1.0, "parse_special": False,
    "stop_token_ids": [7], "repetition_penalty": 3.0, "chat_template_kwargs": {"greeting": "Hi"},
}  # fmt: skip
"""Keys that act, OpenAI's and others -> a value that changes the answer, beside those of `NEEDS`."""
NEEDS: dict[str, dict[str, Any]] = {
    "top_p": {"temperature": 1.0, "seed": 1}, "seed": {"temperature": 1.0}, "temperature": {"seed": 1},
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_tokens": None},
    "frequency_penalty": {"max_tokens": 20}, "presence_penalty": {"max_tokens": 20},
    "repetition_penalty": {"max_tokens": 20},
    "top_k": {"temperature": 9.0, "seed": 1}, "min_p": {"temperature": 9.0, "seed": 1},
    "parse_special": {"prompt": "<|im_end|> yes"}, "stop_token_ids": {"logit_bias": {"7": 100}},
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "audio": {"voice": "a", "format": "wav"}, "best_of": 2, "function_call": "auto", "functions": [{"name": "f"}],
    "modalities": ["audio"], "prediction": {"type": "content", "content": "x"}, "reasoning_effort": "high",
    "response_format": {"type": "json_object"}, "suffix": "x", "tool_choice": "required", "verbosity": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}], "web_search_options": {},
    "structured_outputs": {"regex": "!+"},  # as response_format it needs an id that ends an answer, which this has not
}  # fmt: skip
HINTS = {"parallel_tool_calls"}
"""Of tools, which this model's template does not render: without them it says nothing."""


@pytest.mark.parametrize(
    ("path", "params", "body"),
    [
        ("/v1/completions", of_completions.CompletionCreateParamsBase, CompletionBody),
        ("/v1/chat/completions", of_chats.CompletionCreateParamsBase, ChatBody),
    ],
)
def test_each_key_of_openais_api_acts_or_is_refused_by_name(path, params, body, served):
    keys = set(params.__annotations__) | {"stream"} | set(body.model_fields)
    newer = keys - set(body.model_fields) - set(NEUTRAL) - set(IGNORED)
    base: Any = {"temperature": 0, "max_tokens": 4}
    base |= {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}

    async def choices(client: Client, asked: Any) -> Any:
        reply = await client.post(path, **asked)
        if asked.get("stream"):
            return [(one["choices"], one.get("usage")) for one in reply.events]
        return reply.json["choices"] if reply.status == 200 else reply.status

    async def scene(client: Client) -> None:
        for key in sorted(keys - set(IGNORED) - HINTS):
            value = True if (key, path) == ("logprobs", "/v1/chat/completions") else WORKS.get(key)
            if value is None:
                reply = await client.post(path, **base | {key: REFUSED.get(key, "new")})
                assert reply.status == 400, key
                assert key in reply.json["error"]["message"], key
                continue
            needed = base | NEEDS.get(key, {})
            if key == "stop":
                first = (await choices(client, needed))[0]
                value = [(first["text"] if "text" in first else first["message"]["content"])[-1]]
            changed = await choices(client, needed | {key: value})
            assert key in body.model_fields, key
            assert isinstance(changed, list) or key == "model", key
            if key == "seed":
                assert changed == await choices(client, needed | {key: value})
            assert changed != await choices(client, needed), key

    assert not newer & set(WORKS)
    served.run(scene)


WRONG = {
    "logit_bias: 9999 is outside of the model's vocabulary": {"logit_bias": {"9999": 1}},
    "logit_bias: 'a' is no token id": {"logit_bias": {"a": 1}},
    "logit_bias.3: Input should be less than or equal to 100": {"logit_bias": {"3": 101}},
    "presence_penalty: Input should be less": {"presence_penalty": 3},
    "logprobs: Input should be less": {"logprobs": 21},
    "echo: is not streamed": {"echo": True, "stream": True},
    "max_tokens: with 0 there is no answer": {"max_tokens": 0},
    "stop_token_ids: 9999 is outside of the model's vocabulary": {"stop_token_ids": [9999]},
    "stream_options: has no effect without stream": {"stream_options": {"include_usage": True}},
    "stream_options.include_obfuscation: Input should be False": {
        "stream": True,
        "stream_options": {"include_obfuscation": True},
    },
}
OF_CHATS = {
    "top_logprobs: has no effect without logprobs": {"top_logprobs": 2},
    "max_tokens: is max_completion_tokens by its earlier name": {"max_tokens": 2, "max_completion_tokens": 3},
    "gretting, messages: changes nothing": {
        "chat_template_kwargs": {"gretting": "Hi", "messages": [], "greeting": "Yes"}
    },
}


def test_wrong_values_of_these_keys_are_refused(served):
    async def scene(client: Client) -> None:
        for message, body in WRONG.items():
            reply = await client.complete(PROMPT, **body)
            assert reply.status == 400, body
            assert message in reply.json["error"]["message"], body
        for message, body in OF_CHATS.items():
            reply = await client.post("/v1/chat/completions", messages=MESSAGES, **body)
            assert message in reply.json["error"]["message"], body

    served.run(scene)


def test_log_probabilities_sum_to_one(served):
    ranked = served.complete(logprobs=20)["choices"][0]["logprobs"]["top_logprobs"]
    assert all(0 < sum(map(math.exp, one.values())) < 1.0001 for one in ranked)
