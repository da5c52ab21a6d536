"""Features that a run may not use together, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshpar.errors import Problems

_OVERLAPS = ("parallel.tensor.overlap", "parallel.fsdp.overlap")
_RINGS = "its rings are permutes, which wait for all devices of the mesh, and stages run different operations at a time"
_CHUNKS = "it multiplies chunks as they arrive, before the largest element of the whole operand is known"
_SLOTS = "stages save activations in branches, and XLA would hold two copies of each slot in the host's memory"
REFUSED: Mapping[tuple[str, str], str] = {
    **{(overlap, "parallel.pipeline"): _RINGS for overlap in _OVERLAPS},
    **{(overlap, "precision.matmul"): _CHUNKS for overlap in _OVERLAPS},
    ("model.remat.offload", "parallel.pipeline"): _SLOTS,
    ("prune", "lora"): "LoRA freezes the kernels, and pruning changes trained weights",
    ("prune", "parallel.local"): "slices would prune different weights, and the mean of slices would have fewer zeros",
}
"""(feature, other feature) -> why a run may not use both. The docs' table of combinations and the tests read it."""

_OFF = dict.fromkeys(_OVERLAPS, "none") | {
    "parallel.pipeline": "null",
    "precision.matmul": "null",
    "lora": "null",
    "parallel.local": "null",
    "model.remat.offload": "[]",
}


def check_combinations(used: Collection[str], problems: Problems) -> None:
    """Adds each feature that cannot be combined with others in use, and which ones to turn off.

    Args:
      used: the keys of the features in use, as in `REFUSED`.
    """
    for key in used:
        others_by_reason: dict[str, list[str]] = {}
        for (one, other), why in REFUSED.items():
            if one == key and other in used:
                others_by_reason.setdefault(why, []).append(other)
        for why, others in others_by_reason.items():
            fix = " and ".join(f"{other}={_OFF[other]}" for other in others)
            problems.add(key, why, f"no {key}, or {fix}")
