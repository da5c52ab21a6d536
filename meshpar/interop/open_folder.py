"""Opens a Hugging Face folder: of one of meshpar's own decoders, of a family, of an encoder, or of an adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshpar.errors import Problems
from meshpar.interop import architectures
from meshpar.interop.encoder_config import encoder_family
from meshpar.interop.encoder_model import open_encoder
from meshpar.interop.family_config import family_of, options_of
from meshpar.interop.family_model import open_family
from meshpar.interop.folder import CONFIG, read_json
from meshpar.interop.huggingface import Pretrained, open_pretrained
from meshpar.interop.peft import adapted, base_of, is_adapter


def open_folder(folder: Path) -> Pretrained:
    """Reads the config and the headers of a folder, but no tensor. The folder of an adapter is that of its base model,
    with the adapter's updates.

    meshpar's own decoders come first; what they do not compute is a family's, if there is one.

    Raises:
      CheckpointError: lists every problem, see `open_pretrained`.
    """
    if is_adapter(folder):
        base = open_folder(base_of(folder))
        return replace(base, tensors=adapted(folder, base.tensors, base.layout.prefixes[0], base.layout.transposed))
    config = read_json(folder, CONFIG, Problems()) if folder.exists() else {}
    if encoder_family(config):
        return open_encoder(folder, config)
    if _is_of_family(config):
        return open_family(folder, config)
    return open_pretrained(folder)


def _is_of_family(config: dict[str, object]) -> bool:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return False
    if kind not in architectures.ARCHITECTURES:
        return True
    is_own = architectures.read(dict(config), "", Problems()) is not None
    return not is_own and family_of(dict(config)) is not None and options_of(dict(config), "", Problems()) is not None
