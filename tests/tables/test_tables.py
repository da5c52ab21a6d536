"""Tables on eight devices: equal to a NumPy reference in float64, to closed forms in bytes, and without a copy."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import checkpoints, fit
from meshpar.errors import CheckpointError, ConfigError, DataError, ShardingError
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.mesh.layout import MeshLayout
from meshpar.records.file import FILE, read
from meshpar.tables import Async, LazyAdam, Stale, Table, training
from meshpar.tables.request import Slots
from meshpar.tables.shards import TableShards
from meshpar.train.program import compile_program, trace
from meshpar.verification.trial import QUICK
from tests.tables.oracle import Reference

N, B, WIDTH, LR = 8, 4, 16, 0.5
"""Devices, examples of each, columns, and the learning rate of the dense bias."""
ROWS = {"users": 37, "items": 64, "tags": 20}
STEPS = 6
OPTIM = {
    "row_adagrad": {"kind": "row_adagrad", "lr": 0.3},
    "lazy_adam": {"kind": "lazy_adam", "lr": 0.1},
}
CONSISTENCY = {
    "sync": {"kind": "sync"},
    "stale": {"kind": "stale", "steps": 2},
    "async": {"kind": "async", "limit": 3, "seed": 5},
}
OTHERS = list(itertools.product(OPTIM, CONSISTENCY))
PARTITIONS = ("range", "hash", "column")
PROGRAMS = [[(partition, *OTHERS[(i + 4 * j) % 6]) for j, partition in enumerate(PARTITIONS)] for i in range(6)]
"""The settings of three tables: together, every partition with every optimizer and consistency."""


def table(name, partition="range", optim="row_adagrad", consistency="sync", **settings):
    """A table whose slots suffice for any ids."""
    fixed = {"num_rows": ROWS[name], "width": WIDTH, "partition": partition, "dtype": "float64", "capacity": 3 * B}
    return Table(**{**fixed, "optim": OPTIM[optim], "consistency": CONSISTENCY[consistency], **settings})


def score(bias, rows):
    """<user, item + sum of tags> + bias."""
    return (rows["users"] * (rows["items"] + rows["tags"].sum(-2))).sum(-1) + bias


def loss(bias, rows, batch):
    return jnp.square(score(bias, rows) - batch["y"]).mean()


def ids_of(batch):
    return {name: batch[name] for name in ROWS}


def batches(seed=0, num=STEPS):
    """Ids with many duplicates; the last tag of an example may be missing."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        tags = rng.integers(0, ROWS["tags"], (N * B, 2)).astype("i4")
        tags[:, 1] = np.where(rng.random(N * B) < 0.3, -1, tags[:, 1])
        yield {
            "users": (ROWS["users"] * rng.random(N * B) ** 3).astype("i4"),
            "items": rng.integers(0, ROWS["items"], N * B).astype("i4"),
            "tags": tags,
            "y": rng.normal(size=N * B),
        }


def trained(tables, mesh=None):
    mesh = mesh or MeshLayout(data=N)
    return training(
        lambda key: jnp.zeros((), jnp.float64), loss, ids_of, optax.sgd(LR), next(batches()), tables=tables, mesh=mesh
    )


def in_order(table, state):
    """The rows by id, and the arrays of the optimizer's state."""
    shards = table.shards(N)
    part, row = shards.locate(jnp.arange(table.num_rows, dtype=jnp.int32))
    found = [np.asarray(x)[part, row] for x in (state.rows, *state.optim.values())]
    if table.hot:
        hot = state.hot.rows, *state.hot.optim.values()
        found = [np.concatenate([first, x[table.hot :]]) for first, x in zip(hot, found, strict=True)]
    return found


def by_row(table, state):
    """[num_rows, ...], the row of each id with its state of the optimizer, as bits."""
    arrays = [x.reshape(table.num_rows, -1) for x in in_order(table, state)]
    return np.concatenate([x.view("u4") for x in arrays], axis=1)


def delays(table, step):
    return np.asarray(table.consistency.delays(jnp.int32(step), N))


def reference_step(bias, references, batch, expected):
    """A step of the model in NumPy, with gradients by hand. Returns the bias, the loss and each table's updated rows.

    Args:
      expected: table -> the delays of the devices' pushes.
    """
    rows = {name: reference.pull(batch[name]) for name, reference in references.items()}
    error = score(bias, rows) - batch["y"]
    slope = (2 * error / error.size)[:, None]
    of_items = slope * rows["users"]
    grads = {
        "users": slope * (rows["items"] + rows["tags"].sum(-2)),
        "items": of_items,
        "tags": np.repeat(of_items[:, None], 2, 1),
    }
    updated = {
        name: reference.push(
            batch[name].reshape(N, -1), grads[name].reshape(N, -1, WIDTH), expected(reference.table, reference.step)
        )
        for name, reference in references.items()
    }
    return bias - LR * slope.sum(), (error**2).mean(), updated


def differences(tables, expected=delays):
    """The largest difference of any loss and any row from the reference; and how many rows changed without a push."""
    run = trained(tables)
    state = run.compile_init(QUICK)(jax.random.key(0))
    step = run.compile_step(QUICK)
    references = {name: Reference(t, in_order(t, state.tables[name])[0]) for name, t in tables.items()}
    bias = 0.0
    found = []
    num_changed = 0
    for batch in batches():
        before = {name: by_row(t, state.tables[name]) for name, t in tables.items()}
        state, metrics = step(state, run.put(batch))
        run.check(metrics)
        bias, mean, updated = reference_step(bias, references, batch, expected)
        found.append(abs(float(metrics.loss) - mean))
        for name, t in tables.items():
            found.append(np.abs(in_order(t, state.tables[name])[0] - references[name].rows).max())
            untouched = [row for row in range(t.num_rows) if row not in updated[name]]
            num_changed += (by_row(t, state.tables[name]) != before[name])[untouched].any(1).sum()
    return max(found), num_changed


def slowly(cases, num_quick):
    return [case if i < num_quick else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


@pytest.mark.parametrize("settings", slowly(PROGRAMS, 1), ids=str)
def test_tables_equal_the_reference_and_untouched_rows_are_bitwise_the_same(settings, float64):
    tables = {name: table(name, *chosen) for name, chosen in zip(ROWS, settings, strict=True)}
    tables = {name: t.model_copy(update={"hot": 0 if t.consistency.bound else 7}) for name, t in tables.items()}
    largest, num_changed = differences(tables)
    assert largest <= 1e-10
    assert num_changed == 0


def first_of_each(slots, grads):
    """The gradient of one id of each slot, instead of their sum."""
    empty = jnp.zeros((slots.rows.size, grads.shape[-1]), grads.dtype)
    return empty.at[slots.places.reshape(-1)].set(grads.reshape(-1, grads.shape[-1]), mode="drop")


def dense_decay(optimizer, table, state, rows, grads, axes):
    """Moments of all rows decay, as in Adam that is not lazy."""
    state = state | {"mean": optimizer.b1 * state["mean"]}
    return UPDATE(optimizer, table, state, rows, grads, axes)


UPDATE = LazyAdam.update
# The consistency of a table, and what is replaced.
PLANTS = {
    "stale by one too many": ("stale", Stale, "bound", property(lambda self: 3)),
    "other rows touched": ("sync", LazyAdam, "update", dense_decay),
    "stale by one too few": ("stale", Stale, "delays", lambda self, step, num: jnp.full(num, 1, jnp.int32)),
    "asynchronous at other times": ("async", Async, "delays", lambda self, step, num: jnp.zeros(num, jnp.int32)),
    "duplicates lost": ("sync", Slots, "summed", first_of_each),
}


@pytest.mark.parametrize("plant", slowly(PLANTS, 1))
def test_a_planted_fault_is_seen(plant, float64, monkeypatch):
    kind, owner, name, fault = PLANTS[plant]
    tables = {"users": table("users", "range", "lazy_adam", kind)}
    tables |= {name: table(name) for name in ("items", "tags")}
    expected = {(name, step): delays(t, step) for name, t in tables.items() for step in range(STEPS)}
    names = {t.num_rows: name for name, t in tables.items()}
    monkeypatch.setattr(owner, name, fault)
    largest, num_changed = differences(tables, lambda t, step: expected[names[t.num_rows], step])
    assert largest > 1e-4
    assert (num_changed > 0) == (plant != "duplicates lost")


# Bytes and memory ---------------------------------------------------------------------------------------------------

SLOTS, FLOAT = 6, 4
PER_DEVICE = 2 * SLOTS * N
"""Ids of a device: each of SLOTS rows of every device, twice."""


def alone(partition="range", **settings):
    """A training of nothing but a table, in float32."""
    small = {"num_rows": N * 64, "width": WIDTH, "capacity": SLOTS, "dtype": "float32", "optim": OPTIM["row_adagrad"]}
    return training(
        lambda key: (),
        lambda params, rows, batch: jnp.square(rows["only"]).mean(),
        lambda batch: {"only": batch["ids"]},
        optax.identity(),
        {"ids": jax.ShapeDtypeStruct((N * PER_DEVICE,), jnp.int32)},
        tables={"only": Table(partition=partition, **{**small, **settings})},
        mesh=MeshLayout(data=N),
    )


def requested(num_each):
    """Ids [N x PER_DEVICE]: every device requests `num_each` rows of each shard, 64 rows long, some of them twice."""
    shard, row = np.divmod(np.arange(PER_DEVICE), PER_DEVICE // N)
    ids = 64 * shard + row % num_each
    return {"ids": np.concatenate([ids + 3 * device for device in range(N)]).astype("i4")}


def row_bytes(partition, capacity, width=WIDTH):
    """What pull and push send of rows of `width` columns, and of requests, with so many slots."""
    share = width // N if partition == "column" else width
    return (N - 1) * capacity * (4 + 2 * share * FLOAT)


@pytest.mark.parametrize("partition", slowly(("range", "column", "hash"), 1))
def test_the_compiled_step_sends_the_bytes_of_the_unique_rows_and_reports_all_others(partition):
    capacity = SLOTS * N if partition == "column" else SLOTS
    run = alone(partition, capacity=capacity)
    step = run.compile_step(QUICK)
    of_loss = 2 * (N - 1) * FLOAT // N
    of_norms = 2 * (N - 1) * capacity * FLOAT if partition == "column" else 0
    expected = row_bytes(partition, capacity) + of_loss + of_norms
    assert total_sent_bytes(collectives_of(step.compiled, run.mesh)) == expected
    if partition != "range":
        return
    state = run.compile_init(QUICK)(jax.random.key(0))
    state, metrics = step(state, run.put(requested(SLOTS)))
    run.check(metrics)
    assert np.isfinite(metrics.loss)
    assert set(metrics.counts["only"].needed.tolist()) == {SLOTS}  # every slot has a row: nothing is padding
    state, metrics = step(state, run.put(requested(SLOTS + 1)))
    assert np.isnan(metrics.loss)
    with pytest.raises(DataError, match=r"64 ids of a step got no slot(?s:.*)capacity=7; it is 6"):
        run.check(metrics)
    unknown = requested(SLOTS)
    unknown["ids"][0] = N * 64
    _, metrics = step(state, run.put(unknown))
    with pytest.raises(DataError, match=r"only.num_rows\n *1 ids of a step are 512 or more"):
        run.check(metrics)


def held(run, donate):
    """Bytes on a device during a step over those of the state."""
    arguments = (run.state, run.batch)
    program = compile_program(trace(run.step, arguments, run.step_shardings, donate=donate), QUICK)
    stats = program.compiled.memory_analysis()
    whole = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    shards = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(run.state)]
    state = sum(math.prod(shape) * size for shape, size in shards)
    return (whole + stats.temp_size_in_bytes) / state


@pytest.mark.parametrize("optim", slowly(OPTIM, 1))
def test_a_step_on_a_table_of_4_gib_makes_no_copy_of_it(optim):
    """Nothing is allocated: these are the compiler's figures."""
    run = alone("hash", num_rows=1 << 24, width=64, optim=OPTIM[optim])
    assert run.tables["only"].num_rows * 64 * FLOAT == 1 << 32
    assert held(run, donate=(0,)) <= 1.1
    assert held(run, donate=()) > 1.9


@pytest.mark.slow
def test_a_table_of_4_gib_is_trained_in_the_memory_of_its_shards():
    script = Path(__file__).parents[2] / "scripts" / "measure_tables.py"
    done = subprocess.run([sys.executable, script, "4"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["shards_gib"] > 4
    assert found["peak_over_shards"] <= 1.1
    assert found["last_loss"] < 0.8 * found["first_loss"]


def test_hot_rows_add_an_all_reduce_and_need_no_slots():
    hot = 16
    run = alone("range", hot=hot)
    of_loss = 2 * (N - 1) * FLOAT // N
    of_hot = 2 * (N - 1) * hot * (WIDTH * FLOAT + 4) // N
    found = collectives_of(run.compile_step(QUICK).compiled, run.mesh)
    assert total_sent_bytes(found) == row_bytes("range", SLOTS) + of_loss + of_hot
    one = run.tables["only"]
    popular = np.tile(np.arange(hot), (N, 1))
    assert one.needed(popular, N) == 1
    assert one.model_copy(update={"hot": 0}).needed(popular, N) == hot


@pytest.mark.parametrize("wrong", [{"hot": 65}, {"hot": 3, "consistency": "stale"}], ids=str)
def test_hot_rows_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ConfigError, match="hot"):
        Table(num_rows=64, width=WIDTH, capacity=1, optim=OPTIM["lazy_adam"], **wrong)


# In the loop of runs ------------------------------------------------------------------------------------------------


def fitted(folder, num_steps=STEPS, **settings):
    """The tables after the loop; they have few enough slots for late gradients to matter."""
    tables = {name: table(name, "hash", "lazy_adam", "stale") for name in ROWS}
    rows = [*batches()]
    state = fit(
        trained(tables), data=lambda step: rows[step], num_steps=num_steps, run_dir=folder, json=True, **settings
    )
    return state, read(folder / FILE)


def test_the_loop_trains_as_steps_do_and_resumes_to_the_bit(float64, tmp_path):
    run = trained({name: table(name, "hash", "lazy_adam", "stale") for name in ROWS})
    expected, step = run.compile_init()(jax.random.key(0)), run.compile_step()
    for batch in batches():
        expected, metrics = step(expected, run.put(batch))
    held_out = next(batches(1))
    whole, records = fitted(tmp_path / "whole", held_out=held_out, log_every=1)
    fitted(tmp_path / "parts", STEPS - 2)
    parts, _ = fitted(tmp_path / "parts")
    for state in (whole, parts):
        assert jax.tree.all(jax.tree.map(np.array_equal, state.carried, expected.tables))
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses[-1] == float(metrics.loss)
    [evaluated] = [record for record in records if record["kind"] == "evaluation"]
    bias = np.asarray(whole.params)
    rows = {name: in_order(run.tables[name], whole.carried[name])[0][held_out[name]] for name in ROWS}
    rows["tags"] = np.where((held_out["tags"] < 0)[..., None], 0, rows["tags"])
    assert evaluated["loss"] == pytest.approx(np.square(score(bias, rows) - held_out["y"]).mean(), rel=1e-12)


@pytest.mark.parametrize("at", [0, 3])
def test_the_loop_ends_at_ids_without_a_slot_also_in_steps_that_are_not_logged(at, tmp_path):
    data = [requested(SLOTS + 1) if step == at else requested(SLOTS) for step in range(20)]
    with pytest.raises(DataError, match=r"64 ids of a step got no slot(?s:.*)capacity=7; it is 6"):
        fit(alone(), data=lambda step: data[step], num_steps=20, run_dir=tmp_path, log_every=20, json=True)


# Misuse -------------------------------------------------------------------------------------------------------------


def test_the_needed_capacity_is_known_before_anything_is_compiled():
    one = Table(num_rows=N * 64, width=WIDTH, capacity=1, optim=OPTIM["lazy_adam"])
    assert one.needed(requested(SLOTS + 1)["ids"], N) == SLOTS + 1
    assert one.model_copy(update={"partition": "column"}).needed(requested(SLOTS)["ids"], N) == SLOTS * N


def test_tables_that_do_not_fit_are_refused_together():
    tables = {
        "users": table("users", "column", width=12),
        "items": table("items", axes=("fsdp",)),
        "tags": table("tags", axes=("rows",)),
    }
    with pytest.raises(ShardingError) as refused:
        trained(tables)
    text = str(refused.value)
    assert all(part in text for part in ("12 columns cannot be divided among 8", "width=16", "items.axes", "no rows"))


def test_ids_that_differ_along_another_axis_are_refused(float64):
    run = trained({name: table(name) for name in ROWS}, MeshLayout(data=4, fsdp=2))
    users = run.state.tables["users"]
    both = jax.sharding.PartitionSpec(("data", "fsdp"))
    specs = jax.tree.map(lambda struct: struct.sharding.spec, users)

    def pull(state, ids):
        return run.tables["users"].pull(state, ids).rows

    local = jax.shard_map(pull, mesh=run.mesh, in_specs=(specs, both), out_specs=both)
    with pytest.raises(ShardingError, match="ids differ along fsdp"):
        jax.eval_shape(local, users, jax.ShapeDtypeStruct((N * B,), jnp.int32))


@pytest.mark.parametrize("partition", ["range", "hash"])
def test_a_checkpoint_is_not_restored_on_another_number_of_devices(partition, float64, tmp_path):
    tables = {name: table(name, partition=partition) for name in ROWS}
    with checkpoints(tmp_path) as saved:
        saved.save(0, trained(tables).compile_init()(jax.random.key(0)))
        saved.wait()
        assert saved.restore(trained(tables).state)
        with pytest.raises(CheckpointError, match="rows"):
            saved.restore(trained(tables, MeshLayout(data=N // 2, fsdp=2)).state)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_ids_and_rows_are_a_bijection(partition):
    shards = TableShards(partition, 1001, N)
    part, row = shards.locate(jnp.arange(1001, dtype=jnp.int32))
    assert len(set(zip(part.tolist(), row.tolist(), strict=True))) == 1001
    assert row.max() < shards.rows_each
    np.testing.assert_array_equal(shards.ids(part, row), np.arange(1001))


def test_hash_spreads_ids_with_a_stride_and_range_does_not():
    ids = jnp.arange(0, 1 << 16, N, dtype=jnp.int32)
    on_first = {kind: int((TableShards(kind, 1 << 16, N).locate(ids)[0] == 0).sum()) for kind in ("hash", "range")}
    assert abs(on_first["hash"] - len(ids) // N) < 0.1 * len(ids) // N
    first = jnp.arange(1 << 13, dtype=jnp.int32)
    assert int((TableShards("range", 1 << 16, N).locate(first)[0] == 0).sum()) == len(first)
