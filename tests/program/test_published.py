"""The planner's predictions beside what others measured and published (docs/published.yaml)."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from meshpar.cost.flops import ProductSizes
from meshpar.cost.traced import Collective
from meshpar.errors import ConfigError, RunError
from meshpar.mesh.layout import MeshLayout
from meshpar.planning import published as publishing
from meshpar.planning.estimate import Operations, Work
from meshpar.planning.published import Comparison, Factors, Measured, compare, fitted, spread
from meshpar.planning.published_file import read
from meshpar.planning.torch_ring import around_a_ring

TOLD = 0.05
"""From this difference on, the ranks of two rows of a source must be right."""
AHEAD = ("8B on 8, context 8",)
"""Rows whose tokens a second are further from what was published than a fifth.

With twice the devices and the tokens of a row, steps took 1.53 times as long from 1 to 2, 2.37 from 2 to 4, and 1.95
from 4 to 8 devices; those of 405B, whose devices have as many tokens, 1.62, 1.52 and 1.94. No model of equal steps
around a ring is near all of them.
"""
RATIOS = ("context 4 over 1", "context 8 over 1")
"""Ratios that are further away than six hundredths, for the same reason."""
HEAVY = ("405B on 512, interleaved", "70B on 256", "405B on 512, 32768 tokens")
"""Rows whose memory is further away than a tenth."""


@cache
def whole() -> Comparison:
    return compare()


@cache
def one_gpu() -> Measured:
    file = read()
    source = next(one for one in file.sources if one.name.startswith("meshpar"))
    return publishing.measured(file, source, source.rows[0])


def test_every_row_of_the_table_is_there():
    rows = {source.name.split(",")[0]: len(source.rows) for source in read().sources}
    assert rows == {"torchtitan": 16, "BLOOM": 1, "Megatron-LM": 2, "Llama 3": 3, "meshpar on one H100": 1}


def test_a_step_on_one_gpu_is_predicted_without_any_factor():
    """1.2 billion parameters on one H100, measured in 285 ms: 185 ms before other operations counted."""
    row = one_gpu()
    assert row.published_s == pytest.approx(0.2854, rel=0.001)
    assert row.error(Factors()) == pytest.approx(0.0, abs=0.1)
    assert row.error(fitted([row])) == pytest.approx(0.0, abs=0.01)
    assert row.predicted_s(Factors(products=2.0)) < row.predicted_s(Factors()), "the control: a factor acts"
    assert spread("x", {"a": -0.1, "b": 0.3, "c": 0.2}) == "x: median error 20%, largest 30% (b)"


def test_an_llama_on_eight_gpus_is_no_faster_than_published():
    """The ratio of fp8 to bf16 was published as 1.28. Products at 70 % of the peak alone would say 10,660 tokens/s."""
    file = read()
    source = file.sources[0]
    bf16, fp8 = (publishing.measured(file, source, row) for row in source.rows[:2])
    both = fitted([bf16, fp8])
    assert abs(bf16.error(both)) < 0.05
    assert abs(fp8.error(both)) < 0.05
    terms = bf16.work.on(both.on(bf16.machine)).terms
    assert 0.05 < terms["other operations"] / sum(terms.values()) < 0.2
    assert bf16.work.on(bf16.machine).total_s < bf16.published_s, "its GPUs have 500 of 700 W"


@pytest.mark.slow
def test_tokens_a_second_are_within_a_fifth_and_the_median_within_eight_per_cent():
    for errors in (whole().errors, whole().left_out):
        assert max(abs(error) for name, error in errors.items() if name not in AHEAD) < 0.2
        assert statistics.median(map(abs, errors.values())) < 0.08


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="see AHEAD")
@pytest.mark.parametrize("name", AHEAD)
def test_rows_that_are_ahead_are_within_a_fifth(name):
    assert abs(whole().errors[name]) < 0.2


@pytest.mark.slow
def test_rows_that_were_held_out_are_predicted_by_the_factors_of_the_others():
    for one in whole().compared:
        unseen = [row for row in one.rows if row.row.held_out]
        assert fitted([row for row in one.rows if row not in unseen]) == one.factors
        assert all(abs(row.error(one.factors)) < 0.08 for row in unseen)
    assert {row.row.name for row, *_ in whole().rows() if row.row.held_out} == {
        "405B on 512, context 2",
        "405B on 512, context 4",
    }


@pytest.mark.slow
def test_the_ranks_of_a_source_are_right():
    wrong = set()
    for one in whole().compared:
        for a, b in combinations(one.rows, 2):
            published = a.tokens / a.published_s, b.tokens / b.published_s
            predicted = [row.tokens / row.predicted_s(one.factors) for row in (a, b)]
            is_told = abs(published[0] / published[1] - 1) > TOLD
            if is_told and (published[0] > published[1]) != (predicted[0] > predicted[1]):
                wrong.add((a.row.name, b.row.name))
    assert not wrong


@pytest.mark.slow
def test_a_plan_states_how_published_steps_compare():
    for one in whole().compared:
        assert one.took == pytest.approx(one.source.took, abs=0.01), one.source.name


def ratios() -> dict[str, float]:
    return {name: predicted / published - 1 for name, (published, predicted) in whole().of_ratios.items()}


@pytest.mark.slow
def test_ratios_are_within_six_per_cent():
    assert not {name: off for name, off in ratios().items() if name not in RATIOS and abs(off) >= 0.06}


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="see RATIOS")
@pytest.mark.parametrize("name", RATIOS)
def test_ratios_that_are_off_are_within_six_per_cent(name):
    assert abs(ratios()[name]) < 0.06


@pytest.mark.slow
def test_memory_is_within_a_tenth():
    assert not {name: off for name, off in whole().memory.items() if name not in HEAVY and abs(off) >= 0.1}


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="see HEAVY")
@pytest.mark.parametrize("name", HEAVY)
def test_memory_that_is_off_is_within_a_tenth(name):
    assert abs(whole().memory[name]) < 0.1


def test_a_loss_that_is_not_compiled_reserves_its_own_bytes_of_each_logit():
    file = read()
    source = file.sources[0]
    row = source.rows[0]
    assert source.logit_bytes == {"whole": 14, "sharded": 18}
    other = publishing.measured(file, source.model_copy(update={"logit_bytes": None}), row)
    num_logits = 2 * 8192 * 128256
    more = publishing.measured(file, source, row).work.step_bytes - other.work.step_bytes
    assert more == (14 - publishing.LOGIT_BYTES) * num_logits
    assert other.memory_gib / row.memory_gib < 0.9, "the control: with meshpar's loss the row is not within a tenth"


def test_a_row_that_cannot_be_traced_is_named_and_the_others_are_predicted(command, monkeypatch):
    good = one_gpu()
    others = [good.row.model_copy(update={"name": name}) for name in ("refused", "broken")]
    source = good.source.model_copy(update={"rows": (others[0], good.row, others[1])})
    file = read().model_copy(update={"sources": (source,)})
    errors = {"refused": ConfigError("mesh.tensor: 3 does not divide 8"), "broken": TypeError("add got int8")}

    def measured(file, source, row):
        if row.name in errors:
            raise errors[row.name]
        return good

    monkeypatch.setattr(publishing, "measured", measured)
    monkeypatch.setattr(publishing, "read", lambda: file)
    said = command("plan", "--published")
    assert said.code == RunError.exit_code
    assert good.row.name in said.out
    assert "refused" not in said.out
    assert "refused\n    could not be traced: mesh.tensor: 3 does not divide 8" in said.err
    assert "broken\n    could not be traced: TypeError: add got int8" in said.err
    assert compare().failed.keys() == errors.keys()


def test_a_ring_computes_what_ulysses_does_and_waits_for_what_it_sends():
    """Two rows of 64 tokens on 4 devices, 8 heads of 16: Ulysses gives a device 2 heads, a ring 16 tokens."""
    heads, local, size = 2 * 8, 16, 4
    forward = ProductSizes("dot_product_attention_fwd_wrapper", 4096, heads // size, local * size, local * size, 16, 2)
    backward = replace(forward, kind="dot_product_attention_bwd_wrapper", num_flops=10240)
    exchanged = Collective("all_to_all", ("context",), 100, size)
    gathered = Collective("all_gather", ("fsdp",), 100, 2)
    computes = Operations({forward: 2.0, backward: 1.0}, {})
    mesh = MeshLayout(context=size, fsdp=2).abstract()
    work = Work(mesh, computes, [], [exchanged, gathered], 1.0, 0, 0)
    ring = around_a_ring(work)
    assert ring.computes.flops == computes.flops
    assert {(one.batch, one.rows, one.columns) for one in ring.computes.products} == {(16, 16, 16), (16, 16, 8)}
    elements = heads * local * 16
    assert ring.computes.num_bytes == (size - 1) * elements * (2 * 18 + 50)
    sent = {(one.kind, one.axes): one.times * one.sent_bytes for one in ring.waits}
    assert sent["all_gather", ("fsdp",)] == 50
    assert ring.sent_bytes - 50 == 3 * (size - 1) * 4 * elements + size * 8 * elements
    alone = replace(work, mesh=MeshLayout(fsdp=2).abstract())
    assert around_a_ring(alone) is alone, "the control: a row on one device goes around no ring"


def test_published_takes_no_config(command):
    said = command("plan", "--published", "configs/quickstart.yaml")
    assert said.code == 2
    assert "--published takes no config" in said.err
    said = command("plan", "--target", "h100:1x8")
    assert said.code == 2
    assert "plan needs CONFIG" in said.err
