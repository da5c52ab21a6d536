"""A model of lm-eval that computes by the engine of a server, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from meshpar.data.chat.template import ChatTemplate, read_template
from meshpar.data.tokenizer import TokenizerFile
from meshpar.errors import ConfigError
from meshpar.serve.answer import Answer
from meshpar.serve.batch import Batch
from meshpar.serve.engine import Engine
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Request
from meshpar.serve.source import Source

Pair = tuple[Any, list[int], list[int]]
"""A context and what follows it: as lm-eval names them, and the tokens of each."""
LENGTHS = 2
"""Tokens of a row beside the inputs of the longest request: the last one, and one that the engine samples after it."""
MOST_TOKENS = 256
"""The tokens of an answer, if a task names no number: as for lm-eval's other models."""
GENERATION = ("do_sample", "temperature", "top_p", "top_k", "min_p", "until", "max_gen_toks")


class EngineModel(TemplateLM):
    """Computes log-probabilities and answers, as lm-eval's `hf` does for a Hugging Face folder.

    Args:
      source: the model and its tokenizer.
      engine: its engine, which scores prompts.
    """

    def __init__(self, source: Source, engine: Engine):
        super().__init__()
        self.source = source
        self.engine = engine
        self.max_length = engine.decoding.capacity.max_len - LENGTHS
        tokenizer = source.tokenizer
        is_file = isinstance(tokenizer, TokenizerFile)
        first = tokenizer.token(tokenizer.bos) if is_file else None
        self._opening_text = first if source.encode("") else None
        self._eot = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
        self._prefix = tokenizer.bos if first or not is_file else self._eot
        self._eot_text = tokenizer.token(self._eot) if is_file else None

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return read_template(self.source.folder) if self.source.folder else None

    @property
    def eot_token_id(self) -> int:
        return self._eot

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return str(self.source.folder or "")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if self._template is None:
            raise ConfigError("--chat: the model has no chat template; leave it out")
        return self._template.text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert self._template, "`chat_template` has checked it"
        text = self._template.rendered(chat_history, answers=add_generation_prompt).text
        last = chat_history[-1]["content"].strip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids = self.source.encode(string)
        has_opening = self._opening_text and string.startswith(self._opening_text)
        if add_special_tokens or (add_special_tokens is None and not has_opening):
            return ids
        return ids[len(self.source.encode("")) :]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows: list[Pair] = []
        numbers = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text)
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            found = [(None, *make_disjoint_window(one)) for one in rolling]
            windows += found
            numbers.append(len(found))
        scored = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scored)[0] for _ in range(number)) for number in numbers]

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        asked, first = [], []
        for _, context, following in requests:
            tokens = [*context, *following][-(self.max_length + 1) :]
            asked.append(Request(prompt=tokens, max_tokens=0, scores=True, scores_prompt=True))
            first.append(len(tokens) - len(following))
        answers = [Answer(self.source.tokenizer, (), 0, ()) for _ in asked]
        _ = list(Batch(answers).stream(self.engine, asked))
        found = []
        for request, answer, begin in zip(asked, answers, first, strict=True):
            scores, tokens = answer.prompt_scores[begin - 1 :], request.prompt[begin:]
            is_greedy = all(one.ids[0] == token for one, token in zip(scores, tokens, strict=True))
            found.append((sum(one.logprob for one in scores), is_greedy))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        asked, answers, stops = [], [], []
        for i, (context, options) in enumerate(request.args for request in requests):
            options: dict[str, Any] = dict(normalize_gen_kwargs(options, MOST_TOKENS))
            _check_options(options)
            stop = handle_stop_sequences(options.pop("until", None), eos=self._eot_text)
            longest = options["max_gen_toks"]
            if not 0 < longest < self.max_length:
                what = f"max_gen_toks = {longest} and a prompt do not fit rows of {self.max_length} tokens"
                raise ConfigError(f"generation_kwargs: {what}; a smaller number, or a larger --max-len")
            prompt = self.tok_encode(context)[-(self.max_length - longest) :]
            asked.append(Request(prompt=prompt, max_tokens=longest, sampling=_sampling(options), index=i))
            answers.append(Answer(self.source.tokenizer, list(filter(None, stop)), longest, self.source.ends, prompt))
            stops.append(stop)
        _ = list(Batch(answers).stream(self.engine, asked))
        decode = self.source.tokenizer.decode
        texts = [decode(answer.tokens) for answer in answers]
        return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]


def _check_options(options: dict[str, Any]) -> None:
    """Raises ConfigError for a setting of generation that would be ignored."""
    unknown = [key for key in options if key not in GENERATION]
    if unknown:
        raise ConfigError(f"generation_kwargs: {', '.join(unknown)}: not known; there are {', '.join(GENERATION)}")


def _sampling(options: dict[str, Any]) -> Sampling:
    if not (temperature := options.get("temperature")):
        return Sampling()
    top_p, min_p = options.get("top_p") or 1.0, options.get("min_p") or 0.0
    top_k = options.get("top_k") or None
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
