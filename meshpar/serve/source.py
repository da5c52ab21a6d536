"""Opens a trained model: a run, by its config or its folder, or a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import config
from meshpar.checkpoint.saved import META, find, find_all
from meshpar.checkpoint.selection import AVERAGES, PARAMS
from meshpar.convert import TOKENIZER, restore_params, run_of
from meshpar.data import Chat, NoData, Synthetic
from meshpar.data.fingerprint import checksum
from meshpar.data.special_tokens import FILES, end_ids
from meshpar.data.tokenizer import Ids, Tokenizer, TokenizerFile
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.experiment.config import Run, load, permit_code
from meshpar.experiment.validate import task_of
from meshpar.interop.flax_model import Import
from meshpar.interop.folder import CONFIG, MODEL_FILES, check_inside, read_json
from meshpar.interop.huggingface import Pretrained, hub_hint
from meshpar.interop.open_folder import open_folder
from meshpar.interop.peft import files_of, is_adapter
from meshpar.models.decoder import DecoderModel
from meshpar.parallel.context import ParallelContext
from meshpar.serve.language import Language
from meshpar.serve.merged import restore_merged
from meshpar.serve.on_mesh import for_tokens
from meshpar.serve.own_source import CausalModel
from meshpar.tree import flatten_with_paths, map_with_path


@dataclass(frozen=True)
class Source:
    """A trained model and the mesh on which it runs.

    Args:
      run: its model, mesh, rules, lowering and precision are used.
      restore: structs with shardings -> the parameters.
      language: the tokenizer; default: that of the run's data, with the token that opens a document.
      folder: the folder with the chat template and the settings of sampling: the Hugging Face folder that the tokenizer
        is in, or that of the conversations' tokenizer; None if there is none.
    """

    run: Run
    restore: Callable[[Any], Any]
    language: Language | None = None
    folder: Path | None = None

    @property
    def decoder(self) -> DecoderModel | None:
        """The model, if it is one of meshpar's decoders; None if it is a user's own."""
        return self.run.model if isinstance(self.run.model, DecoderModel) else None

    @property
    def model(self) -> DecoderModel:
        """The model, where it is known to be one of meshpar's decoders."""
        assert self.decoder, "one of meshpar's decoders"
        return self.decoder

    @cached_property
    def own(self) -> CausalModel | None:
        """The user's own model, on the mesh of its run; None if it is one of meshpar's decoders.

        Raises:
          ConfigError: it is written for local shards, or has state that the forward changes.
        """
        run = self.run
        if not isinstance(run.model, Import):
            return None
        if run.precision.cache:
            what = "only meshpar's own decoders can cache keys and values in another format"
            raise ConfigError(f"precision.cache: {what}; precision.cache=null")
        functions, init = run.model.causal(run.data.seq_len)
        return CausalModel(
            functions=functions, params=None, mesh=run.mesh, rules=run.rules, dims=run.model.names(task_of(run)),
            lowering=run.lowering, dtype=np.dtype(run.precision.params), compute_dtype=np.dtype(run.precision.compute),
            tokenizer=self.tokenizer, ends=self.ends, init=init, load=self.restore,
        )  # fmt: skip

    @cached_property
    def _language(self) -> Language:
        return self.language or Language.of(self.run.data.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._language.tokenizer

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end an answer; default: those that open and close a document of the run's data."""
        return self._language.ends

    def encode(self, prompt: str, parse_special: bool = True) -> list[int]:
        """See `Language.encode`."""
        return self._language.encode(prompt, parse_special)

    @cached_property
    def ctx(self) -> ParallelContext:
        """The run's parallel context on its mesh, for decoding; see `for_tokens`."""
        return for_tokens(self.run.context(self.run.mesh.build()))


def open_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Opens a model by a run's config, a run's folder, the folder of a checkpoint, or a Hugging Face folder.

    Raises:
      ConfigError, CheckpointError: there is no model, or it was not trained.
    """
    if not path.exists() and (hint := hub_hint(path)):
        raise CheckpointError(f"{path}: there is no such config or folder{hint}")
    if not path.is_dir():
        return of_run(load(path, overrides), f"meshpar train {path}")
    if (path / CONFIG).is_file() or is_adapter(path):
        return _of_pretrained(open_folder(path), overrides)
    saved = find(path, include=())
    run = config.build(Run, saved.meta["config"], str(saved.folder / META), overrides)
    permit_code(run, path, overrides)
    return _of_checkpoint(path, run)


def of_run(run: Run, train: str = "train it first") -> Source:
    """The model of the latest checkpoint that a run wrote."""
    try:
        return _of_checkpoint(run.run_dir, run)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; an untrained model cannot generate: {train}") from None


def _of_checkpoint(path: Path, run: Run) -> Source:
    """The files of parameters are checked in `restore`, after everything that is cheaper to check."""
    folder = _model_files(run, find_all(path)[-1].folder.parents[1])
    vocabulary = run.model.vocabulary()
    language = _language(folder, vocabulary) if folder and vocabulary else None
    if language and not isinstance(run.data, (Chat, Synthetic, NoData)):
        language = replace(language, ends=language.ends | _closing(run.data.tokenizer))

    def restore(structs: Any) -> Any:
        saved = find(path, (*PARAMS, *AVERAGES))
        return restore_merged(run, saved, structs) if run.lora else restore_params(saved, structs)

    return Source(_in_floats(run) if run.lora else run, restore, language, folder if language else _chat_files(run))


def _in_floats(run: Run) -> Run:
    """The run whose kernels are floats, to which updates of LoRA can be added."""
    if not isinstance(run.model, DecoderModel):
        return run
    return run.model_copy(update={"model": run.model.model_copy(update={"weights": None})})


def _closing(tokenizer: Tokenizer) -> set[int]:
    """The id that ended the documents of a training; none if its tokenizer is not there any more."""
    if isinstance(tokenizer, TokenizerFile) and not Path(tokenizer.path).exists():
        return set()
    return {tokenizer.bos if tokenizer.eos is None else tokenizer.eos}


def _of_pretrained(pretrained: Pretrained, overrides: Sequence[str]) -> Source:
    plain = run_of(pretrained, pretrained.folder, pretrained.folder).model_dump(mode="json")
    run = config.build(Run, plain, str(pretrained.folder / CONFIG), overrides)

    def restore(structs: Any) -> Any:
        read = pretrained.params(flatten_with_paths(structs))
        return map_with_path(lambda path, _: read[path], structs)

    return Source(run, restore, _language(pretrained.folder, pretrained.model.vocab_size), pretrained.folder)


def _model_files(run: Run, run_dir: Path) -> Path | None:
    """The folder with the tokenizer of the model that a run started from, unless its data have another tokenizer."""
    folders = [run_dir / MODEL_FILES, *([files_of(run.init.from_hf)] if run.init and run.init.from_hf else [])]
    folder = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    tokenizer = run.data.tokenizer
    if folder is None or isinstance(run.data, (Synthetic, NoData)) or isinstance(tokenizer, Ids):
        return folder
    return folder if isinstance(tokenizer, TokenizerFile) and _is_copy(Path(tokenizer.path), folder) else None


def _chat_files(run: Run) -> Path | None:
    """The folder with the template of a model that was trained on conversations from the beginning."""
    tokenizer = run.data.tokenizer
    return tokenizer.folder if isinstance(run.data, Chat) and isinstance(tokenizer, TokenizerFile) else None


def _is_copy(path: Path, folder: Path) -> bool:
    """Whether a tokenizer file is that of the folder. A file that is not there any more counts as one."""
    try:
        return checksum(path) == checksum(folder / TOKENIZER)
    except OSError:
        return (folder / TOKENIZER).is_file()


def _language(folder: Path, vocab_size: int) -> Language:
    """The tokenizer and the end ids of a Hugging Face folder; without a tokenizer, prompts are ids.

    Raises:
      CheckpointError: one of the files cannot be read, or is a link out of the folder.
    """
    problems = Problems()
    there = [name for name in (TOKENIZER, *FILES) if os.path.lexists(folder / name)]
    for name in there:
        try:
            check_inside(folder, name)
        except OSError as error:
            problems.add(str(folder / name), f"cannot be read: {error.strerror}")
    read_json(folder, CONFIG, problems)
    problems.raise_any(CheckpointError, f"the tokenizer of {folder} cannot be read:")
    ends = frozenset(one for one in end_ids(folder) if one < vocab_size)
    if TOKENIZER not in there:
        first = min(ends, default=vocab_size - 1)
        return Language(Ids(vocab_size=vocab_size, bos=first, eos=first if ends else None), (), ends)
    tokenizer = TokenizerFile(path=str(folder / TOKENIZER))
    return Language(tokenizer, tokenizer.opening, ends)
