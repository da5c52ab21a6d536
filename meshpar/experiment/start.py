"""Finds what a run starts from: its own last checkpoint, the model that `init` names, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.checkpoint.saved import FOLDER, Checkpoint, find, steps
from meshpar.checkpoint.selection import EVERYTHING
from meshpar.config import build
from meshpar.data.fingerprint import changed_files
from meshpar.data.order import Order, resumed
from meshpar.errors import CheckpointError, ConfigError
from meshpar.experiment.config import Init, Run
from meshpar.experiment.prepare import Prepared
from meshpar.interop.export import keep_model_files
from meshpar.interop.huggingface import Pretrained
from meshpar.interop.open_folder import open_folder
from meshpar.interop.peft import files_of, is_adapter
from meshpar.interop.peft_params import AdapterParams, adapter_params
from meshpar.interop.pretrained import PretrainedBeginning, check_ids, model_files
from meshpar.models.decoder import DecoderModel
from meshpar.nn.compressed import kernels_in_codes
from meshpar.nn.lora import NAME, is_lora
from meshpar.regular_files import nearby
from meshpar.train.begin import Beginning, saved_structs
from meshpar.train.copies.copies import CopiedBeginning, Copies
from meshpar.tree import flatten_with_paths


def beginning_of(
    prepared: Prepared, saved: Checkpoints, copies: Copies | None
) -> Beginning | CopiedBeginning | PretrainedBeginning | None:
    """The run's own last intact checkpoint; or else the source that `init` names; or else None.

    A copy in the memory of the hosts comes first if it is newer; then no checkpoint is read.

    Raises:
      CheckpointError, ConfigError: the source does not fit the run.
    """
    init = prepared.run.init
    if copies and (copy := copies.newest(saved.latest() or 0)):
        return CopiedBeginning(copies, copy)
    source = None if _is_converted(prepared.run) else saved.newest(partial(saved_structs, prepared))
    include: Sequence[str] = EVERYTHING
    exclude: Sequence[str] = ()
    if source is None and init and init.from_hf:
        return _pretrained(prepared, init, init.from_hf)
    if source is None and init and init.from_checkpoint:
        source = find(init.from_checkpoint, init.include)
        include = init.include
        exclude = init.exclude
        if prepared.run.lora and not any(map(is_lora, source.described)):
            paths = flatten_with_paths(prepared.specs)  # a model without LoRA is where LoRA begins
            exclude = (*exclude, *(f"params.{path}" for path in paths if is_lora(path)))
    if source is None:
        _check_not_random(prepared.run)
        return None
    data_changed = _data_changed(prepared.run, source, saved)
    beginning = Beginning(prepared, source, include, exclude, saved.about.config, data_changed)
    _ = beginning.selection
    return beginning


def _pretrained(prepared: Prepared, init: Init, folder: Path) -> PretrainedBeginning:
    """The model of `init.from_hf`, and the adapter that its LoRA begins with."""
    if not folder.is_dir():
        raise ConfigError(_no_folder("init.from_hf", folder))
    if init.adapter and not init.adapter.is_dir():
        raise ConfigError(_no_folder("init.adapter", init.adapter))
    pretrained = replace(open_folder(folder), is_upcycled=init.upcycle).fitted(prepared.run.model)
    return replace(from_files(prepared, pretrained), adapter=_adapter(prepared, init.adapter, folder))


def from_files(prepared: Prepared, pretrained: Pretrained) -> PretrainedBeginning:
    """The weights of a Hugging Face folder, in codes where the model stores codes."""
    model = prepared.run.model
    codes = kernels_in_codes(model.abstract()) if isinstance(model, DecoderModel) and model.weights else {}
    return PretrainedBeginning(prepared, pretrained, codes)


def _adapter(prepared: Prepared, folder: Path | None, of_model: Path) -> AdapterParams | None:
    """The adapter that a run's LoRA begins with.

    Raises:
      CheckpointError, ConfigError: it is none of the model, or none that the run's LoRA trains.
    """
    if folder is None:
        return None
    lora, model = prepared.run.lora, prepared.run.model
    if lora is None:
        raise ConfigError(f"init.adapter: {folder} needs lora, which trains it")
    if not isinstance(model, DecoderModel):
        raise ConfigError(f"init.adapter: {folder} is for meshpar's own decoders; init.from_hf={folder} merges it")
    if not is_adapter(folder):
        raise ConfigError(f"init.adapter: {folder} is no folder with an adapter_config.json")
    adapter = adapter_params(folder, model, files_of(of_model))
    end = f".{NAME}.a"
    specs = flatten_with_paths(prepared.specs)
    adapter.check(lora, {path.removesuffix(end): one.shape[0] for path, one in specs.items() if path.endswith(end)})
    return adapter


def _is_converted(run: Run) -> bool:
    """Whether the run directory holds the model that `init` names, and no step of training.

    Its optimizer state is not restored: LoRA, `freeze` and another optimizer have another one.
    """
    init = run.init
    is_own = init and init.from_checkpoint and init.from_checkpoint.resolve() == run.run_dir.resolve()
    return bool(is_own) and steps(run.run_dir / FOLDER) == [0]


def _check_not_random(run: Run) -> None:
    """Refuses to freeze random parameters for the whole run.

    Raises:
      ConfigError: the run has LoRA or `freeze`, and starts from no checkpoint.
    """
    frozen = [one for one in run.freeze if one.until is None]
    if run.lora or frozen:
        key = "lora" if run.lora else "freeze"
        what = (
            f"{key} freezes parameters, which would stay random: {run.run_dir} has no checkpoint, and init is not set"
        )
        raise ConfigError(f"{what}; init.from_checkpoint=RUN, or init.from_hf=FOLDER")


def _no_folder(key: str, folder: Path) -> str:
    """The error for a key where there is no folder; a name of the Hub is a likely mistake."""
    problems = [f"{key}: there is no folder {folder}", nearby(folder)]
    if len(folder.parts) == 2 and not folder.parent.exists():
        problems.append(f"nothing is downloaded: `hf download {folder} --local-dir FOLDER`, then {key}=FOLDER")
    return "\n  ".join(filter(None, problems))


def _data_changed(run: Run, source: Checkpoint, saved: Checkpoints) -> list[str]:
    """The data files that changed since this run's last checkpoint; none for step 0 or another run's checkpoint."""
    if source.folder.parent != saved.directory or not source.step:
        return []
    before = source.meta["data"].get("files")
    return changed_files(before, saved.about.files, source.folder, run.data.if_changed == "allow")


def newest_described(folder: Path) -> Checkpoint | None:
    """The run's last checkpoint whose metadata can be read; a damaged one is reported later."""
    for step in reversed(steps(folder)):
        with suppress(CheckpointError):
            _ = (checkpoint := Checkpoint(folder / str(step))).meta
            return checkpoint
    return None


def order_of(run: Run, source: Checkpoint | None) -> Order:
    """Which row of the data is read when, by a run that goes on from one of its checkpoints.

    Raises:
      DataError: rows would be read twice, or not at all; see `order.resumed`.
    """
    if source is None or not source.step or source.step >= run.num_steps:
        return Order()
    saved = source.meta["data"]
    try:
        before = build(Run, source.meta["config"], str(source.folder)).data
    except ConfigError:  # of another version: only the number of rows can be kept
        rows = saved["rows_read"]
        return Order() if rows is None else Order(first=rows - source.step * run.data.batch_size)
    was, now = (data.model_dump(mode="json") for data in (before, run.data))
    return resumed(saved, was, now, source.step, run.seed)


def keep_files_of_source(run: Run) -> None:
    """Copies the tokenizer and the templates of the model that `init` names, in the first process.

    Raises:
      ConfigError: the data are encoded as other ids than those of the model.
    """
    init = run.init
    folder = model_files(init.from_hf, init.from_checkpoint, run.run_dir) if init else None
    if folder is None:
        return
    check_ids(folder, run.data.tokenizer)
    if jax.process_index() == 0:
        keep_model_files(folder, run.run_dir)
