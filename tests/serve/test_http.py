"""The endpoints of a server: its answers equal those of `generate`, and what ends or is refused holds nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshpar.data.special_tokens import SamplingDefaults, sampling_defaults
from meshpar.errors import DataError
from meshpar.serve.answer import Answer
from meshpar.serve.batch import Batch, requests_of
from meshpar.serve.drafts import NGrams
from meshpar.serve.engine import Engine
from meshpar.serve.http.replies import EventStream
from meshpar.serve.paged_model import GREEDY, DraftModel
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Request, Row
from meshpar.serve.service import Answers
from tests.serve import malformed
from tests.serve.client import IDS, JSON, Client, serving
from tests.serving import batch_engine, engine, paged, params, placed

PROMPT = [3, 1, 4]
NUM = 200
LONGEST_PROMPT = 20
LONGEST_ANSWER = 12
DRAFTER = NGrams(size=1, num_drafts=3)
COMPILATIONS: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **about: COMPILATIONS.append(name) if name.endswith("backend_compile_duration") else None
)


@pytest.fixture(scope="module")
def float64_module():
    with jax.enable_x64(True):
        yield


ROOM: dict[str, Any] = {"slots": 8, "pages": 64, "page_size": 4, "max_len": 32, "chunk": 8, "max_queue": NUM}


@pytest.fixture(scope="module")
def one(float64_module) -> Engine:
    """An engine on one device. Its pages keep prefixes of earlier tests, as those of a server do.

    It can check drafts, and has no drafter.
    """
    return without_drafter("one", "auto")


def without_drafter(layout: str, lowering: str) -> Engine:
    found = engine("llama", layout, lowering, drafter=DRAFTER, **ROOM)
    found.drafter = None
    return found


def mixed() -> tuple[list[list[int]], list[int]]:
    """Prompts of mixed lengths, some with the same beginning, and the lengths of their answers."""
    drawn = random.Random(0)
    beginning = [drawn.randrange(28) for _ in range(9)]
    prompts = [
        (beginning if i % 4 == 0 else []) + [drawn.randrange(28) for _ in range(drawn.randint(1, LONGEST_PROMPT - 9))]
        for i in range(NUM)
    ]
    return prompts, [drawn.randint(1, LONGEST_ANSWER) for _ in prompts]


@pytest.fixture(scope="module")
def expected(float64_module) -> list[str]:
    """The answers of `generate` to the mixed prompts."""
    prompts, lengths = mixed()
    batch = Batch([Answer(IDS, [], length) for length in lengths])
    list(batch.stream(on_one_device(GREEDY), requests_of(prompts, LONGEST_ANSWER, GREEDY)))
    return [answer.text for answer in batch.answers]


@lru_cache
def on_one_device(sampling: Sampling) -> Engine:
    sizes = {"num_rows": NUM, "longest": LONGEST_PROMPT, "max_tokens": LONGEST_ANSWER}
    return batch_engine("llama", "one", "auto", sampling, **sizes)


async def ask_all(client: Client) -> list[str]:
    prompts, lengths = mixed()
    replies = await asyncio.gather(
        *(client.complete(p, max_tokens=n, temperature=0) for p, n in zip(prompts, lengths, strict=True))
    )
    assert {reply.status for reply in replies} == {200}
    return [reply.json["choices"][0]["text"] for reply in replies]


def run(engine: Engine, scene: Any, **settings: Any) -> Any:
    """Runs `scene(client)` in a server that must hold nothing at its end."""

    async def inside() -> Any:
        async with serving(engine, **settings) as client:
            return await scene(client)

    return asyncio.run(inside())


def generated(num_tokens: int, sampling: Sampling = GREEDY, stop: tuple[str, ...] = ()) -> Answer:
    """The answer of `generate` to PROMPT."""
    answer = Answer(IDS, stop, num_tokens)
    list(Batch([answer]).stream(on_one_device(sampling), requests_of([PROMPT], LONGEST_ANSWER, sampling)))
    return answer


# Answers --------------------------------------------------------------------------------------------------------------


def test_200_concurrent_requests_get_the_tokens_of_generate_and_compile_nothing(one, expected):
    before = len(COMPILATIONS)
    assert before > 0
    assert run(one, ask_all) == expected
    assert len(COMPILATIONS) == before


def test_200_concurrent_requests_with_drafts_get_the_same_tokens(one, expected, monkeypatch):
    monkeypatch.setattr(one, "drafter", DRAFTER)
    before = len(COMPILATIONS)

    async def scene(client: Client) -> None:
        assert await ask_all(client) == expected
        counts = samples(await client.get("/metrics"))
        assert 20 < counts["meshpar_serve_accepted_drafts_total"] < counts["meshpar_serve_drafts_total"]

    run(one, scene)
    assert len(COMPILATIONS) == before


def test_200_concurrent_requests_on_tensor_4_and_data_2_get_the_same_tokens_with_and_without_drafts(expected):
    engine = without_drafter("data2_tensor4", "manual")
    assert run(engine, ask_all) == expected
    engine.drafter = DRAFTER
    assert run(engine, ask_all) == expected


def test_a_model_that_drafts_for_itself_is_always_right(one, expected, monkeypatch):
    """All keys and values of its own pages are those of the model, those of shared and of reused pages too."""
    decoding = paged("llama", "one", "auto", num_drafts=DRAFTER.num_drafts, **ROOM)
    monkeypatch.setattr(one, "drafter", DraftModel(decoding, lambda structs: placed(params("llama"), structs)))

    async def scene(client: Client) -> None:
        assert await ask_all(client) == expected
        counts = samples(await client.get("/metrics"))
        assert counts["meshpar_serve_accepted_drafts_total"] == counts["meshpar_serve_drafts_total"] > 500

    run(one, scene)


def test_control_a_wrong_draft_that_is_accepted_gives_other_tokens(one, expected, monkeypatch):
    monkeypatch.setattr(one, "drafter", DRAFTER)
    monkeypatch.setattr("meshpar.serve.engine.accepted", lambda drafts, own: [*drafts, own[len(drafts)]])
    assert run(one, ask_all) != expected


def test_control_a_compilation_in_another_thread_is_counted():
    before = len(COMPILATIONS)
    asyncio.run(asyncio.to_thread(lambda: jax.jit(lambda x: x * 3)(np.zeros(5))))
    assert len(COMPILATIONS) == before + 1


def test_control_a_wrong_page_gives_other_tokens(one, expected, monkeypatch):
    place = Engine._placed_rows

    def rotated(self, rows):
        placed = place(self, rows)
        return placed._replace(table=jax.device_put(jnp.roll(placed.table, 1, axis=0), placed.table.sharding))

    monkeypatch.setattr(Engine, "_placed_rows", rotated)
    assert run(one, ask_all) != expected


def test_a_stream_is_the_whole_answer_in_pieces(one):
    async def scene(client: Client) -> None:
        settings = {"max_tokens": 8, "temperature": 0}
        whole = (await client.complete(PROMPT, **settings)).json
        options = {"include_usage": True}
        events = (await client.complete(PROMPT, **settings, stream=True, stream_options=options)).events
        *pieces, end = events
        assert "".join(event["choices"][0]["text"] for event in pieces) == whole["choices"][0]["text"]
        assert len(pieces) > 4
        assert [event["choices"][0]["finish_reason"] for event in pieces][-2:] == [None, "length"]
        assert end["choices"] == []
        assert all(event["usage"] is None for event in pieces)
        assert end["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8

    run(one, scene)


def test_a_stop_string_that_spans_tokens_ends_an_answer_as_in_generate(one):
    free = generated(10).text
    stop = free[3:8]  # parts of several tokens, whose texts are one or two digits
    want = generated(10, stop=(stop,))
    assert want.finish == "stop"

    async def scene(client: Client) -> None:
        settings: Any = {"max_tokens": 10, "temperature": 0, "stop": stop}
        [choice] = (await client.complete(PROMPT, **settings)).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == (want.text, "stop")
        pieces = (await client.complete(PROMPT, **settings, stream=True)).events
        assert "".join(event["choices"][0]["text"] for event in pieces) == want.text

    run(one, scene)


def test_ids_at_which_an_answer_stops_are_those_of_the_request_too(one):
    free = generated(10)
    third = free.tokens[2]
    before = free.tokens.index(third)

    async def scene(client: Client) -> None:
        settings: Any = {"max_tokens": 10, "temperature": 0, "stop_token_ids": [third]}
        reply = (await client.complete(PROMPT, **settings)).json
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["choices"][0]["text"].split() == [str(token) for token in free.tokens[:before]]
        again = (await client.complete(PROMPT, max_tokens=10, temperature=0)).json
        assert again["choices"][0]["finish_reason"] == "length", "other requests stop where they did"

    run(one, scene)


def test_a_request_that_names_no_sampling_has_that_of_generation_config(one, tmp_path, monkeypatch):
    from meshpar.serve.http import app

    saved = {"do_sample": True, "temperature": 5.0, "top_k": 9, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(saved))
    monkeypatch.setattr(app, "NEUTRAL", sampling_defaults(tmp_path))

    async def scene(client: Client) -> list[str]:
        replies = [await client.complete(PROMPT, max_tokens=9, seed=5, **more) for more in ({}, {"temperature": 0})]
        return [reply.json["choices"][0]["text"] for reply in replies]

    drawn, greedy = run(one, scene)
    assert drawn == generated(9, Sampling(temperature=5.0, top_k=9, top_p=0.9, seed=5)).text
    assert greedy == generated(9).text


def test_generation_config_is_read_as_it_is_meant(tmp_path):
    def read(saved: dict[str, Any]) -> SamplingDefaults:
        (tmp_path / "generation_config.json").write_text(json.dumps(saved))
        return sampling_defaults(tmp_path)

    assert read({"temperature": 0.2}) == SamplingDefaults(), "do_sample is false by default"
    assert read({"do_sample": True, "temperature": 0.2, "top_k": 0}) == SamplingDefaults(temperature=0.2)
    with pytest.raises(DataError, match=r"top_p = 2 *\n* *is not from 0 to 1"):
        read({"do_sample": True, "top_p": 2})
    assert read({"temperature": 0.2, "repetition_penalty": 1.05}) == SamplingDefaults(repetition_penalty=1.05)


@pytest.mark.parametrize("drafter", [None, DRAFTER])
def test_drawn_answers_are_those_of_generate_with_the_same_seed(one, drafter, monkeypatch):
    monkeypatch.setattr(one, "drafter", drafter)
    sampling = Sampling(temperature=5.0, top_k=9, top_p=0.9, seed=5)
    settings: Any = {"max_tokens": 9, "temperature": 5.0, "top_k": 9, "top_p": 0.9}

    async def scene(client: Client) -> tuple[str, ...]:
        drawn, other, greedy = await asyncio.gather(
            client.complete(PROMPT, **settings, seed=5),
            client.complete(PROMPT, **settings, seed=6),
            client.complete(PROMPT, max_tokens=9, temperature=0),
        )
        return tuple(reply.json["choices"][0]["text"] for reply in (drawn, other, greedy))

    drawn, other, greedy = run(one, scene)
    assert drawn == generated(9, sampling).text
    assert greedy == generated(9).text
    assert len({drawn, other, greedy}) == 3


def test_a_request_has_several_prompts_and_several_answers(one):
    async def scene(client: Client) -> None:
        reply = (await client.complete([[3, 1], [4, 1]], n=2, max_tokens=8, seed=1)).json
        texts = [choice["text"] for choice in reply["choices"]]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert texts[0] != texts[1]
        assert reply["usage"]["prompt_tokens"] == 4, "a prompt counts once, however many answers it has"
        assert reply["usage"]["completion_tokens"] == 32

    run(one, scene)


def test_a_prefix_is_reused_and_gives_the_same_tokens(one):
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, 28, 14)]

    async def scene(client: Client) -> None:
        first, second = [(await client.complete(prompt, max_tokens=4, temperature=0)).json for _ in range(2)]
        assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)] == [0, 12]
        assert first["choices"] == second["choices"]

    run(one, scene)


def test_nan_of_an_earlier_request_reaches_no_other(one):
    """Pages are not cleared. Weights of 0 times NaN would be NaN."""
    one._pages = jax.tree.map(lambda x: jax.device_put(jnp.full_like(x, jnp.nan), x.sharding), one._pages)

    async def scene(client: Client) -> list[str]:
        # The chunk of 8 is longer than the page of 4 that the first request reserves.
        replies = [await client.complete(PROMPT, max_tokens=num, temperature=0) for num in (1, 8)]
        return [reply.json["choices"][0]["text"] for reply in replies]

    assert run(one, scene) == [generated(1).text, generated(8).text]


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_pages(one, stream):
    async def scene(client: Client) -> None:
        body = b'{"prompt": [3, 1, 4], "max_tokens": 29, "temperature": 0, "stream": %s}' % str(stream).lower().encode()
        counts = []
        for leave_after in (0, 1, 3) if stream else (0,):
            sent = asyncio.create_task(client.send("/v1/completions", body, leave_after=leave_after))
            await asyncio.sleep(0)
            while not client.endpoints.service.scheduler.is_idle or not sent.done():
                counts.append(client.num_held)
                await asyncio.sleep(0)
            assert client.num_held == 0
        assert max(counts) == 8 or not stream  # 32 tokens
        assert finished(await client.get("/metrics")) == {"cancelled": 3 if stream else 1}

    run(one, scene)


def test_control_a_stream_that_forgets_to_cancel_holds_pages(one, monkeypatch):
    async def forgetful(self, scope, receive, send):
        pass

    monkeypatch.setattr(EventStream, "__call__", forgetful)

    async def scene(client: Client) -> int:
        await client.complete(PROMPT, max_tokens=29, stream=True)
        return client.num_held

    with pytest.raises(AssertionError):
        run(one, scene)


def finished(reply: Any) -> dict[str, float]:
    """How many answers ended, by the reason."""
    found = [sample for sample in parsed(reply) if sample.name == "meshpar_serve_answers_total"]
    return {sample.labels["finish"]: sample.value for sample in found}


def samples(reply: Any) -> dict[str, float]:
    """Metrics by name."""
    return {sample.name: sample.value for sample in parsed(reply)}


def parsed(reply: Any) -> list[Any]:
    families = text_string_to_metric_families(reply.body.decode())
    return [sample for family in families for sample in family.samples]


def test_a_full_queue_is_429(one):
    async def scene(client: Client) -> None:
        scheduler = client.endpoints.service.scheduler
        scheduler.capacity = replace(scheduler.capacity, max_queue=4)
        assert (await client.complete([[1]] * 5, max_tokens=1)).status == 400
        replies = await asyncio.gather(*(client.complete([1, 2], max_tokens=29, temperature=0) for _ in range(30)))
        statuses = Counter(reply.status for reply in replies)
        assert statuses.keys() == {200, 429}
        assert 4 <= statuses[200] <= 8 + 4  # slots, and the queue
        refused = next(reply for reply in replies if reply.status == 429)
        assert refused.json["error"]["type"] == "rate_limit_error"

    run(one, scene)


def test_draining_refuses_new_requests_and_answers_the_others(one):
    async def scene(client: Client) -> None:
        running = asyncio.create_task(client.complete(PROMPT, max_tokens=20, temperature=0))
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(client.endpoints.service.drain())
        await asyncio.sleep(0)
        refused = await client.complete([1], max_tokens=1)
        assert (refused.status, refused.json["error"]["message"]) == (503, "the server is draining")
        assert (await client.get("/health")).status == 503
        assert (await running).json["usage"]["completion_tokens"] == 20
        await draining

    run(one, scene)


def test_an_engine_that_fails_ends_every_request_with_503(one, monkeypatch):
    async def scene(client: Client) -> None:
        monkeypatch.setattr(client.endpoints.service._engine, "run", broken)
        whole, stream = await asyncio.gather(client.complete([1]), client.complete([1], stream=True))
        assert whole.status == 503
        assert b"the server has failed" in stream.body
        assert (await client.complete([1])).status == 503
        assert (await client.get("/health")).json["status"] == "failed"
        monkeypatch.undo()

    def broken(plan):
        raise RuntimeError("out of memory")

    run(one, scene)


# Refusals -------------------------------------------------------------------------------------------------------------

BAD = {
    "no prompt": ({}, "prompt: Field required"),
    "an empty prompt": ({"prompt": ""}, "prompt: is empty"),
    "no prompts": ({"prompt": []}, "0 prompts"),
    "ids outside of the vocabulary": ({"prompt": [29]}, "outside of the model's vocabulary of 29"),
    "text that is no id": ({"prompt": "a"}, "is not a line of token ids"),
    "a number": ({"prompt": 3}, "prompt: Input should be a valid array"),
    "too many tokens": ({"prompt": [1], "max_tokens": 32}, "1 tokens and 32 more do not fit 32"),
    "no tokens": ({"prompt": [1], "max_tokens": 0}, "max_tokens: with 0 there is no answer"),
    "a temperature below 0": ({"prompt": [1], "temperature": -1}, "temperature: Input should be greater"),
    "text as a number": ({"prompt": [1], "temperature": "1"}, "temperature: Input should be a valid number"),
    "an unknown key": ({"prompt": [1], "max_token": 3}, "max_token: unknown key; did you mean max_tokens?"),
    "a key that is not supported": ({"prompt": [1], "suffix": "a"}, "suffix is not supported"),
    "an empty stop string": ({"prompt": [1], "stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
    "too many answers": ({"prompt": [1], "n": 129}, "n: Input should be less than or equal to 128"),
    "too many answers to too many prompts": ({"prompt": [[1]] * 9, "n": 99}, "9 prompts with n = 99"),
    "two problems": ({"prompt": [1], "n": 0, "seed": -1}, "seed: Input should be greater than or equal to 0; n:"),
}


def test_bad_requests_are_refused_with_the_reason(one):
    async def scene(client: Client) -> None:
        for body, message in BAD.values():
            reply = await client.post("/v1/completions", **body)
            error = reply.json["error"]
            assert (reply.status, error["type"]) == (400, "invalid_request_error"), body
            assert message in error["message"]
        assert (await client.complete([1], model="other")).status == 404
        assert (
            "has no chat template"
            in (await client.post("/v1/chat/completions", messages=MESSAGES)).json["error"]["message"]
        )
        vectors = await client.post("/v1/embeddings", input="a")
        assert (vectors.status, vectors.json["error"]["code"]) == (400, "no_embeddings")
        assert "serve an encoder: BERT, RoBERTa or ModernBERT" in vectors.json["error"]["message"]
        assert (await client.send("/v1/completions", b"{", headers=JSON)).status == 400
        assert (await client.send("/v1/completions", b"{}", headers={"content-type": "text/plain"})).status == 400
        assert (await client.send("/v1/completions", b" " * (2**22 + 1))).status == 413
        assert (await client.send("/v1/completions", method="GET")).status == 405
        assert (await client.get("/v1/nothing")).json["error"]["message"] == "GET /v1/nothing: Not Found"

    run(one, scene)


MESSAGES = [{"role": "user", "content": "3 1"}]


def test_keys_that_ask_for_nothing_are_accepted(one):
    async def scene(client: Client) -> None:
        neutral = {
            "logprobs": None,
            "echo": False,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "user": "me",
        }
        reply = await client.complete([1], max_tokens=2, temperature=0, top_p=0.5, stop=None, **neutral)
        assert reply.status == 200

    run(one, scene)


def test_a_bearer_token_is_required_if_there_is_one(one):
    async def scene(client: Client) -> None:
        for path in ("/v1/models", "/metrics"):
            assert (await client.get(path)).status == 401
            assert (await client.get(path, {"authorization": "Bearer wrong"})).status == 401
            assert (await client.get(path, {"authorization": "Bearer s\xe9cret"})).status == 200
        assert (await client.complete([1])).status == 401
        assert (await client.get("/health")).status == 200
        assert (await client.get("/")).body.startswith(b"<!doctype html>")

    run(one, scene, token="s\xe9cret")


def test_a_page_whose_name_leads_here_is_refused(one):
    async def scene(client: Client) -> None:
        assert (await client.send("/v1/completions", b"{}", headers=JSON | {"host": "evil.example"})).status == 400
        assert (await client.get("/health", {"host": "localhost:8000"})).status == 200

    run(one, scene, hosts=("localhost",))


def test_models_health_and_metrics_say_what_there_is(one):
    async def scene(client: Client) -> None:
        await client.complete([1, 2], max_tokens=5, temperature=0)
        assert [model["id"] for model in (await client.get("/v1/models")).json["data"]] == ["tiny"]
        health = (await client.get("/health")).json
        assert health["slots"] == {"running": 0, "all": 8, "queued": 0}
        assert health["pages"][0]["held"] == 0
        text = (await client.get("/metrics")).body.decode()
        for line in ("meshpar_serve_tokens_total 5.0", "meshpar_serve_time_to_first_token_seconds_count 1.0"):
            assert line in text
        assert finished(await client.get("/metrics")) == {"length": 1}

    run(one, scene)


# Random and malformed requests ----------------------------------------------------------------------------------------

REFUSALS = {400, 404, 405, 413, 429}
LEFT = {0, 499}
"""The client left before a response; or before a complete one."""
IN_USE = (Request, Row, Answer, Answers)


def num_alive() -> int:
    """The objects of requests in memory. The engine keeps the rows of its last turn."""
    gc.collect()
    return sum(issubclass(type(thing), IN_USE) for thing in gc.get_objects())


async def send_many(client: Client, num: int, seed: int) -> Counter[int]:
    """Sends random requests, 16 at a time. Returns how many had each status."""
    statuses = Counter[int]()
    drawn = random.Random(seed)
    requests = [malformed.request(drawn) for _ in range(num)]

    async def some() -> None:
        while requests:
            path, body, method, headers, leave_after = requests.pop()
            reply = await client.send(path, body, method, headers, leave_after)
            statuses[reply.status] += 1
            assert leave_after is not None or reply.status not in LEFT
            assert reply.status in {200, 307} | REFUSALS | LEFT, (path, body, reply)
            if reply.status in REFUSALS:
                assert reply.json["error"]["message"] or method == "HEAD"

    await asyncio.gather(*(some() for _ in range(16)))
    return statuses


def test_random_and_malformed_requests_are_answered_or_refused(one):
    run(one, partial(send_many, num=20, seed=1))
    before = num_alive()
    statuses = run(one, partial(send_many, num=300, seed=0))
    assert statuses[200] > 80
    assert statuses[400] > 40
    assert statuses[499] > 5
    assert num_alive() <= before + 4 * 8  # rows in 8 slots, their requests and answers


@pytest.mark.slow
def test_10_000_random_and_malformed_requests_leak_nothing(one):
    async def scene(client: Client) -> None:
        await send_many(client, 2000, seed=2)
        before = rss()
        for seed in range(3, 7):
            await send_many(client, 2000, seed)
        assert client.num_held == 0
        assert rss() - before < 8 * 2**20

    before = num_alive()
    run(one, scene)
    assert num_alive() <= before + 4 * 8


def rss() -> int:
    """Bytes of memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_control_an_error_that_nobody_handles_is_500(one, monkeypatch):
    def broken(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("meshpar.serve.http.app.parse", broken)
    with pytest.raises(KeyError):  # the application sends 500, and raises it again for the log
        run(one, partial(send_many, num=20, seed=0))
