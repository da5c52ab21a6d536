"""Tasks in lm-eval's format, as plain data: YAML files with documents beside them, and no code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpar.config.yaml_text import UnreadableYaml, read
from meshpar.errors import ConfigError, Problems, excerpt, nearest
from meshpar.regular_files import open_regular

SUFFIXES = (".yaml", ".yml")
LARGEST_TASK = 2**20
"""The largest file of a task, in bytes."""
LARGEST_DOCUMENTS = 2**30
"""The largest file of documents, in bytes."""
TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
KEYS = (
    "task", "task_alias", "tag", "dataset_path", "dataset_kwargs", *SPLITS, *TEMPLATES, "description",
    "target_delimiter", "fewshot_delimiter", "fewshot_config", "num_fewshot", "metric_list", "output_type",
    "generation_kwargs", "repeats", "filter_list", "gen_prefix", "metadata",
)  # fmt: skip
"""The keys of lm-eval's tasks that are data."""
CODE = {
    "class": "Python", "process_docs": "Python", "process_results": "Python", "custom_dataset": "Python",
    "unsafe_code": "Python", "use_prompt": "of another package", "doc_to_image": "for images",
    "doc_to_audio": "for audio",
}  # fmt: skip
"""Keys of lm-eval's tasks that are refused -> why."""
FILTERS = (
    "regex", "regex_pos", "multi_choice_regex", "remove_whitespace", "lowercase", "uppercase", "map", "format_span",
    "take_first", "take_first_k", "majority_vote",
)  # fmt: skip
OUTPUTS = ("loglikelihood", "loglikelihood_rolling", "multiple_choice", "generate_until")


@dataclass(frozen=True)
class TaskFile:
    """A task.

    Args:
      path: its file.
      config: the keys of lm-eval's `TaskConfig`, without those of the documents.
      documents: split -> the files of its documents, JSON Lines.
    """

    path: Path
    config: Mapping[str, Any]
    documents: Mapping[str, Sequence[Path]]

    @property
    def name(self) -> str:
        return str(self.config["task"])

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The documents of a split.

        Raises:
          ConfigError: a file cannot be read, or a line is no JSON object.
        """
        return [row for path in self.documents[split] for row in _lines(path)]


def read_tasks(path: Path) -> list[TaskFile]:
    """The task of a file, or those of all files of a folder.

    Raises:
      ConfigError: lists all problems: keys that are not known or would run code, files outside of the folder.
    """
    try:
        files = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES) if path.is_dir() else [path]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not files:
        raise ConfigError(f"{path}: there is no task; one is a file that ends with .yaml")
    problems = Problems()
    tasks = [task for one in files if (task := _task(one, problems))]
    for name in {task.name for task in tasks if sum(other.name == task.name for other in tasks) > 1}:
        problems.add(f"task = {name}", "is the name of several files", "another name")
    problems.raise_any(ConfigError, "the tasks cannot be evaluated:")
    return tasks


def _task(path: Path, problems: Problems) -> TaskFile | None:
    """Reads a file; None if it cannot be read."""
    try:
        with open_regular(path) as file:
            text = file.read(LARGEST_TASK + 1).decode("utf-8")
        if len(text) > LARGEST_TASK:
            raise ConfigError(f"{path}: is larger than {LARGEST_TASK} bytes, which no task is")
        config = read(text, "", lambda line: f"{path}:{line}", {}, problems)
    except OSError as error:
        problems.add(str(path), f"cannot be read: {error.strerror}")
        return None
    except UnreadableYaml as error:
        fix = "write it as a template in Jinja, or as a filter" if "!function" in str(error) else ""
        problems.add(f"{path}{error.place}", str(error).replace("a config holds", "a task holds"), fix)
        return None
    except ValueError as error:
        problems.add(str(path), f"cannot be read: {error}")
        return None
    if not isinstance(config, dict):
        problems.add(str(path), "is no task: it has no keys", "task: NAME, and the other keys of a task")
        return None
    before = len(problems)
    _check_keys(path, config, problems)
    documents = _documents(path, config, problems)
    kept = {key: value for key, value in config.items() if key not in ("dataset_path", "dataset_kwargs")}
    return TaskFile(path, kept, documents) if len(problems) == before else None


def _check_keys(path: Path, config: Mapping[str, Any], problems: Problems) -> None:
    for key in config:
        where = f"{path}: {key}"
        if key in CODE:
            problems.add(where, f"is {CODE[key]}, and a task holds only text", "remove it")
        elif key in ("include", "group", "task_list", "dataset_name"):
            problems.add(where, "is not supported", "write a file for each task, with all its keys and local documents")
        elif key not in KEYS:
            near = nearest(str(key), KEYS)
            problems.add(where, "is no key of a task", f"did you mean {near}?" if near else "")
    if not isinstance(config.get("task"), str):
        problems.add(f"{path}: task", "is missing, or no text", "task: NAME")
    if (output := config.get("output_type", "generate_until")) not in OUTPUTS:
        problems.add(f"{path}: output_type = {excerpt(str(output))}", "is not known", " or ".join(OUTPUTS))
    for metric in _objects(config.get("metric_list")):
        if metric.get("hf_evaluate"):
            problems.add(f"{path}: metric_list.hf_evaluate", "would load Python from a hub", "a metric of lm-eval")
    for one in _objects(config.get("filter_list")):
        for step in _objects(one.get("filter")):
            _check_filter(path, step, problems)


def _check_filter(path: Path, step: Mapping[str, Any], problems: Problems) -> None:
    name = step.get("function")
    if name not in FILTERS:
        near = nearest(str(name), FILTERS)
        fix = f"did you mean {near}?" if near else "one of " + ", ".join(FILTERS)
        problems.add(f"{path}: filter_list.function = {excerpt(str(name))}", "is no filter of texts", fix)
    if "regexes_to_ignore" in step:
        problems.add(f"{path}: filter_list.regexes_to_ignore", "is for the metric exact_match here", "remove it")


def _documents(path: Path, config: Mapping[str, Any], problems: Problems) -> dict[str, list[Path]]:
    """Split -> the files of its documents, which are in the folder of the task."""
    if config.get("dataset_path") != "json":
        what = f"is {excerpt(str(config.get('dataset_path')))}, and documents are local files of JSON Lines"
        problems.add(f"{path}: dataset_path", what, "dataset_path: json, and dataset_kwargs: {data_files: FILE}")
        return {}
    options = config.get("dataset_kwargs")
    named = options.get("data_files") if isinstance(options, dict) and len(options) == 1 else None
    if not named:
        problems.add(f"{path}: dataset_kwargs", "is not {data_files: FILE}", "data_files alone, a file or {test: FILE}")
        return {}
    by_split = named if isinstance(named, dict) else {"train": named}
    found = {}
    for split, names in by_split.items():
        listed = names if isinstance(names, list) else [names]
        found[split] = [file for name in listed if (file := _inside(path, name, problems))]
    for key in SPLITS:
        if config.get(key) is not None and config[key] not in found:
            problems.add(f"{path}: {key} = {config[key]}", "has no documents", f"one of {', '.join(found)}")
    if not any(config.get(key) for key in ("test_split", "validation_split")):
        problems.add(f"{path}: test_split", "is missing", f"test_split: {next(iter(found), 'train')}")
    return found


def _inside(path: Path, name: Any, problems: Problems) -> Path | None:
    folder, where = path.parent.resolve(), f"{path}: data_files = {excerpt(str(name))}"
    file = (folder / str(name)).resolve()
    if not file.is_relative_to(folder):
        problems.add(where, "is outside of the task's folder", "a file beside it")
    elif not file.is_file():
        problems.add(where, "there is no such file")
    else:
        return file
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(path) as file:
            text = file.read(LARGEST_DOCUMENTS + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(text) > LARGEST_DOCUMENTS:
        raise ConfigError(f"{path}: is larger than {LARGEST_DOCUMENTS} bytes; split it, and list the files")
    for number, line in ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: is no JSON object")
        yield row


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
