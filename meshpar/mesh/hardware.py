"""The only hardware numbers of meshpar: what the makers state, nothing measured and nothing guessed."""

from __future__ import annotations

from dataclasses import dataclass

import jax

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """An accelerator, as one JAX device sees it.

    Args:
      name: as its maker calls it.
      kinds: the `device_kind`s by which JAX knows it.
      flops: dense bfloat16 operations a second.
      memory_bytes: high-bandwidth memory.
      memory_bytes_per_s: its bandwidth.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float


CHIPS = (
    # cloud.google.com/tpu/docs/v4
    Chip("TPU v4", ("TPU v4",), 275e12, 32 * GIB, 1200e9),
    # cloud.google.com/tpu/docs/v5e
    Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * GIB, 819e9),
    # cloud.google.com/tpu/docs/tpu7x, which has v5p and v6e beside it. A TPU7x is two JAX devices: half of it.
    Chip("TPU v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * GIB, 2765e9),
    Chip("TPU v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * GIB, 1638e9),
    Chip("TPU7x", ("TPU7x",), 2307e12 / 2, 192 * GIB / 2, 7380e9 / 2),
    # nvidia.com/en-us/data-center/a100
    Chip("A100 40GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 312e12, 40e9, 1555e9),
    Chip("A100 80GB SXM", ("NVIDIA A100-SXM4-80GB",), 312e12, 80e9, 2039e9),
    Chip("A100 80GB PCIe", ("NVIDIA A100 80GB PCIe",), 312e12, 80e9, 1935e9),
    # nvidia.com/en-us/data-center/h100 and h200: there with sparsity, so here half.
    Chip("H100 SXM", ("NVIDIA H100 80GB HBM3",), 1979e12 / 2, 80e9, 3350e9),
    Chip("H100 PCIe", ("NVIDIA H100 PCIe",), 1513e12 / 2, 80e9, 2000e9),
    Chip("H200 SXM", ("NVIDIA H200",), 1979e12 / 2, 141e9, 4800e9),
    # nvidia.com/en-us/data-center/dgx-b200, of 8: 36 PFLOPS with sparsity, 1440 GB, 64 TB/s.
    Chip("B200", ("NVIDIA B200",), 36e15 / 8 / 2, 1440e9 / 8, 64e12 / 8),
)


@dataclass(frozen=True)
class Link:
    """What joins a chip to others.

    Args:
      bytes_per_s: one way; of each of a torus's two links along an axis, of all that a chip on a switch sends.
      latency_s: before the first byte of a message arrives, for each hop.
      torus: whether each chip is joined to its neighbours, and not all to a switch.
    """

    bytes_per_s: float
    latency_s: float
    torus: bool = False


@dataclass(frozen=True)
class Links:
    """Inside a slice (TPU) or a host's NVLink (GPU), and across."""

    inside: Link
    across: Link


# TPU: jax-ml.github.io/scaling-book/tpus (bandwidths, one way) and /sharding (1 us a hop). GPU: half of NVLink's
# bidirectional bandwidth as nvidia.com states it, 400 Gb/s InfiniBand a GPU in DGX systems. Latencies of GPUs, and of
# networks: the hwLat table of NCCL's tuning model (github.com/NVIDIA/nccl), Ring/Simple.
_NVLINK_S, _NETWORK_S = 3.4e-6, 14e-6
LINKS = {
    "TPU v4": Links(Link(45e9, 1e-6, torus=True), Link(6.25e9, _NETWORK_S)),
    "TPU v5e": Links(Link(45e9, 1e-6, torus=True), Link(3.125e9, _NETWORK_S)),
    "TPU v5p": Links(Link(90e9, 1e-6, torus=True), Link(6.25e9, _NETWORK_S)),
    "TPU v6e": Links(Link(90e9, 1e-6, torus=True), Link(12.5e9, _NETWORK_S)),
    "A100 40GB": Links(Link(300e9, _NVLINK_S), Link(25e9, _NETWORK_S)),
    "A100 80GB SXM": Links(Link(300e9, _NVLINK_S), Link(25e9, _NETWORK_S)),
    "H100 SXM": Links(Link(450e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
    "H200 SXM": Links(Link(450e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
    "B200": Links(Link(900e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
}


@dataclass(frozen=True)
class _GPU:
    """What XLA's GPU compiler wants to be told of a device: its own figures, as such a device reports them."""

    description: str
    major: int
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    shared_per_core: int
    shared_per_block: int

    def __str__(self) -> str:
        """As XLA's `GpuTargetConfigProto`, in text."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_core} shared_memory_per_block_optin: {self.shared_per_block}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.memory_bytes_per_s} l2_cache_size: {self.l2_bytes} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {self.major} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }} device_description_str: "{self.description}"
"""


# github.com/openxla/xla, xla/backends/gpu/target_config/specs: what such devices reported.
_GPUS_OF_XLA = {
    "A100 40GB": _GPU("NVIDIA A100-SXM4-40GB", 8, 108, 64, 1.41, 42331013120, 1555200000000, 41943040, 167936, 166912),
    "A100 80GB SXM": _GPU(
        "NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 85100068864, 2039040000000, 41943040, 167936, 166912
    ),
    "H100 SXM": _GPU("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 84942979072, 3352320000000, 52428800, 233472, 232448),
    "H200 SXM": _GPU("NVIDIA H200", 9, 132, 128, 1.98, 151397597184, 4800000000000, 52428800, 233472, 232448),
    "B200": _GPU("NVIDIA B200", 10, 148, 128, 1.965, 191514411008, 7672320000000, 132644864, 233472, 232448),
}
FOR_XLA = {name: str(gpu) for name, gpu in _GPUS_OF_XLA.items()}
"""Name of a GPU -> what it is to XLA's compiler."""


def chip_of(device: jax.Device) -> Chip | None:  # pyright: ignore[reportInvalidTypeForm]
    """The chip of a device; None where no maker states its speed, as for a CPU.

    Kinds are compared whole: a GH200 is no H200, though its name holds one.
    """
    return next((chip for chip in CHIPS if device.device_kind in chip.kinds), None)
