"""The chapters of `docs/learn`: each has all its parts, and each is a notebook too.

`test_code_blocks.py` runs them and compares what they print, as it does for every page.
"""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient

from scripts.notebooks import CHAPTERS, notebook, write
from tests.docs.page import ROOT, blocks, check_same, shell
from tests.process.test_newcomer import pasted

INDEX = ROOT / "docs" / "learn" / "index.md"
IMAGE = re.compile(r"!\[[^\]]+\]\(([\w.-]+)\)")


def missing(text: str) -> list[str]:
    """The parts that a chapter lacks."""
    written = re.findall(r'(?:savefig|open)\("([\w.-]+)"', text)
    found = {
        "a number to change": "**Change a number.**" in text and re.search("(# |; )try ", text),
        "what large systems do": "\n## What large systems do\n" in text,
        "a paper": re.search(r"^\*\*Read:\*\* [^#]*\(https://", text, re.MULTILINE),
        "the next page": re.search(r"^(Next: |Back to )\[", text, re.MULTILINE),
        "a picture": IMAGE.search(text),
        "a picture that it makes": set(IMAGE.findall(text)) == set(written),
    }
    return [part for part, is_there in found.items() if not is_there]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_chapter_has_all_its_parts(page):
    text = page.read_text()
    assert not missing(text)
    assert all((page.parent / name).is_file() for name in IMAGE.findall(text))
    assert text.startswith(f"# {int(page.stem[:2])}. ")


def test_control_a_missing_part_is_seen():
    text = CHAPTERS[0].read_text()
    assert missing(text.replace("**Read:**", "Read")) == ["a paper"]
    assert missing(text.replace('savefig("', 'savefig("other-')) == ["a picture that it makes"]


def test_the_index_lists_each_chapter_with_its_time():
    rows = re.findall(r"^\| \[\d+\]\(([\w.-]+)\) \|.*\| (\d+\.\d) s \|$", INDEX.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [page.name for page in CHAPTERS]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_notebook_has_the_code_of_its_page_and_no_outputs(page):
    cells = notebook(page.read_text()).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert code == [block.code.strip("\n") for block in blocks(page) if block.language == "python"]
    assert not any("```" in cell.source for cell in cells)


SAMPLE = {"03-collectives"}
"""A cheap chapter; the others are executed by slow tests."""
chapters = pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[] if page.stem in SAMPLE else pytest.mark.slow) for page in CHAPTERS],
)


@chapters
def test_a_chapter_pasted_into_python_prints_what_it_shows(page, tmp_path):
    """Python's own prompt; `test_code_blocks.py` reads lines as it does. It shows no values of lines."""
    program = [block for block in blocks(page) if block.language == "python"]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    quiet = "import sys\nsys.displayhook = lambda value: None"
    check_same(page, program, pasted([quiet, *(block.code for block in program)], tmp_path)[1:])


@chapters
def test_a_notebook_prints_what_its_page_shows(page, tmp_path):
    path = next(path for path in write(tmp_path) if path.stem == page.stem)
    client = NotebookClient(
        nbformat.read(path, as_version=4), timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    executed = [cell for cell in client.execute(env=shell()).cells if cell.cell_type == "code"]
    printed = ["".join(output.text for output in cell.outputs if output.get("name") == "stdout") for cell in executed]
    check_same(page, [block for block in blocks(page) if block.language == "python"], printed)
    assert all((tmp_path / name).is_file() for name in IMAGE.findall(page.read_text()))
