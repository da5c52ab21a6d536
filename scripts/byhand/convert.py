"""Turns the parameters of meshpar's llama into those of the hand-written step."""

from __future__ import annotations

from typing import Any

import numpy as np


def from_llama(params: Any) -> dict[str, Any]:
    """Unstacks the layers, and joins q, k and v, and gate and up; all on the host."""
    blocks = params["blocks"]
    attn = {name: np.asarray(w["kernel"]) for name, w in blocks["attn"].items()}
    mlp = {name: np.asarray(w["kernel"]) for name, w in blocks["mlp"].items()}
    stacked = {
        "attn_norm": np.asarray(blocks["attn_norm"]["scale"]),
        "qkv": np.stack([attn["q"], attn["k"], attn["v"]], 2),
        "o": attn["o"],
        "mlp_norm": np.asarray(blocks["mlp_norm"]["scale"]),
        "gate_up": np.stack([mlp["gate"], mlp["up"]], 2),
        "down": mlp["down"],
    }
    return {
        "embedding": np.asarray(params["embedding"]),
        "layers": [{name: w[i] for name, w in stacked.items()} for i in range(len(attn["q"]))],
        "norm": np.asarray(params["norm"]["scale"]),
        "head": np.asarray(params["head"]),
    }
