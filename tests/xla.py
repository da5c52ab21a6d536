"""How XLA compiles in the tests: their programs are tiny, and optimizing them takes longer than it saves."""

from __future__ import annotations

from importlib.metadata import version  # these flags are set before JAX is imported
from typing import Any

FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=300 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"  # by default 32 modules, each with its own overhead
)
# jax 0.10 has two kinds of emitters of fusions. The older kind compiles a step in half of the time. It fuses otherwise,
# which findings show and bits: a test that reads those compiles with XLA's default.
DEFAULT_FUSIONS: dict[str, Any] = {}
if version("jax").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    DEFAULT_FUSIONS["xla_cpu_use_fusion_emitters"] = True

AS_USERS: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_parallel_codegen_split_count": 32,
    **DEFAULT_FUSIONS,
}
"""Options of a compilation: XLA's defaults again, where seconds of compiling are compared."""
