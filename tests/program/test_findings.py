"""Each finding occurs in a program that is known to have it, with line, bytes and text, and in no other."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar.data import Synthetic
from meshpar.errors import ContractWarning
from meshpar.experiment.config import Run, load
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.findings.planned import Planned, planned_by
from meshpar.inspection.inspect import Inspection, inspect
from meshpar.inspection.program.compiling import compiling
from meshpar.mesh.layout import MeshLayout
from meshpar.optim import Adafactor, AdamW
from meshpar.sharding.rules import AxisRules
from meshpar.train.program import compile_program, trace
from meshpar.train.step import compile_step
from tests.program.test_bytes import MODEL, ROWS, SEQ, prepared
from tests.xla import DEFAULT_FUSIONS

KIB = 2**10


@lru_cache
def mesh(**sizes: int) -> jax.sharding.Mesh:
    return MeshLayout(**sizes).build()


def named(spec: P, **sizes: int) -> jax.NamedSharding:
    return jax.NamedSharding(mesh(**sizes), spec)


def array(shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32, **sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named(spec, **sizes))


def inspected(
    function: Any, *args: Any, on: dict[str, int], donate: Any = (), out: P | None = None, **more: Any
) -> Inspection:
    options = {} if out is None else {"out_shardings": named(out, **on)}
    lowered = jax.jit(function, donate_argnums=donate, **options).lower(*args)
    with compiling() as warnings:
        compiled = lowered.compile()
    return inspect(compiled, mesh(**on), warnings=warnings, **more)


def here(mark: str) -> str:
    """The `file:line` of the line of this file that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


# Involuntary rematerialization -----------------------------------------------------------------------------------

GRID = {"data": 2, "tensor": 4}


def crossing(x: jax.Array, *by_way_of: P) -> jax.Array:
    """Shards rows over both axes, and then columns over one; XLA has no direct way between the two."""
    rows, columns, *between = (named(spec, **GRID) for spec in (P(("data", "tensor")), P(None, "data"), *by_way_of))
    x = lax.with_sharding_constraint(jnp.sin(x), rows)  # crosses
    for sharding in between:
        x = lax.with_sharding_constraint(x, sharding)
    return jnp.cos(lax.with_sharding_constraint(x, columns))


@lru_cache
def crossed(*by_way_of: P) -> tuple[list[str], Inspection]:
    x = array((16, 32), P(), **GRID)
    lowered = jax.jit(lambda x: crossing(x, *by_way_of)).lower(x)
    with compiling() as warnings:
        compiled = lowered.compile()
    return warnings, inspect(compiled, mesh(**GRID), warnings=warnings)


def test_a_rematerialization_is_found_with_its_line_its_bytes_and_both_shardings():
    warnings, seen = crossed()
    assert len(warnings) == 1
    assert seen.findings == (
        Finding(
            kind="rematerialization",
            what="to go from P(('data', 'tensor')) to P(None, 'data'), every device gathers the whole f32[16,32]",
            where=here("crosses"),
            num_bytes=16 * 32 * 4,
            fix="after this line, insert x = jax.lax.with_sharding_constraint(x, P('data'))",
        ),
    )


def test_the_proposed_line_removes_the_rematerialization():
    assert crossed()[1].findings[0].fix.endswith("x = jax.lax.with_sharding_constraint(x, P('data'))")
    warnings, seen = crossed(P("data"))
    assert (warnings, seen.findings) == ([], ())


def test_without_a_mesh_the_shardings_are_as_xla_prints_them():
    text = jax.jit(crossing).lower(array((16, 32), P(), **GRID)).compile().as_text()
    found = inspect(text, warnings=crossed()[0]).findings
    assert re.match(
        r"to go from (devices=\[8,1\]|mesh\[).* to .*, every device gathers the whole f32\[16,32\]", found[0].what
    )


def test_a_warning_of_an_attempt_that_xla_dropped_is_no_finding():
    """JAX 0.10 warns of the embedding lookup under fsdp x tensor, and then compiles it in another way."""
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}

    def look_up(table, ids):
        return lax.with_sharding_constraint(table[ids], named(P(("data", "fsdp")), **sizes))

    table = array((32, 16), P("tensor", "fsdp"), **sizes)
    assert inspected(look_up, table, array((32, 16), P(("data", "fsdp")), jnp.int32, **sizes), on=sizes).findings == ()
    unrelated = jax.jit(jnp.sin).lower(array((16, 32), P("data"), **GRID)).compile()
    assert inspect(unrelated, mesh(**GRID), warnings=crossed()[0]).findings == ()


def crossing_step(run: Prepared) -> Any:
    def step(state: Any, batch: Any) -> Any:
        x = jnp.sin(state.params["embedding"])
        x = lax.with_sharding_constraint(x, jax.NamedSharding(run.mesh, P(("data", "fsdp", "tensor"))))  # of a step
        x = lax.with_sharding_constraint(x, jax.NamedSharding(run.mesh, P(None, "data")))
        return state, {"loss": jnp.cos(x).sum()}

    return compile_step(step, run.placement, run.batch)


def test_the_warnings_of_a_runs_step_reach_its_inspection():
    run = prepared("data2_fsdp2_tensor2")
    step = crossing_step(run)
    with pytest.warns(ContractWarning):
        found = run.inspect(step).findings
    assert len(step.warnings) == 2
    # The table is also gathered over an axis over which the plan keeps it sharded.
    assert sorted(finding.kind for finding in found) == ["rematerialization", "rematerialization", "unplanned_gather"]
    assert here("of a step") in {finding.where for finding in found}
    astray = "state.params.embedding is gathered over tensor, but the plan keeps it sharded there"
    assert [finding.what for finding in found if finding.kind == "unplanned_gather"] == [astray]


def test_compiler_warnings_of_another_program_still_reach_standard_error():
    """Nothing reads the warnings of an evaluation, so collecting them would hide them."""

    def not_compiled_before(x):
        return crossing(x)

    sharded = (array((16, 32), P(), **GRID),)
    with compiling() as seen:
        compile_program(trace(not_compiled_before, sharded, None))
    assert len(seen) == 1 and "Involuntary full rematerialization" in seen[0]


# Gathers ---------------------------------------------------------------------------------------------------------

FSDP = {"fsdp": 8}


def gathering(w: Any, x: jax.Array) -> jax.Array:
    def local(w: Any, x: jax.Array) -> jax.Array:
        def whole(w):
            return lax.all_gather(w, "fsdp", tiled=True)  # gathers

        x, _ = lax.scan(lambda x, layer: (jnp.tanh(x @ whole(layer)), None), x, w["stack"])
        return x @ whole(w["head"])  # multiplies the head

    rows = P("fsdp")
    return jax.shard_map(
        local, mesh=mesh(**FSDP), in_specs=({"stack": P(None, "fsdp"), "head": rows}, rows), out_specs=rows
    )(w, x)


def gathered(threshold_bytes: int = KIB, **more: Any) -> tuple[Finding, ...]:
    w = {"stack": array((3, 16, 16), P(None, "fsdp"), **FSDP), "head": array((16, 32), P("fsdp"), **FSDP)}
    return inspected(
        gathering, w, array((8, 16), P("fsdp"), **FSDP), on=FSDP, threshold_bytes=threshold_bytes, **more
    ).findings


def test_a_parameter_that_is_gathered_whole_is_found_and_one_that_is_gathered_by_layers_is_not():
    found = gathered()
    assert found == (
        Finding(
            kind="unplanned_gather",
            what="w.head is sharded over fsdp, but gathered whole",
            where=found[0].where,
            num_bytes=16 * 32 * 4 * 7 // 8,
            fix="compute with its shards, or gather it layer by layer inside a scan; if it is intended, pass "
            "planned=Planned(gathered={'w.head': ('fsdp',)})",
        ),
    )
    assert found[0].where in (here("gathers"), here("multiplies the head"))


def test_gathers_that_are_small_or_planned_are_no_finding():
    assert gathered(threshold_bytes=KIB * 1024) == ()
    assert gathered(planned=Planned(gathered={"w.head": ("fsdp",), "w.stack": ("fsdp",)})) == ()


def test_a_gather_beyond_the_plan_is_found_in_every_layer():
    found = gathered(planned=Planned(gathered={"w.head": ("fsdp",)}))
    assert [(finding.kind, finding.what, finding.num_bytes) for finding in found] == [
        (
            "unplanned_gather",
            "w.stack is gathered over fsdp, but the plan keeps it sharded there",
            3 * 16 * 16 * 4 * 7 // 8,
        )
    ]


def test_a_gather_of_the_update_of_a_replicated_parameter_is_no_finding():
    rows = named(P("fsdp"), **FSDP)

    def update(w, x):
        return lax.with_sharding_constraint(w + x, rows) * 2

    w = array((16, 4), P(), **FSDP)
    x = array((16, 4), P("fsdp"), **FSDP)
    seen = inspected(update, w, x, on=FSDP, donate=0, out=P(), planned=Planned())
    assert [(collective.kind, collective.tensors) for collective in seen.collectives] == [("all_gather", ("w",))]
    assert seen.findings == ()


# Replication -----------------------------------------------------------------------------------------------------


def scaled(state: Any) -> Any:
    return {"mean": state["w"].mean(), "w": state["w"] * state["scale"]}


def replicated(spec: P, shape: tuple[int, ...] = (512, 512), **more: Any) -> tuple[Finding, ...]:
    state = {"w": array(shape, spec, **GRID), "scale": array((), P(), **GRID)}
    return inspected(scaled, state, on=GRID, out=spec if len(spec) == 0 else None, **more).findings


def test_a_large_array_that_every_device_holds_is_found_by_its_path():
    shard = "shard it, for example by P(('data', 'tensor')), which saves 896.00 KiB on each device"
    assert replicated(P()) == tuple(
        Finding("replication", f"each of 8 devices holds the whole of {path}, [512, 512], 1.00 MiB", path, 2**20, shard)
        for path in ("state.w", "output w")
    )


def test_an_array_that_no_axis_divides_has_a_fix_that_says_so():
    found = replicated(P(), (521, 521))
    assert {finding.fix for finding in found} == {"no axis divides any dim of it: choose sizes that the mesh divides"}


def test_arrays_that_are_sharded_small_or_planned_are_no_finding():
    assert replicated(P("data")) == ()
    assert replicated(P(), (511, 512)) == ()
    assert replicated(P(), planned=Planned(whole=("state.*", "output w"))) == ()


def of_run(run: Prepared, threshold_bytes: int) -> tuple[Finding, ...]:
    step = run.compile_step(DEFAULT_FUSIONS)
    meant = planned_by(run.ctx, run.placement.sharded, run.placement.opt_state)
    return inspect(
        step.compiled, run.mesh, warnings=step.warnings, planned=meant, threshold_bytes=threshold_bytes
    ).findings


def on_data8(rules: AxisRules, optim: Any = AdamW) -> Prepared:
    return prepare(
        Run(
            model=MODEL, data=Synthetic(batch_size=ROWS, seq_len=SEQ, vocab_size=32), optim=optim(lr=1e-3),
            mesh=MeshLayout(data=8), rules=rules, num_steps=10, run_dir="unused",
        )
    )  # fmt: skip


def test_fsdp_rules_on_a_mesh_without_the_axis_are_found_as_replication():
    found = of_run(on_data8(AxisRules(preset=("fsdp",))), 6 * KIB)
    kernels = {f"blocks.mlp.{name}.kernel" for name in ("gate", "up", "down")}
    trees = ("state.params", "state.opt_state.0.mu", "state.opt_state.0.nu")
    assert {finding.where for finding in found} == {f"{tree}.{name}" for tree in trees for name in kernels}
    finding = next(finding for finding in found if finding.where == "state.params.blocks.mlp.up.kernel")
    assert finding.what == f"each of 8 devices holds the whole of {finding.where}, [3, 16, 32], 6.00 KiB"
    assert (
        finding.fix
        == "add a rule that shards one of layers, embed, mlp, or set rules.mlp=[] to replicate it on purpose"
    )


@pytest.mark.parametrize("rules", [AxisRules(preset=("replicated",)), AxisRules(preset=("fsdp",), mlp=())], ids=str)
def test_a_declared_replication_is_no_finding(rules):
    assert of_run(on_data8(rules), 6 * KIB) == ()


# Donation --------------------------------------------------------------------------------------------------------


def overwritten(w: jax.Array, x: jax.Array) -> Any:
    return w.at[0].set(x)


def overwritten_and_read(w: jax.Array, x: jax.Array) -> Any:
    return w.at[0].set(x), w[::-1]  # reads the old


def donating(function: Any, out: P | None = None) -> tuple[Finding, ...]:
    w = array((16, 16), P(), **FSDP)
    x = array((16,), P(), **FSDP)
    return inspected(function, w, x, on=FSDP, donate=0, out=out).findings


def test_a_donated_buffer_that_is_copied_before_it_is_overwritten_is_found():
    (found,) = donating(overwritten_and_read)
    at = here("reads the old")
    assert found == Finding(
        kind="donation_copied",
        what=f"w is donated, but it is copied first, because its old value is still read at {at}",
        where="w",
        num_bytes=KIB,
        fix="read the old value only before the new one is written",
    )


def test_a_donated_buffer_that_no_output_uses_is_found():
    """JAX warns only if the sharding of the outputs is given, and not if XLA chooses it."""
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        (found,) = donating(lambda w, x: (w @ x).sum(), out=P())
    assert donating(lambda w, x: (w @ x).sum()) == (found,)
    assert found == Finding(
        kind="donation_copied",
        what="w is donated, but no output reuses its buffer",
        where="w",
        num_bytes=KIB,
        fix="give an output its shape, dtype and sharding, or do not donate it",
    )


def test_a_donated_buffer_that_is_overwritten_in_place_is_no_finding():
    assert donating(overwritten) == ()


def test_copies_that_only_the_cpu_compiler_makes_are_no_finding():
    """It copies what two loops read: here Adafactor's means."""
    run = on_data8(AxisRules(preset=("replicated",)), Adafactor)
    text = run.compile_step().text
    assert re.search(r"ENTRY(?s:.*) copy\(%param\.\d+\)", text)
    assert of_run(run, KIB) == ()


def test_arguments_that_nothing_reads_shift_no_name():
    def unread(unused, w, x):
        return overwritten_and_read(w, x)

    args = array((4,), P(), **FSDP), array((16, 16), P(), **FSDP), array((16,), P(), **FSDP)
    assert [finding.where for finding in inspected(unread, *args, on=FSDP, donate=1).findings] == ["w"]


# Reductions in a loop --------------------------------------------------------------------------------------------

DATA = {"data": 8}


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(x @ w).sum()  # multiplies


def accumulated(w: jax.Array, xs: jax.Array) -> jax.Array:
    grads, _ = lax.scan(lambda sums, x: (sums + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)
    return w - 0.1 * grads


def reduced_after(w: jax.Array, xs: jax.Array) -> jax.Array:
    def local(w: jax.Array, xs: jax.Array) -> jax.Array:
        own = lax.pcast(w, ("data",), to="varying")
        grads, _ = lax.scan(lambda sums, x: (sums + jax.grad(loss)(own, x), None), jnp.zeros_like(own), xs)
        return w - 0.1 * lax.psum(grads, "data")

    return jax.shard_map(local, mesh=mesh(**DATA), in_specs=(P(), P(None, "data")), out_specs=P())(w, xs)


def trained(w: jax.Array, xs: jax.Array) -> jax.Array:
    """Four steps, each of which needs the reduced gradient of the step before."""
    return lax.scan(lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), None), w, xs)[0]


def watched(w: jax.Array, xs: jax.Array) -> Any:
    """Each turn computes the norm of the sum."""

    def add(sums: jax.Array, x: jax.Array) -> Any:
        sums = sums + jax.grad(loss)(w, x)
        return sums, jnp.square(sums).sum()

    grads, norms = lax.scan(add, jnp.zeros_like(w), xs)
    return w - 0.1 * grads, norms


def squared(w: jax.Array, xs: jax.Array) -> jax.Array:
    """The loop sums the squares of whole gradients."""
    return lax.scan(lambda sums, x: (sums + jax.grad(loss)(w, x) ** 2, None), jnp.zeros_like(w), xs)[0]


def reducing(function: Any, donate: Any = 0, **more: Any) -> tuple[Finding, ...]:
    w = array((16, 4), P(), **DATA)
    xs = array((4, 8, 16), P(None, "data"), **DATA)
    return inspected(function, w, xs, on=DATA, donate=donate, out=P(), **more).findings


def test_a_gradient_that_is_reduced_in_each_microbatch_is_found():
    (found,) = reducing(accumulated)
    assert found == Finding(
        kind="reduction_in_loop",
        what="the gradient of w is reduced over data 4 times, once in each iteration of the loop that adds it up",
        where=here("multiplies"),
        num_bytes=3 * (2 * 16 * 4 * 4 * 7 // 8),  # three of four are too many
        fix="reduce after the loop, as lowering=manual does; elsewhere, in jax.shard_map, cast the parameters before "
        "the loop with jax.lax.pcast(w, axes, to='varying') and psum the sums after it",
    )


def test_a_gradient_without_a_parameter_is_found_as_an_array():
    (found,) = reducing(accumulated, donate=())
    assert found.what.startswith("f32[4,16] is reduced over data 4 times, ")  # XLA computes the transpose


@pytest.mark.parametrize("function", [reduced_after, trained, watched, squared])
def test_a_reduction_that_each_turn_needs_is_no_finding(function):
    assert reducing(function) == ()


def test_a_planned_reduction_in_a_loop_is_no_finding():
    assert reducing(accumulated, planned=Planned(reduced_in_loop={"w": ("data",)})) == ()


# Runs ------------------------------------------------------------------------------------------------------------


@lru_cache
def run_findings(layout: str, lowering: str) -> tuple[Finding, ...]:
    run = prepared(layout, lowering, 4)
    return run.inspect(run.compile_step(DEFAULT_FUSIONS)).findings


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["zero2", "zero3", "hsdp2x4", "data2_fsdp2_tensor2"])
def test_the_manual_lowering_has_no_findings(layout):
    assert run_findings(layout, "manual") == ()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["quickstart", "data-parallel", "fsdp", "gpt", "hsdp", "tensor", "zero1"])
def test_the_configs_have_no_findings(name):
    run = load(Path(__file__).parents[2] / "configs" / f"{name}.yaml", ["model.num_layers=2"])
    assert of_run(prepare(run), KIB) == ()


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["data8", "zero3"])
def test_gspmd_reduces_the_gradient_of_every_parameter_in_every_microbatch(layout):
    found = run_findings(layout, "auto")
    assert {finding.kind for finding in found} == {"reduction_in_loop"}
    assert found[0].what.startswith("the gradient of state.params.")
    assert all(" 4 times, " in finding.what for finding in found)


def test_the_reductions_of_zero3_are_planned_in_the_manual_lowering_alone():
    run = prepared("zero3", "manual", 4)
    planned = planned_by(run.ctx, run.placement.sharded, run.placement.opt_state)
    assert set(planned.reduced_in_loop.values()) == {("fsdp",)}
    report = inspect(run.compile_step().compiled, run.mesh, planned=Planned(gathered=planned.gathered))
    assert {finding.kind for finding in report.findings} == {"reduction_in_loop"}
    auto = prepared("zero3", "auto")
    assert planned_by(auto.ctx, auto.placement.sharded, auto.placement.opt_state).reduced_in_loop == {}


# Text and JSON ----------------------------------------------------------------------------------------------------


def test_the_text_and_the_json_of_a_finding():
    seen = crossed()[1]
    found = seen.findings[0]
    assert str(seen).endswith(
        "findings\n"
        "  rematerialization  2.00 KiB\n"
        "    to go from P(('data', 'tensor')) to P(None, 'data'), every device gathers the whole f32[16,32]\n"
        f"    where: tests/program/{Path(found.where).name}\n"
        "    fix: after this line, insert x = jax.lax.with_sharding_constraint(x, P('data'))"
    )
    assert json.loads(json.dumps(seen.as_json()))["findings"] == [
        {"kind": found.kind, "what": found.what, "where": found.where, "bytes": 2048, "fix": found.fix}
    ]


def test_a_program_without_findings_has_no_such_section():
    seen = crossed(P("data"))[1]
    assert "\nfindings\n" not in str(seen)
    assert seen.as_json()["findings"] == []
