"""What changed between two programs, on hand-written inspections."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from meshpar.errors import ProgramError
from meshpar.inspection.difference import FigureChange, difference
from meshpar.inspection.report.plain import read


def collective(kind="all_gather", axes=("fsdp",), times=2, sent=100.0, tensors=("p.w",), source="/a/nn/x.py:3", **more):
    some = {"axes": list(axes), "group_size": 2, "times": times, "branches": [], "arrays": ["f32[50]"], "op_name": ""}
    return some | {"kind": kind, "sent_bytes": sent, "tensors": list(tensors), "source": source} | more


GATHER = collective()
ACTIVATION = collective("all_reduce", ("tensor",), 4, 64.0, (), "/a/nn/layers.py:10")
INSPECTION = {
    "mesh": {"data": 1, "fsdp": 2, "tensor": 2},
    "sent_bytes": 456,
    "sent_bytes_per_axis": {"fsdp": 200, "tensor": 256},
    "traced_bytes_per_axis": None,
    "collectives": [GATHER, ACTIVATION],
    "flops": 1000,
    "memory": {"arguments": {"p.w": 400}, "outputs": 8, "temporaries": 1000, "peak": None, "total": 1408},
    "largest": [],
    "opaque": [],
}


def changed(**more):
    return deepcopy(INSPECTION) | more


def test_equal_programs_have_no_difference():
    changes = difference(INSPECTION, changed())
    assert not changes
    assert str(changes) == "no difference"
    assert changes.as_json()["differs"] is False
    assert changes.as_json()["collectives"] == []


@pytest.mark.parametrize(
    "after",
    [
        changed(collectives=[ACTIVATION, GATHER]),
        changed(collectives=[GATHER | {"times": 1}, GATHER | {"times": 1}, ACTIVATION]),
        changed(collectives=[GATHER, ACTIVATION | {"source": "/elsewhere/nn/layers.py:17"}]),
        changed(collectives=[GATHER | {"source": "/a/nn/moved.py:3"}, ACTIVATION]),
        changed(mesh={"fsdp": 2, "tensor": 2, "expert": 1}),
        changed(findings=[], a_newer_key=3),
    ],
    ids=["order", "in two places", "another line", "a tensor's file", "axes of size one", "keys of a newer meshpar"],
)
def test_another_order_of_the_same_program_is_no_difference(after):
    assert not difference(INSPECTION, after)


@pytest.mark.parametrize(
    ("collectives", "verdict"),
    [
        ([ACTIVATION], "gone"),
        ([GATHER, collective(tensors=["p.v"]), ACTIVATION], "new"),
        ([GATHER | {"times": 3}, ACTIVATION], "more often"),
        ([GATHER, ACTIVATION | {"times": 3}], "less often"),
        ([GATHER | {"sent_bytes": 101.0}, ACTIVATION], "larger"),
        ([GATHER | {"sent_bytes": 99.0}, ACTIVATION], "smaller"),
    ],
)
def test_a_collective_is_reported_as_new_gone_or_changed(collectives, verdict):
    changes = difference(INSPECTION, changed(collectives=collectives))
    assert [change.verdict for change in changes.collectives] == [verdict]
    assert changes


@pytest.mark.parametrize(
    "other",
    [
        GATHER | {"kind": "all_reduce"},
        GATHER | {"axes": ["data"]},
        GATHER | {"axes": None},
        GATHER | {"tensors": ["p.v"]},
        GATHER | {"branches": ["b"]},
    ],
    ids=["kind", "axes", "no mesh", "tensor", "branch"],
)
def test_another_collective_is_gone_and_new(other):
    changes = difference(INSPECTION, changed(collectives=[other, ACTIVATION]))
    assert sorted(change.verdict for change in changes.collectives) == ["gone", "new"]


@pytest.mark.parametrize(
    "after",
    [
        changed(flops=1001),
        changed(sent_bytes_per_axis={"fsdp": 200, "tensor": 255, "data": 1}),
        changed(memory=INSPECTION["memory"] | {"temporaries": 1001}),
        changed(memory=INSPECTION["memory"] | {"peak": 1407, "total": 1407}),
        changed(mesh={"data": 2, "fsdp": 2, "tensor": 1}),
    ],
    ids=["flops", "axes", "memory", "total", "mesh"],
)
def test_any_figure_makes_a_difference(after):
    assert difference(INSPECTION, after)


def test_a_change_is_printed_with_its_amount_and_percentage():
    assert [FigureChange(*pair).by for pair in [(8, 8), (0, 8), (8, 0), (1000, 1250)]] == [
        "same",
        "+8",
        "-8 (-100.0%)",
        "+250 (+25.0%)",
    ]


def test_the_text_of_a_difference():
    after = changed(
        mesh={"fsdp": 4, "tensor": 1},
        sent_bytes=300,
        sent_bytes_per_axis={"fsdp": 300},
        collectives=[GATHER | {"times": 3, "tensors": ["p.w", "p.b"]}],
        memory={"arguments": {"p.w": 200}, "outputs": 8, "temporaries": 2000, "peak": None, "total": 2208},
    )
    assert (
        str(difference(INSPECTION, after))
        == """\
a device, in one step, before -> after

mesh: fsdp=2, tensor=2 -> fsdp=4

sends 456 B -> 300 B
  over    before  after  change
  fsdp    200     300    +100 (+50.0%)
  tensor  256     0      -256 (-100.0%)

collectives
                    over    times     bytes         what or where
  new   all_gather  fsdp    0x -> 3x  0 B -> 300 B  p.b and 1 more
  gone  all_reduce  tensor  4x -> 0x  256 B -> 0 B  nn/layers.py
  gone  all_gather  fsdp    2x -> 0x  200 B -> 0 B  p.w

matrix products: 1,000 FLOPs

holds 1.38 KiB -> 2.16 KiB
               before  after  change
  p.w          400     200    -200 (-50.0%)
  outputs      8       8      same
  temporaries  1,000   2,000  +1,000 (+100.0%)"""
    )


def test_equal_collectives_are_summarized():
    assert "\nthe same collectives\n" in str(difference(INSPECTION, changed(flops=1)))


def test_the_json_has_both_sides():
    after = changed(flops=2000, collectives=[GATHER | {"times": 3}, ACTIVATION])
    changes = json.loads(json.dumps(difference(INSPECTION, after).as_json()))
    assert changes["flops"] == {"before": 1000, "after": 2000}
    assert changes["sent_bytes_per_axis"]["fsdp"] == {"before": 200, "after": 200}
    assert changes["collectives"] == [
        {
            "change": "more often",
            "kind": "all_gather",
            "axes": "fsdp",
            "what": ["p.w"],
            "in_branch": False,
            "times": {"before": 2, "after": 3},
            "sent_bytes": {"before": 200, "after": 300},
        }
    ]


# Files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path):
    (tmp_path / "kept.json").write_text(json.dumps(INSPECTION, indent=2))
    assert not difference(read(tmp_path / "kept.json"), INSPECTION)


NO_PROGRAMS = {
    "no JSON": ("model: {kind: llama}", "  the file\n    Invalid JSON: expected value at line 1 column 1"),
    "cut off": (json.dumps(INSPECTION)[:100], "  the file\n    Invalid JSON: EOF while parsing"),
    "deep": ("[" * 10000, "  the file\n    Invalid JSON: recursion limit exceeded"),
    "a list": ("[]", "  the file\n    Input should be an object"),
    "a word for a number": (json.dumps(changed(flops="many")), "  flops\n    Input should be a valid integer"),
    "a negative count": (
        json.dumps(changed(collectives=[GATHER | {"times": -1}])),
        "  collectives.0.times\n    Input should be greater than or equal to 0",
    ),
    "not finite": (
        json.dumps(changed(collectives=[GATHER | {"sent_bytes": float("nan")}])),
        "  collectives.0.sent_bytes\n    Input should be a finite number",
    ),
    "a key is missing": (
        json.dumps({k: v for k, v in INSPECTION.items() if k != "memory"}),
        "  memory\n    Field required",
    ),
}


@pytest.mark.parametrize("case", NO_PROGRAMS)
def test_a_file_that_no_inspection_wrote_is_refused(case, tmp_path):
    text, message = NO_PROGRAMS[case]
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProgramError) as error:
        read(path)
    assert str(error.value).startswith(f"{path} was not written by `meshpar inspect --json`:\n{message}")


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(ProgramError) as error:
        read(tmp_path / "none.json")
    assert str(error.value) == f"{tmp_path}/none.json cannot be read: No such file or directory"
    (tmp_path / "bytes.json").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(ProgramError, match="Invalid JSON"):
        read(tmp_path / "bytes.json")
