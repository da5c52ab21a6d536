"""Families of decoders of Hugging Face: plain NNX modules, which `partition` puts on meshes.

One file a family reads its `config.json` into options of one decoder, and names its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.models.families import (
    earlier,
    gemma,
    granite,
    layer_norm,
    llama_like,
    mixtures,
    olmo,
    rescaled,
)
from meshpar.models.families.family import Family

FAMILIES: Mapping[str, Family] = {
    **llama_like.FAMILIES,
    **gemma.FAMILIES,
    **granite.FAMILIES,
    **olmo.FAMILIES,
    **layer_norm.FAMILIES,
    **earlier.FAMILIES,
    **mixtures.FAMILIES,
    **rescaled.FAMILIES,
}
"""Hugging Face's `model_type` -> the family."""
REFUSED: Mapping[str, str] = {
    "mistral3": "holds a vision tower beside its decoder, which a run here would lose",
    "llama4_text": "attends in chunks, which no layer here computes",
    "mamba2": "keeps a state in place of keys and values, which no layer here computes",
    "falcon_h1": "mixes attention with a state of Mamba 2, which no layer here computes",
    "nemotron_h": "mixes attention with a state of Mamba 2, which no layer here computes",
    "qwen3_next": "has layers of gated delta rule, which no layer here computes",
    "qwen3_5_text": "has layers of gated delta rule, which no layer here computes",
    "minimax": "has layers of lightning attention, which no layer here computes",
    "gemma4_text": "has embeddings of each layer and keys shared by layers, which no layer here computes",
}
"""Published `model_type`s that are refused, and why."""
