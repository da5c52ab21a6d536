"""The guide that chooses a layout advises what the planner puts first, for the same models and machines."""

from __future__ import annotations

import re

import pytest

import advice
import pictures
from meshpar.planning.plan import Plan

PAGE = advice.PAGE.read_text()
ADVISED = [line for name in advice.TABLES for table in advice.block(name).findall(PAGE) for line in table.splitlines()]
ANSWERS = [re.findall(r"rules=\[([\w,]+)\]", answer) for answer in pictures.QUESTIONS.values()]
CASES = [*advice.CASES_OF_STAGES, *advice.CASES]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "hosts", "rules"), CASES)
def test_the_guide_advises_what_the_planner_says(model, hosts, rules):
    line = advice.line(model, hosts, rules)
    assert line in ADVISED, "write it: python scripts/advice.py"
    planted = re.sub(r"(\d) (s|ms|GiB)\b", r"\g<1>1 \2", line, count=1)
    assert planted not in [line, *ADVISED], "the control: another figure"
    found = advice.advised(model, hosts, rules)
    if isinstance(found, Plan):
        layout = found.ranked[0].layout
        assert ",".join(layout.presets) in sum(ANSWERS, ["zero1"]), "it is an answer of the five questions"
        assert layout.size("tensor") <= advice.PER_HOST


def test_the_tables_have_each_model_and_machine():
    cells = [tuple(cell.strip("` ") for cell in line.strip("|").split("|")[:2]) for line in ADVISED]
    shown = [(model, rules or str(hosts * advice.PER_HOST)) for model, hosts, rules in CASES]
    assert sorted(set(cells) - {("model", "H100s"), ("model", "rules"), ("---", "---"), ("",)}) == sorted(shown)


def test_the_questions_are_in_the_order_of_the_stages_by_the_planner():
    """Of a model that fits with each stage, the fastest is the first answer; of 8B, the second."""
    rows = [[cell.strip("` ") for cell in line.strip("|").split("|")] for line in ADVISED]
    of_stages = [row for row in rows if len(row) == 6 and row[1] in advice.STAGES]
    fastest = {}
    for model, rules, _, step, *_ in of_stages:
        seconds = [float(n) * {"s": 1, "ms": 1e-3}[unit] for n, unit in re.findall(r"([\d.]+) (m?s)", step)]
        for one in seconds:
            fastest[model] = min(fastest.get(model, (one, rules)), (one, rules))
    assert [fastest["1.2B"][1], fastest["8B"][1]] == [ANSWERS[0][0], ANSWERS[1][0]] == ["zero2", "fsdp"]
