"""Turns the parameters of meshpar's llama into those of the hand-written step."""

from __future__ import annotations

from typing import Any

import numpy as np


def from_llama(params: Any, num_shards: int) -> dict[str, Any]:
    """Unstacks the layers, and joins q, k and v, and gate and up, so that each shard has its own three or two.

    Args:
      num_shards: of heads and MLP.
    """
    blocks = params["blocks"]
    num_layers, width = blocks["attn_norm"]["scale"].shape

    def columns(w: Any) -> np.ndarray:
        return np.asarray(w["kernel"]).reshape(num_layers, width, num_shards, -1)

    def joined(parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, -1).reshape(num_layers, width, -1)

    def transposed(w: Any) -> np.ndarray:
        return np.asarray(w["kernel"]).reshape(num_layers, -1, width).swapaxes(1, 2)

    def of_experts(mlp: Any) -> dict[str, np.ndarray]:
        gate, up, down = (np.asarray(mlp["experts"][name]["kernel"]) for name in ("gate", "up", "down"))
        router = np.asarray(mlp["router"]["weight"])
        return {"gate_up": np.concatenate([gate, up], -1), "down": down.swapaxes(2, 3), "router": router}

    def of_mlp(mlp: Any) -> dict[str, np.ndarray]:
        return {"gate_up": joined([columns(mlp["gate"]), columns(mlp["up"])]), "down": transposed(mlp["down"])}

    attn = blocks["attn"]
    mlp = blocks["mlp"]
    stacked = {
        "attn_norm": np.asarray(blocks["attn_norm"]["scale"]),
        "qkv": joined([columns(attn[name]) for name in "qkv"]),
        "o": transposed(attn["o"]),
        "mlp_norm": np.asarray(blocks["mlp_norm"]["scale"]),
        **(of_experts(mlp) if "router" in mlp else of_mlp(mlp)),
    }
    return {
        "embedding": np.asarray(params["embedding"]),
        "layers": [{name: w[i] for name, w in stacked.items()} for i in range(num_layers)],
        "norm": np.asarray(params["norm"]["scale"]),
        "head": np.asarray(params["head"]),
    }
