"""Opens a trained model: a run, by its config or its folder, or a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpar import config
from meshpar.checkpoint.saved import META, find, find_all
from meshpar.checkpoint.selection import AVERAGES, PARAMS
from meshpar.convert import COMPANIONS, restore_params, run_of
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.experiment.config import Run
from meshpar.interop.folder import check_inside, read_json
from meshpar.interop.huggingface import CONFIG, Pretrained, open_pretrained
from meshpar.models.decoder import DecoderModel
from meshpar.parallel.context import ParallelContext
from meshpar.serve.merged import restore_merged
from meshpar.serve.on_mesh import for_tokens
from meshpar.sharding.resolve import AnyMesh
from meshpar.train.data import Synthetic
from meshpar.train.data.tokenizer import Ids, Tokenizer, TokenizerFile
from meshpar.tree import flatten_with_paths, map_with_path

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Language:
    """A tokenizer, and the ids before every prompt."""

    tokenizer: Tokenizer
    opening: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A trained model and the mesh on which it runs.

    Args:
      run: its model, mesh, rules, lowering and precision are used.
      restore: structs with shardings -> the parameters.
      language: the tokenizer; default: that of the run's data, with the token that opens a document.
      folder: the Hugging Face folder that the tokenizer is in; None if the tokenizer is that of the run's data.

    Raises:
      ConfigError: the model is the user's own.
    """

    run: Run
    restore: Callable[[Any], Any]
    language: Language | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not (decoder := self.run.model.generation()):
            raise ConfigError(f"model.kind = {self.run.model.kind}: {decoder.because}")

    @property
    def model(self) -> DecoderModel:
        return self.run.model.generation()  # pyright: ignore

    @property
    def tokenizer(self) -> Tokenizer:
        return self.language.tokenizer if self.language else self.run.data.tokenizer

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, with those that open it."""
        opening = self.language.opening if self.language else (self.tokenizer.bos,)
        return [*opening, *self.tokenizer.encode(prompt).tolist()]

    def ctx(self, mesh: AnyMesh) -> ParallelContext:
        """The run's parallel context, for decoding; see `for_tokens`."""
        return for_tokens(self.run.context(mesh))


def open_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Opens a model by a run's config, a run's folder, the folder of a checkpoint, or a Hugging Face folder.

    Raises:
      ConfigError, CheckpointError: there is no model, or it was not trained.
    """
    if not path.is_dir():
        return of_run(config.load(Run, path, overrides), f"meshpar train {path}")
    if (path / CONFIG).is_file():
        return _of_pretrained(open_pretrained(path), overrides)
    saved = find(path, include=())
    return _of_checkpoint(path, config.build(Run, saved.meta["config"], str(saved.folder / META), overrides))


def of_run(run: Run, train: str = "train it first") -> Source:
    """The model of the latest checkpoint that a run wrote."""
    try:
        return _of_checkpoint(run.run_dir, run)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; an untrained model cannot generate: {train}") from None


def _of_checkpoint(path: Path, run: Run) -> Source:
    """The files of parameters are checked in `restore`, after everything that is cheaper to check."""
    converted = find_all(path)[-1].folder.parents[1] / COMPANIONS
    # A converted run that has no data of its own uses the tokenizer of the model it was converted from.
    has_language = converted.is_dir() and isinstance(run.data, Synthetic)
    vocabulary = run.model.vocabulary()
    language = _language(converted, vocabulary.size) if has_language and vocabulary else None

    def restore(structs: Any) -> Any:
        saved = find(path, (*PARAMS, *AVERAGES))
        return restore_merged(run, run.lora, saved, structs) if run.lora else restore_params(saved, structs)

    return Source(run, restore, language, converted if language else None)


def _of_pretrained(pretrained: Pretrained, overrides: Sequence[str]) -> Source:
    plain = run_of(pretrained, pretrained.folder).model_dump(mode="json")
    run = config.build(Run, plain, str(pretrained.folder / CONFIG), overrides)

    def restore(structs: Any) -> Any:
        read = pretrained.params(flatten_with_paths(structs))
        return map_with_path(lambda path, _: read[path], structs)

    return Source(run, restore, _language(pretrained.folder, pretrained.model.vocab_size), pretrained.folder)


def _language(folder: Path, vocab_size: int) -> Language:
    """The tokenizer of a Hugging Face folder; without one, prompts are ids.

    Raises:
      CheckpointError: the config cannot be read, or the tokenizer is a link out of the folder.
    """
    problems = Problems()
    end = read_json(folder, CONFIG, problems).get("eos_token_id")
    end = end if isinstance(end, int) and 0 <= end < vocab_size else None
    path = folder / TOKENIZER
    has_tokenizer = os.path.lexists(path)
    if has_tokenizer:
        try:
            check_inside(folder, TOKENIZER)
        except OSError as error:
            problems.add(str(path), f"cannot be read: {error.strerror}")
    problems.raise_any(CheckpointError, f"the tokenizer of {folder} cannot be read:")
    if not has_tokenizer:
        return Language(Ids(vocab_size=vocab_size, bos=vocab_size - 1 if end is None else end, eos=end), ())
    tokenizer = TokenizerFile(path=str(path))
    named = None if end is None else tokenizer.token(end)
    return Language(TokenizerFile(path=str(path), eos_token=named), tokenizer.opening)
