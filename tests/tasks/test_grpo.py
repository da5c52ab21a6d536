"""GRPO: equal to the paper's formula in NumPy, exact at a resume, on the engine's answers; and what it refuses."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshpar import fit
from meshpar.errors import ConfigError, DataError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.experiment.rollouts import of_prompts, rollouts_of
from meshpar.experiment.validate import task_of
from meshpar.interop import user_code
from meshpar.nn.lora import without_lora
from meshpar.train import grpo
from meshpar.tree import flatten_with_paths
from tests.chats import CITIES, UNMARKED, write_lines, write_tokenizer
from tests.tasks.test_preferences import MESHES

REWARD = """\
def length(answers, lines):
    return [len(answer) / 8 + len(line["city"]) for answer, line in zip(answers, lines)]

def nan(answers, lines):
    return [float("nan")] * len(answers)

def one(answers, lines):
    return [1.0]

def words(answers, lines):
    return answers

def fails(answers, lines):
    return lines[0]["nothing"]
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with prompts, a tokenizer, and rewards."""
    write_tokenizer(tmp_path, UNMARKED)
    lines = [{"prompt": f"Capital of {a}? ({i})", "city": b} for i in range(4) for a, b in CITIES.items()]
    write_lines(tmp_path / "prompts.jsonl", lines)
    Path(tmp_path, "rewards_of_cities.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("rewards_of_cities", None)
    return tmp_path


def run_of(here: Path, reward: str = "length", **more: Any) -> Run:
    loss = {"reward": f"rewards_of_cities:{reward}", "group": 4, "max_tokens": 6, "clip": 0.1, "beta": 0.3}
    loss = {"kind": "grpo"} | loss | more.pop("loss", {})
    user_code.permit(loss["reward"], None)
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "vocab_size": 320}
    data = {"kind": "prompts", "path": "prompts.jsonl", "tokenizer": "tokenizer.json", "held_out_fraction": 0.3}
    settings = {
        "model": {"kind": "llama", **sizes}, "data": data | {"batch_size": 8, "seq_len": 64} | more.pop("data", {}),
        "loss": loss, "optim": {"kind": "adamw", "lr": 1e-2}, "num_steps": 4, "run_dir": str(here / "run"),
        "loggers": [],
    }  # fmt: skip
    return Run(**settings | MESHES["fsdp"] | more)


FLOAT64 = {"precision": {"params": "float64", "compute": "float64"}}


def log_probs(prepared: Prepared, params: Any, batch: dict[str, Any]) -> list[np.ndarray]:
    """Of each row, the log-probabilities of the tokens of its answer, by the model's forward on one device."""
    forward = prepared.run.model.program(task_of(prepared.run)).forward
    assert forward
    arrays = {name: batch[name] for name in ("tokens", "segments", "positions")}
    arrays["rows"] = np.arange(len(batch["tokens"]), dtype=np.int32)
    logits = np.asarray(jax.jit(lambda params, batch: forward(params, batch, None).logits)(params, arrays))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [
        np.array([log_p[i, at, token] for at, token in enumerate(row) if token >= 0])
        for i, row in enumerate(batch["targets"])
    ]


def by_the_paper(new: Any, old: Any, base: Any, rewards: np.ndarray, run: Run) -> dict[str, float]:
    """Equations 3 and 4 of Shao et al. 2024, with outcome rewards, one answer after the other."""
    loss: Any = run.loss
    total, kl = 0.0, 0.0
    for i, (p, q, r) in enumerate(zip(new, old, base, strict=True)):
        group = rewards[i // loss.group * loss.group :][: loss.group]
        advantage = (rewards[i] - np.mean(group)) / np.std(group) if np.std(group) else 0.0
        advantage = float(np.float32(advantage))  # as it is given to the devices
        ratio = np.exp(p) / np.exp(q)
        surrogate = np.minimum(ratio * advantage, np.clip(ratio, 1 - loss.clip, 1 + loss.clip) * advantage)
        away = np.exp(r) / np.exp(p) - np.log(np.exp(r) / np.exp(p)) - 1
        total += np.mean(surrogate - loss.beta * away)
        kl += np.mean(away)
    return {"loss": -total / len(new), "kl": kl / len(new), "reward": float(rewards.mean())}


def compared(run: Run) -> list[tuple[float, float]]:
    """Numbers of a step on a mesh, and those of the formula. The model has moved since the sampling."""
    prepared = prepare(run, run.mesh.build(jax.devices()[:8]))
    train, _ = run.data.datasets(0)
    train = of_prompts(train, run.loss)
    rollouts = rollouts_of(prepared, train)
    assert rollouts
    state = prepared.compile_init()()
    step = prepared.compile_step()
    first = jax.device_get(state.params)
    batch = rollouts.batch(state.params, 1, next(train.batches()))
    for _ in range(2):
        state, _ = step(state, prepared.put(batch))
    params = jax.device_get(state.params)
    old = [row[targets >= 0] for row, targets in zip(batch[grpo.LOG_PROBS], batch["targets"], strict=True)]
    base = log_probs(prepared, without_lora(params) if run.lora else first, batch)
    new = log_probs(prepared, params, batch)
    rewards = batch[grpo.REWARDS].astype(np.float64)
    want = by_the_paper(new, [row.astype(np.float64) for row in old], base, rewards, run)
    _, metrics = step(state, prepared.put(batch))
    assert 0 < float(metrics["clipped"]) < 1
    return [(float(metrics[name]), value) for name, value in want.items()]


CASES: dict[str, dict[str, Any]] = {
    "copy": {"num_microbatches": 2},
    "lora": {"lora": {"rank": 2, "alpha": 60, "paths": ["blocks.**"]}},
    "gspmd": {"lowering": "auto"},
}


@pytest.mark.parametrize("case", [c if c == "copy" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_loss_is_the_papers(here, float64, case):
    for got, want in compared(run_of(here, **FLOAT64, **CASES[case])):
        np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.slow
def test_sampled_probabilities_are_those_of_the_training_on_the_same_arrays(here, float64):
    """The engine's parameters are the training's, without a copy."""
    run = run_of(here, **FLOAT64)
    prepared = prepare(run, run.mesh.build(jax.devices()[:8]))
    train = of_prompts(run.data.datasets(0)[0], run.loss)
    rollouts = rollouts_of(prepared, train)
    assert rollouts
    params = prepared.compile_init()().params
    batch = rollouts.batch(params, 1, next(train.batches()))
    want = log_probs(prepared, jax.device_get(params), batch)
    for row, targets, expected in zip(batch[grpo.LOG_PROBS], batch["targets"], want, strict=True):
        np.testing.assert_allclose(row[targets >= 0], expected, rtol=0, atol=1e-6)
    served = flatten_with_paths(rollouts._engine._params)
    for path, x in flatten_with_paths(params).items():
        at, of = ([one.data.unsafe_buffer_pointer() for one in y.addressable_shards] for y in (served[path], x))
        assert at == of, path


@pytest.mark.slow
def test_a_run_resumes_exactly_between_the_steps_of_the_same_answers(here):
    more: dict[str, Any] = {"loss": {"updates": 2}, "checkpoints": {"every": 3}}
    whole = fit(run_of(here, **more), json=True)
    assert jax.device_get(whole.step) == 4
    fit(run_of(here, **more, run_dir="again").model_copy(update={"num_steps": 3}), json=True)
    resumed = fit(run_of(here, **more, run_dir="again"), json=True)
    want = flatten_with_paths(jax.device_get(whole.params))
    for path, x in flatten_with_paths(jax.device_get(resumed.params)).items():
        np.testing.assert_array_equal(x, want[path], err_msg=path)
    steps = [json.loads(line)["step"] for line in Path("run", "rollouts.jsonl").read_text().splitlines()]
    assert steps == [1] * 8 + [3] * 8


WRONG = {
    "nan": (DataError, r"rewards_of_cities:nan returned nan for 8 of 8 answers, first for"),
    "one": (DataError, r"rewards_of_cities:one returned \[1\] values for 8 answers"),
    "words": (DataError, r"rewards_of_cities:words returned .*not a number for each answer"),
    "fails": (DataError, r"rewards_of_cities:fails failed at .*rewards_of_cities.py:14: KeyError"),
}


@pytest.mark.parametrize("reward", WRONG)
def test_a_reward_that_is_no_number_for_each_answer_is_an_error_in_one_line(here, reward, monkeypatch):
    error, message = WRONG[reward]
    run = run_of(here, reward)
    train = of_prompts(run.data.datasets(0)[0], run.loss)
    rollouts = rollouts_of(prepare(run, run.mesh.build(jax.devices()[:8])), train)
    assert rollouts
    with pytest.raises((error, ConfigError), match=message):
        rollouts._rewards(["a"] * 8, [{"city": "Rome"}] * 8)


def test_lines_that_are_no_prompts_are_listed(here):
    lines = [{"prompt": " "}, {"prompts": "a"}, {"messages": [{"role": "assistant", "content": "a"}]}, {"prompt": []}]
    lines += [{"prompt": "a <|im_end|>"}, {"prompt": "word " * 99}, {"messages": [{"role": "user", "content": None}]}]
    write_lines(here / "bad.jsonl", lines)
    with pytest.raises(DataError) as raised:
        run_of(here, data={"path": "bad.jsonl"}).data.datasets(0)
    said = str(raised.value)
    for what in (
        "has a prompt without text", "rename prompts to prompt", "ends with a message of the assistant",
        "a special token of the model", "has no room in data.seq_len = 64", "neither content nor tool_calls",
    ):  # fmt: skip
        assert what in said
    assert said.count("without text") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"batch_size": 10}, "rules": ["replicated"], "mesh": {"data": 1}}, "10 answers are not groups of"),
        ({"loss": {"max_tokens": 64}}, "answers of 64 tokens leave no room for a prompt"),
        ({"data": {"documents_in_row": "joined"}}, "a row is one answer, and no document is beside it"),
    ],
)
def test_what_does_not_fit_is_refused(here, changes, message):
    run = run_of(here, **changes)
    with pytest.raises(ConfigError, match=message):
        prepare(run, run.mesh.abstract())


def test_prompts_are_for_grpo_and_it_is_for_prompts(here):
    run = run_of(here)
    with pytest.raises(ConfigError, match="prompts without answers, of which this loss learns nothing"):
        prepare(Run(**{**dict(run), "loss": {"kind": "dpo"}}), run.mesh.abstract())
    with pytest.raises(ConfigError, match="the model answers prompts, and these data have answers"):
        prepare(Run(**{**dict(run), "data": {"kind": "synthetic", "batch_size": 8}}), run.mesh.abstract())


@pytest.mark.slow
def test_the_example_becomes_polite(tmp_path, monkeypatch, command):
    examples = Path(__file__).parents[2] / "configs" / "examples"
    monkeypatch.syspath_prepend(str(examples))
    monkeypatch.chdir(tmp_path)
    importlib.import_module("grow_polite").write_all(tmp_path / "grown")
    (tmp_path / "grow_polite.py").write_text((examples / "grow_polite.py").read_text())
    (tmp_path / "prefer_polite.py").write_text((examples / "prefer_polite.py").read_text())
    for name in ("grow_polite_start", "grow_polite"):
        (tmp_path / f"{name}.yaml").write_text((examples / f"{name}.yaml").read_text())
        assert command("train", f"{name}.yaml", "mesh.data=8").code == 0
    rollouts = [json.loads(line) for line in Path("runs/grow_polite/rollouts.jsonl").read_text().splitlines()]
    first, last = (np.mean([row["reward"] for row in rollouts if row["step"] == step]) for step in (1, 40))
    assert first < 0.6 and last > 0.9
