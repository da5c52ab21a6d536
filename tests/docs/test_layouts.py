"""The table of layouts and what pages quote of it are what their steps send and hold; pictures are drawn from it."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from html import unescape

import pytest

import compare_layouts
import pictures
from meshpar import load, prepare
from tests.docs.page import ROOT, shell

SMALL = ["model.num_layers=1", "data={kind: synthetic, batch_size: 8, seq_len: 32}"]
TABLE = pictures.table_of(pictures.PAGE.read_text()).splitlines()
SAMPLE = ["tensor 4, sequence", *compare_layouts.RECOMPUTED]
"""Compiled in CI; all others in the slow tests."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


SHOWN = {cells(line)[0]: cells(line) for line in TABLE[2:]}


@cache
def measured(*names: str) -> dict[str, list[str]]:
    """The rows of layouts, compiled and trained without the XLA flags of these tests, as for the page."""
    command = [sys.executable, ROOT / "scripts" / "compare_layouts.py", *names]
    environment = shell() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {cells(line)[0]: cells(line) for line in done.stdout.splitlines()[2:]}


MANUAL = [name for name, keys in compare_layouts.LAYOUTS.items() if "lowering=auto" not in keys]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MANUAL)
def test_the_table_has_the_bytes_of_a_layout(name):
    run = load(compare_layouts.CONFIG, compare_layouts.LAYOUTS[name])
    traced = prepare(run, run.mesh.abstract()).traced_bytes
    assert traced is not None
    sent = compare_layouts.sent({", ".join(axes): float(num) for axes, num in traced.items()})
    assert sent == SHOWN[name][2]
    assert [other for other in MANUAL if SHOWN[other][2] == sent] in ([name], ["data 8"], ["ZeRO-1", "ZeRO-2"])


@pytest.mark.slow
def test_the_table_has_what_a_layout_holds():
    """Loss, bytes and memory, to the digit."""
    for name in set(SAMPLE) & set(SHOWN):
        assert measured(*SAMPLE)[name] == SHOWN[name]


@pytest.mark.slow
def test_the_table_has_what_each_layout_holds():
    assert measured(*compare_layouts.LAYOUTS) == SHOWN


@pytest.mark.slow
def test_a_page_quotes_what_the_table_has():
    text = re.sub(r"\s+", " ", pictures.PAGE.read_text())
    held = {name: row[3].removesuffix(" MiB") for name, row in (SHOWN | measured(*SAMPLE)).items()}
    sent = {name: row[2].partition(" MiB")[0] for name, row in SHOWN.items()}
    sequence = "tensor 4, sequence"
    quick, by_gspmd = sent["ZeRO-3 and tensor"], sent["the same, by GSPMD"]
    assert f"{sent['data 8']} MiB in the table below, where tensor parallelism sends {sent['tensor 4']} MiB" in text
    assert f"GSPMD sends {by_gspmd} MiB instead of {quick} in a step of the quickstart" in text
    assert f"it holds more, {held[sequence]} MiB instead of {held['tensor 4']}:" in text
    assert float(held[sequence]) > float(held["tensor 4"])
    full, full_sequence = held["tensor 4, recomputed"], held[f"{sequence}, recomputed"]
    assert f"with `model.remat=full` {full_sequence} MiB instead of {full} in the model of the table" in text
    assert float(full_sequence) < float(full)
    readme = (ROOT / "README.md").read_text()
    assert f"the quickstart sends {quick} MiB; under GSPMD the same declaration sends {by_gspmd}" in readme


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
