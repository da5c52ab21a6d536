"""All hardware figures of meshpar, each with its public source; none is measured or guessed by meshpar."""

from __future__ import annotations

from dataclasses import dataclass

import jax

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """An accelerator, as one JAX device sees it.

    Args:
      name: the maker's name.
      kinds: the values of JAX's `device_kind` for this chip.
      flops: dense bfloat16 operations a second.
      memory_bytes: size of the high-bandwidth memory.
      memory_bytes_per_s: bandwidth of that memory.
      flops8: dense operations a second of 8 bits: of floats, or of integers where the chip has no such floats. 0 if it
        has neither.
      cores: how many tiles of a product it computes at once: streaming multiprocessors, or 1 where the arrays of a TPU
        work on one product.
      tile: rows and columns of the part of a product that one core computes.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    flops8: float = 0.0
    cores: int = 1
    tile: tuple[int, int] = (1, 1)


# Tiles of GPUs: the most efficient of cuBLAS, 256 x 128 (docs.nvidia.com/deeplearning/performance/
# dl-performance-matrix-multiplication). The arrays of a TPU: jax-ml.github.io/scaling-book/tpus.
_GPU_TILE = (256, 128)
_A100_CORES, _H100_CORES, _H100_PCIE_CORES, _B200_CORES = 108, 132, 114, 148
CHIPS = (
    # cloud.google.com/tpu/docs/v4
    Chip("TPU v4", ("TPU v4",), 275e12, 32 * GIB, 1200e9, 275e12, tile=(128, 128)),
    # cloud.google.com/tpu/docs/v5e
    Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * GIB, 819e9, 393e12, tile=(128, 128)),
    # cloud.google.com/tpu/docs/tpu7x, which also lists v5p and v6e. A TPU7x is two JAX devices; these are for one.
    Chip("TPU v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * GIB, 2765e9, 918e12, tile=(128, 128)),
    Chip("TPU v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * GIB, 1638e9, 1836e12, tile=(256, 256)),
    Chip("TPU7x", ("TPU7x",), 2307e12 / 2, 192 * GIB / 2, 7380e9 / 2, 4614e12 / 2, tile=(256, 256)),
    # nvidia.com/en-us/data-center/a100
    Chip(
        "A100 40GB",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        312e12,
        40e9,
        1555e9,
        624e12,
        _A100_CORES,
        _GPU_TILE,
    ),
    Chip("A100 80GB SXM", ("NVIDIA A100-SXM4-80GB",), 312e12, 80e9, 2039e9, 624e12, _A100_CORES, _GPU_TILE),
    Chip("A100 80GB PCIe", ("NVIDIA A100 80GB PCIe",), 312e12, 80e9, 1935e9, 624e12, _A100_CORES, _GPU_TILE),
    # nvidia.com/en-us/data-center/h100 and h200, whose FLOPs are with sparsity: half of them are dense.
    Chip("H100 SXM", ("NVIDIA H100 80GB HBM3",), 1979e12 / 2, 80e9, 3350e9, 3958e12 / 2, _H100_CORES, _GPU_TILE),
    # As torchtitan's hosts have it: 96 GB of HBM2e, 500 W. Its makers state no other peak than the SXM's.
    # github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
    Chip("H100 96GB HBM2e", (), 1979e12 / 2, 96e9, 2400e9, 3958e12 / 2, _H100_CORES, _GPU_TILE),
    Chip("H100 PCIe", ("NVIDIA H100 PCIe",), 1513e12 / 2, 80e9, 2000e9, 3026e12 / 2, _H100_PCIE_CORES, _GPU_TILE),
    Chip("H200 SXM", ("NVIDIA H200",), 1979e12 / 2, 141e9, 4800e9, 3958e12 / 2, _H100_CORES, _GPU_TILE),
    # nvidia.com/en-us/data-center/dgx-b200, of 8: 36 PFLOPS with sparsity (8 bits: 72), 1440 GB, 64 TB/s.
    Chip("B200", ("NVIDIA B200",), 36e15 / 8 / 2, 1440e9 / 8, 64e12 / 8, 72e15 / 8 / 2, _B200_CORES, _GPU_TILE),
    # nvidia.com/en-us/data-center/gb200-nvl72, of 72: 360 PFLOPS with sparsity (8 bits: 720), 13.4 TB, 576 TB/s.
    Chip(
        "GB200", ("NVIDIA GB200",), 360e15 / 72 / 2, 13.4e12 / 72, 576e12 / 72, 720e15 / 72 / 2, _B200_CORES, _GPU_TILE
    ),
)


@dataclass(frozen=True)
class Link:
    """The connection of a chip to others.

    Args:
      bytes_per_s: bandwidth one way: of each of the two links along a torus axis, or of a chip's one link to a switch.
      latency_s: time for each hop before the first byte of a message arrives.
      torus: whether chips connect to their neighbours instead of to a switch.
    """

    bytes_per_s: float
    latency_s: float
    torus: bool = False


@dataclass(frozen=True)
class Links:
    """The links inside a slice (TPU) or a host (GPU, over NVLink), and those across slices or hosts."""

    inside: Link
    across: Link


# TPU: jax-ml.github.io/scaling-book/tpus (bandwidths, one way) and /sharding (1 us a hop). GPU: half of NVLink's
# bidirectional bandwidth as nvidia.com states it. Across hosts, a DGX has a network adapter for each of its eight GPUs
# (nvidia.com/en-us/data-center/dgx-h100: 8 of 400 Gb/s; dgx-a100: 8 of 200 Gb/s): the figure is that of one GPU, and
# a group with m devices on a host has m of them, see `planning.machine`. Latencies of NVLink
# and networks: the hwLat table of NCCL's tuning model (github.com/NVIDIA/nccl), Ring/Simple.
_NVLINK_S = 3.4e-6
_PCIE_S = 5.7e-6
_NETWORK_S = 14e-6
LINKS = {
    "TPU v4": Links(Link(45e9, 1e-6, torus=True), Link(6.25e9, _NETWORK_S)),
    "TPU v5e": Links(Link(45e9, 1e-6, torus=True), Link(3.125e9, _NETWORK_S)),
    "TPU v5p": Links(Link(90e9, 1e-6, torus=True), Link(6.25e9, _NETWORK_S)),
    "TPU v6e": Links(Link(90e9, 1e-6, torus=True), Link(12.5e9, _NETWORK_S)),
    "A100 40GB": Links(Link(300e9, _NVLINK_S), Link(25e9, _NETWORK_S)),
    "A100 80GB SXM": Links(Link(300e9, _NVLINK_S), Link(25e9, _NETWORK_S)),
    "H100 SXM": Links(Link(450e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
    "H100 96GB HBM2e": Links(Link(450e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
    # nvidia.com/en-us/data-center/h100: PCIe Gen5, 128 GB/s in both directions
    "H100 PCIe": Links(Link(64e9, _PCIE_S), Link(50e9, _NETWORK_S)),
    "H200 SXM": Links(Link(450e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
    "B200": Links(Link(900e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
    # A host is a rack of 72 GPUs that NVLink joins; 400 Gb/s a GPU across (nvidia.com/en-us/data-center/gb200-nvl72).
    "GB200": Links(Link(900e9, _NVLINK_S), Link(50e9, _NETWORK_S)),
}


def _gpu(
    description: str, major: int, cores: int, fpus_per_core: int, clock_ghz: float, memory_bytes: int,
    memory_bytes_per_s: int, l2_bytes: int, shared_per_core: int, shared_per_block: int,
) -> str:  # fmt: skip
    """The description of a device for XLA's GPU compiler, from the figures that the device itself reports."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: {cores} fpus_per_core: {fpus_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} shared_memory_per_block_optin: {shared_per_block}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {memory_bytes_per_s} l2_cache_size: {l2_bytes} clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {major} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }} device_description_str: "{description}"
"""


# Figures that these devices reported: github.com/openxla/xla, xla/backends/gpu/target_config/specs.
FOR_XLA = {
    "A100 40GB": _gpu("NVIDIA A100-SXM4-40GB", 8, 108, 64, 1.41, 42331013120, 1555200000000, 41943040, 167936, 166912),
    "A100 80GB SXM": _gpu(
        "NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 85100068864, 2039040000000, 41943040, 167936, 166912
    ),
    "H100 SXM": _gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 84942979072, 3352320000000, 52428800, 233472, 232448),
    "H200 SXM": _gpu("NVIDIA H200", 9, 132, 128, 1.98, 151397597184, 4800000000000, 52428800, 233472, 232448),
    "B200": _gpu("NVIDIA B200", 10, 148, 128, 1.965, 191514411008, 7672320000000, 132644864, 233472, 232448),
}
"""Name of a GPU -> its description for XLA's compiler, a `GpuTargetConfigProto` in text form."""


def chip_of(device: jax.Device) -> Chip | None:  # pyright: ignore[reportInvalidTypeForm]
    """The chip of a device; None if no maker states its speed, as for a CPU.

    Kinds must be equal: a GH200 is no H200, though its name contains "H200".
    """
    return next((chip for chip in CHIPS if device.device_kind in chip.kinds), None)
