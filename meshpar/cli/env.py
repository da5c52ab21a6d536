"""`meshpar env`."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from meshpar.cli.app import AsJson, app, echo_either
from meshpar.errors import printable

PACKAGES = ("meshpar", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
EXTRAS = {
    "data": ("tokenizers", "pyarrow"),
    "images": ("PIL",),
    "remote": ("s3fs", "gcsfs", "huggingface_hub"),
    "plot": ("matplotlib",),
    "quantized": ("qwix",),
    "onnx": ("torch", "transformers", "onnx", "onnxscript", "equinox", "dm_pix", "onnxruntime"),
    "privacy": ("dp_accounting",),
    "metrics": ("prometheus_client",),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
    "structured": ("llguidance",),
    "eval": ("lm_eval", "regex"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "tpu-target": ("libtpu",),
    "gpu-target": ("jax_plugins",),
}
"""Extra -> the modules that it installs."""
VARIABLES = re.compile(
    r"(JAX|XLA|TPU|LIBTPU|CUDA|NCCL|ROCR|HIP|TF_CPP|SLURM|OMPI|MESHPAR)_|LD_PRELOAD$|OMP_NUM_THREADS$"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|JWT", re.IGNORECASE)


@app.command()
def env(json: AsJson = False) -> None:
    """Prints versions, devices, installed extras and the environment variables that affect a run."""
    found = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in PACKAGES},
        "extras": [extra for extra, modules in EXTRAS.items() if all(find_spec(module) for module in modules)],
        "devices": _devices(),
        "variables": {
            name: "set, and not shown" if SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if VARIABLES.match(name)
        },
    }
    echo_either(_text(found), found, json)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    """The devices that JAX finds; or the reason why JAX cannot start, for which most users call this verb."""
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # a broken plugin may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
    }


def _text(found: dict[str, Any]) -> str:
    devices = found["devices"]
    if "error" in devices:
        summary = f"JAX cannot start: {devices['error']}"
    else:
        summary = f"{devices['count']} {devices['platform']} ({devices['kind']}), processes: {devices['processes']}"
    rows = [
        ("python", found["python"]),
        *((name, version or "not installed") for name, version in found["versions"].items()),
        ("devices", summary),
        ("extras", ", ".join(found["extras"]) or "none"),
        *found["variables"].items(),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {printable(value)}" for name, value in rows)
