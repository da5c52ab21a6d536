"""Reads an adapter of the library PEFT as parameters: the thin matrices of each projection; see `peft`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.interop.export import exported
from meshpar.interop.layout import Index
from meshpar.interop.peft import LayerUpdate, updates_in
from meshpar.models.decoder import DecoderModel
from meshpar.nn.lora import MAGNITUDE, NAME, LoRA


@dataclass(frozen=True)
class AdapterParams:
    """An adapter as parameters of one of meshpar's decoders.

    Args:
      updates: path of a projection -> its updates by layer, for the layers that have one.
    """

    folder: Path
    updates: dict[str, dict[Index, LayerUpdate]]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(one.rank for layers in self.updates.values() for one in layers.values())

    @property
    def has_magnitudes(self) -> bool:
        """Whether it is one of DoRA."""
        return any(one.magnitudes is not None for layers in self.updates.values() for one in layers.values())

    def check(self, lora: LoRA, stacks: Mapping[str, int]) -> None:
        """Checks that a run's LoRA can begin with this adapter.

        Args:
          stacks: the projections that the run adapts -> how many layers each has.

        Raises:
          ConfigError: lists the keys of `lora` that differ, with the adapter's values.
        """
        problems = Problems()
        if stacks.keys() != self.updates.keys():
            fix = f"lora.paths=[{', '.join(sorted(self.updates))}]"
            problems.add("lora.paths", f"the adapter adapts other projections than {', '.join(sorted(stacks))}", fix)
        for path in sorted(stacks.keys() & self.updates.keys()):
            if len(self.updates[path]) < stacks[path]:
                what = f"the adapter has updates in {len(self.updates[path])} of {stacks[path]} layers"
                problems.add(path, what, "serve it beside its model, or merge it: init.from_hf=ADAPTER")
        both = [(path, lora.size(path), [*self.updates[path].values()]) for path in sorted({*stacks} & {*self.updates})]
        ranks = {path: (mine.rank, {one.rank for one in layers}) for path, mine, layers in both}
        alphas = {
            path: (lora.alpha_of(*mine), {round(lora.alpha_of(one.rank, one.scale), 6) for one in layers})
            for path, mine, layers in both
        }
        for key, values in (("rank", ranks), ("alpha", alphas)):
            if any(theirs != {round(mine, 6)} for mine, theirs in values.values()):
                _add_sizes(f"lora.{key}", values, problems)
        if lora.use_dora != self.has_magnitudes:
            what = f"the adapter has {'' if self.has_magnitudes else 'no '}magnitudes of DoRA"
            problems.add("lora.use_dora", what, f"lora.use_dora={json.dumps(self.has_magnitudes)}")
        problems.raise_any(ConfigError, f"lora does not fit init.adapter = {self.folder}:")

    def array(self, path: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
        """The parameter at a path such as `blocks.attn.q.lora.a`, of all layers; of magnitudes the norms."""
        projection, _, name = path.rpartition(f".{NAME}.")
        whole = np.zeros(struct.shape, struct.dtype)
        for place, update in self.updates[projection].items():
            whole[place] = {"a": update.a, "b": update.b, MAGNITUDE: update.magnitudes}[name]
        return jax.device_put(whole, struct.sharding)


def _add_sizes(key: str, values: Mapping[str, tuple[float, Collection[float]]], problems: Problems) -> None:
    """Adds a key of `lora` that differs: path -> its value, and those of the adapter's layers."""
    all_mine = sorted({mine for mine, _ in values.values()})
    all_theirs = sorted(set[float]().union(*(theirs for _, theirs in values.values())))
    if len(all_theirs) == 1:
        fix = f"{key}={all_theirs[0]:g}"
    elif all(len(theirs) == 1 for _, theirs in values.values()):
        fix = f"{key}_pattern={{{', '.join(f'{path}: {min(theirs):g}' for path, (_, theirs) in values.items())}}}"
    else:
        fix = "one for all layers of a projection, which lora trains"
    mine, theirs = (", ".join(map("{:g}".format, found)) for found in (all_mine, all_theirs))
    problems.add(key, f"{mine}, and the adapter has {theirs}", fix)


def adapter_params(folder: Path, model: DecoderModel, companions: Path | None) -> AdapterParams:
    """Reads an adapter of a model.

    Args:
      companions: the folder with the model's `config.json`, whose names of tensors the adapter has; None for those of
        the first architecture that computes what the model does.

    Raises:
      CheckpointError: see `updates_in`; or what is adapted is no projection of its own: the embedding, the output
        projection or an expert.
    """
    layout = exported(model, companions)[1]
    places = {place.name: place for place in layout.places}
    problems = Problems()
    found: dict[str, dict[Index, LayerUpdate]] = {}
    for name, update in updates_in(folder, layout.sizes, layout.prefixes[0]).items():
        place, begin = places[name], 0
        if place.is_of_expert or not all(path.endswith(".kernel") for path in place.foreign.parts):
            what = "is no projection of its own, whose update is computed beside it"
            problems.add(name.removesuffix(".weight"), what, "merge the adapter: serve or train its folder")
            continue
        for path in place.foreign.parts:
            shape, num = layout.shapes[path], place.foreign.inputs
            part = update.part(begin, shape[:num], shape[num:])
            found.setdefault(path.removesuffix(".kernel"), {})[place.index] = part
            begin += math.prod(shape[num:])
    problems.raise_any(CheckpointError, f"the adapter {folder} cannot be computed beside its model:")
    if not found:
        raise CheckpointError(f"the adapter {folder} adapts nothing; its file has no matrices")
    return AdapterParams(folder, found)
