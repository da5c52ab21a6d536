"""The map of the rooms in CONTRIBUTING.md: the floors of pyproject.toml, with the first sentence of each room."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- written by make reference -->\n"
END = "<!-- end of what make reference writes -->\n"


def floors() -> list[list[str]]:
    """The rooms of meshpar, those of one floor in a list, the highest floor first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    first = next(contract for contract in contracts if contract.get("containers") == ["meshpar"])
    return [re.split(" [|:] ", line) for line in first["layers"]]


def says(room: str) -> str:
    """The first sentence of a room's docstring.

    Raises:
      ValueError: it has none.
    """
    folder = ROOT / "meshpar" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring, which the map of the rooms quotes")
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".:")


def rooms_map() -> str:
    """The table, with the highest floor first."""
    house = floors()
    rows = [f"| {len(house) - i} | `{room}` | {says(room)} |" for i, floor in enumerate(house) for room in floor]
    return "\n".join(["| floor | room | what is in it |", "|---|---|---|", *rows]) + "\n"


def written(page: str) -> str:
    """A page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{rooms_map()}\n{END}{rest.partition(END)[2]}"
