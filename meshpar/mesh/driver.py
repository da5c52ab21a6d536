"""Detects an NVIDIA driver, and drops the CUDA plugin's log message on a machine without one.

The extra `gpu-target` installs JAX's CUDA plugin, which compiles for GPUs of other machines. Without a driver the
plugin cannot start, and JAX would log a traceback in every command.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

_PLUGIN_FAILED = "Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda"


def is_installed(root: Path = Path("/")) -> bool:
    """Whether there is a sign of a driver: its devices, its folder in /proc, `nvidia-smi`, or WSL's device."""
    devices = [*root.glob("dev/nvidia*"), *root.glob("dev/dxg"), *root.glob("proc/driver/nvidia")]
    return bool(devices) or shutil.which("nvidia-smi") is not None


def is_relevant(record: logging.LogRecord) -> bool:
    """A filter for JAX's log: drops the CUDA plugin's failure if there is no driver and nobody requested CUDA."""
    if not record.getMessage().startswith(_PLUGIN_FAILED):
        return True
    return is_installed() or bool({"cuda", "gpu"} & set(os.environ.get("JAX_PLATFORMS", "").split(",")))
