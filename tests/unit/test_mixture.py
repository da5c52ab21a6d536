"""Mixtures: weights are kept from the first row on, and each part's epochs lose and repeat nothing."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from meshpar.config import to_yaml
from meshpar.data import Data, Mixture, MixtureComponent, Synthetic
from meshpar.data.dataset import Dataset
from meshpar.data.documents import Documents
from meshpar.data.packing import PackedRows
from meshpar.data.round_robin import WeightedRoundRobin, whole_weights
from meshpar.data.tokenizer import TokenizerFile
from meshpar.data.weights import Phase
from meshpar.errors import ConfigError
from meshpar.experiment.config import Run, load

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=7).map(tuple)


def assert_keeps_the_weights(turns: WeightedRoundRobin, num_rows: int) -> None:
    """Over each prefix, every part is within one row of its share; and its rows come in order."""
    part, turn = turns.of(np.arange(num_rows))
    for p, weight in enumerate(turns.weights):
        taken = np.cumsum(part == p)
        due = [Fraction(n * weight, sum(turns.weights)) for n in range(1, num_rows + 1)]
        assert all(abs(int(t) - d) < 1 for t, d in zip(taken, due, strict=True))
        assert np.array_equal(turn[part == p], np.arange(taken[-1]))


@given(WEIGHTS)
@settings(deadline=None, max_examples=50)
def test_weights_are_kept_within_one_row_over_any_prefix(weights: tuple[int, ...]):
    assert_keeps_the_weights(WeightedRoundRobin(weights), 2 * sum(weights) + 3)


class OneAfterTheOther(WeightedRoundRobin):
    """The shares are right only at the end of each period."""

    @property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        return np.repeat(np.arange(len(self.weights)), self.weights), np.concatenate([*map(np.arange, self.weights)])


class LargestFirst(WeightedRoundRobin):
    """Jefferson's method without a quota: a heavy part gets ahead."""

    @property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        due = [(Fraction(i + 1, w), p, i) for p, w in enumerate(self.weights) for i in range(w)]
        return tuple(np.array([d[1:] for d in sorted(due)]).T)


@pytest.mark.parametrize("fault", [OneAfterTheOther, LargestFirst])
def test_control_uneven_turns_are_seen(fault: type[WeightedRoundRobin]):
    weights = (17, 1, 1, 1, 1)
    assert_keeps_the_weights(WeightedRoundRobin(weights), 63)
    with pytest.raises(AssertionError):
        assert_keeps_the_weights(fault(weights), 63)


@given(st.lists(st.decimals("0.001", "999", places=3, allow_nan=False), min_size=1, max_size=5))
def test_decimal_weights_become_exact_integers(written: list):
    whole = whole_weights([float(w) for w in written])
    assert [Fraction(w, sum(whole)) for w in whole] == [Fraction(w) / sum(map(Fraction, written)) for w in written]


def numbered(sizes: tuple[int, ...], weights: tuple[int, ...], seed: int | None = 0, batch_size: int = 4) -> Dataset:
    """Part p's row r is one document of the token 100 p + r."""
    parts = [
        Documents.joined([(0.0, np.array([100 * p + r])) for r in range(n)], 999, np.uint16)
        for p, n in enumerate(sizes)
    ]
    return Dataset(tuple(PackedRows(part, seq_len=2) for part in parts), batch_size, seed, (Phase(0, weights),))


def rows_by_part(dataset: Dataset, num_batches: int) -> list[list[int]]:
    rows = [row for i in range(num_batches) for row in dataset[i]["tokens"][:, 1].tolist()]
    return [[row % 100 for row in rows if row // 100 == p] for p in range(len(dataset.parts))]


SIZES = st.lists(st.integers(1, 12), min_size=2, max_size=4)


def assert_epochs_are_whole(dataset: Dataset, num_batches: int) -> None:
    for part, taken in zip(dataset.parts, rows_by_part(dataset, num_batches), strict=True):
        for at in range(0, len(taken), len(part)):
            epoch = taken[at : at + len(part)]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < len(part) or sorted(epoch) == list(range(len(part)))


@given(SIZES, st.data(), st.integers(0, 2**40))
@settings(deadline=None, max_examples=20)
def test_no_row_of_a_part_is_lost_or_repeated_in_its_epoch(sizes: list[int], data: st.DataObject, seed: int):
    weights = data.draw(st.tuples(*(st.integers(1, 5) for _ in sizes)))
    assert_epochs_are_whole(numbered(tuple(sizes), weights, seed), 12)


def test_control_a_repeated_row_is_seen(monkeypatch: pytest.MonkeyPatch):
    dataset = numbered((5, 7), (1, 2))
    assert_epochs_are_whole(dataset, 12)
    right = WeightedRoundRobin.of
    monkeypatch.setattr(WeightedRoundRobin, "of", lambda self, rows: (right(self, rows)[0], right(self, rows)[1] // 2))
    with pytest.raises(AssertionError):
        assert_epochs_are_whole(dataset, 12)


def test_each_part_has_an_order_of_its_own_whatever_the_other_parts():
    two = rows_by_part(numbered((20, 20), (1, 1)), 10)
    assert two[0] != two[1]
    alone = rows_by_part(numbered((20,), (3,)), 5)
    assert two[0] == alone[0]


def test_held_out_rows_come_once_part_after_part_whatever_the_weights():
    dataset = numbered((3, 4), (5, 1), seed=None)
    assert len(dataset) == 2
    assert rows_by_part(dataset, 2)[0] == [0, 1, 2]
    tokens = [row for batch in dataset for row in batch["tokens"][:, 1].tolist()]
    assert tokens == [0, 1, 2, 100, 101, 102, 103, 999]
    assert dataset[1]["segments"][-1].tolist() == [0, 0]


# From a config -------------------------------------------------------------------------------------------------

CONFIG = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 64}
data:
  kind: mixture
  batch_size: 8
  seq_len: 16
  parts:
    - {weight: 0.7, data: {kind: synthetic, num_documents: 30}}
    - {weight: 0.3, data: {kind: synthetic, noise: 0.5, num_documents: 30}}
optim: {kind: adamw, lr: 1e-2}
num_steps: 2
run_dir: run
"""


def test_the_parts_of_a_mixture_inherit_its_batch_size_and_row_length(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    run = load(tmp_path / "config.yaml")
    assert isinstance(run.data, Mixture)
    assert run.data.phases == (Phase(0, (7, 3)),)
    assert [(corpus.seq_len, corpus.batch_size) for corpus in run.data.corpora] == [(16, 8), (16, 8)]
    (tmp_path / "again.yaml").write_text(to_yaml(run))
    assert load(tmp_path / "again.yaml") == run
    assert Run.model_validate_json(run.model_dump_json()) == run
    part = MixtureComponent(weight=0.7, data=Synthetic(num_documents=30))
    other = MixtureComponent(weight=0.3, data=Synthetic(noise=0.5, num_documents=30))
    assert Mixture(batch_size=8, seq_len=16, parts=(part, other)) == run.data


WRONG_WEIGHTS = {
    "{kind: piecewise, steps: [0, 5], weights: [[1, 1]]}": "2 steps have 1 lists of weights",
    "{kind: piecewise, steps: [1, 5], weights: [[1, 1], [1, 2]]}": "must begin with 0 and ascend",
    "{kind: piecewise, steps: [0, 5], weights: [[1, 1], [1, 2, 3]]}": "have the lengths [2, 3]",
    "{kind: piecewise, steps: [0], weights: [[1, 0.000001]]}": "have too many digits",
    "{kind: linear, first: [0, 0], last: [1, 1], num_steps: 5}": "weights are all 0",
    "{kind: linear, first: [1, 2, 3], last: [1, 1, 1], num_steps: 5}": "weights has 3 of them, and there are 2 parts",
    "{kind: linear, first: [1, 2], last: [1, 1], num_steps: 5}": "parts.0.weight is set, and weights say how",
}


@pytest.mark.parametrize("weights", WRONG_WEIGHTS)
def test_a_schedule_that_does_not_fit_is_refused(weights, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("  parts:", f"  weights: {weights}\n  parts:"))
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "config.yaml")
    assert WRONG_WEIGHTS[weights] in str(error.value)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("weight: 0.3, ", ""))
    with pytest.raises(ConfigError, match=r"parts\.1\.weight is missing"):
        load(tmp_path / "config.yaml")


def test_a_cap_evaluates_the_first_rows_of_each_part():
    parts = [{"weight": 1, "data": {"kind": "synthetic", "num_documents": 30, "document_len": 40}} for _ in range(2)]
    shared = {"kind": "mixture", "parts": parts, "batch_size": 4, "seq_len": 16, "held_out_fraction": 0.3}
    whole, capped = (TypeAdapter(Data).validate_python(shared | cap) for cap in ({}, {"held_out_rows": 3}))
    everything = np.concatenate([batch["tokens"] for batch in whole.held_out()])
    some = list(capped.held_out())
    assert len(everything) > 12 and len(some) == 2
    tokens = np.concatenate([batch["tokens"] for batch in some])
    num = len(whole.corpora[0].rows()[1])
    assert np.array_equal(tokens[:6], np.concatenate([everything[:3], everything[num : num + 3]]))
    assert not some[1]["segments"][2:].any() and (some[1]["targets"][2:] == -1).all()
    assert np.array_equal(capped.train(0)[0]["tokens"], whole.train(0)[0]["tokens"])


def test_a_part_accepts_the_shorthand_of_a_tokenizer(tmp_path):
    part = "{weight: 1, data: {kind: text, path: corpus, tokenizer: tokenizer.json}}"
    head, _, tail = CONFIG.partition("    - {weight")
    (tmp_path / "config.yaml").write_text(f"{head}    - {part}\n{tail[tail.index('optim') :]}")
    (part,) = load(tmp_path / "config.yaml").data.parts  # pyright: ignore
    assert part.data.tokenizer == TokenizerFile(path="tokenizer.json")


def test_a_mixture_is_a_pure_function_of_config_and_seed():
    data = TypeAdapter(Data).validate_python(
        {"kind": "mixture", "parts": [{"weight": w, "data": {"kind": "synthetic", "vocab_size": 9}} for w in (2, 1)]}
    )
    first = data.train(1)
    again = data.train(1)
    other = data.train(2)
    assert all(np.array_equal(first[7][name], again[7][name]) for name in first[7])
    assert not np.array_equal(first[7]["tokens"], other[7]["tokens"])
    assert (data.vocab_size, data.tokenizer.bos) == (9, 8)


def test_a_mixture_without_parts_is_refused():
    with pytest.raises(ConfigError):
        Mixture(parts=())
