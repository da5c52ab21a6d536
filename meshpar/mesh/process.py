"""Settings that JAX needs before it looks for devices, such as the number of simulated ones."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import jax

from meshpar.errors import MeshError
from meshpar.mesh import compilation_cache, driver, join

logging.getLogger("jax._src.xla_bridge").addFilter(driver.is_relevant)

MOST = 1024
"""The most devices that are simulated: each costs memory and threads, and beyond about 256 a step no longer runs."""

_FORCED = "xla_force_host_platform_device_count"
_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def simulate(num_devices: int) -> None:
    """Makes the CPU backend present itself as `num_devices` devices; other backends do not change.

    Call it before JAX looks for its devices, which it does only once. More than 1024 devices are not simulated. Joined
    processes share the devices evenly.

    On a loaded machine a simulated device may wait long for its peers, so the time-out of collectives is raised from 40
    seconds to 10 minutes, unless XLA_FLAGS sets it.

    Raises:
      MeshError: JAX has started already, with another number of CPU devices; or the processes cannot share them evenly.

    >>> import meshpar
    >>> meshpar.simulate(8)
    >>> jax.device_count()
    8
    """
    try:
        _configure(join.share(num_devices))
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.device_count() != num_devices:
            raise MeshError(f"{_started()}, and cannot simulate {num_devices} now: {_earlier(num_devices)}") from None


def devices(least: int) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """All devices. A machine without an accelerator simulates `least` CPU devices, and logs a warning.

    Nothing is simulated if the number of CPU devices is configured, or if JAX has started already, because JAX looks
    for devices only once. An accelerator is never replaced.
    """
    configured: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    is_set = configured >= 0 or _FORCED in os.environ.get("XLA_FLAGS", "") or jax.distributed.is_initialized()
    simulated = False
    if 1 < least <= MOST and not is_set:
        with suppress(RuntimeError):
            _configure(least)
            simulated = True
    found = jax.devices()
    if simulated and found[0].platform == "cpu":
        logging.getLogger(__name__).warning("meshpar: %d simulated CPU devices", least)
    return found


def more_devices(num_devices: int, platform: str) -> tuple[str, str]:
    """The reason why there are too few devices, and the way to get `num_devices`."""
    if num_devices > MOST:
        why = f"a CPU presents itself as {MOST} devices at most"
        return why, "meshpar explain needs no devices, and meshpar inspect --target compiles for another machine"
    if platform == "cpu":
        return _started(), _earlier(num_devices)
    return (
        f"JAX runs on {platform}",
        f"JAX_PLATFORMS=cpu in the environment simulates {num_devices} CPU devices instead",
    )


def _configure(num_devices: int) -> None:
    """Raises RuntimeError if JAX has already looked for its devices."""
    if num_devices > MOST:
        return
    jax.config.update("jax_num_cpu_devices", num_devices)
    flags = os.environ.get("XLA_FLAGS", "")
    if _TIMEOUT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_TIMEOUT}=600".strip()


def _started() -> str:
    count = jax.device_count()
    return f"JAX has started with {count} CPU device{'s' if count > 1 else ''}"


def _earlier(n: int) -> str:
    return f"request {n} before JAX starts: meshpar.simulate({n}), --devices {n} or JAX_NUM_CPU_DEVICES={n}"


def compile_only() -> None:
    """Prepares JAX to compile for other machines: it does not look for accelerators, and runs nothing on them."""
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    compilation_cache.disable()  # these programs cannot be loaded from it
