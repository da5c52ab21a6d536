"""Converts the chapters of docs/learn into Jupyter notebooks in the folder `notebooks`: Python blocks become cells.

python scripts/notebooks.py
jupyter lab notebooks
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "docs" / "learn").glob("[0-9]*.md"))
OUTPUT = re.compile(r"^```\n\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> NotebookNode:
    """A page as a notebook. The outputs that the page shows are left out, since the cells print their own."""
    text = OUTPUT.sub("```", page)
    text = re.sub(r"\((\d\d-[\w-]+)\.md\)", r"(\1.ipynb)", text)
    text = text.replace("](../", "](../docs/").replace("](index.md)", "](../docs/learn/index.md)")
    return jupytext.reads(text, fmt="md")


def write(folder: Path) -> list[Path]:
    """Writes all notebooks, and a link to `configs`, which some of them read."""
    folder.mkdir(exist_ok=True)
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
    written = [folder / f"{page.stem}.ipynb" for page in CHAPTERS]
    for page, path in zip(CHAPTERS, written, strict=True):
        jupytext.write(notebook(page.read_text()), path)
    return written


if __name__ == "__main__":
    print(*write(ROOT / "notebooks"), sep="\n")
