"""A run that resumes with other batches reads each row that was not read, once. Rows are counted by their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshpar.checkpoint.checkpoints import CheckpointMetadata
from meshpar.data import Mixture, Numpy
from meshpar.data.order import Order, resumed
from meshpar.data.weights import LinearWeights, Phase, PiecewiseWeights
from meshpar.errors import DataError, DataWarning
from meshpar.train.loop import loop
from meshpar.train.loop.loop import Loop

ROWS, LENGTH = 96, 8
"""Rows of each corpus, all of whose tokens differ, so that a token tells which row was read."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of documents of one token each; the first two documents are held out."""
    paths = []
    for i in range(2):
        path = tmp_path_factory.mktemp("data") / f"{i}.npy"
        np.save(path, np.arange(ROWS * LENGTH, dtype=np.int32)[:, None] + 1 + i * ROWS * LENGTH)
        paths.append(str(path))
    return paths


def data_of(corpora: list[str], weights: tuple[float, ...], **changes: Any) -> Any:
    ids = {"kind": "ids", "vocab_size": 2 * ROWS * LENGTH + 1, "bos": 0}
    shared = {"batch_size": 8, "seq_len": LENGTH, "held_out_fraction": 0.02} | changes
    corpus = {"kind": "numpy", "tokenizer": ids}
    parts = [{"weight": w, "data": corpus | {"path": p}} for w, p in zip(weights, corpora, strict=False)]
    return Mixture(parts=parts, **shared) if len(parts) > 1 else Numpy(path=corpora[0], tokenizer=ids, **shared)


def trained_on(data: Any, order: Order, start: int, end: int, num_processes: int = 1, seed: int = 3) -> list[int]:
    """The tokens of steps start + 1 to end, which several processes read, each its own rows."""
    train = replace(data.train(seed), order=order)
    parts = np.array_split(np.arange(data.batch_size), num_processes)
    seen: list[int] = []
    for rows in parts:
        batches = train.batches(start, rows)
        for _ in range(start, end):
            seen += next(batches)["tokens"].ravel().tolist()
        batches.close()
    return [token for token in seen if token]


def position(data: Any, order: Order, step: int, seed: int = 3) -> dict[str, Any]:
    """The position in a checkpoint of this step."""
    about = CheckpointMetadata(batch_size=data.batch_size, seed=seed, first_row=order.first, order=order.as_json())
    return about.at(step, {})["data"]


def go_on(was: Any, order: Order, now: Any, step: int, seed: int = 3) -> Order:
    dumped = [data.model_dump(mode="json") for data in (was, now)]
    return resumed(position(was, order, step), *dumped, step, seed)


CHANGES: dict[str, tuple[tuple[float, ...], list[tuple[int, int, tuple[float, ...], int, int]]]] = {
    # name: weights, [(batch size, row length, weights, processes, steps)] of each part of the run
    "nothing": ((1,), [(8, 8, (1,), 1, 3), (8, 8, (1,), 1, 4)]),
    "half the batch": ((1,), [(8, 8, (1,), 1, 3), (4, 8, (1,), 1, 4)]),
    "twice the batch": ((1,), [(8, 8, (1,), 1, 3), (16, 8, (1,), 1, 4)]),
    "a batch of another divisor": ((1,), [(8, 8, (1,), 1, 3), (6, 8, (1,), 1, 5), (5, 8, (1,), 1, 7)]),
    "to one row and back": ((1,), [(8, 8, (1,), 1, 3), (1, 8, (1,), 1, 5), (8, 8, (1,), 1, 3)]),
    "half the row": ((1,), [(8, 8, (1,), 1, 3), (8, 4, (1,), 1, 4)]),
    "a quarter of the row in other batches": ((1,), [(8, 8, (1,), 1, 3), (6, 2, (1,), 1, 9)]),
    "shorter rows and longer again": ((1,), [(8, 8, (1,), 1, 3), (4, 4, (1,), 1, 4), (8, 8, (1,), 1, 4)]),
    "more processes": ((1,), [(8, 8, (1,), 1, 3), (8, 8, (1,), 4, 4)]),
    "fewer processes and another batch": ((1,), [(8, 8, (1,), 4, 3), (12, 8, (1,), 3, 4)]),
    "other weights": ((1, 1), [(8, 8, (1, 1), 1, 3), (8, 8, (3, 1), 1, 4), (8, 8, (1, 2), 1, 3)]),
    "other weights, rows, batches and processes": (
        (2, 1), [(6, 8, (2, 1), 2, 3), (12, 4, (1, 3), 3, 4), (4, 4, (2, 1), 1, 5), (4, 2, (2, 1), 2, 5)]
    ),
    "beyond the end of an epoch": ((1,), [(16, 8, (1,), 1, 5), (24, 8, (1,), 2, 9)]),
    "shorter rows beyond the end of an epoch": ((1,), [(16, 8, (1,), 1, 5), (24, 4, (1,), 2, 9)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_row_that_was_not_read_is_read_once(corpora, name):
    _, phases = CHANGES[name]
    order, step = Order(), 0
    was = None
    seen: Counter[int] = Counter()
    for batch_size, length, weights, processes, steps in phases:
        now = data_of(corpora, weights, batch_size=batch_size, seq_len=length)
        if was is not None:
            order = go_on(was, order, now, step)
        seen.update(trained_on(now, order, step, step + steps, processes))
        was, step = now, step + steps
    for part in range(len(phases[0][2])):
        counts = counted(seen, was, part)
        # Of a corpus that has not ended, no token is read twice; of one that has, all alike, to within one.
        assert max(counts) - min(counts) <= 1
        if sum(counts) < len(counts):
            assert max(counts) == 1


def counted(seen: Counter[int], data: Any, part: int) -> list[int]:
    """How often each training token of a part was read; a held-out one is not among them."""
    first = part * ROWS * LENGTH
    held_out = {token for batch in data.held_out() for token in batch["tokens"].ravel().tolist()}
    return [seen[token] for token in range(first + 1, first + ROWS * LENGTH + 1) if token not in held_out]


def test_the_weights_hold_after_a_change(corpora):
    was, now = data_of(corpora, (1, 1)), data_of(corpora, (3, 1))
    order = go_on(was, Order(), now, 3)
    seen = trained_on(now, order, 3, 7)
    second = sum(token > ROWS * LENGTH for token in seen) / len(seen)
    assert abs(second - 1 / 4) < 0.05


def test_control_by_steps_rows_are_read_twice_and_others_never(corpora):
    was, smaller, larger = (data_of(corpora, (1,), batch_size=size) for size in (8, 4, 16))
    twice = Counter(trained_on(was, Order(), 0, 3)) + Counter(trained_on(smaller, Order(), 3, 6))
    assert max(twice.values()) == 2
    skipping = Counter(trained_on(was, Order(), 0, 3)) + Counter(trained_on(larger, Order(), 3, 6))
    assert len(skipping) < 9 * 8 * LENGTH
    assert position(was, Order(), 3)["rows_read"] == 24


REFUSED = {
    "seed": ({}, {"seed": 4}, "seed\n    was 3, is 4: it determines the order of the rows"),
    "longer rows": ({"seq_len": 12}, {}, "data.seq_len\n    was 8, is 12: a new row would have tokens of rows that"),
    "held out": ({"held_out_fraction": 0.2}, {}, "data.held_out_fraction\n    was 0.02, is 0.2"),
    "more corpora": ({"weights": (1, 1)}, {}, "data.parts\n    was 1 corpora, is 2 corpora"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_with_the_reason_or_allowed_with_a_warning(corpora, name):
    changes, more, message = REFUSED[name]
    was = data_of(corpora, (1,))
    weights = changes.pop("weights", (1,))
    with pytest.raises(DataError) as refused:
        go_on(was, Order(), data_of(corpora, weights, **changes), 3, **more)
    assert message in str(refused.value)
    assert "data.if_changed=allow goes on after as many tokens as were read" in str(refused.value)
    now = data_of(corpora, weights, if_changed="allow", **changes)
    with pytest.warns(DataWarning, match="rows would be read that were read before"):
        order = go_on(was, Order(), now, 3, **more)
    assert (order.first + 3 * now.batch_size) * now.seq_len == 3 * was.batch_size * was.seq_len


def test_a_longer_row_may_not_begin_inside_of_one_that_was_read(corpora):
    shorter = data_of(corpora, (1,), seq_len=4, batch_size=3)
    order = go_on(data_of(corpora, (1,)), Order(), shorter, 3)
    with pytest.raises(DataError, match=r"51 rows of 4 tokens were read, which end inside of a longer row"):
        go_on(shorter, order, data_of(corpora, (1,), batch_size=2), 4)
    assert go_on(shorter, order, data_of(corpora, (1,), batch_size=2), 5).first == 27 - 5 * 2


def test_an_old_checkpoint_has_its_position_by_steps(corpora):
    data = data_of(corpora, (1,), batch_size=4).model_dump(mode="json")
    saved = {"next_batch": 3, "rows_read": 24, "seed": 3}
    was = data | {"batch_size": 8}
    del was["documents_in_row"], was["if_changed"]
    assert resumed(saved, was, data, 3, 3) == Order(first=24 - 3 * 4)


def test_a_position_of_other_corpora_is_refused(corpora):
    data = data_of(corpora, (1,)).model_dump(mode="json")
    order = {"first": 0, "since": 0, "pieces": 1, "before": [1, 2]}
    saved = {"next_batch": 3, "rows_read": 24, "seed": 3, "order": order}
    with pytest.raises(DataError, match="the position of 2 corpora, and 1 corpora"):
        resumed(saved, data, data, 3, 3)


SCHEDULES = {
    "piecewise": {"kind": "piecewise", "steps": [0, 2, 5], "weights": [[1, 0], [1, 1], [1, 3]]},
    "linear": {"kind": "linear", "first": [3, 1], "last": [1, 3], "num_steps": 6},
}


def scheduled(corpora: list[str], schedule: str, **changes: Any) -> Mixture:
    data = data_of(corpora, (1, 1), **changes)
    parts = [{"data": part.data.model_dump()} for part in data.parts]
    shared = data.model_dump(exclude={"parts", "weights", "kind"})
    return Mixture(parts=parts, weights=SCHEDULES[schedule], **shared)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_step_has_the_weights_of_its_schedule(corpora, schedule):
    """Over each prefix of the rows of a phase, a part is within one row of its share."""
    data = scheduled(corpora, schedule, batch_size=24)
    train = data.train(3)
    part = np.concatenate([(train[i]["tokens"].max(1) > ROWS * LENGTH) for i in range(9)])
    phases = data.weights.phases
    for phase, stop in zip(phases, [*(one.step for one in phases[1:]), 9], strict=True):
        of = np.cumsum(part[phase.step * 24 : stop * 24])
        due = np.arange(1, len(of) + 1) * phase.weights[1] / sum(phase.weights)
        assert (abs(of - due) < 1).all()


RESUMES = {
    "nothing": ("piecewise", {}, "piecewise"),
    "batches": ("piecewise", {"batch_size": 4}, "piecewise"),
    "batches of a line": ("linear", {"batch_size": 6}, "linear"),
    "rows and batches": ("linear", {"batch_size": 12, "seq_len": 4}, "linear"),
    "the schedule": ("piecewise", {}, "linear"),
}


@pytest.mark.parametrize("name", RESUMES)
@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_schedule_of_weights_goes_on_where_it_was(corpora, name, step):
    first, changes, then = RESUMES[name]
    was = scheduled(corpora, first)
    now = scheduled(corpora, then, **changes)
    order = go_on(was, Order(), now, step)
    seen = Counter(trained_on(was, Order(), 0, step))
    seen.update(trained_on(now, order, step, 8))
    for part in range(2):
        counts = counted(seen, now, part)
        assert max(counts) - min(counts) <= 1  # each row that was not read is read once
    if not changes and first == then:
        assert order == Order()
        whole = trained_on(was, Order(), 0, 8)
        assert trained_on(was, Order(), 0, step) + trained_on(now, order, step, 8) == whole
    rows = now.train(3).in_order(order)[step]["tokens"].max(1) > ROWS * LENGTH
    phase = [one for one in now.weights.phases if one.step <= step][-1]
    later = [one.step for one in now.weights.phases if one.step > step]
    if not later or later[0] > step + 1:  # the first step after the resume has the weights of its own step
        assert abs(rows.sum() - len(rows) * phase.weights[1] / sum(phase.weights)) < 2


def test_control_a_schedule_that_forgets_the_phases_before_reads_rows_twice(corpora, monkeypatch):
    was, now = scheduled(corpora, "linear"), scheduled(corpora, "linear", batch_size=6)
    order = replace(go_on(was, Order(), now, 6), before=(0, 0))
    seen = Counter(trained_on(was, Order(), 0, 6)) + Counter(trained_on(now, order, 6, 8))
    counts = [count for part in range(2) for count in counted(seen, now, part)]
    assert max(counts) == 2 and min(counts) == 0


def test_weights_of_a_schedule_may_be_whole_and_end():
    whole = LinearWeights(first=[1, 0], last=[0, 1], num_steps=10_000)
    assert len(whole.phases) == 101 and whole.phases[-1] == Phase(10_000, (0, 1))
    shares = [one.weights[1] / sum(one.weights) for one in whole.phases]
    assert shares == sorted(shares) and abs(shares[50] - 0.505) < 1e-9
    kept = LinearWeights(first=[1, 0], last=[1, 1e-6], num_steps=3)
    assert [one.weights for one in kept.phases] == [(1000, 1)] * 4
    assert PiecewiseWeights(steps=[0], weights=[[2, 4]]).phases == (Phase(0, (1, 2)),)


def test_billions_of_rows_are_counted_at_once():
    assert Order().read_of_parts((Phase(0, (2, 1)),), 8, 3 * 10**12 + 1) == (2 * 10**12 + 1, 10**12)


RUN = """
model: {kind: llama, num_layers: 1, hidden_size: 8, num_heads: 2, intermediate_size: 8, vocab_size: 2000}
data: {kind: numpy, path: PATH, batch_size: 16, seq_len: 8, held_out_fraction: 0.02,
       tokenizer: {kind: ids, vocab_size: 1537, bos: 0}}
optim: {kind: adamw, lr: 1e-3}
mesh: {data: 8}
num_steps: 3
run_dir: run
loggers: []
"""


def test_a_run_goes_on_with_the_rows_that_it_has_not_read(corpora, command, tmp_path, monkeypatch):
    """`meshpar train` four times, with another batch, accumulation, row length and mesh; then what is refused."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(RUN.replace("PATH", corpora[0]))
    seen: Counter[int] = Counter()
    put = loop.put

    def noted(batch: Any, structs: Any, rows: Any, order: Any = None) -> Any:
        seen.update(batch["tokens"].ravel().tolist() if noted.trains else ())
        return put(batch, structs, rows, order)

    held_out = Loop._evaluate

    def evaluated(*given: Any) -> Any:
        noted.trains = False
        try:
            return held_out(*given)
        finally:
            noted.trains = True

    noted.trains = True
    monkeypatch.setattr(loop, "put", noted)
    monkeypatch.setattr(Loop, "_evaluate", evaluated)
    steps = [
        ["num_steps=3"],
        ["num_steps=5", "data.batch_size=8"],
        ["num_steps=6", "data.batch_size=24", "num_microbatches=3"],
        ["num_steps=8", "data.batch_size=24", "data.seq_len=4", "mesh={data: 4, fsdp: 2}"],
    ]
    for words in steps:
        said = command("train", "config.yaml", *words)
        assert said.code == 0, said.err
    tokens = 3 * 16 * 8 + 2 * 8 * 8 + 24 * 8 + 2 * 24 * 4
    assert sum(seen.values()) == tokens
    assert max(count for token, count in seen.items() if token) == 1
    assert "224 rows read" in command("checkpoint", "show", "run").out
    said = command("train", "config.yaml", "num_steps=9", "data.batch_size=24", "data.seq_len=6", "seed=5")
    assert said.code == 2
    assert "seed\n    was 0, is 5" in said.err
    assert "data.seq_len\n    was 4, is 6: a new row would have tokens of rows that were read and of others" in said.err
    with pytest.warns(DataWarning, match="from step 8 on"):
        said = command("train", "config.yaml", "num_steps=9", "data.batch_size=8", "data.if_changed=allow", "seed=5")
    assert said.code == 0, said.err


def test_conversations_are_packed_anew_into_rows_of_another_length():
    """So a run cannot go on in rows of another length, although the old one is a multiple of it."""
    data = {"kind": "chat", "batch_size": 8, "seq_len": 8, "held_out_fraction": 0.1, "if_changed": "refuse"}
    saved = {"rows_read": 24, "seed": 0}
    with pytest.raises(DataError, match=r"data.seq_len\n    was 8, is 4: conversations are packed in another way"):
        resumed(saved, data, data | {"seq_len": 4}, 3, 0)
    assert resumed(saved, data, data | {"batch_size": 4}, 3, 0).first == 24 - 3 * 4
