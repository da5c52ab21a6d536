"""The table of layouts is what their steps send, and its pictures are those that the scripts draw."""

from __future__ import annotations

from html import unescape

import pytest

import compare_layouts
import pictures
from meshpar import load, prepare

SMALL = ["model.num_layers=1", "data={kind: synthetic, batch_size: 8, seq_len: 32}"]


def cell(name: str) -> str:
    """What a layout sends, as the page shows it."""
    lines = pictures.PAGE.read_text().splitlines()
    return next(line.split(" | ")[2] for line in lines if line.startswith(f"| {name} |"))


@pytest.mark.parametrize("name", ["data 8", "ZeRO-3 in two groups", "tensor 4, sequence"])
def test_the_table_has_the_bytes_of_a_layout(name):
    run = load(compare_layouts.CONFIG, compare_layouts.LAYOUTS[name])
    traced = prepare(run, run.mesh.abstract()).traced_bytes
    assert traced is not None
    sent = compare_layouts.sent({", ".join(axes): float(num) for axes, num in traced.items()})
    assert sent == cell(name)
    assert sent != cell("ZeRO-3")


@pytest.mark.slow
def test_layouts_have_the_same_loss():
    """A sample; `tests/equivalence` proves it in float64."""
    one, other = (compare_layouts.measured(name, SMALL) for name in ("one device", "ZeRO-3 and tensor"))
    wrong = compare_layouts.measured("one device", [*SMALL, "optim.lr=2e-2"])
    assert abs(one.loss - other.loss) < 1e-5 < abs(one.loss - wrong.loss)
    assert one.sent == {}
    assert other.sent


def test_the_pictures_are_up_to_date():
    assert not [path.name for path, drawn in pictures.pictures().items() if path.read_text() != drawn]


def test_a_picture_has_each_row_and_each_question():
    table = pictures.rows(pictures.PAGE.read_text())
    assert [row.name for row in table] == list(compare_layouts.LAYOUTS)
    drawn = pictures.layouts(table, "light")
    assert all(f">{row.name}<" in drawn and f">{row.total}<" in drawn for row in table)
    tree = unescape(pictures.tree("dark"))
    assert all(f">{line}<" in tree for question in pictures.QUESTIONS for line in question.split("/"))
