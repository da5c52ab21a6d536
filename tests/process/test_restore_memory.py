"""A restore holds little more on the host than the arrays that it restores, measured in a process of its own.

The peak of resident memory is Linux's `VmHWM`, which `clear_refs` resets after a first array has been restored; what
was resident then is subtracted. Simulated devices are host memory, so a process needs what its eight devices hold.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import gc, sys
from pathlib import Path
import jax

jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.saved import find

what, folder, count, shape = sys.argv[1], Path(sys.argv[2]), 64, (1024, 2048)
mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
columns = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
structs = {f"w{i}": jax.ShapeDtypeStruct(shape, np.float32, sharding=columns) for i in range(count)}


def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


if what == "save":
    noise = np.random.default_rng(0)
    with checkpoints(folder) as saved:
        saved.save(1, {path: jax.device_put(noise.random(shape, np.float32), jax.devices()[0]) for path in structs})
    sys.exit()

saved = find(folder)
saved.restore({"w0": structs["w0"]}, include=["w0"])
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
if what == "restore":
    held = saved.restore(structs)
else:  # the control: whole arrays on the host, and then onto the devices
    whole = {path: saved.on_host(path) for path in structs}
    held = {path: jax.device_put(x, columns) for path, x in whole.items()}
jax.block_until_ready(held)
print((resident("VmHWM") - before) / sum(x.nbytes for x in held.values()))
"""


def worker(what: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, what, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 MiB, saved by one device and restored to eight, each of which gets some columns of each chunk."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory can be set back on Linux only")
    folder = tmp_path_factory.mktemp("memory")
    worker("save", folder)
    return folder


def test_a_restore_holds_little_more_than_what_it_restores(folder: Path):
    assert 1 <= float(worker("restore", folder)) <= 1.3


def test_control_whole_arrays_on_the_host_are_seen(folder: Path):
    assert float(worker("whole", folder)) > 1.5
