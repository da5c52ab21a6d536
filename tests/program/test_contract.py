"""Contracts: each limit and the message of a violation; and the traced bytes, which every manual step must keep."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.errors import ConfigError, ContractError, ContractWarning, ProgramError
from meshpar.experiment.fit_run import _check_programs
from meshpar.inspection.contract import Allowed, Contract
from meshpar.inspection.inspect import Inspection, inspect
from meshpar.partition.program import Use
from meshpar.train.program import Program
from meshpar.train.step import Step, Update, compile_step, step_function
from tests.program.oracle import closed_form
from tests.program.test_bytes import prepared
from tests.program.test_hlo import make_mesh


def local(w: jax.Array, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda x, layer: (x @ lax.all_gather(layer, "fsdp", tiled=True), None), x, w)
    return lax.psum(lax.pcast(x, "tensor", to="varying"), "tensor")


GATHER, SUM = (f"tests/program/test_contract.py:{local.__code__.co_firstlineno + line}" for line in (1, 2))


@lru_cache
def inspected() -> Inspection:
    """Three layers of 256 bytes gathered over fsdp, 128 bytes sent for each; then a sum of 32 bytes over tensor."""
    mesh = make_mesh()
    rows = P(("data", "fsdp"))
    step = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "fsdp"), rows), out_specs=rows)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 8, 8), (4, 8))]
    return inspect(jax.jit(step).lower(*shapes).compile(), mesh)


FORM = {("fsdp",): Fraction(384), ("tensor",): Fraction(32)}


def broken(**contract) -> str:
    return "\n".join(map(str, Contract(**contract).check(inspected(), FORM, layer_passes=3).found))


@pytest.mark.parametrize(
    "contract",
    [
        {},
        {"all_gather": {"times": 3, "per_layer": 1, "axes": ["fsdp"]}, "all_to_all": {"times": 0}},
        {"all_gather": {"axes": ["fsdp", "tensor"]}, "all_reduce": {"times": 1, "axes": ["tensor"]}},
        {"bytes_per_axis": {"fsdp": 384, "tensor": "traced", "data": 0}},
        {"bytes_per_axis": {"fsdp": "0.375KiB"}, "peak_bytes": "1MiB"},
    ],
)
def test_a_program_that_keeps_its_contract_has_no_problem(contract):
    assert broken(**contract) == ""


REFUSED = {
    "times": (
        {"all_gather": {"times": 2}},
        f"""\
  contract.all_gather.times
    runs 3 times, more than 2:
      all_gather over fsdp  3x  384 B  w  {GATHER}""",
    ),
    "per_layer": (
        {"all_gather": {"per_layer": 0}},
        """\
  contract.all_gather.per_layer
    more than 0 in each of 3 passes of a layer:
      w  3x""",
    ),
    "axes": (
        {"all_reduce": {"axes": ["data"]}},
        f"""\
  contract.all_reduce.axes
    runs over other axes than data:
      all_reduce over tensor  1x  32 B  f32[1,8]  {SUM}""",
    ),
    "bytes": (
        {"bytes_per_axis": {"tensor": "traced * 0.5", "fsdp": 383}},
        f"""\
  contract.bytes_per_axis.tensor
    sends 32 bytes, more than 16 (traced * 0.5):
      all_reduce over tensor  1x  32 B  f32[1,8]  {SUM}
  contract.bytes_per_axis.fsdp
    sends 384 bytes, more than 383:
      all_gather over fsdp  3x  384 B  w  {GATHER}""",
    ),
}


@pytest.mark.parametrize(("contract", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_violation_names_collective_axis_bytes_tensor_and_line(contract, text):
    assert broken(**contract) == text


def test_a_step_that_holds_too_much_lists_its_largest_arrays():
    lines = broken(peak_bytes="0.5KiB").splitlines()
    assert lines[0] == "  contract.peak_bytes"
    assert lines[1].endswith("more than 0.5KiB:")
    assert lines[2] == "      384 B  f32[3,4,8]  w"
    assert lines[3].startswith("      256 B  f32[8,8]  jit(local)/shard_map/while/body/")


def test_a_limit_by_the_traced_bytes_needs_them():
    problems = Contract(bytes_per_axis={"fsdp": "traced"}).check(inspected(), None, 3)
    assert "the traced bytes of this step are unknown, because GSPMD chooses its collectives" in str(problems.found[0])


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"bytes_per_axis": {"tensr": 0}}, "the mesh has no axis 'tensr'"),
        ({"all_gather": {"axes": ["tensr"]}}, "the mesh has no axis 'tensr'"),
        ({"bytes_per_axis": {"tensor": "traced + 1"}}, "'traced \\+ 1' is not a number of bytes"),
        ({"peak_bytes": "40MB"}, "'40MB' is not a number of bytes; valid: 1000, 40MiB"),
        ({"peak_bytes": "traced"}, "'traced' is not a number of bytes"),
    ],
)
def test_a_limit_that_cannot_be_read_is_refused(contract, message):
    with pytest.raises(ConfigError, match=message):
        Contract(**contract)


# Runs ------------------------------------------------------------------------------------------------------------


def test_a_run_refuses_a_step_that_breaks_its_contract():
    run = prepared("zero3", contract=Contract(all_gather=Allowed(per_layer=1)))
    with pytest.raises(ContractError, match=r"breaks its contract:\n  contract\.all_gather\.per_layer"):
        run.inspect(run.compile_step())


def test_a_compiler_that_sends_more_than_the_traced_step_is_reported(monkeypatch):
    """The update constrains its parameters to be replicated, so GSPMD adds gathers that are not in the traced step."""

    def whole(update, *given):
        new, metrics = Update.__call__(update, *given)
        replicated = jax.tree.map(lambda one: NamedSharding(one.mesh, P()), given[2])
        params = jax.tree.map(jnp.sin, jax.lax.with_sharding_constraint(new.params, replicated))
        return replace(new, params=params), metrics

    run = prepared("zero3")
    step = step_function(run.gradients, partial(whole, run.update), run.placement)
    compiled = compile_step(step, run.placement, run.batch)
    with pytest.warns(ContractWarning, match=r"sends more than the traced step says:\n  over fsdp"):
        run.inspect(compiled)


def test_planted_a_second_reduction_in_a_layer_differs_from_the_formulas(monkeypatch):
    """Neither types nor numbers show it: the loss is the same, with three times the bytes."""
    monkeypatch.setattr(Use, "__hash__", object.__hash__)  # so that each use of a partial sum is summed by itself
    monkeypatch.setattr(Use, "__eq__", object.__eq__)
    run = prepared("tensor4")
    assert run.traced_bytes["tensor",] > closed_form(run)["tensor",]


def test_gspmd_is_held_to_the_traced_bytes_only_by_a_contract():
    run = prepared("zero3", "auto")
    step = run.compile_step()
    run.inspect(step)
    with_contract = prepared("zero3", "auto", contract=Contract(bytes_per_axis={"fsdp": "traced * 1.1"}))
    with pytest.raises(ContractError, match=r"more than [\d,]+ \(traced \* 1.1\)"):
        with_contract.inspect(step)


def test_a_program_that_cannot_be_read_is_an_error_only_with_a_contract():
    step = Step(Program(Unreadable(), jax.make_jaxpr(lambda: 0)()), {})  # pyright: ignore
    with pytest.raises(ProgramError):
        prepared("zero3", contract=Contract()).inspect(step)
    run = prepared("zero3")
    with pytest.warns(ContractWarning, match="could not be compared"):
        _check_programs(run, step, run.lazy_evaluation())


class Unreadable:
    def as_text(self) -> str:
        return "HloModule m"
