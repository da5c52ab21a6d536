"""What LoRA and DoRA do not adapt, and layers that are not frozen, are errors that name the key."""

from __future__ import annotations

from typing import Any

import pytest

from meshpar import ConfigError, Run, prepare

SIZES: dict[str, Any] = {"kind": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 32}
SETTINGS: dict[str, Any] = {
    "model": SIZES, "data": {"kind": "synthetic"}, "optim": {"kind": "adamw", "lr": 1e-3}, "num_steps": 1,
    "run_dir": "unused", "mesh": {"fsdp": 4, "tensor": 2}, "rules": ["fsdp", "megatron"],
}  # fmt: skip
NONE = "matches none of the projections that `lora.paths` adapts"
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a pattern beside the paths": (
        {"rank_pattern": {"blocks.mlp.*": 2}}, {},
        f"lora.rank_pattern\n    'blocks.mlp.*' {NONE}\n    add it to lora.paths",
    ),
    "a pattern with a typo": (
        {"alpha_pattern": {"blocks.attn.p": 2}}, {},
        f"lora.alpha_pattern\n    'blocks.attn.p' {NONE}\n    did you mean",
    ),
    "experts": (
        {"use_dora": True, "paths": ["blocks.**"]},
        {"model": SIZES | {"experts": {"num": 4, "per_token": 2, "intermediate_size": 8}}},
        "lora.use_dora\n    blocks.mlp.experts.down, blocks.mlp.experts.gate, blocks.mlp.experts.up: kernels",
    ),
    "factors": (
        {"use_dora": True, "paths": ["blocks.mlp.*"]},
        {"model": SIZES | {"low_rank": [{"path": "blocks.mlp.up", "rank": 4}]}},
        "lora.use_dora\n    blocks.mlp.up: kernels of experts, and factors of a kernel, are adapted without",
    ),
    "a rank of zero": ({"rank_pattern": {"blocks.attn.q": 0}}, {}, "lora.rank_pattern"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_adapted_is_refused_by_its_key(case):
    lora, changes, message = WRONG[case]

    def prepared() -> None:
        run = Run.model_validate(SETTINGS | changes | {"lora": lora})
        prepare(run, run.mesh.abstract())

    with pytest.raises(ConfigError) as raised:
        prepared()
    assert message in str(raised.value)


PIPELINE = {"mesh": {"pipe": 2, "fsdp": 2, "tensor": 2}, "rules": ["fsdp", "megatron", "pipeline"]}
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "stages": (
        {"parallel": {"pipeline": {"kind": "1f1b", "num_microbatches": 2}}} | PIPELINE,
        "freeze.layers\n    the trained layers alone, and the optimizer's state of them, cannot be spread",
    ),
    "pruning": ({"prune": {"kind": "n_of_m", "every": 1, "times": 1}}, "freeze.layers\n    pruning sets weights of"),
    "two stacks": (
        {"model": SIZES | {"num_layers": 3, "experts": {"num": 4, "per_token": 2, "intermediate_size": 8,
                                                        "first_dense": 1}}},
        "freeze\n    the layers are in several stacks: blocks, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_cannot_be_frozen_are_refused(case):
    changes, message = LAYERS[case]

    def prepared() -> None:
        run = Run.model_validate(SETTINGS | {"freeze": [{"layers": "0:1"}]} | changes)
        prepare(run, run.mesh.abstract())

    with pytest.raises(ConfigError) as raised:
        prepared()
    assert message in str(raised.value)
