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


# An H100 SXM as XLA's GPU compiler wants a device told: its own figures, as such a device reports them.
H100_FOR_XLA = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


def chip_of(device: jax.Device) -> Chip | None:  # pyright: ignore[reportInvalidTypeForm]
    """The chip of a device; None where no maker states its speed, as for a CPU.

    Kinds are compared whole: a GH200 is no H200, though its name holds one.
    """
    return next((chip for chip in CHIPS if device.device_kind in chip.kinds), None)
