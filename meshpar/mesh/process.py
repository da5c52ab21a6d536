"""What must be said to JAX before it looks at the devices."""

from __future__ import annotations

import os

import jax

from meshpar.errors import MeshError

_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def simulate(num_devices: int) -> None:
    """Makes the CPU backend present itself as `num_devices` devices; other backends are not touched.

    A loaded machine may keep a simulated device waiting for its peers for a while: the collective's
    time-out is raised from 40 seconds to 10 minutes, unless XLA_FLAGS already says otherwise.

    Raises:
      MeshError: JAX has looked at its devices already and found another number of them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _TIMEOUT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_TIMEOUT}=600".strip()
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.device_count() != num_devices:
            raise MeshError(
                f"{num_devices} simulated devices were asked for after JAX had started with {jax.device_count()}"
            ) from None


def compile_only() -> None:
    """Lets JAX compile for machines that are not here: it must not look for them, and runs nothing."""
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # such programs cannot be read back
