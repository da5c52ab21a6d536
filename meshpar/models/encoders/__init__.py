"""Encoders of Hugging Face: plain NNX modules, which `partition` puts on meshes. One file a family."""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.models.encoders import bert, clip, modernbert, vit
from meshpar.models.encoders.family import EncoderFamily

ENCODERS: Mapping[str, EncoderFamily] = {**bert.FAMILIES, **modernbert.FAMILIES, **vit.FAMILIES, **clip.FAMILIES}
"""Hugging Face's `model_type` -> the family."""
