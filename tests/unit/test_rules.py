"""Rules: presets, a user's own rules, and rules that disagree."""

from __future__ import annotations

import pytest

from meshpar.errors import ShardingError
from meshpar.sharding.rules import DIMS, PRESETS, UNNAMED, AxisRules


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_rule_for_every_standard_dim(name):
    assert set(AxisRules(preset=name).table) - {UNNAMED} == set(DIMS)


def test_without_a_preset_there_are_only_the_users_rules():
    assert AxisRules(embed=("fsdp",)).table == {"embed": ("fsdp",)}


def test_a_users_rule_overrides_the_presets():
    rules = AxisRules(preset="megatron", kv_heads=())
    assert rules["kv_heads"] == () and rules["heads"] == ("tensor",)
    assert rules.source("kv_heads") == "rules.kv_heads" and rules.source("heads") == "preset megatron"


def test_presets_in_a_list_are_joined():
    rules = AxisRules.model_validate(["zero2", "megatron_sp"])
    assert rules["embed"] == ("fsdp",) and rules["residual_seq"] == ("tensor",) and rules.zero_stage == 2


def test_batch_axes_store_parameters_and_partition_only_the_batch():
    rules = AxisRules(preset=("fsdp", "megatron"))
    assert rules.storage_axes("embed") == ("fsdp",) and rules.partition_axes("embed") == ()
    assert rules.storage_axes("mlp") == () and rules.partition_axes("mlp") == ("tensor",)
    assert rules.partition_axes("batch") == ("replica", "data", "fsdp")


def test_or_joins_and_is_commutative_where_nothing_disagrees():
    left = AxisRules(preset="fsdp")
    right = AxisRules(preset="megatron", kv_heads=())
    assert (left | right).table == (right | left).table == AxisRules(preset=("fsdp", "megatron"), kv_heads=()).table


@pytest.mark.parametrize(
    ("left", "right"),
    [(AxisRules(embed=("fsdp",)), AxisRules(embed=("tensor",))), (AxisRules(zero=1), AxisRules(zero=2))],
)
def test_rules_that_disagree_are_refused(left, right):
    with pytest.raises(ShardingError, match="two rules disagree"):
        left | right


def test_presets_that_disagree_are_refused():
    with pytest.raises(ValueError, match="preset zero1 sets 1, preset fsdp sets 3"):
        AxisRules(preset=("zero1", "fsdp"))


def test_a_stage_that_never_gathers_shards_is_refused():
    with pytest.raises(ValueError, match="expected 1, 2 or 3, got 0"):
        AxisRules(preset="fsdp", zero=0)  # pyright: ignore[reportArgumentType]
