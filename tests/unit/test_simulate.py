"""On CPUs a mesh simulates the devices that it asks for. Each case is a program of its own, as JAX starts only once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.page import shell

MESH = "from meshpar.mesh.layout import MeshLayout\nprint(MeshLayout(data=2, tensor=4).build().size)"
REPORT = "meshpar: 8 simulated CPU devices\n"


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = shell() | {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_a_mesh_simulates_its_devices_and_says_so():
    done = run(MESH)
    assert (done.stdout, done.stderr) == ("8\n", REPORT)


def test_a_free_axis_gets_one_simulated_device():
    done = run(MESH.replace("data=2", "data=-1"))
    assert (done.stdout, done.stderr) == ("4\n", "meshpar: 4 simulated CPU devices\n")


@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ("from meshpar.mesh.process import simulate\nsimulate(8)\n", {}),
        ("", {"JAX_NUM_CPU_DEVICES": "8"}),
        ("", {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
    ],
)
def test_a_mesh_simulates_nothing_if_the_number_of_devices_is_set(before, variables):
    done = run(before + MESH, **variables)
    assert (done.stdout, done.stderr) == ("8\n", "")


@pytest.mark.parametrize(
    ("before", "variables", "count"),
    [
        ("import jax\njax.devices()\n", {}, "1 CPU device"),
        ("import jax.numpy as jnp\njnp.ones(2)\n", {}, "1 CPU device"),
        ("from meshpar.mesh.process import simulate\nsimulate(4)\n", {}, "4 CPU devices"),
        ("", {"JAX_NUM_CPU_DEVICES": "4"}, "4 CPU devices"),
    ],
)
def test_a_mesh_after_jax_has_started_says_how_to_simulate(before, variables, count):
    done = run(before + MESH, **variables)
    assert done.returncode == 1
    assert done.stderr.endswith(f"""\
  devices
    JAX has started with {count}
    request 8 before JAX starts: meshpar.simulate(8), --devices 8 or JAX_NUM_CPU_DEVICES=8
""")


def test_the_proposed_fixes_work():
    late = "import jax.numpy as jnp\njnp.ones(2)\n" + MESH
    assert run(f"from meshpar.mesh.process import simulate\nsimulate(8)\n{late}").stdout == "8\n"
    assert run(late, JAX_NUM_CPU_DEVICES="8").stdout == "8\n"


def test_simulating_too_late_says_what_to_do():
    done = run("import jax\njax.devices()\nfrom meshpar.mesh.process import simulate\nsimulate(8)")
    assert "JAX has started with 1 CPU device, and cannot simulate 8 now: request 8 before JAX starts" in done.stderr


def test_more_devices_than_a_cpu_can_simulate_are_refused_at_once():
    done = run(MESH.replace("data=2", "data=2**20"))
    assert done.returncode == 1
    assert "a CPU presents itself as 1024 devices at most\n    meshpar explain needs no devices" in done.stderr


ACCELERATOR = """
import jax
class Device:
    platform, device_kind = "gpu", "NVIDIA H200"
jax.devices = lambda: [Device()]
"""


def test_an_accelerator_is_never_replaced():
    """The accelerator is planted: `jax.devices` returns one."""
    done = run(ACCELERATOR + MESH)
    assert done.returncode == 1
    assert done.stderr.endswith("""\
MeshError: mesh (data=2, tensor=4) does not fit 1 device:
  mesh
    the sizes multiply to 8, more than the 1 device available
    sizes that divide 1: 1
  devices
    JAX runs on gpu
    JAX_PLATFORMS=cpu in the environment simulates 8 CPU devices instead
""")
    assert "simulated CPU" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("XLA_FLAGS", "--xla_force_host_platform_device_count=3"), ("JAX_NUM_CPU_DEVICES", "3")],
)
def test_these_programs_do_not_inherit_devices_from_the_tests(name, value, monkeypatch):
    """The other tests here show that a program which is given these variables simulates nothing."""
    monkeypatch.setenv(name, value)
    assert run(MESH).stderr == REPORT
