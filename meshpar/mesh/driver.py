"""Whether there is an NVIDIA driver, and what JAX says where there is none.

The extra `gpu-target` installs JAX's CUDA plugin, which compiles for GPUs that are not here. Without a driver the
plugin cannot start, and JAX logs a traceback in every command.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

_PLUGIN_FAILED = "Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda"


def is_here(root: Path = Path("/")) -> bool:
    """Whether anything speaks for a driver: devices, its folder in /proc, its tool, or WSL's device."""
    devices = [*root.glob("dev/nvidia*"), *root.glob("dev/dxg"), *root.glob("proc/driver/nvidia")]
    return bool(devices) or shutil.which("nvidia-smi") is not None


def says_what_matters(record: logging.LogRecord) -> bool:
    """A filter for JAX's log: without a driver, the CUDA plugin's failure is no news, unless CUDA was asked for."""
    if not record.getMessage().startswith(_PLUGIN_FAILED):
        return True
    return is_here() or bool({"cuda", "gpu"} & set(os.environ.get("JAX_PLATFORMS", "").split(",")))
