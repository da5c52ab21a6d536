"""A damaged or hostile file, template or request is read as it was, or refused: no traceback, no hang, no difference.

`pytest -m slow tests/fuzz` runs 2,000 cases of each kind; MESHPAR_FUZZ_SEED chooses others.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshpar.checkpoint import checksums
from meshpar.checkpoint.checkpoints import CheckpointMetadata, checkpoints
from meshpar.checkpoint.saved import META, Checkpoint, find
from meshpar.data import Arrow, Jsonl, Numpy, Parquet, TokenizerFile
from meshpar.data.chat.template import ChatTemplate
from meshpar.data.special_tokens import SamplingDefaults
from meshpar.errors import MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.start import order_of
from meshpar.interop.huggingface import open_pretrained
from meshpar.serve.http.bodies import CompletionBody, parse
from meshpar.serve.http.chat_bodies import ChatBody
from meshpar.serve.http.errors import ApiError
from tests.config.keys import PLAIN
from tests.damage import at_most
from tests.effect.files import write_llama
from tests.fuzz.test_fuzz import SEEDS
from tests.fuzz.values import scalar, value
from tests.sources import write_tokenizer

REFUSALS = (MeshparError, ApiError)
LIMIT_S = 20


# Damage -------------------------------------------------------------------------------------------------------------


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The content with one fault that a disk, a network or a person makes."""
    at = rng.randrange(len(content) + 1)
    size = rng.choice((1, 1, 2, 8, 64, 4096))
    form = rng.randrange(7)
    if form == 0:
        return content[:at]
    if form == 1:
        return content[:at] + content[at + size :]
    if form == 2:
        return content[:at] + rng.randbytes(size) + content[at:]
    if form == 3 and content:
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if form == 4:
        return content[:at] + bytes(size) + content[at + size :]
    if form == 5:
        return b""
    return of_json(rng, content)


def of_json(rng: random.Random, content: bytes) -> bytes:
    """Another value somewhere in JSON; damage elsewhere."""
    try:
        data = json.loads(content)
    except ValueError:
        return content[::-1]
    holders = [one for one in nodes(data) if one]
    if not holders:
        return content + b"x"
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    if rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = value(rng)
    return json.dumps(data).encode("utf-8", "surrogatepass")


def nodes(data: Any) -> list[Any]:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [*([data] if isinstance(data, (dict, list)) else []), *(found for one in inner for found in nodes(one))]


def in_copy(rng: random.Random, whole: Path, folder: Path) -> str | None:
    """Copies a folder, with damage to one of its files; the damaged file, None if its content is the same."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    if rng.random() < 0.05:
        path.unlink()
        return path.name
    before = path.read_bytes()
    after = damaged(rng, before)
    path.write_bytes(after)
    return path.name if after != before else None


def fuzzed(case: Callable[[random.Random], str], seed: int, count: int) -> Counter[str]:
    """How the cases ended: each is read, or refused by one of `REFUSALS`. A fault names its case."""
    ended: Counter[str] = Counter()
    for i in range(count):
        rng = random.Random(f"{case.__qualname__} {seed} {i}")
        try:
            with at_most(LIMIT_S), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ended[case(rng)] += 1
        except REFUSALS:
            ended["refused"] += 1
        except BaseException as error:
            error.add_note(f"case {i} of seed {seed}")
            raise
    return ended


# Checkpoints --------------------------------------------------------------------------------------------------------

STATE = {"params": {"w": np.arange(12.0, dtype=np.float32).reshape(3, 4)}, "step": np.int32(3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    run = Run(**PLAIN)
    about = CheckpointMetadata(run.model_dump(mode="json"), seed=0, batch_size=8, order={"first": 0, "since": 0,
                               "pieces": 1, "before": []})  # fmt: skip
    with checkpoints(folder / "checkpoints", about=about) as writer:
        writer.save(3, as_jax(STATE))
    return folder


def as_jax(state: Any) -> Any:
    import jax

    return jax.tree.map(jax.numpy.asarray, state)


def checkpoint_case(saved: Path, folder: Path) -> Callable[[random.Random], str]:
    import jax

    expected = find(saved).meta

    def case(rng: random.Random) -> str:
        name = in_copy(rng, saved, folder)
        found = find(folder)
        found.verify()
        restored = found.restore(jax.eval_shape(lambda: as_jax(STATE)))
        jax.tree.map(np.testing.assert_array_equal, restored, STATE)
        assert found.meta == expected
        assert name is None or name not in ("meta.json", "sha256.json") or found.meta == expected
        return "read"

    return case


def signed_case(saved: Path, folder: Path) -> Callable[[random.Random], str]:
    """Another program wrote meta.json: its checksum is right, and its content may be anything."""
    run = Run(**PLAIN)

    def case(rng: random.Random) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)
        checkpoint = folder / "checkpoints" / "3"
        path = checkpoint / META
        path.write_bytes(of_json(rng, path.read_bytes()))
        (checkpoint / checksums.FILE).unlink()
        checksums.write(checkpoint)
        _ = Checkpoint(checkpoint).meta
        order_of(run, Checkpoint(checkpoint))
        return "read"

    return case


# Hugging Face folders, tokenizers, templates ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "model"
    write_llama(folder)
    return folder


def folder_case(pretrained: Path, folder: Path) -> Callable[[random.Random], str]:
    whole = open_pretrained(pretrained)

    def case(rng: random.Random) -> str:
        name = in_copy(rng, pretrained, folder)
        found = open_pretrained(folder)
        assert found.paths and found.dtype
        if name != "config.json":
            assert found.model == whole.model
        return "read"

    return case


def tokenizer_case(folder: Path) -> Callable[[random.Random], str]:
    path = folder / "tokenizer.json"
    write_tokenizer(path)
    content = path.read_bytes()

    def case(rng: random.Random) -> str:
        path.unlink()  # a file of the same size and time would be known
        path.write_bytes(damaged(rng, content) if rng.random() < 0.5 else of_json(rng, content))
        tokenizer = TokenizerFile(path=str(path))
        ids = tokenizer.encode("a mesh, 1 né").tolist()
        assert all(0 <= i < tokenizer.vocab_size for i in (*ids, tokenizer.bos))
        tokenizer.decode(ids)
        return "read"

    return case


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PIECES = ("{{", "}}", "{%", "%}", "{{ x.y.z }}", "{{ 1/0 }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}",
          "{% for i in range(9) %}", "{% endfor %}", "{{ self }}", "{% include 'x' %}", "{% import 'os' as os %}",
          "{{ cycler.__init__.__globals__ }}", "{{ messages | tojson }}", "{% set x = 1 %}", "{{ [0] * 99 }}",
          "\0")  # fmt: skip


def template_case(rng: random.Random) -> str:
    text = TEMPLATE
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(PIECES) + text[at + rng.choice((0, 0, 1, 5)) :]
    messages = [{"role": rng.choice(("user", "system", "x")), "content": rng.choice(("hi", "{{ 1 }}", ""))}]
    rendered = ChatTemplate(text, {"bos_token": "<s>"}).render(messages)
    assert isinstance(rendered, str)
    assert "class 'object'" not in rendered, "the sandbox was left"
    return "read"


# Requests -----------------------------------------------------------------------------------------------------------

BODIES = {
    CompletionBody: {"prompt": "hi", "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "n": 2, "stream": True},
    ChatBody: {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "seed": 3, "top_p": 0.5},
}


def request_case(rng: random.Random) -> str:
    kind = rng.choice(list(BODIES))
    body = copy.deepcopy(BODIES[kind])
    for _ in range(rng.choice((0, 1, 1, 2))):
        holder = rng.choice([one for one in nodes(body) if isinstance(one, dict)])
        names = (*holder, *kind.model_fields, "tools", "logprobs", "user", "x")
        holder[rng.choice(names)] = value(rng) if rng.random() < 0.8 else scalar(rng)
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        content = damaged(rng, content)
    parse(kind, content).sampling(SamplingDefaults())
    return "read"


# Caches and packed data ---------------------------------------------------------------------------------------------


def cache_case(folder: Path) -> Callable[[random.Random], str]:
    """A damaged cache is computed again: the tokens are those of the files."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i} " * 3}) + "\n" for i in range(20)))
    data = Jsonl(path=str(folder / "a.jsonl"), cache=str(folder / "cache"))
    expected = tokens(data)
    shutil.copytree(folder / "cache", folder / "whole")

    def case(rng: random.Random) -> str:
        in_copy(rng, folder / "whole", folder / "cache")
        np.testing.assert_array_equal(tokens(data), expected)
        return "read"

    return case


def tokens(data: Any) -> np.ndarray:
    documents = data.documents()
    return documents.take(np.arange(documents.num_tokens))[0]


def packed_case(folder: Path) -> Callable[[random.Random], str]:
    """Files of ids and of columns, of which any part may be damaged."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    ids = {"kind": "ids", "vocab_size": 50, "bos": 0}
    table = pa.table({"text": [[1, 2, 3], [4, 5]] * 5})
    np.save(folder / "a.npy", np.arange(40, dtype=np.uint16).reshape(10, 4))
    np.savez(folder / "b.npz", a=np.arange(40, dtype=np.uint16).reshape(10, 4))
    parquet.write_table(table, folder / "c.parquet")
    with ipc.new_file(folder / "d.arrow", table.schema) as writer:
        writer.write_table(table)
    kinds = {"a.npy": Numpy, "b.npz": Numpy, "c.parquet": Parquet, "d.arrow": Arrow}
    contents = {name: (folder / name).read_bytes() for name in kinds}

    def case(rng: random.Random) -> str:
        name = rng.choice(list(kinds))
        path = folder / f"damaged-{name}"
        path.unlink(missing_ok=True)  # the file may still be mapped
        path.write_bytes(damaged(rng, contents[name]))
        found = tokens(kinds[name](path=str(path), tokenizer=ids))
        assert found.min(initial=0) >= 0
        assert found.max(initial=0) < 50
        return "read"

    return case


# The cases ----------------------------------------------------------------------------------------------------------

FILES = ("checkpoints", "signed", "folders", "tokenizers", "templates", "requests", "caches", "packed")


@pytest.fixture
def case_of(saved: Path, pretrained: Path, tmp_path: Path) -> Callable[[str], Callable[[random.Random], str]]:
    made = {
        "checkpoints": lambda: checkpoint_case(saved, tmp_path / "copy"),
        "signed": lambda: signed_case(saved, tmp_path / "copy"),
        "folders": lambda: folder_case(pretrained, tmp_path / "copy"),
        "tokenizers": lambda: tokenizer_case(tmp_path),
        "templates": lambda: template_case,
        "requests": lambda: request_case,
        "caches": lambda: cache_case(tmp_path),
        "packed": lambda: packed_case(tmp_path),
    }
    return lambda name: made[name]()


@pytest.mark.parametrize("name", FILES)
def test_a_sample_is_read_as_it_was_or_refused(case_of, name):
    ended = fuzzed(case_of(name), 0, 40)
    assert sum(ended.values()) == 40
    assert ended["refused"] > 5 or name == "caches"
    assert ended["read"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FILES)
def test_2000_cases_are_read_as_they_were_or_refused(case_of, name, seed):
    assert sum(fuzzed(case_of(name), seed, 2000).values()) == 2000


@pytest.mark.parametrize("fault", [KeyError("planted"), AssertionError("planted"), MemoryError()])
def test_control_a_fault_is_no_refusal(fault):
    def case(rng: random.Random) -> str:
        raise fault

    with pytest.raises(type(fault)):
        fuzzed(case, 0, 1)


def test_control_a_silent_difference_is_found(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "verify", lambda self, include=(): None)
    monkeypatch.setattr(Checkpoint, "restore", lambda self, structs: STATE | {"step": np.int32(4)})
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        fuzzed(checkpoint_case(saved, tmp_path / "copy"), 0, 40)
