"""Generates text with a trained model, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshpar.data.tokenizer import Ids
from meshpar.errors import ConfigError, Problems
from meshpar.experiment.config import Run
from meshpar.mesh.layout import describe_sizes
from meshpar.nn.decoder import Decoder
from meshpar.serve.answer import Answer, AnswerPiece, Finish
from meshpar.serve.batch import Batch, requests_of
from meshpar.serve.open_engine import NUM_DRAFTS, check_tokenizer, open_batch, own_of
from meshpar.serve.own_source import CausalModel
from meshpar.serve.sampling import Sampling
from meshpar.serve.source import Source, of_run, open_source
from meshpar.tree import human_bytes

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """The answer of a model to a prompt.

    Args:
      prompt: as it was passed.
      text: the answer, without the prompt and without a stop string.
      tokens: all sampled tokens, including those of a stop string.
      finish: `stop` at a stop string, `end` at an end id of the model, or `length`.
    """

    prompt: Prompt
    text: str
    tokens: list[int]
    finish: Finish | None


@dataclass(frozen=True)
class Generated:
    """The answers to a batch of prompts, with the time and memory that they took.

    Args:
      completions: in the order of the prompts.
      mesh: the size of each axis.
      cache_bytes: bytes of the cache of keys and values on one device.
      prefill_s: seconds until each row had its first token, without compilation.
      decode_s: seconds for all other tokens.
      acceptance: the fraction of drafts that the model accepted; None without drafts.
      how: how a model of the user's own generates: with its cache, or by recomputing each row.
    """

    completions: list[Completion]
    mesh: str
    cache_bytes: int
    prefill_s: float
    decode_s: float
    acceptance: float | None = None
    how: str = ""

    @property
    def texts(self) -> list[str]:
        return [completion.text for completion in self.completions]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Speed and memory in one line."""
        num = sum(len(completion.tokens) for completion in self.completions)
        later = num - len(self.completions)
        rate = f", then {later / self.decode_s:.0f} tokens/s" if later and self.decode_s else ""
        cache = f"cache {human_bytes(self.cache_bytes)} a device"
        how = f"; {self.how}" if self.how else ""
        drafts = "" if self.acceptance is None else f"; {self.acceptance:.0%} of drafts accepted"
        return f"{num} tokens on {self.mesh}: the first after {self.prefill_s:.2f} s{rate}; {cache}{drafts}{how}"


def generate(
    source: Source | Run | CausalModel | Path | str,
    prompts: Sequence[Prompt] | str,
    *,
    overrides: Sequence[str] = (),
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] | str = (),
    draft: Source | Path | str | None = None,
    ngrams: int | None = None,
    num_drafts: int = NUM_DRAFTS,
    parse_special: bool = True,
    show: Callable[[AnswerPiece], None] = lambda piece: None,
) -> Generated:
    """Answers all prompts in one batch. The tokens are the same on any mesh.

    Args:
      source: a run, its config file, or the folder that it wrote; its latest checkpoint is restored to its mesh. Or a
        `CausalModel` of your own.
      prompts: texts or lists of token ids; or one text. The tokens that open a document are added only to texts.
      overrides: `key=value` as on the command line, such as `mesh.tensor=4`; for a file or a folder.
      max_tokens: largest number of tokens of an answer.
      temperature, top_k, top_p, seed: see `Sampling`.
      stop: texts before which an answer ends.
      draft: a smaller model with the same vocabulary, which drafts tokens; see `drafts`. Answers do not change, up
        to the rounding of floats.
      ngrams: drafts the tokens that followed the newest `ngrams` tokens of the row where those occurred before; where
        they are new, none.
      num_drafts: tokens that are drafted at a time.
      parse_special: whether the text of a special token in a prompt, such as `<s>`, is that token, as in transformers;
        or its characters, for texts of people whom you do not trust. In training data it is always its characters.
      show: called with each `Piece` of an answer as soon as it is known.

    Raises:
      ConfigError: lists all problems: empty prompts, prompts that are too long, invalid settings.
      CheckpointError, MeshError, ShardingError: there is no checkpoint, or it does not fit the mesh.

    Communication: per token, that of a forward pass with one token per row, and that of `sample`.

    Memory: the parameters as they are stored, and a page of the cache for the longest prompt and answer in each row,
      see `PagedDecoding.pages`.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    opened = _opened(source, overrides)
    drafting = None if draft is None else _opened(draft, ())
    prompts = [prompts] if isinstance(prompts, str) else prompts
    stop = [stop] if isinstance(stop, str) else stop
    ids = [opened.encode(one, parse_special) if isinstance(one, str) else list(one) for one in prompts]
    own = own_of(opened)
    _check(None if own else opened, prompts, ids, max_tokens, stop)
    engine = open_batch(
        opened, sampling, num_rows=len(ids), longest=max(map(len, ids)), max_tokens=max_tokens, draft=drafting,
        ngrams=ngrams, num_drafts=num_drafts,
    )  # fmt: skip
    if own:
        _check_ids(ids, engine.decoding.vocab_size)
    tokenizer = opened.tokenizer or Ids(vocab_size=engine.decoding.vocab_size, bos=0)
    ends = () if opened.tokenizer is None and opened.ends is None else opened.ends
    batch = Batch([Answer(tokenizer, stop, max_tokens, ends, prompt) for prompt in ids])
    for piece in batch.stream(engine, requests_of(ids, max_tokens, sampling)):
        show(piece)
    return Generated(
        [Completion(prompt, x.text, x.tokens, x.finish) for prompt, x in zip(prompts, batch.answers, strict=True)],
        describe_sizes(dict(engine.decoding.ctx.mesh.shape)),
        engine.decoding.cache_bytes,
        prefill_s=sum(batch.prefill_s),
        decode_s=sum(batch.decode_s),
        acceptance=batch.acceptance if engine.drafter else None,
        how=own.functions.how if own else "",
    )


def _opened(source: Any, overrides: Sequence[str]) -> Any:
    """A `Source`, or a `CausalModel`."""
    if isinstance(source, (str, Path)):
        return open_source(Path(source), overrides)
    if overrides and isinstance(source, CausalModel):
        raise ConfigError("overrides: a model in Python has no config; CausalModel.of(..., mesh=, rules=)")
    if overrides:
        raise ConfigError("overrides are for a config file or a folder: of a Run, change the fields")
    return of_run(source) if isinstance(source, Run) else source


def _check(
    source: Source | None, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str]
) -> None:
    """Checks the prompts.

    Args:
      source: None of a user's own model, whose vocabulary and positions are not known yet.
    """
    problems = Problems()
    if source:
        check_tokenizer(source, problems)
    if max_tokens < 1:
        problems.add("max_tokens", f"{max_tokens} is not 1 or more", "1")
    if "" in stop:
        problems.add("stop", "an empty text occurs everywhere", "leave it out")
    if not prompts:
        problems.add("prompts", "there is none", "pass at least one")
    for number, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True), 1):
        if not prompt:
            problems.add(f"prompt {number}", "is empty", "write at least one character")
        elif source:
            _check_prompt(f"prompt {number}", source.model, prompt, tokens, max_tokens, problems)
    problems.raise_any(ConfigError, "these prompts cannot be answered:")


def _check_prompt(
    where: str, model: Decoder, prompt: Prompt, ids: Sequence[int], max_tokens: int, problems: Problems
) -> None:
    if not isinstance(prompt, str) and not all(0 <= token < model.vocab_size for token in ids):
        problems.add(where, f"has token ids outside of the model's vocabulary of {model.vocab_size}")
    if model.learned_positions and len(ids) + max_tokens > model.max_seq_len:
        what = f"{len(ids)} tokens and {max_tokens} more do not fit model.max_seq_len = {model.max_seq_len}"
        room = model.max_seq_len - len(ids)
        problems.add(where, what, f"max_tokens={room}" if room > 0 else "a shorter prompt")


def _check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    problems = Problems()
    for number, ids in enumerate(prompts, 1):
        if not all(0 <= token < vocab_size for token in ids):
            problems.add(f"prompt {number}", f"has token ids outside of the model's vocabulary of {vocab_size}")
    problems.raise_any(ConfigError, "these prompts cannot be answered:")
