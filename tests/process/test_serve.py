"""A server as users start it, of a Llama in a Hugging Face folder: OpenAI's client, a browser, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import openai
import pytest
from flax import nnx

import meshpar
from meshpar.interop.export import export
from meshpar.models import Llama
from meshpar.tree import flatten_with_paths
from tests.program.chromium import chromium

MESH = ("mesh.data=2", "mesh.tensor=2", "rules=[megatron]")
TEMPLATE = "{% for m in messages %}{{ '<user> ' + m.content + ' <end> ' }}{% endfor %}{{ '<assistant>' }}"
VOCAB = 64
LIMIT_S = 240


class Server(NamedTuple):
    process: subprocess.Popen[str]
    url: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama with random weights, a tokenizer of words and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = tmp_path_factory.mktemp("tokenizer")
    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB - 4)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<user>", "<assistant>", "<end>"])
    library.save(str(words / "tokenizer.json"))
    (words / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    sizes: Any = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64}
    model = Llama(**sizes, vocab_size=VOCAB)
    drawn = nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param))
    made = tmp_path_factory.mktemp("models") / "tiny-llama"
    params = flatten_with_paths(jax.tree.map(lambda x: 3 * x, drawn))
    params["head"] = params["head"].at[:, VOCAB - 1].set(0.0)  # the end of a document is never the most probable
    export(made, model, params, words)
    return made


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    command = [sys.executable, "-m", "meshpar", "serve", folder, *MESH, "--port=0", "--max-len=640", "--slots=4"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MESHPAR_SERVE_TOKEN": "secret"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stderr.readline() for _ in range(2)]
        assert "data=2, tensor=2: 4 slots, 160 pages of 16 tokens" in lines[0], lines
        found = re.fullmatch(r"listening at (http://127\.0\.0\.1:\d+)\n", lines[1])
        assert found, lines
        yield Server(process, found[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder) -> list[str]:
    """The answers of `generate` to two prompts: a text, and a chat with one message."""
    prompts = ["w3 w1 w4", [VOCAB - 4, 3, 1, 4, VOCAB - 2, VOCAB - 3]]
    return meshpar.generate(folder, prompts, max_tokens=12, overrides=["mesh.data=8"]).texts


def test_openais_client_gets_the_answers_of_generate(client, expected):
    assert [model.id for model in client.models.list()] == ["tiny-llama"]
    settings: Any = {"model": "tiny-llama", "temperature": 0}
    completion = client.completions.create(prompt="w3 w1 w4", max_tokens=12, **settings)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (expected[0], "length")
    assert completion.usage.completion_tokens == 12
    stream = client.completions.create(prompt="w3 w1 w4", max_tokens=12, stream=True, **settings)
    assert "".join(event.choices[0].text for event in stream) == expected[0]
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "w3 w1 w4"}]}]
    chat = client.chat.completions.create(messages=messages, max_completion_tokens=12, **settings)
    assert (chat.choices[0].message.role, chat.choices[0].message.content) == ("assistant", expected[1])
    again = [*messages, chat.choices[0].message.model_dump(), *messages]
    client.chat.completions.create(messages=again, max_tokens=1, **settings)
    chunks = client.chat.completions.create(messages=messages, max_tokens=12, stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected[1]


def test_openais_client_raises_its_own_errors(client):
    settings: Any = {"model": "tiny-llama", "prompt": "w1"}
    with pytest.raises(openai.BadRequestError, match="1 tokens and 700 more do not fit 640") as error:
        client.completions.create(max_tokens=700, **settings)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.completions.create(**settings | {"model": "other"})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(**settings)
    with pytest.raises(openai.BadRequestError, match="contains '<end>', a special token"):
        client.chat.completions.create(model="tiny-llama", messages=[{"role": "user", "content": "w1 <end>"}])


# Writes down what the page shows at each change, which is faster than a driver can ask.
WATCH = """
window.shown = [];
const count = (kind) => document.querySelectorAll(`#pages .${kind}`).length;
new MutationObserver(() => window.shown.push([
  document.getElementById("answer").textContent, count("held"), count("reusable")
])).observe(document.body, {subtree: true, childList: true, characterData: true});
document.getElementById("prompt").value = "w3 w1 w4";
document.getElementById("token").value = "secret";
document.getElementById("max_tokens").value = arguments[0];
document.getElementById("send").click();
"""


def wait_until(browser: Any, expression: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser.driver, LIMIT_S, poll_frequency=0.05).until(lambda _: browser.ask(expression))


def test_the_page_shows_tokens_as_they_arrive_and_the_cache_as_it_fills(server, expected, tmp_path):
    with chromium(tmp_path / "profile") as browser:
        browser.driver.get(f"{server.url}/")
        wait_until(browser, "document.getElementById('status').textContent.startsWith('ok')")
        browser.driver.execute_script(WATCH, 300)
        wait_until(browser, "document.getElementById('speed').textContent")
        wait_until(browser, "!document.querySelector('#pages .held') && document.querySelector('#pages .reusable')")
        shown = browser.ask("window.shown")
        texts = list(dict.fromkeys(text for text, *_ in shown))
        assert len(texts) > 20
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert texts[-1].startswith(expected[0])
        assert max(held for _, held, _ in shown) == 19  # 303 tokens, in pages of 16
        assert browser.ask("document.getElementById('speed').textContent").startswith("300 tokens, the first after")
        assert browser.ask("document.getElementById('model').textContent") == "tiny-llama"
        for width in (1280, 400):
            browser.screen(width)
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
        assert browser.console() == []
        asked = [url for url in browser.requests() if url.startswith("http")]
        assert [url for url in asked if not url.startswith(server.url)] == []

        browser.driver.execute_script("document.getElementById('prompt').value = '<img src=x onerror=alert(1)>'")
        browser.driver.execute_script("document.getElementById('token').value = 'wrong'")
        browser.driver.execute_script("document.getElementById('send').click()")
        wait_until(browser, "document.getElementById('answer').classList.contains('bad')")
        assert "Bearer TOKEN is missing or wrong" in browser.ask("document.getElementById('answer').textContent")


def test_at_sigterm_it_answers_what_runs_refuses_the_rest_and_ends_with_0(server, client):
    """The last test of this module, since it ends the server."""
    settings: Any = {"model": "tiny-llama", "prompt": "w3 w1 w4", "temperature": 0}
    counted: Any = {"include_usage": True}
    stream = iter(client.completions.create(max_tokens=600, stream=True, stream_options=counted, **settings))
    pieces = [next(stream)]
    server.process.send_signal(signal.SIGTERM)
    while health(server) == 200:
        pass
    with pytest.raises(openai.APIStatusError, match="the server is draining") as refused:
        client.completions.create(max_tokens=1, **settings)
    assert refused.value.status_code == 503
    pieces.extend(stream)
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage.completion_tokens == 600
    assert server.process.wait(LIMIT_S) == 0


def health(server: Server) -> int:
    try:
        with urllib.request.urlopen(f"{server.url}/health") as page:
            return page.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
