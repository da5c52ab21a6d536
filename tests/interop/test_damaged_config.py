"""A `config.json` with a wrong value in any key is refused at once, with a message."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshpar.errors import CheckpointError
from meshpar.interop.huggingface import open_pretrained
from meshpar.models import foreign
from tests.damage import at_most
from tests.interop.pretrained import saved

KINDS = ("llama3_rope", "qwen2", "gpt2")
VALUES: list[Any] = [
    None, True, -1, 0, 3, 10**9, 10**12, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "x", "\x1b[1m",
    [], ["x"], [1], {}, {"x": 1}, {"rope_type": "linear"}, {"rope_type": ["x"]}, {"rope_type": "llama3", "factor": "x"},
    {"full_attention": {"rope_theta": 1.0}}, [["x"]] * 2,
]  # fmt: skip
OURS = {
    "model_type", "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "max_window_layers", "sliding_window",
    "use_sliding_window", "attention_bias", "mlp_bias", "partial_rotary_factor", "quantization_config", "hidden_act",
    "activation_function", "scale_attn_weights", "n_inner",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("configs")
    return {kind: saved(kind, folder / kind) for kind in KINDS}


def mutated(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each key with each value, and without the key."""
    for key in sorted(config.keys() | OURS):
        yield {name: value for name, value in config.items() if name != key}
        yield from (config | {key: value} for value in VALUES)


def outcomes(folder: Path, every: int) -> Counter[str]:
    right = json.loads((folder / "config.json").read_text())
    found = Counter[str]()
    for number, config in enumerate(mutated(right)):
        if number % every:
            continue
        (folder / "config.json").write_text(json.dumps(config))
        try:
            with at_most(20):
                open_pretrained(folder)
            found["read"] += 1
        except CheckpointError as error:
            found["refused, by a message without end" if len(str(error)) > 10_000 else "refused"] += 1
        except BaseException as error:
            changed = {key: value for key, value in config.items() if right.get(key, "missing") != value}
            error.add_note(f"by {changed or right.keys() - config.keys()}")
            raise
    (folder / "config.json").write_text(json.dumps(right))
    open_pretrained(folder)
    return found


@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_in_any_key_ends_with_a_message(kind: str, every: int, folders: dict[str, Path]):
    found = outcomes(folders[kind], every)
    print(kind, dict(found))
    assert found.keys() == {"read", "refused"} and found["refused"] > 8


NAMED = {
    "rope_scaling": ["x", ["x"], 3, float("nan")],
    "model_type": [["llama"], {"llama": 1}],
    "num_hidden_layers": [10**9, 10**12],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NAMED.items() for value in values])
def test_values_that_once_crashed_or_hung_are_refused_by_their_key(
    key: str, value: Any, folders: dict[str, Path], tmp_path: Path
):
    for kind in ("llama3_rope", "qwen2"):
        folder = shutil.copytree(folders[kind], tmp_path / kind)
        config = json.loads((folder / "config.json").read_text())
        config.pop("rope_parameters", None)
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        with at_most(20), pytest.raises(CheckpointError, match=f"config.json: {key}\n"):
            open_pretrained(folder)


def test_layers_are_counted_before_each_is_named(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "qwen2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError) as error:
        open_pretrained(folder)
    assert str(error.value) == (
        f"{folder} cannot be imported:\n  {folder}/config.json: num_hidden_layers\n"
        "    is 1000000000, but there are tensors for at most 27 layers"
    )


def test_control_an_unchecked_config_ends_in_a_traceback(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(foreign.Given, "model_validate", lambda given: foreign.Given.model_construct(**given))
    with pytest.raises((AttributeError, TypeError)):
        outcomes(folders["llama3_rope"], 1)
