"""The tables of what is tested in the reference are what the tests of equivalence parametrize."""

from __future__ import annotations

import pytest

from tests.docs.matrix import (
    ENCODER_TABLE,
    FAMILY_TABLE,
    PAGE,
    STRATEGY_TABLE,
    TABLE,
    VARIANT_TABLE,
    encoder_table,
    family_table,
    mark,
    strategy_table,
    table,
    variant_table,
)
from tests.equivalence.test_zoo import KNOWN, cases


def test_the_table_of_models_and_layouts_is_up_to_date():
    assert TABLE.findall(PAGE.read_text()) == [table(cases())], "write it: PYTHONPATH=. python -m tests.docs.matrix"


def test_the_table_of_models_and_strategies_is_up_to_date():
    found = STRATEGY_TABLE.findall(PAGE.read_text())
    assert found == [strategy_table()], "write it: PYTHONPATH=. python -m tests.docs.matrix"


def test_the_tables_of_families_and_encoders_are_up_to_date():
    page = PAGE.read_text()
    found = [one.findall(page) for one in (FAMILY_TABLE, ENCODER_TABLE, VARIANT_TABLE)]
    written = [[family_table()], [encoder_table()], [variant_table()]]
    assert found == written, "write them: PYTHONPATH=. python -m tests.docs.matrix"


def test_control_a_case_that_fails_is_marked():
    last = [*cases()][-1]
    failing = pytest.param(*last.values, marks=[pytest.mark.xfail(raises=AssertionError, reason="planted")])
    assert mark(failing) == "✗" != mark(last)
    known = {case.id for case in cases() if mark(case) == "✗"}
    assert known >= {*KNOWN} & {case.id for case in cases()}


def test_control_a_model_that_is_not_tested_is_no_row():
    with pytest.raises(KeyError):
        table([case for case in cases() if case.values[0] != "vit"])
