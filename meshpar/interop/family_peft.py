"""Writes the updates of LoRA of a family's decoder as an adapter of the library PEFT, under the names of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax

from meshpar.errors import CheckpointError
from meshpar.interop.family_model import VALUE, FamilyModel
from meshpar.interop.family_tensors import places_of, shapes_in, shapes_of
from meshpar.interop.peft_export import Adapted, projections_in, write_matrices
from meshpar.models.foreign import EXPERT
from meshpar.nn.lora import NAME, LoRA, is_lora


def write_family_adapter(
    folder: Path, model: FamilyModel, lora: LoRA, params: Mapping[str, jax.Array], base: str, companions: Path | None
) -> None:
    """Writes a new folder, completely or not at all.

    Args, Raises: see `write_adapter`.
    """
    end = f".{NAME}.kernel."
    named = {path.removesuffix(VALUE).replace(end, f".{NAME}."): array for path, array in params.items()}
    places = [place for place in places_of(model.options, model.family) if EXPERT not in place.name]
    shapes = {path: size for place in places for path, size in shapes_in(place, shapes_of(model.options)).items()}
    written = {part.removesuffix("kernel") for place in places for part in projections_in(place.foreign, named)}
    if rest := sorted(path for path in named if is_lora(path) and path.partition(f"{NAME}.")[0] not in written):
        raise CheckpointError(f"{rest[0]}: is of no matrix that PEFT adapts; export with --format hf")
    matrices = [Adapted(place.foreign, [*place.numbered()]) for place in places]
    write_matrices(folder, matrices, shapes, lora, named, base, companions)
