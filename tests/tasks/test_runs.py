"""Runs of a user's model on rows of arrays: metrics, meshes, resumes, and what is refused."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from sklearn import metrics as sklearn

from meshpar import ConfigError, DataError, verify
from meshpar.experiment.held_out import check_short_batch
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code
from meshpar.partition import moved
from tests.tasks import own, runs

ROWS = 1003
LINEAR = {
    "model": {"target": "tests.tasks.own:Linear", "inputs": {"features": "x"}},
    "mesh": {"data": 2, "fsdp": 4},
    "rules": ["fsdp"],
}


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """The record of an evaluation of 1,003 rows over eight devices, and the scores of the model in NumPy."""
    folder = tmp_path_factory.mktemp("classified")
    state = runs.trained(
        folder,
        data={"target": "tests.tasks.own:columns", "held_out": {"num": ROWS, "seed": 1}, "held_out_fraction": None},
        loss={"metrics": ["accuracy", "top_2", "f1", "auc"], "label_smoothing": 0.2},
        num_steps=3,
        **LINEAR,
    )
    rows = own.columns(ROWS, seed=1)
    logits = rows["x"].astype("d") @ np.asarray(jax.tree.leaves(state.params)[0], "d")
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    (record,) = runs.records(folder, "evaluation")
    return record, rows["label"], scores / scores.sum(-1, keepdims=True)


EXPECTED = {
    "loss": lambda label, scores: sklearn.log_loss(label, scores),
    "accuracy": lambda label, scores: sklearn.accuracy_score(label, scores.argmax(-1)),
    "top_2": lambda label, scores: sklearn.top_k_accuracy_score(label, scores, k=2),
    "f1": lambda label, scores: sklearn.f1_score(label, scores.argmax(-1), average="macro"),
    "auc": lambda label, scores: sklearn.roc_auc_score(label, scores, multi_class="ovr"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_metrics_of_1003_rows_over_8_devices_are_those_of_scikit_learn(classified, name):
    record, label, scores = classified
    assert record["tokens"] == ROWS
    assert record[name] == pytest.approx(EXPECTED[name](label, scores), rel=2e-6)


LAYOUTS = {
    "tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron"]),
    "fsdp": ({"fsdp": 8}, ["fsdp"]),
    "zero1": ({"data": 8}, ["zero1"]),
}


def in_float64(folder, layout, **changes):
    mesh, preset = layout
    precision = {"params": "float64", "compute": "float64"}
    return runs.run(folder, mesh=mesh, rules={"preset": preset, "unnamed": []}, precision=precision, **changes)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "tensor" else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_model_with_statistics_is_equal_to_one_device(tmp_path, float64, layout):
    """Without dropout, whose random numbers differ. The last batch of the evaluation is short."""
    changes = {"model": {"arguments": {"rate": 0.0}}}
    expected = runs.after_steps(in_float64(tmp_path, runs.ONE, **changes), num_devices=1)
    assert 0 < expected[2]["tokens"] < 16
    found = runs.after_steps(in_float64(tmp_path, LAYOUTS[layout], **changes))
    runs.assert_close(expected, found, 1e-10)


def test_a_run_on_rows_of_ones_own_is_verified_and_a_fault_is_found(tmp_path, monkeypatch):
    own_rows = runs.run(tmp_path, data={"batch_size": 64}, mesh={"data": 2}, rules=["replicated"])
    found = verify(own_rows)
    assert found.is_equal and found.shrunk == {"data.batch_size": (64, 4)}
    perform = moved._perform

    def doubled(move, x):
        return perform(move, x) * (2 if move.kind == "all-reduce" else 1)

    monkeypatch.setattr(moved, "_perform", doubled)
    assert [row.name for row in verify(own_rows).culprits] == ["data=2"]


NOISY = {"transform": "tests.tasks.own:noisy"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that stopped in the middle of the first epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    runs.trained(folder, num_steps=3, data=NOISY, **LINEAR)
    return folder


def test_a_run_resumes_in_the_middle_of_an_epoch_to_the_bit_with_workers(stopped, tmp_path):
    whole = runs.trained(tmp_path, num_steps=7, data=NOISY, **LINEAR)
    resumed = runs.trained(stopped, num_steps=7, data=NOISY | {"workers": 1}, **LINEAR)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(jax.device_get(one), jax.device_get(other))


def test_a_resume_with_other_rows_is_refused(stopped):
    with pytest.raises(DataError, match=r"data\.arguments\n    was .*, is .*: it determines what the rows are"):
        runs.trained(stopped, num_steps=9, data=NOISY | {"arguments": {"num": 80}}, **LINEAR)


def test_a_loss_of_ones_own_gets_the_model_and_the_batch_as_in_training(tmp_path):
    """Here with statistics that steps change, and a `LossSums`."""
    changes = {"model": {"arguments": {"outputs": 1}}, "loss": "tests.tasks.own:counted"}
    prepared = prepare(runs.run(tmp_path, **changes))
    assert prepared.carried and not prepared.of_rows


def test_masked_tokens_are_evaluated_with_a_fixed_key(tmp_path):
    """No key is an argument of an evaluation, so that it is a constant of the loss."""
    changes = LINEAR | {"model": {"target": "tests.tasks.own:Embedded"}, "data": {"target": "tests.tasks.own:tokens"}}
    loss = {"kind": "masked_tokens", "mask_id": 1, "vocab_size": 16}
    prepared = prepare(runs.run(tmp_path, loss=loss, **changes))
    assert prepared.lazy_evaluation().traced


def begin(run):
    prepared = prepare(run)
    check_short_batch(run, run.data.datasets(0)[1], prepared.lazy_evaluation())


REFUSED = {
    "a short batch": (
        {"model": {"arguments": {"outputs": 1}}, "loss": "tests.tasks.own:squared"},
        "21 held-out rows may end in a batch of fewer than 16 rows",
        "or data.held_out_rows=16",
    ),
    "a decoder": (
        {"model": {"kind": "llama", "target": None}},
        "data.kind = import\n    a model of kind llama trains on packed tokens",
        "loss.kind = classify",
    ),
    "tokens": (
        {"data": {"kind": "synthetic", "target": None, "held_out_fraction": 0.1}},
        "loss.kind = classify\n    a loss by name reads rows of arrays",
        "data.kind=import",
    ),
    "inputs": (
        {"model": {"target": "tests.tasks.own:Linear"}},
        "model.inputs.features\n    the call of tests.tasks.own:Linear needs it, and the rows have x, y besides label",
        "model.inputs={features: x}",
    ),
    "names": ({"data": {"dims": {"z": ["a"], "x": ["a", "b"]}}}, "data.dims.z", "2 names for [8]"),
    "pairs in parts": ({"loss": {"kind": "contrastive"}, "num_microbatches": 2}, "loss.kind = contrastive", "in parts"),
    "held out twice": ({"data": {"held_out": {"num": 8}}}, "held_out_fraction = 0.25", "leave one of them out"),
    "no loss": ({"loss": {"kind": "next_token"}}, "the loss of rows of arrays is your own, or has a name", "classify"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name):
    changes, *messages = REFUSED[name]
    mapping = runs.mapping(tmp_path, **changes)
    if name == "a decoder":
        mapping["model"] = {"kind": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
    if name == "tokens":
        mapping["data"] = {"kind": "synthetic", "batch_size": 16, "seq_len": 16}
    with pytest.raises((ConfigError, DataError)) as error:
        begin(runs.of(mapping))
    for text in messages:
        assert text in str(error.value)


def test_a_bad_row_ends_the_command_with_its_name_and_code_2(tmp_path, command, monkeypatch):
    mapping = runs.mapping(tmp_path / "run", data={"target": "tests.tasks.own:columns", "arguments": {"bad": "label"}})
    (tmp_path / "config.yaml").write_text(
        json.dumps(mapping | LINEAR | {"model": runs.BASE["model"] | LINEAR["model"]})
    )
    monkeypatch.setattr(user_code, "permit", lambda target, config: None)
    runs.run(tmp_path / "run", **LINEAR)
    said = command("train", tmp_path / "config.yaml", "--no-cache")
    assert said.code == 2
    assert "tests.tasks.own:columns, row 17: label\n    is 4, and the model has the 4 classes 0 to 3" in said.err
