"""Writes tables from the cases that are tested: of models, layouts and strategies, and of Hugging Face's families.

PYTHONPATH=. python -m tests.docs.matrix
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def table(found: Iterable[Any]) -> str:
    """The table of the partitioned program, from the cases that are tested."""
    marks = {tuple(case.values[:2]): mark(case) for case in found if case.values[2] == "manual"}
    rows = [
        ("model", *(f"`{layout}`" for layout in LAYOUTS)),
        ("---", *[":-:"] * len(LAYOUTS)),
        *((f"`{model}`", *(marks[model, layout] for layout in LAYOUTS)) for model in MODELS),
    ]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def strategy_table() -> str:
    """The table of strategies, from the cases that are tested."""
    marks = {case.values: "✗" if case.values in strategies.REFUSED else mark(case) for case in strategies.cases()}
    rows = [
        ("strategy", *(f"`{model}`" for model in strategies.MODELS)),
        ("---", *[":-:"] * len(strategies.MODELS)),
        *((name, *(marks[model, name] for model in strategies.MODELS)) for name in strategies.STRATEGIES),
    ]
    why: dict[str, list[str]] = {}
    for (model, name), part in strategies.REFUSED.items():
        why.setdefault(strategies.WHY[part], []).append(f"{name} on `{model}`")
    reasons = "".join(f"- {'; '.join(cells)}: {reason}.\n" for reason, cells in why.items())
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n✗:\n\n" + reasons


def family_table() -> str:
    """The table of families, their options and their meshes, from the cases that are tested."""
    marks = {case.values: mark(case) for case in mesh_cases()}
    rows = [
        ("`model_type`", "options, each against transformers", *(f"`{mesh}`" for mesh in MESHES)),
        ("---", "---", *[":-:"] * len(MESHES)),
        *(
            (f"`{kind}`", ", ".join(families.OPTIONS.get(kind, {})), *(marks.get((kind, mesh), "") for mesh in MESHES))
            for kind in families.BASE
        ),
    ]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def encoder_table() -> str:
    """The table of encoders: their heads and options, and the meshes of those that are trained."""
    marks = {case.values: mark(case) for case in test_encoders.mesh_cases()}
    rows = [
        ("`model_type`", "heads", "options", "trained", *(f"`{mesh}`" for mesh in test_encoders.MESHES)),
        (*["---"] * 4, *[":-:"] * len(test_encoders.MESHES)),
    ]
    for case, (head, *_) in test_encoders.TRAINED.items():
        kind = case.partition("-")[0]
        options = [name.removeprefix(f"{kind}-") for name in encoders.VARIANTS if name.startswith(f"{kind}-")]
        against = [", ".join(names) if case == kind else "" for names in (encoders.HEADS[kind], options)]
        rows.append((f"`{kind}`", *against, head, *(marks[case, mesh] for mesh in test_encoders.MESHES)))
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def variant_table() -> str:
    """The table of published variants: the kind of model that computes each, or why it is refused."""
    found: dict[str, list[str]] = {}
    for name, case in families.PUBLISHED.items():
        found.setdefault(outcome(case), []).append(name)
    rows = [("how", "number", "variants"), ("---", "--:", "---")]
    rows += [(how, str(len(names)), ", ".join(names)) for how, names in sorted(found.items())]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


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
