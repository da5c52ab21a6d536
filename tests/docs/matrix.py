"""Writes lists and tables from the cases that are tested: models, layouts, strategies, families of Hugging Face.

PYTHONPATH=. python -m tests.docs.matrix
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tests.docs.page import ROOT
from tests.equivalence import test_strategies_of_any_model as strategies
from tests.equivalence.test_zoo import LAYOUTS, cases
from tests.interop import encoders, families, test_encoders
from tests.interop.test_families import MESHES, mesh_cases, outcome
from tests.zoo import MODELS

PAGE = ROOT / "docs" / "reference" / "tested.md"
TABLE = re.compile(r"(?<=<!-- models and layouts -->\n)\n.*?\n(?=\n<!-- end -->)", re.DOTALL)
FAMILY_TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
ENCODER_TABLE = re.compile(r"(?<=<!-- encoders -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
VARIANT_TABLE = re.compile(r"(?<=<!-- variants -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
STRATEGY_TABLE = re.compile(r"(?<=<!-- models and strategies -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def mark(case: Any) -> str:
    """How a case is tested: in each run, in the sweep of all cases, or as one that is known to fail."""
    names = {one.name for one in case.marks}
    if names & {"xfail", "skip"}:
        return "✗"
    return "○" if "slow" in names else "●"


def crossed(
    rows: Collection[str], columns: Collection[str], marks: Mapping[Any, str], which: str, signs: str = "●✗"
) -> str:
    """A list: which rows, all columns, and the cases with a mark other than that of most."""
    lines = [which, f"○ each in {named(columns)}"]
    for sign in signs:
        marked = {column: [row for row in rows if marks[row, column] == sign] for column in columns}
        inside = [f"in `{column}` {named(found)}" for column, found in marked.items() if found]
        lines += [f"{sign} {'; '.join(inside)}"] if inside else []
    return "\n" + "".join(f"- {line}.\n" for line in lines)


def named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def rows_of(rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def table(found: Iterable[Any]) -> str:
    """Models and layouts of the partitioned program, from the cases that are tested."""
    marks = {tuple(case.values[:2]): mark(case) for case in found if case.values[2] == "manual"}
    return crossed(MODELS, LAYOUTS, marks, named(MODELS))


def strategy_table() -> str:
    """Strategies and models, from the cases that are tested, and why some are refused."""
    marks = {(name, model): mark(case) for case in strategies.cases() for model, name in [case.values]}
    why: dict[str, list[str]] = {}
    for (model, name), part in strategies.REFUSED.items():
        why.setdefault(strategies.WHY[part], []).append(f"`{name}` in `{model}`")
    reasons = "".join(f"- ✗ {', '.join(cells)}: {reason}.\n" for reason, cells in why.items())
    return crossed(strategies.STRATEGIES, strategies.MODELS, marks, named(strategies.STRATEGIES), "●") + reasons


def family_table() -> str:
    """The families and their options, and the meshes of those that are not `kind: llama`."""
    options = [(f"`{kind}`", ", ".join(families.OPTIONS.get(kind, {}))) for kind in families.BASE]
    marks = {case.values: mark(case) for case in mesh_cases()}
    kinds = dict.fromkeys(kind for kind, _ in marks)
    which = f"On meshes: all but {named(kind for kind in families.BASE if kind not in kinds)}, as `kind: llama` is"
    return rows_of([("`model_type`", "options"), ("---", "---"), *options]) + crossed(kinds, MESHES, marks, which)


def encoder_table() -> str:
    """The encoders: their heads and options, the head that is trained, and the meshes on which it is."""
    rows = [("`model_type`", "heads", "options", "trained"), *[("---",) * 4]]
    for case, (head, *_) in test_encoders.TRAINED.items():
        kind = case.partition("-")[0]
        options = [name.removeprefix(f"{kind}-") for name in encoders.VARIANTS if name.startswith(f"{kind}-")]
        against = [", ".join(names) if case == kind else "" for names in (encoders.HEADS[kind], options)]
        rows.append((f"`{kind}`", *against, head))
    marks = {case.values: mark(case) for case in test_encoders.mesh_cases()}
    return rows_of(rows) + crossed(test_encoders.TRAINED, test_encoders.MESHES, marks, "On meshes: all of them")


def variant_table() -> str:
    """The table of published variants: the kind of model that computes each, or why it is refused."""
    found: dict[str, list[str]] = {}
    for name, case in families.PUBLISHED.items():
        found.setdefault(outcome(case), []).append(name)
    rows = [("how", "number", "variants"), ("---", "--:", "---")]
    rows += [(how, str(len(names)), ", ".join(names)) for how, names in sorted(found.items())]
    return rows_of(rows)


if __name__ == "__main__":
    page = PAGE.read_text()
    for found, made in (
        (TABLE, lambda: table(cases())),
        (STRATEGY_TABLE, strategy_table),
        (FAMILY_TABLE, family_table),
        (ENCODER_TABLE, encoder_table),
        (VARIANT_TABLE, variant_table),
    ):
        page = found.sub(lambda _, made=made: made(), page)
    PAGE.write_text(page)
