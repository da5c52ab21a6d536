"""Evaluates a trained model on tasks of lm-eval, in this process, on any mesh."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshpar.errors import ConfigError, excerpt
from meshpar.evaluation.patterns import Pattern
from meshpar.evaluation.tasks import TaskFile, read_tasks
from meshpar.serve.engine import Engine
from meshpar.serve.open_engine import open_engine
from meshpar.serve.source import Source

SEED = 1234
"""Of the selection of examples in prompts, as in lm-eval."""


@dataclass(frozen=True)
class Score:
    """A number of a task.

    Args:
      filter: what was applied to the answers before; `none` if nothing.
      stderr: the standard error; None if lm-eval has no formula for it.
    """

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    num_documents: int


@dataclass(frozen=True)
class Evaluation:
    """The numbers of a model.

    Args:
      what: mesh and sizes.
    """

    what: str
    scores: tuple[Score, ...]

    def value(self, task: str, metric: str) -> float:
        """The number of a task, with its first filter."""
        return next(one.value for one in self.scores if (one.task, one.metric) == (task, metric))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [("task", "metric", "filter", "value", "stderr", "documents")]
        for one in self.scores:
            stderr = "" if one.stderr is None else f"{one.stderr:.4f}"
            rows.append((one.task, one.metric, one.filter, f"{one.value:.4f}", stderr, str(one.num_documents)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.what, "", *lines])


def evaluate(
    source: Source, tasks: Path | Sequence[TaskFile], *, slots: int = 8, max_len: int | None = None,
    limit: int | None = None, num_fewshot: int | None = None, chat: bool = False,
) -> Evaluation:  # fmt: skip
    """The numbers of a model on tasks in lm-eval's format; needs the extra `eval`.

    Args:
      source: see `open_source`.
      tasks: a task's file, or a folder of them; see `read_tasks`.
      slots: requests that are computed together.
      max_len: most tokens of an input, lm-eval's `max_length`: longer ones lose their beginning, and longer documents
        are divided into windows. Default: 2048, or fewer if the model has fewer positions.
      limit: only the first documents of each task.
      num_fewshot: examples in each prompt, instead of the task's own number.
      chat: whether the model's chat template renders each prompt as the message of a user.

    Raises:
      ConfigError: the tasks or the sizes are wrong, or the model computes no log-probabilities.
      CheckpointError, MeshError, ShardingError: there is no checkpoint, or it does not fit the mesh.
    """
    files = read_tasks(tasks) if isinstance(tasks, Path) else tasks
    check_extra()
    from meshpar.evaluation.model import LENGTHS

    if source.own:
        raise ConfigError("a model of your own is served without log-probabilities, so it cannot be evaluated")
    longest = source.model.max_seq_len if source.model.learned_positions else None
    rows = None if max_len is None else max_len + LENGTHS if longest is None else min(max_len + LENGTHS, longest)
    engine = open_engine(source, slots=slots, max_len=rows)
    return Evaluation(str(engine), tuple(_scores(source, engine, files, limit, num_fewshot, chat)))


def check_extra() -> None:
    """Raises ConfigError if lm-eval is not installed."""
    if missing := [name for name in ("lm_eval", "regex") if not find_spec(name)]:
        raise ConfigError(f"{', '.join(missing)}: not installed; pip install 'meshpar[eval]'")


def _scores(
    source: Source, engine: Engine, files: Sequence[TaskFile], limit: int | None, num_fewshot: int | None, chat: bool
) -> Iterator[Score]:
    from lm_eval.evaluator import evaluate as evaluated  # pyright: ignore[reportMissingImports]

    from meshpar.evaluation.model import EngineModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what was set here on purpose
    with _sandboxed():
        tasks = {file.name: _opened(file, num_fewshot) for file in files}
        found: Any = evaluated(
            EngineModel(source, engine), {"tasks": tasks}, limit=limit, apply_chat_template=chat, log_samples=False
        )
    assert found
    for task, numbers in found["results"].items():
        for key, value in numbers.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr"):
                stderr = numbers.get(f"{metric}_stderr,{filtered}")
                stderr = stderr if isinstance(stderr, float) else None
                yield Score(task, metric, filtered, float(value), stderr, found["n-samples"][task]["effective"])


def _opened(file: TaskFile, num_fewshot: int | None) -> Any:
    """The task of lm-eval, whose patterns are bounded.

    Raises:
      ConfigError: lm-eval refuses it.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

    rows = {split: file.rows(split) for split in file.documents}
    if empty := [split for split, listed in rows.items() if not listed]:
        raise ConfigError(f"{file.path}: {', '.join(empty)}: has no documents")
    try:
        documents = {split: Dataset.from_list(listed) for split, listed in rows.items()}
        task = ConfigurableTask(config={**file.config, "custom_dataset": lambda **_: documents})
        if num_fewshot is not None:
            task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=SEED)
    except ConfigError:
        raise
    except Exception as error:  # lm-eval and the template raise errors of many kinds
        raise ConfigError(
            f"{file.path}: lm-eval refuses it: {type(error).__name__}: {excerpt(str(error), 500)}"
        ) from None
    for ensemble in task._filters:
        ensemble.filters = [partial(_bounded, build) for build in ensemble.filters]
    for metric, options in task._metric_fn_kwargs.items():
        if ignored := options.pop("regexes_to_ignore", None):
            patterns = [Pattern(one) for one in ignored]
            task._metric_fn_list[metric] = partial(_without, task._metric_fn_list[metric], patterns)
    return task


def _bounded(build: Any) -> Any:
    """A filter of lm-eval, whose pattern is bounded."""
    made = build()
    if hasattr(made, "regex"):
        made.regex = Pattern(made.regex_pattern)
    return made


def _without(metric: Any, ignored: Sequence[Pattern], *, predictions: Any, references: Any, **options: Any) -> Any:
    """A metric of texts from which what matches the patterns is removed."""
    for pattern in ignored:
        predictions = [pattern.sub("", text) for text in predictions]
        references = [pattern.sub("", text) for text in references]
    return metric(predictions=predictions, references=references, **options)


@contextmanager
def _sandboxed() -> Iterator[None]:
    """Renders the templates of tasks in Jinja's sandbox: lm-eval's own environment lets them call anything."""
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils  # pyright: ignore[reportMissingImports]

    sandbox = ImmutableSandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters["regex_replace"] = _replaced
    before: Mapping[str, Any] = {"env": utils.env, "DISABLE_MULTIPROC": os.environ.get("DISABLE_MULTIPROC")}
    utils.env = sandbox
    os.environ["DISABLE_MULTIPROC"] = "1"  # JAX has threads, which a process that forks would lose
    try:
        yield
    finally:
        utils.env = before["env"]
        if before["DISABLE_MULTIPROC"] is None:
            del os.environ["DISABLE_MULTIPROC"]


def _replaced(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return Pattern(pattern).sub(replacement, text, count)
