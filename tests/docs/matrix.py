"""Writes the table of models and layouts into `docs/guides/your-model.md`, from what `tests/equivalence` parametrizes.

PYTHONPATH=. python -m tests.docs.matrix
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tests.docs.page import ROOT
from tests.equivalence.test_zoo import LAYOUTS, cases
from tests.zoo import MODELS

PAGE = ROOT / "docs" / "guides" / "your-model.md"
TABLE = re.compile(r"(?<=<!-- models and layouts -->\n)\n.*?\n(?=\n<!-- end -->)", re.DOTALL)


def mark(case: Any) -> str:
    """How a case is tested: in each run, in the sweep of all cases, or as one that is known to fail."""
    names = {one.name for one in case.marks}
    if names & {"xfail", "skip"}:
        return "✗"
    return "○" if "slow" in names else "●"


def table(found: Iterable[Any]) -> str:
    """The table of the partitioned program, from the cases that are tested."""
    marks = {tuple(case.values[:2]): mark(case) for case in found if case.values[2] == "manual"}
    rows = [
        ("model", *(f"`{layout}`" for layout in LAYOUTS)),
        ("---", *[":-:"] * len(LAYOUTS)),
        *((f"`{model}`", *(marks[model, layout] for layout in LAYOUTS)) for model in MODELS),
    ]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(cases()), PAGE.read_text()))
