"""Eight simulated devices, strict dtype promotion, warnings are errors (pyproject), one mesh fixture."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable

from tests.xla import FLAGS

os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"  # the lines of all callers make lowering a tenth longer
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the cache in the user's home is neither read nor written

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Every call is checked against the shapes and dtypes in its signature, local shards and global arrays alike.
CHECKED = ("nn", "parallel", "train.token_loss", "train.chunks", "serve.vocabulary")
hook = install_import_hook([f"meshpar.{name}" for name in CHECKED], "beartype.beartype")

from tests.command import Said, exit_code  # noqa: E402 (what the hook checks is imported after it)

# Hypothesis draws the same examples in every run, so that results repeat; HYPOTHESIS_PROFILE=default draws others.
settings.register_profile("same", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

gc.set_threshold(100_000, 20, 20)  # tracing makes many objects and few cycles: by default it takes 7 to 13 % longer
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CI runs n of the cases of a test with `@pytest.mark.sample(n)`, evenly chosen; the others are slow."""
    tests = defaultdict(list)
    for item in items:
        if (sample := item.get_closest_marker("sample")) and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0], *sample.args].append(item)
    for (_, num), cases in tests.items():
        kept = {i * len(cases) // num for i in range(num)}
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker("slow")


def pytest_collection_finish() -> None:
    """What was imported stays: looking for garbage in it takes a tenth of the tests' time."""
    gc.freeze()


@pytest.fixture
def float64():
    """Equivalence is proved in float64: a right layout differs by 1e-14, a missing factor by 1e-1."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs `meshpar WORDS`."""
    return lambda *words: Said(exit_code(*words), *capsys.readouterr())


@pytest.fixture
def lines_of_callers():
    """An inspection reads them: as many as JAX keeps by default."""
    jax.config.update("jax_traceback_in_locations_limit", 100)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 1)
