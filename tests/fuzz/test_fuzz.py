"""Whatever a user writes, meshpar exits with 0, 1 or 2 within a minute, and never with a traceback.

`pytest -m slow tests/fuzz` runs 500 configs and 200 command lines for each of several seeds; MESHPAR_FUZZ_SEED=7,8
chooses others.
"""

from __future__ import annotations

import os

import pytest

from tests.fuzz.harness import Case, faults
from tests.fuzz.mutate import FILES, command_case, config_case, generated

SEEDS = [int(seed) for seed in os.environ.get("MESHPAR_FUZZ_SEED", "1,2,3").split(",")]


def assert_no_faults(make, seed: int, count: int) -> dict[int, int]:
    found, codes = faults(generated(make, seed, count))
    assert not found, f"{len(found)} of {count} cases:\n" + "\n".join(map(str, found))
    assert sum(codes.values()) == count
    return codes


def test_a_sample_of_configs_and_command_lines_ends_with_a_message():
    codes = assert_no_faults(config_case, seed=0, count=24)
    assert codes[0] and codes[2], "some configs are right, and some are wrong"
    assert_no_faults(command_case, seed=0, count=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_500_configs_end_with_a_message(seed):
    assert_no_faults(config_case, seed, 500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_200_command_lines_end_with_a_message(seed):
    assert_no_faults(command_case, seed, 200)


def test_control_a_crash_is_found():
    assert "KeyError: 'planted'" in planted("crash")


@pytest.mark.slow
def test_control_a_case_that_hangs_is_found_and_the_next_case_runs():
    assert planted("hang") == "no end in 5 s"


@pytest.mark.slow
def test_control_a_case_that_exhausts_memory_is_found():
    assert "MemoryError" in planted("devour")


def planted(plant: str) -> str:
    """The fault that the harness finds in a verb with this plant, run between two sound cases."""
    fine = Case(("schema",), FILES)
    found, codes = faults([fine, Case(("explain", "config.yaml"), FILES, plant), fine], timeout_s=5)
    assert len(found) == 1
    assert codes == {0: 2}
    return found[0].what


def test_the_same_seed_gives_the_same_cases():
    first, again, other = (list(generated(config_case, seed, 5)) for seed in (1, 1, 2))
    assert first == again != other
