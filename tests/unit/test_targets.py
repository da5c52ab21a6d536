"""Targets: which are read or refused, and the report of a fit, on devices that stand in for a machine's."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from meshpar.errors import MeshError
from meshpar.inspection import fit
from meshpar.inspection.fit import compile_for, judge
from meshpar.inspection.inspect import inspect
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.hlo import Collective
from meshpar.inspection.program.text import ArrayType, Program
from meshpar.mesh import process, targets
from meshpar.mesh.hardware import CHIPS, FOR_XLA
from meshpar.mesh.targets import parse


@pytest.mark.parametrize(
    ("text", "chip", "shape"),
    [("v5e:16x16", "TPU v5e", (16, 16)), ("v5p:8x8x8", "TPU v5p", (8, 8, 8)), ("h100:64x8", "H100 SXM", (64, 8)),
     ("a100:1x8", "A100 80GB SXM", (1, 8)), ("a100_40gb:1x8", "A100 40GB", (1, 8)), ("H200:2x8", "H200 SXM", (2, 8)),
     ("b200:4x8", "B200", (4, 8))],
)  # fmt: skip
def test_a_machine_is_a_chip_and_a_shape(text, chip, shape):
    machine = parse(text)
    assert (machine.chip.name, machine.shape) == (chip, shape)


REFUSED = {
    "v5e": "--target v5e: not a machine; write chip:shape, as in v5e:4x4, v5p:4x4x4 or h100:4x8",
    "v5e:4x": "--target v5e:4x: not a machine; write chip:shape, as in v5e:4x4, v5p:4x4x4 or h100:4x8",
    "h100:0x8": "--target h100:0x8: a machine with a size of 0 has no devices; write at least 1",
    "v5f:4x4": "--target v5f:4x4: no chip is called 'v5f'; did you mean v5p? There are v4, v5e, v5p, v6e, tpu7x, "
    "a100, a100_40gb, h100, h200, b200, h100_hbm2e, h100_pcie, gb200",
    "mi300:1x8": "--target mi300:1x8: no chip is called 'mi300'; there are v4, v5e, v5p, v6e, tpu7x, "
    "a100, a100_40gb, h100, h200, b200, h100_hbm2e, h100_pcie, gb200",
    "h100:2x4x8": "--target h100:2x4x8: write hosts x GPUs on each, as in h100:4x8",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_an_unknown_machine_is_refused(text, message):
    with pytest.raises(MeshError) as error:
        parse(text)
    assert str(error.value) == message


@pytest.mark.parametrize(("text", "extra"), [("v5e:4x4", "tpu-target"), ("h100:1x8", "gpu-target")])
def test_a_compiler_that_is_not_installed_is_named_with_its_extra(text, extra, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda module: None)
    with pytest.raises(MeshError, match=rf"its compiler is not installed; .*'meshpar\[{extra}\]'"):
        parse(text).devices()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "module"),
    [("v5e:2x4", "libtpu"), *((f"{gpu}:2x4", "jax_cuda12_plugin") for gpu in targets.GPUS)],
)
def test_an_installed_compiler_has_devices_for_each_target(text, module):
    """Needs the extras tpu-target and gpu-target."""
    assert find_spec(module), f"{module} is not installed"
    process.compile_only()
    assert len(parse(text).devices()) == 8


@pytest.mark.parametrize("name", targets.GPUS.values())
def test_the_figures_of_a_gpu_for_xla_agree_with_its_makers(name):
    """Memory and bandwidth are in both tables, so that a digit too many in one would show."""
    chip = next(chip for chip in CHIPS if chip.name == name)
    figures = {key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", FOR_XLA[name])}
    assert figures["device_memory_size"] == pytest.approx(chip.memory_bytes, rel=0.1)
    assert figures["memory_bandwidth"] == pytest.approx(chip.memory_bytes_per_s, rel=0.05)
    assert any(kind in FOR_XLA[name] for kind in chip.kinds)


def test_a_machine_unknown_to_the_compiler_is_an_error_in_its_words(monkeypatch):
    def unknown(*_):
        raise RuntimeError("INVALID_ARGUMENT: no such topology\nand a trace")

    monkeypatch.setattr(targets, "find_spec", lambda module: True)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", unknown)
    with pytest.raises(MeshError) as error:
        parse("v5e:3x5").devices()
    message = "--target v5e:3x5: the compiler does not know this machine: INVALID_ARGUMENT: no such topology"
    assert str(error.value) == message


# FitReport -------------------------------------------------------------------------------------------------------


def program(groups=((0, 1),)):
    """A program of 8192 FLOPs that sends 40 bytes in these groups, three times."""
    compiled = jax.jit(lambda x: x @ x).lower(jax.numpy.ones((16, 16))).compile()
    flow = Flow(Program(compiled.as_text()))
    collective = Collective(
        "all_gather", (ArrayType("f32", (20,)),), 80, groups, ("data",), False, 4, 3, (), "",
        next(flow.program.instructions()), flow,
    )  # fmt: skip
    return replace(inspect(compiled), collectives=(collective,))


def two_hosts():
    """A mesh of four devices, two on each host."""
    hosts = [type("Device", (), {"process_index": number // 2})() for number in range(4)]
    return type("Mesh", (), {"devices": np.array(hosts)})()


def test_bytes_are_counted_by_network(monkeypatch):
    monkeypatch.setattr(fit, "Mesh", object)
    for text, groups, inside, across in [
        ("h100:2x2", ((0, 1), (2, 3)), 120, 0),
        ("h100:2x2", ((0, 2), (1, 3)), 0, 120),
        ("v5e:2x2", ((0, 2), (1, 3)), 120, 0),
    ]:
        judged = judge(program(groups), parse(text), two_hosts())
        assert (judged.sent_inside, judged.sent_across) == (inside, across)


def test_a_program_fits_if_the_chip_holds_its_peak():
    machine = parse("h100:1x1")
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    fits = judge(program(((0,),)), machine, mesh)
    too_big = replace(
        fits, inspection=replace(fits.inspection, memory=replace(fits.inspection.memory, peak=int(80e9) + 1))
    )
    assert (fits.fits, too_big.fits) == (True, False)
    assert "  fits: a device holds 2.00 KiB of 74.51 GiB (0.0%)" in str(fits).splitlines()
    assert "  does not fit: a device holds 74.51 GiB of 74.51 GiB (100.0%)" in str(too_big).splitlines()
    assert fits.as_json()["products_s_estimate"] == 8192 / (1979e12 / 2)


def test_a_step_that_is_too_big_to_compile_is_reported_in_the_compilers_words():
    def too_big():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 20.30G of 15.75G hbm.\nmore")

    with pytest.raises(MeshError) as error:
        compile_for(parse("v5e:4x4"), too_big)
    message = (
        "--target v5e:4x4: the step does not fit; the compiler reports: RESOURCE_EXHAUSTED: Used 20.30G of 15.75G hbm."
    )
    assert str(error.value) == message


def test_another_error_of_the_compiler_is_not_caught():
    def broken():
        raise jax.errors.JaxRuntimeError("INTERNAL: ...")

    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_for(parse("v5e:4x4"), broken)
