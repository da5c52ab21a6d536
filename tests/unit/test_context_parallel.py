"""Declarations of context parallelism: what is reported of them, and which are refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.errors import ConfigError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.sequence import SequenceLayout
from meshpar.serve.on_mesh import for_tokens
from meshpar.sharding.rules import AxisRules

PIPELINE = {"kind": "1f1b", "num_microbatches": 2}
MODEL = {"kind": "llama", "num_layers": 2, "hidden_size": 48, "num_heads": 6, "num_kv_heads": 3, "intermediate_size": 8}


def declared(context, mesh=None, rules=("fsdp", "context"), seq_len=64, pipeline=None, **settings):
    """A run whose devices share rows, prepared without devices."""
    mesh = MeshLayout(**(mesh or {"fsdp": 2, "context": 4}))
    run = Run(
        model=MODEL | {"vocab_size": 64},
        data={"kind": "synthetic", "vocab_size": 64, "batch_size": 8, "seq_len": seq_len},
        optim={"kind": "adamw", "lr": 1e-3},
        mesh=mesh,
        rules=rules,
        parallel={"context": context, "pipeline": pipeline},
        num_steps=1,
        run_dir="unused",
        **settings,
    )
    return prepare(run, mesh.abstract(None))


@pytest.mark.parametrize(
    ("problem", "declaration"),
    [
        (
            r"parallel.context\n.*6 query heads on each device cannot be divided among the 4 devices that exchange them"
            r"\n.*parallel.context={kind: hybrid, group: 2}",
            {"context": {"kind": "ulysses"}},
        ),
        (
            r"group\n.*4 devices that share a row cannot be divided into groups of 3\n.*parallel.context.group=2",
            {"context": {"kind": "hybrid", "group": 3}},
        ),
        (
            r"data.seq_len\n.*62 is not divisible by the 4 shards of the sequence of two chunks each\n.*seq_len=64",
            {"context": {}, "seq_len": 62},
        ),
        (
            r"nothing to share: the rules do not shard seq.*\n.*the preset context",
            {"context": {"kind": "ulysses"}, "mesh": {"fsdp": 8}, "rules": ["fsdp"]},
        ),
        (
            r"GSPMD chooses how devices that share a row attend\n.*lowering=manual",
            {"context": {"kind": "ulysses"}, "lowering": "auto"},
        ),
        (
            r"exchange keys in pairs, and 3 shards .* are an odd number\n.*parallel.context=all_gather, or ulysses",
            {
                "context": {},
                "seq_len": 66,
                "mesh": {"pipe": 2, "context": 3},
                "rules": ["pipeline", "context"],
                "pipeline": PIPELINE,
            },
        ),
        (
            r"rules.seq\n.*cannot be sharded over fsdp: batch is sharded over it already",
            {"context": {}, "rules": {"preset": ["fsdp", "context"], "seq": ["context", "fsdp"]}},
        ),
        (
            r"rules.residual_seq\n.*cannot be sharded over context: seq is sharded over it already",
            {"context": {}, "rules": {"preset": ["fsdp", "context"], "residual_seq": ["context"]}},
        ),
    ],
)
def test_a_declaration_that_cannot_work_says_why_and_what_would(problem, declaration):
    with pytest.raises(ConfigError, match=problem):
        declared(**declaration)


@pytest.mark.parametrize(
    ("problem", "context"),
    [
        ("kind=hybrid needs group", {"kind": "hybrid"}),
        ("kind=ring has no groups", {"kind": "ring", "group": 2}),
        ("ulysses gives all devices the same work anyway", {"kind": "ulysses", "layout": "zigzag"}),
    ],
)
def test_kinds_refuse_settings_of_others(problem, context):
    with pytest.raises(ConfigError, match=problem):
        declared(context)


def test_the_exchange_and_the_balance_of_context_parallelism_are_reported():
    def described(**context):
        return declared(context, seq_len=512).selected["parallel.context"]

    assert described().startswith("ring, zigzag: the keys and values of 128 tokens travel 3 hops; the busiest device")
    assert described(kind="all_gather").startswith(
        "all_gather, zigzag: a device gathers the keys and values of 4 x 128"
    )
    assert "after 2 devices exchange 128 tokens for 3 of 6 heads" in described(kind="hybrid", group=2)
    in_pairs = declared({}, {"pipe": 2, "context": 4}, ["pipeline", "context"], pipeline=PIPELINE)
    assert "16 tokens are exchanged by one pair of devices after the other" in in_pairs.selected["parallel.context"]
    assert described(layout="contiguous").endswith("computes 1.88 times an equal share of the needed scores")
    assert "parallel.context" not in declared(None, {"fsdp": 8}, ["fsdp"]).selected


@pytest.mark.parametrize("layout", [SequenceLayout(3), SequenceLayout(4, is_zigzag=True)])
def test_each_token_is_on_one_shard(layout):
    order = layout.order(24)
    assert sorted(order) == [*range(24)]
    assert np.array_equal(layout.tokens(jnp.arange(24, dtype=jnp.int32), 24), order)


def test_devices_that_shared_rows_decode_rows_of_their_own():
    mesh = MeshLayout(data=2, context=4).abstract(None)
    rules = AxisRules(preset=("fsdp", "context"), embed=("fsdp", "context"))
    ctx = for_tokens(ParallelContext(mesh=mesh, rules=rules, manual=True))
    assert ctx.axes("batch") == ("data", "context")
    assert ctx.axes("seq") == ()
    assert ctx.storage("embed") == ("context",)
