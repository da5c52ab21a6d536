"""Pairs of commands, run as a reader runs them: nothing of a model is lost between them, in one folder or in two.

The model has everything that can be lost: a tokenizer whose decoder drops a first space, a template, special tokens
that only `special_tokens_map.json` names, an end id that is not customary, a second one in `generation_config.json`, a
BOS that its tokenizer adds or does not add, and a head that is not the embedding.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from meshpar import generate
from meshpar.checkpoint.saved import find, steps
from meshpar.convert import on_one_device, restore_params, trained
from meshpar.data.chat.template import read_template
from meshpar.data.tokenizer import Bytes, TokenizerFile
from meshpar.errors import ConfigError
from meshpar.experiment.config import Run, load
from meshpar.interop.pretrained import check_ids
from meshpar.serve.http.chat import encode_chat
from meshpar.serve.open_engine import open_engine
from meshpar.serve.source import Source, open_source
from meshpar.tree import flatten_with_paths
from tests.interop.pretrained import SIZES, loaded, logits, saved_with
from tests.serve.client import serving

jax.devices()

WORDS = ["▁the", "▁capital", "▁of", "▁is", "▁paris", "▁rome", "▁user", "▁assistant", "▁go", "▁on", "▁a", "▁b"]
SPECIAL = ["<unk>", "<s>", "</s>", "<end>", "<turn>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn> {{ m.role }} {% generation %}{{ m.content }}{% endgeneration %}<end>"
    "{% endfor %}{% if add_generation_prompt %}<turn> assistant{% endif %}"
)
MESSAGES = [{"role": "user", "content": "go on"}]
CONFIG: dict[str, Any] = {
    **SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 24, "eos_token_id": [3, 4],
    "bos_token_id": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-3, "rope_theta": 100.0,
}  # fmt: skip
TEXTS = [f"the capital of {a} is {b} go on" for a in ("paris", "rome", "a", "b") for b in ("paris", "rome", "a", "b")]
SETTINGS = "data.kind=jsonl data.path=texts.jsonl data.batch_size=8 data.seq_len=8 data.held_out_fraction=0.2"
MESH = ["mesh.data=8"]
STEPS = "num_steps=2 loggers=[]"


def write_tokenizer(folder: Path, adds_bos: bool) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    library = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(SPECIAL)
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(folder / "tokenizer.json"))


def write_model(folder: Path, adds_bos: bool = False, **changes: Any) -> Path:
    saved_with(CONFIG | changes, folder)
    write_tokenizer(folder, adds_bos)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    named = {"bos_token": "<s>", "eos_token": "<end>", "unk_token": {"content": "<unk>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with the model `hf`, its run `run`, which was trained on `texts.jsonl`, and its export `out`."""
    folder = tmp_path_factory.mktemp("seams")
    before = Path.cwd()
    os.chdir(folder)
    write_model(Path("hf"))
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def module_command(here):
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from tests.command import Said, exit_code

    def call(*words: object) -> Said:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = exit_code(*words)
        return Said(code, out.getvalue(), err.getvalue())

    return call


def split(text: str) -> list[str]:
    return shlex.split(text)


@pytest.fixture(scope="module")
def converted(here, module_command):
    """What `convert` prints."""
    said = module_command("convert", "run", "mesh.data=8", "--from-hf", "hf")
    assert said.code == 0, said.err
    return said


@pytest.fixture(scope="module")
def tuned(converted, module_command):
    """The run after the printed command, with the file of the reader's data."""
    printed = converted.out.splitlines()[-1].partition("meshpar ")[2]
    assert "data.path=FILE" in printed
    words = split(printed.replace("FILE", "texts.jsonl"))
    said = module_command(*words, *split(SETTINGS)[2:], *split(STEPS), "optim.lr=0.01")
    assert said.code == 0, said.err
    return Path("run")


@pytest.fixture(scope="module")
def out(tuned, module_command):
    assert module_command("export", "run", "out", "--format", "hf").code == 0
    return Path("out")


LANGUAGE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
            "generation_config.json")  # fmt: skip


def check_language(source: Source, theirs: Path) -> None:
    """Compares prompts, chats and end ids with those of transformers for a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    for prompt in ("the capital of a is", "<s>go on<end> a"):
        assert source.encode(prompt) == tokenizer(prompt).input_ids
    assert source.folder is not None
    template = read_template(source.folder)
    assert template is not None
    chat = encode_chat(source.tokenizer, template, MESSAGES)  # pyright: ignore[reportArgumentType]
    assert chat == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert source.ends == set(transformers.GenerationConfig.from_pretrained(theirs).eos_token_id)


def their_answer(folder: Path, prompt: list[int], num: int) -> list[int]:
    import torch

    answer = loaded(folder).generate(torch.tensor([prompt]), max_new_tokens=num, do_sample=False, pad_token_id=0)
    return answer[0].tolist()[len(prompt) :]


def without_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


# convert, then train ------------------------------------------------------------------------------------------------


def test_convert_then_train_as_printed_without_data_is_refused_and_says_what_to_set(converted, module_command):
    said = module_command("train", "run/config.yaml")
    assert said.code == 2
    assert "there is no data to train on" in said.err and "data.kind=jsonl data.path=FILE" in said.err
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["00000000"] or len(
        [*Path("run/checkpoints").iterdir()]
    ) == 1


def test_a_model_with_a_tokenizer_is_not_trained_on_bytes(converted):
    with pytest.raises(ConfigError, match=r"bytes are not the ids of the model.*data.tokenizer=hf/tokenizer.json"):
        check_ids(Path("hf"), Bytes())
    kept = load("run/config.yaml", ["data.kind=jsonl", "data.path=texts.jsonl"])
    assert kept.data.tokenizer == TokenizerFile(path="run/hugging_face/tokenizer.json")


def test_convert_then_train_closes_documents_as_the_model_does(tuned):
    run = load("run/config.yaml", split(SETTINGS))
    assert (run.data.tokenizer.bos, run.data.tokenizer.eos) == (1, 3)
    documents = run.data.documents()  # pyright: ignore[reportAttributeAccessIssue]
    tokens = documents.take(np.arange(documents.num_tokens))[0].tolist()
    assert tokens.count(1) == tokens.count(3) == len(TEXTS)
    assert 2 not in tokens


# train, then generate, serve, export --------------------------------------------------------------------------------


def test_train_then_generate_in_the_language_of_the_model(tuned, out):
    check_language(open_source(tuned), Path("hf"))
    source = open_source(tuned)
    for prompt in ("the capital of a is", "go on", "rome"):
        answer = generate(source, prompt, max_tokens=12).completions[0]
        want = their_answer(out, source.encode(prompt), 12)
        assert answer.tokens == without_end(want, source.ends)
        assert (answer.finish == "end") == (want[-1] in source.ends)


def test_train_then_generate_and_export_from_another_folder(tuned, out, monkeypatch, tmp_path):
    """The path of the tokenizer in the run's config leads nowhere, and the run has a copy."""
    run = tuned.resolve()
    theirs = Path("hf").resolve()
    expected = trained(run)[1]
    monkeypatch.chdir(tmp_path)
    check_language(open_source(run), theirs)
    assert {path: x.shape for path, x in trained(run)[1].items()} == {path: x.shape for path, x in expected.items()}


def test_train_then_export_keeps_every_file_of_the_language(out):
    for name in LANGUAGE:
        assert (out / name).read_bytes() == Path("hf", name).read_bytes(), name
    kept = json.loads((out / "config.json").read_text())
    assert (kept["eos_token_id"], kept["bos_token_id"]) == ([3, 4], 1)


def test_export_then_generate_and_convert_again(out, module_command):
    check_language(open_source(out), Path("hf"))
    assert module_command("convert", "again", "mesh.data=8", "--from-hf", "out").code == 0
    check_language(open_source(Path("again")), Path("hf"))
    one, other = (trained(Path(name))[1] for name in ("run", "again"))
    assert all(np.array_equal(one[path], other[path]) for path in one)


def test_train_then_serve_a_chat(tuned):
    import asyncio

    source = open_source(tuned)
    engine = open_engine(source, slots=2, max_len=32, page_size=4, chunk=8)

    async def scene() -> None:
        async with serving(engine, source) as client:
            chat = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "n": 2}
            reply = (await client.post("/v1/chat/completions", **chat)).json
            tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
            ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
            assert reply["usage"]["prompt_tokens"] == len(ids)
            plain = (await client.complete("<s>go on", max_tokens=1, parse_special=False)).json
            special = (await client.complete("<s>go on", max_tokens=1)).json
            assert special["usage"]["prompt_tokens"] == len(tokenizer("<s>go on").input_ids) == 3
            assert plain["usage"]["prompt_tokens"] == 2  # "<s>go" is an unknown word

    asyncio.run(scene())


# a config that extends the converted one, in another folder ---------------------------------------------------------


MINE = """\
extends: run/config.yaml
run_dir: mine
data: {kind: jsonl, path: texts.jsonl, batch_size: 8, seq_len: 8, held_out_fraction: 0.2}
optim: {lr: 0.01}
lora: {kind: lora, rank: 2, paths: [blocks.**]}
num_steps: 2
mesh: {data: 8}
loggers: []
"""


@pytest.fixture(scope="module")
def mine(tuned, module_command):
    Path("mine.yaml").write_text(MINE)
    said = module_command("train", "mine.yaml")
    assert said.code == 0, said.err
    return Path("mine")


def test_extends_then_train_with_lora_starts_from_the_weights(mine):
    run, params, _ = trained(Path("run"))
    assert run.lora is None
    structs = on_one_device(load("mine.yaml")).placement.structs.params
    arrays = flatten_with_paths(restore_params(find(mine, ("params.**",)), structs))
    for path, array in params.items():
        np.testing.assert_array_equal(arrays[path], array, err_msg=path)
    assert arrays["blocks.attn.q.lora.b"].any(), "it was trained"


def test_extends_then_generate_serve_and_export_in_the_language_of_the_model(mine, module_command):
    check_language(open_source(mine), Path("hf"))
    check_language(open_source(Path("mine.yaml")), Path("hf"))
    assert module_command("convert", "mine", "--to-hf", "mine-out").code == 0
    for name in LANGUAGE:
        assert Path("mine-out", name).read_bytes() == Path("hf", name).read_bytes(), name
    source = open_source(mine)
    answer = generate(source, "the capital", max_tokens=8).completions[0]
    assert answer.tokens == without_end(their_answer(Path("mine-out"), source.encode("the capital"), 8), source.ends)


# init, without sizes ------------------------------------------------------------------------------------------------


ALONE = """\
init: {from_hf: hf}
run_dir: alone
data: {kind: jsonl, path: texts.jsonl, tokenizer: hf/tokenizer.json, batch_size: 8, seq_len: 8, held_out_fraction: 0.2}
optim: {kind: adamw, lr: 0.01}
num_steps: 1
mesh: {data: 8}
loggers: []
"""


def test_init_brings_the_sizes_and_the_language_of_its_model(converted, module_command):
    Path("alone.yaml").write_text(ALONE)
    of_folder = load("alone.yaml")
    assert of_folder.model == load("run/config.yaml").model
    assert load("alone.yaml", ["model={kind: llama, dropout: 0.1}"]).model == of_folder.model.model_copy(
        update={"dropout": 0.1}
    )
    of_checkpoint = load("alone.yaml", ["init={from_checkpoint: run}"])
    assert of_checkpoint.model == of_folder.model
    assert module_command("train", "alone.yaml").code == 0
    assert {path.name for path in Path("alone/hugging_face").iterdir()} == {*LANGUAGE, "config.json"}
    check_language(open_source(Path("alone")), Path("hf"))


@pytest.mark.slow
def test_a_run_resumes_without_the_folder_that_it_started_from(converted, module_command):
    shutil.copytree("hf", "gone")
    words = ["train", "alone.yaml", "init={from_hf: gone}", "run_dir=from-gone", "data.tokenizer=hf/tokenizer.json"]
    Path("alone.yaml").write_text(ALONE)
    assert module_command(*words).code == 0
    shutil.rmtree("gone")
    said = module_command(*words, "num_steps=2")
    assert said.code == 0, said.err
    said = module_command(*words[:3], "run_dir=another")
    assert said.code == 2 and "gone cannot be imported: there is no such folder" in said.err


def test_a_model_that_is_imported_by_init_in_python_needs_no_sizes(converted):
    run = Run(
        init={"from_hf": "hf"},
        data={"kind": "synthetic"},
        optim={"kind": "adamw", "lr": 1e-3},
        num_steps=1,
        run_dir="x",
    )  # pyright: ignore
    assert run.model == load("run/config.yaml").model


# what must not start from random weights ----------------------------------------------------------------------------


RANDOM = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 64}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 0.01}
num_steps: 1
run_dir: random
mesh: {data: 8}
loggers: []
"""


@pytest.mark.parametrize("setting", ["lora={kind: lora, rank: 2}", "freeze=[embedding]"])
def test_frozen_random_weights_are_refused(setting, here, module_command):
    Path("random.yaml").write_text(RANDOM)
    said = module_command("train", "random.yaml", setting)
    assert said.code == 2
    assert setting.partition("=")[0] + " freezes parameters, which would stay random" in said.err
    assert "init.from_checkpoint=RUN" in said.err
    assert not Path("random/checkpoints").exists() or not steps(Path("random/checkpoints"))


@pytest.mark.parametrize(
    "setting", ["lora={kind: lora, rank: 2}", pytest.param("freeze=[embedding]", marks=pytest.mark.slow)]
)
def test_convert_then_freeze_in_the_same_folder(setting, converted, module_command, tmp_path):
    """The optimizer has another state than that of the converted checkpoint."""
    folder = tmp_path / "own"
    assert module_command("convert", folder, "mesh.data=8", "--from-hf", "hf").code == 0
    before = trained(folder)[1]
    words = [folder / "config.yaml", *split(SETTINGS), *split(STEPS), "optim.lr=0.01", setting]
    said = module_command("train", *words)
    assert said.code == 0, said.err
    structs = on_one_device(load(words[0], words[1:])).placement.structs.params
    after = flatten_with_paths(restore_params(find(folder, ("params.**",)), structs))
    np.testing.assert_array_equal(after["embedding"], before["embedding"])
    assert any(not np.array_equal(after[path], before.get(path, 0 * after[path])) for path in after)


# compress, then generate; and what another folder makes of it -------------------------------------------------------


@pytest.mark.slow
def test_compress_then_generate_and_export(tuned, module_command):
    assert module_command("compress", "run", "small", "--weights", "int8", "--group", "8").code == 0
    check_language(open_source(Path("small")), Path("hf"))
    assert load("small/config.yaml").init is not None
    assert module_command("export", "small", "small-out", "--format", "hf").code == 0
    for name in LANGUAGE:
        assert Path("small-out", name).read_bytes() == Path("hf", name).read_bytes(), name


# other models -------------------------------------------------------------------------------------------------------


def some(a: int, b: int) -> dict[str, tuple[Any, Any]]:
    """Case -> the end ids of `config.json`, and the content of `generation_config.json`."""
    return {
        "one in config.json": (a, None),
        "a list in config.json": ([b, a], None),
        "a list in generation_config.json": (None, {"eos_token_id": [a, b]}),
        "one in each": (b, {"eos_token_id": a}),
        "none": (None, {}),
    }


@pytest.mark.parametrize("adds_bos", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_answers_end_where_transformers_ends_them(adds_bos, tmp_path):
    folder = write_model(tmp_path / "hf", adds_bos)
    prompts = [[i, 7, 8] for i in range(5, 9)]

    def answers(ends: Any, generation: Any) -> list[list[int]]:
        (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": ends}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return [their_answer(folder, prompt, 10) for prompt in prompts]

    whole = answers(None, {})
    assert {len(answer) for answer in whole} == {10}
    cases = some(whole[0][3], whole[1][5])
    for case in cases if adds_bos else ("a list in config.json", "one in each"):
        ends, generation = cases[case]
        want = answers(ends, generation)
        source = open_source(folder, MESH)
        found = generate(source, prompts, max_tokens=10).completions
        assert [answer.tokens for answer in found] == [without_end(tokens, source.ends) for tokens in want], case
        assert {answer.finish for answer in found} == ({"length"} if case == "none" else {"end", "length"}), case
        assert source.encode("go on") == transformers.AutoTokenizer.from_pretrained(folder)("go on").input_ids


def test_a_head_beside_a_tied_config_is_kept_through_convert_and_export(tmp_path, here, module_command):
    folder = write_model(tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    assert module_command("convert", tmp_path / "run", "mesh.data=8", "--from-hf", folder).code == 0
    assert module_command("convert", tmp_path / "run", "--to-hf", tmp_path / "out").code == 0
    tokens = np.arange(12)[None]
    np.testing.assert_array_equal(logits(loaded(tmp_path / "out"), tokens), logits(loaded(folder), tokens))
    assert {*load_file(tmp_path / "out/model.safetensors")} == {*load_file(folder / "model.safetensors")}
    check_language(open_source(tmp_path / "out"), folder)


# every other command on a converted or a trained run -----------------------------------------------------------------


OTHERS = [
    "explain run/config.yaml",
    "checkpoint ls run",
    "checkpoint verify run",
    "checkpoint diff run run",
    "generate run --draft run --prompt go --max-tokens 4 --json",
    "generate run --ngrams 2 --prompt go --max-tokens 4 --json",
    "inspect run/config.yaml",
    "verify run/config.yaml",
    "export run stablehlo",
]
IN_CI = OTHERS[:3]


@pytest.mark.parametrize(
    "line", [line if line in IN_CI else pytest.param(line, marks=pytest.mark.slow) for line in OTHERS]
)
def test_each_command_takes_a_run_of_a_converted_model(line, tuned, module_command):
    said = module_command(*split(line))
    assert said.code == 0, said.err


@pytest.mark.slow
def test_drafts_of_a_converted_run_do_not_change_its_answers(tuned, module_command):
    lines = [line for line in OTHERS if line.startswith("generate")] + [
        "generate run --prompt go --max-tokens 4 --json"
    ]
    answers = [json.loads(module_command(*split(line)).out)["completions"] for line in lines]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_convert_then_distill(tuned, module_command):
    """The teacher's run names other data than the student's, or none."""
    words = ["train", "alone.yaml", "run_dir=student", "init=null", "distill={teacher: run}"]
    Path("alone.yaml").write_text(ALONE)
    said = module_command(
        *words,
        "model={kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 24}",
    )
    assert said.code == 0, said.err


# a model of one's own ------------------------------------------------------------------------------------------------


SCRATCH = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 24}
data: {kind: jsonl, path: texts.jsonl, tokenizer: own.json, batch_size: 8, seq_len: 8, held_out_fraction: 0.2}
optim: {kind: adamw, lr: 0.01}
num_steps: 2
run_dir: scratch
mesh: {data: 8}
loggers: []
"""


def test_train_then_export_a_model_of_ones_own(here, module_command):
    """Its prompts are opened and its answers end as those of the run."""
    write_tokenizer(here, adds_bos=False)
    Path("tokenizer.json").rename("own.json")
    Path("scratch.yaml").write_text(SCRATCH)
    assert module_command("train", "scratch.yaml").code == 0
    assert module_command("export", "scratch", "scratch-out", "--format", "hf").code == 0
    run, folder = open_source(Path("scratch")), open_source(Path("scratch-out"), MESH)
    assert run.encode("go on") == folder.encode("go on") == [1, 13, 14]
    assert transformers.AutoTokenizer.from_pretrained("scratch-out")("go on").input_ids == [1, 13, 14]
    assert folder.ends == {run.run.data.tokenizer.eos} == {2}
    one, other = (generate(source, "go on", max_tokens=6).completions[0] for source in (run, folder))
    assert (one.text, one.tokens, one.finish) == (other.text, other.tokens, other.finish)


# names on the Hub ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["convert", "x", "--from-hf"], ["generate", "--prompt", "a"], ["serve"]])
def test_a_name_on_the_hub_says_how_to_get_it(words, here, module_command):
    said = module_command(*words[:1], *words[1:], "Qwen/Qwen3-0.6B")
    assert said.code == 2
    assert "Nothing is downloaded" in said.err
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in said.err
