"""Public functions take paths as text too."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path

import pytest

import meshpar
from meshpar import CheckpointError, checkpoints, compress, convert, export, federated
from meshpar.convert import trained

FUNCTIONS = [
    *[one for name in meshpar.__all__ if inspect.isfunction(one := getattr(meshpar, name))],
    *[getattr(module, name) for module in (convert, export, federated) for name in module.__all__],
    meshpar.Checkpoints.__init__,
]


def only_paths(function):
    """The parameters that are paths, and are not text."""
    annotations = {one.name: str(one.annotation) for one in inspect.signature(function).parameters.values()}
    return [name for name, one in annotations.items() if re.search(r"\bPath\b", one) and "str" not in one]


def test_each_path_of_a_public_function_may_be_text():
    functions = [one for one in FUNCTIONS if callable(one) and not inspect.isclass(one)]
    assert {one.__qualname__: only_paths(one) for one in functions if only_paths(one)} == {}


def test_control_a_function_that_takes_no_text_is_seen():
    assert only_paths(trained) == ["source"]


def test_a_config_is_read_by_its_path_as_text():
    assert meshpar.load("configs/quickstart.yaml") == meshpar.load(Path("configs/quickstart.yaml"))
    assert federated.load("configs/federated/digits.yaml") == federated.load(Path("configs/federated/digits.yaml"))


@pytest.mark.parametrize(
    "function", [convert.to_hf, convert.from_hf, partial(compress, low_rank_error=0.1), export.stablehlo]
)
def test_what_is_missing_is_said_for_text(function, tmp_path):
    with pytest.raises(CheckpointError):
        function(str(tmp_path / "nothing"), str(tmp_path / "new"))


def test_checkpoints_are_in_a_folder_named_by_text(tmp_path):
    with checkpoints(str(tmp_path)) as saved:
        assert saved.directory == tmp_path
