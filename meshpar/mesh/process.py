"""What must be said to JAX before it looks at the devices."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import jax

from meshpar.errors import MeshError
from meshpar.mesh import driver

logging.getLogger("jax._src.xla_bridge").addFilter(driver.says_what_matters)

MOST = 1024
"""Simulated devices: each costs memory and threads, and beyond 256 or so a step no longer runs."""

_FORCED = "xla_force_host_platform_device_count"
_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def simulate(num_devices: int) -> None:
    """Makes the CPU backend present itself as `num_devices` devices; other backends are not touched.

    Call it before anything makes JAX look for its devices: it looks only once. More than `MOST` are not simulated.

    A loaded machine may keep a simulated device waiting for its peers for a while: the collective's
    time-out is raised from 40 seconds to 10 minutes, unless XLA_FLAGS already says otherwise.

    Raises:
      MeshError: JAX has started already, with another number of CPU devices.
    """
    try:
        _tell_jax(num_devices)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.device_count() != num_devices:
            raise MeshError(f"{_started()}, and cannot simulate {num_devices} now: {_sooner(num_devices)}") from None


def devices(least: int) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """All devices. A machine that has only its CPU simulates `least` of them, and says so.

    It does not where someone has said how many CPU devices there are, or where JAX has started already: it looks
    for devices only once. An accelerator is never replaced.
    """
    simulated = False
    if 1 < least <= MOST and not _is_said():
        with suppress(RuntimeError):
            _tell_jax(least)
            simulated = True
    found = jax.devices()
    if simulated and found[0].platform == "cpu":
        logging.getLogger(__name__).warning("meshpar: %d simulated CPU devices", least)
    return found


def more_devices(num_devices: int, platform: str) -> tuple[str, str]:
    """Why there are no more devices, and how to have `num_devices`."""
    if num_devices > MOST:
        why = f"a CPU presents itself as {MOST} devices at most"
        return why, "meshpar explain needs no devices, and meshpar inspect --target compiles for a machine elsewhere"
    if platform == "cpu":
        return _started(), _sooner(num_devices)
    return (
        f"JAX runs on {platform}",
        f"JAX_PLATFORMS=cpu in the environment simulates {num_devices} CPU devices instead",
    )


def _tell_jax(num_devices: int) -> None:
    """Raises RuntimeError where JAX has looked at its devices already."""
    if num_devices > MOST:
        return
    jax.config.update("jax_num_cpu_devices", num_devices)
    flags = os.environ.get("XLA_FLAGS", "")
    if _TIMEOUT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_TIMEOUT}=600".strip()


def _is_said() -> bool:
    configured: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    return configured >= 0 or _FORCED in os.environ.get("XLA_FLAGS", "") or jax.distributed.is_initialized()


def _started() -> str:
    count = jax.device_count()
    return f"JAX has started with {count} CPU device{'s' if count > 1 else ''}"


def _sooner(num_devices: int) -> str:
    n = num_devices
    return f"ask for {n} before JAX starts: meshpar.simulate({n}), --devices {n} or JAX_NUM_CPU_DEVICES={n}"


_TASKS = {
    "Slurm": (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "srun -n1"),
    "Open MPI": (("OMPI_COMM_WORLD_SIZE",), "mpirun -n 1"),
    "MPI": (("PMI_SIZE",), "mpirun -n 1"),
}
"""Launcher -> the variables that say how many processes it started, the most exact one first; and how to start one."""


def check_joined() -> None:
    """Refuses several processes that a launcher started and nobody joined: each would train alone, in one run_dir.

    Raises:
      MeshError: there are several, and `jax.distributed.initialize` was not called.
    """
    if jax.distributed.is_initialized():
        return
    for launcher, (variables, alone) in _TASKS.items():
        variable = next((variable for variable in variables if variable in os.environ), "")
        count = os.environ.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            what = f"{launcher} started {count} processes ({variable}={count}), and they are not joined"
            why = "each would be a run of its own in the same run_dir"
            fix = f"start one ({alone}), or call jax.distributed.initialize() before meshpar.fit"
            raise MeshError(f"{what}: {why}; {fix}")


def compile_only() -> None:
    """Lets JAX compile for machines that are not here: it must not look for them, and runs nothing."""
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # such programs cannot be read back
