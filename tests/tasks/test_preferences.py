"""Preferences: DPO and ORPO equal their papers' formulas in NumPy on any mesh, and what they cannot do is refused."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.data import Preferences
from meshpar.data.chat.conversations import read_pair
from meshpar.data.dataset import Dataset
from meshpar.errors import ConfigError, DataError, DataWarning
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.experiment.validate import task_of
from tests.chats import CITIES, UNMARKED, write_lines, write_tokenizer

jax.devices()  # eight, before a command asks for them

CITIES_AND_OTHERS = list(zip(CITIES.items(), [*[*CITIES.values()][1:], "Paris"], strict=True))
LINES = [
    {"prompt": f"Capital of {country}? ({i})", "chosen": f"It is {city}.", "rejected": f"I think: {other}." + "!" * i}
    for i in range(4)
    for (country, city), other in CITIES_AND_OTHERS
]
MESHES = {
    "fsdp": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "rules": {"preset": ["fsdp", "megatron"]}},
    "zero1": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "rules": {"preset": ["zero1", "megatron"]}},
    "zero2": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "rules": {"preset": ["zero2", "megatron"]}},
    "one": {"mesh": {"data": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_tokenizer(folder, UNMARKED)
    write_lines(folder / "pairs.jsonl", LINES)
    return folder


def data(folder: Path, **more: Any) -> dict[str, Any]:
    settings = {"path": str(folder / "pairs.jsonl"), "tokenizer": str(folder / "tokenizer.json")}
    return {"kind": "preferences", **settings, "batch_size": 8, "seq_len": 128, "held_out_fraction": 0.4} | more


def run_of(folder: Path, **more: Any) -> Run:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "vocab_size": 320}
    settings = {
        "model": {"kind": "llama", **sizes}, "data": data(folder), "loss": {"kind": "dpo", "beta": 0.3},
        "optim": {"kind": "adamw", "lr": 1e-2}, "precision": {"params": "float64", "compute": "float64"},
        "num_steps": 4, "run_dir": "unused",
    }  # fmt: skip
    return Run(**settings | more)


# The papers' formulas -------------------------------------------------------------------------------------------------


def answers_of(prepared: Prepared, params: Any, batch: dict[str, np.ndarray]) -> list[list[np.ndarray]]:
    """For each row the log-probabilities of the tokens of both answers: each conversation is computed alone."""
    forward = prepared.run.model.program(task_of(prepared.run)).forward
    assert forward
    rows, width = len(batch["tokens"]), batch["tokens"].shape[1]
    alone: dict[str, Any] = {name: np.zeros((2 * rows, width), np.int32) for name in ("tokens", "segments")}
    alone["positions"] = np.broadcast_to(np.arange(width, dtype=np.int32), (2 * rows, width))
    alone["rows"] = np.arange(2 * rows, dtype=np.int32)
    masks = [batch["segments"][row] == segment for row in range(rows) for segment in (1, 2)]
    for i, of in enumerate(masks):
        alone["tokens"][i, : of.sum()], alone["segments"][i, : of.sum()] = batch["tokens"][i // 2][of], 1
    logits = jax.jit(lambda params, batch: forward(params, batch, None).logits)(params, alone)
    log_p = np.asarray(logits) - np.log(np.exp(np.asarray(logits)).sum(-1, keepdims=True))
    targets = [batch["targets"][i // 2][of] for i, of in enumerate(masks)]
    found = [np.array([log_p[i, at, t] for at, t in enumerate(ids) if t >= 0]) for i, ids in enumerate(targets)]
    return [found[i : i + 2] for i in range(0, len(found), 2)]


def dpo(model: list[list[np.ndarray]], reference: list[list[np.ndarray]], beta: float) -> dict[str, Any]:
    """Equation 7 of Rafailov et al. 2023."""
    losses, margins = [], []
    for (won, lost), (won_ref, lost_ref) in zip(model, reference, strict=True):
        margin = beta * (won.sum() - won_ref.sum()) - beta * (lost.sum() - lost_ref.sum())
        losses.append(-np.log(1 / (1 + np.exp(-margin))))
        margins.append(margin)
    accuracy = np.mean(np.array(margins) > 0)
    return {"loss": np.mean(losses), "reward_margin": np.mean(margins), "reward_accuracy": accuracy}


def orpo(model: list[list[np.ndarray]], weight: float) -> dict[str, Any]:
    """Equations 3 to 7 of Hong et al. 2024."""
    losses, ratios = [], []
    for won, lost in model:
        p, q = np.exp(won.mean()), np.exp(lost.mean())
        ratio = np.log((p / (1 - p)) / (q / (1 - q)))
        losses.append(-won.mean() - weight * np.log(1 / (1 + np.exp(-ratio))))
        ratios.append(ratio)
    accuracy = np.mean([won.mean() > lost.mean() for won, lost in model])
    return {"loss": np.mean(losses), "log_odds_ratio": np.mean(ratios), "reward_accuracy": accuracy}


def datasets(prepared: Prepared) -> tuple[Dataset, Dataset]:
    assert isinstance(prepared.run.data, Preferences)
    return prepared.run.data.datasets(0)


def whole(params: Any) -> Any:
    return jax.tree.map(jnp.asarray, jax.device_get(params))


ORPO = {"loss": {"kind": "orpo", "weight": 0.2}}
CASES = {
    "copy": ("fsdp", {"num_microbatches": 2}),
    "orpo": ("fsdp", ORPO),
    "lora": ("fsdp", {"lora": {"rank": 2, "paths": ["blocks.attn.*"]}}),
    "one": ("one", {}),
    "one-orpo": ("one", ORPO),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {"num_microbatches": 2}),
    "gspmd": ("fsdp", {"lowering": "auto"}),
}
IN_CI = ("copy", "orpo", "zero2")


@pytest.mark.parametrize("case", [c if c in IN_CI else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_losses_are_the_papers(case, folder, float64):
    mesh, more = CASES[case]
    run = run_of(folder, **MESHES[mesh] | more)
    prepared = prepare(run, run.mesh.build(jax.devices()[: 1 if mesh == "one" else 8]))
    train, held_out = datasets(prepared)
    state = prepared.compile_init()()
    first = whole(state.params)
    step = prepared.compile_step()
    for index in range(2):
        state, _ = step(state, prepared.put(train.rows(index, np.arange(8))))
    batch = train.rows(2, np.arange(8))
    params = whole(state.params)

    def expected(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        pairs = answers_of(prepared, params, batch)
        real = [i for i, pair in enumerate(pairs) if all(map(len, pair))]
        model = [pairs[i] for i in real]
        if prepared.run.loss.kind == "orpo":
            return orpo(model, 0.2)
        reference = answers_of(prepared, first, batch)
        return dpo(model, [reference[i] for i in real], 0.3)

    if case not in ("orpo", "lora"):  # whose evaluations have the code of the others
        last = held_out.rows(len(held_out) - 1, np.arange(8))
        assert (last["segments"] == 0).all(-1).any(), "its last batch has rows that do not count"
        found = prepared.compile_evaluation()(state.params, prepared.put(last), state.carried)
        for name, value in expected(last).items():
            np.testing.assert_allclose(float(found[name]) / int(found["tokens"]), value, rtol=1e-10)
    want = expected(batch)
    state, metrics = step(state, prepared.put(batch))
    assert int(metrics["tokens"]) == 8
    for name, value in want.items():
        np.testing.assert_allclose(float(metrics[name]), value, rtol=1e-10)


# A whole run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The words of a command that trains a small version of the example."""
    examples = Path(__file__).parents[2] / "configs" / "examples"
    monkeypatch.syspath_prepend(str(examples))
    importlib.import_module("prefer_polite").write(tmp_path / "polite", most=8)
    monkeypatch.chdir(tmp_path)
    small = ["model.hidden_size=16", "model.num_layers=1", "optim.lr=3e-3", "eval_every=4", "num_steps=8"]
    return ["train", str(examples / "prefer_polite.yaml"), *small]


def evaluations(run_dir: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "evaluation"]


@pytest.mark.parametrize("loss", ["dpo", pytest.param("orpo", marks=pytest.mark.slow)])
def test_the_example_learns_the_style(loss, example, command):
    verb, config, *small = example
    config = config if loss == "dpo" else config.replace(".yaml", "_orpo.yaml")
    assert command(verb, config, *small, "mesh={data: 8}", "rules=replicated", "run_dir=run").code == 0
    last = evaluations("run")[-1]
    assert last["reward_accuracy"] > 0.9 and last["reward_margin"] > 0
    assert command("export", "run", "folder", "--format", "hf").code == 0
    said = command("explain", config, *small)
    assert ("the reference is a second copy of the first parameters: " in said.out) == (loss == "dpo")


@pytest.mark.slow
def test_a_run_resumes_with_its_reference(example, command):
    for words in (["run_dir=whole"], ["run_dir=parts", "num_steps=4"], ["run_dir=parts"]):
        assert command(*example, *words).code == 0
    assert evaluations("parts") == evaluations("whole")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_verify_draws_pairs(loss, example, command):
    said = command("verify", *example[1:], f"loss={{kind: {loss}}}")
    assert said.code == 0 and "equal to one device" in said.out


@pytest.mark.slow
def test_the_reference_is_the_model_with_which_the_run_begins(example, command):
    assert command(*example, "num_steps=4", "run_dir=first").code == 0
    assert command(*example, "init.from_checkpoint=first", "num_steps=4", "log_every=1", "run_dir=second").code == 0
    lines = [json.loads(line) for line in Path("second/metrics.jsonl").read_text().splitlines()]
    first, second = [line for line in lines if line["kind"] == "train"][:2]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and first["reward_accuracy"] == 0.5
    assert second["loss"] != pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.slow
def test_the_auxiliary_losses_of_experts_are_added_in_a_step_alone(folder, float64):
    experts = {"num": 4, "per_token": 2, "intermediate_size": 16, "balance": {"weight": 0.5}}
    found = {}
    for weight in (0.5, 0.0):
        run = run_of(folder)
        sizes = run.model.model_dump() | {"experts": experts | {"balance": {"weight": weight}}}
        prepared = prepare(run_of(folder, model=sizes), run.mesh.build(jax.devices()[:1]))
        batch = datasets(prepared)[0].rows(0, np.arange(8))
        state = prepared.compile_init()()
        evaluated = prepared.compile_evaluation()(state.params, prepared.put(batch), state.carried)
        _, metrics = prepared.compile_step()(state, prepared.put(batch))
        found[weight] = float(metrics["loss"]), float(evaluated["loss"]) / 8
    assert found[0.0][0] == found[0.0][1] == found[0.5][1] < found[0.5][0]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss": {"kind": "next_token"}}, "this loss would learn the rejected ones too"),
        ({"data": {"documents_in_row": "joined"}}, "would attend to the chosen one"),
        ({"data": {"kind": "synthetic"}}, "loss.kind = dpo\n .*data.kind=preferences"),
        ({"parallel": {"pipeline": {"kind": "gpipe", "num_microbatches": 2}}, "rules": {"preset": ["pipeline"]},
          "mesh": {"data": 4, "pipe": 2}}, "stages sum the loss of tokens"),
        ({"mesh": {"data": 2, "context": 4}, "rules": {"preset": ["context"]}}, "whose tokens these rules divide"),
        ({"mesh": {"data": 8}, "rules": {"preset": ["replicated"]}, "num_steps": 8,
          "parallel": {"local": {"axis": "data", "every": 2}}}, "slices do not carry the second copy"),
    ],
    ids=["next-token", "joined", "no-pairs", "pipeline", "context", "local"],
)  # fmt: skip
def test_what_a_loss_of_preferences_is_not_for_is_refused(more, message, folder):
    of_data = more.get("data", {})
    read = of_data if "kind" in of_data else data(folder, **of_data)
    settings = MESHES["fsdp"] | {"precision": {}} | more | {"data": read}
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        prepare(run_of(folder, **settings))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no rejected"),
        ({"prompt": "a", "chosen": "b", "rejects": "c"}, "rename rejects to rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "prefers an answer to the same answer"),
        ({"chosen": "b", "rejected": "c"}, "has no prompt"),
        ([1], "is not a JSON object"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}, "no message of the assistant"),
        ({"prompt": "<|im_end|>", "chosen": "b", "rejected": "c"}, "a special token of the model"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_pair_is_named(line, message, folder, tmp_path):
    write_lines(tmp_path / "bad.jsonl", [LINES[0], line])
    settings = data(folder, path=str(tmp_path / "bad.jsonl"))
    with pytest.raises(DataError, match=f"(?s)bad.jsonl:2\n.*{message}"):
        Preferences.model_validate(settings).pairs()


def test_pairs_are_those_of_the_template_and_longer_ones_are_refused_or_left_out(folder, tmp_path):
    pairs = Preferences.model_validate(data(folder))
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for pair, line in zip(pairs.pairs(), LINES, strict=True):
        question = {"role": "user", "content": line["prompt"]}
        asked = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
        for piece, answer in ((pair.chosen, line["chosen"]), (pair.rejected, line["rejected"])):
            want = tokenizer(f"{asked}{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
            assert [*piece.tokens.tolist(), piece.targets[-1]] == want
            assert tokenizer.decode(piece.targets[piece.targets >= 0]) == f"{answer}<|im_end|>"
    size = pairs.pairs()[0].size
    few = data(folder, seq_len=size)
    with pytest.raises(DataError, match=rf"more than data.seq_len = {size}\n    data.seq_len=\d+, or data.if_longer"):
        Preferences.model_validate(few).pairs()
    with pytest.warns(DataWarning, match=rf"\d+ of {len(LINES)} pairs are longer than data.seq_len = {size}: left out"):
        assert 0 < len(Preferences.model_validate(few | {"if_longer": "drop"}).pairs()) < len(LINES)


def test_the_prompt_may_be_the_messages_with_which_both_sides_begin():
    question = {"role": "user", "content": "2 + 2?"}
    sides = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    chosen, rejected = read_pair(sides)
    assert chosen.is_learned == rejected.is_learned == [False, True]
    assert chosen == read_pair({"prompt": "2 + 2?", "chosen": "chosen", "rejected": "rejected"})[0]
