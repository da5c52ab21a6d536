"""Lists the commands of meshpar, with their arguments and options, from the signatures of their functions."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from meshpar.config.annotations import alternatives, is_sequence

ABOUT = """# Commands

This page lists every command with its arguments and options, as `meshpar COMMAND --help` prints them. CONFIG is a YAML
file, and KEY=VALUE changes [one of its keys](config.md). Exit codes: 0; 1 for a run or a check that failed; 2 for bad
input; 75 for a run that a signal ended, which the same command resumes.
"""
OPTIONS = "Options of several commands:\n"
TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


OF_SEVERAL = 3
"""An option of so many commands, with one meaning, is listed once."""


def commands_page() -> str:
    from meshpar import cli

    app = cli.verbs()
    found = dict(sorted(_commands(app, "meshpar")))
    times = Counter(option for function in found.values() for option in _options(function))
    shared = [option for option in times if times[option] >= OF_SEVERAL]
    options = _table(_options(app.registered_callback.callback))  # pyright: ignore
    sections = (_section(name, function, shared) for name, function in found.items())
    return "\n".join([ABOUT, options, OPTIONS, _table(shared), *sections])


def _commands(app: typer.Typer, name: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """All commands of an app and of its groups, by their full names."""
    for command in app.registered_commands:
        if command.hidden:
            continue
        assert command.callback
        word = command.name or command.callback.__name__.replace("_", "-")
        yield f"{name} {word}", command.callback
    for group in app.registered_groups:
        assert group.typer_instance
        yield from _commands(group.typer_instance, f"{name} {group.name}")


def _section(name: str, function: Callable[..., None], shared: list[tuple[str, str]]) -> str:
    options = _options(function)
    usage = " ".join([name, *_arguments(function), *(["[OPTION]..."] if options else [])])
    parts = [f"## {name}", f"`{usage}`", inspect.getdoc(function) or ""]
    if own := [option for option in options if option not in shared]:
        parts.append(_table(own).rstrip())
    if others := [spelling.partition(" ")[0] for spelling, meaning in options if (spelling, meaning) in shared]:
        parts.append(f"{'Also' if own else 'Options:'} {', '.join(others)}.")
    return "\n\n".join(parts) + "\n"


def _parameters(function: Callable[..., None]) -> Iterator[tuple[inspect.Parameter, Any, Any]]:
    """Each parameter, its type without None, and what Typer knows of it."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is typer.Context:
            continue
        hint, info = get_args(hints[name])
        yield parameter, next(one for one in alternatives(hint) if one is not type(None)), info


def _arguments(function: Callable[..., None]) -> list[str]:
    found = []
    for parameter, _, info in _parameters(function):
        if not isinstance(info, OptionInfo):
            name = info.metavar or parameter.name.upper()
            is_required = parameter.default is inspect.Parameter.empty or name.startswith("[")
            found.append(name if is_required else f"[{name}]")
    return found


def _options(function: Callable[..., None]) -> list[tuple[str, str]]:
    """The spelling of each option with the type of its value, and what it does."""
    return [
        (_spelling(parameter, hint, info), _meaning(parameter, hint, info))
        for parameter, hint, info in _parameters(function)
        if isinstance(info, OptionInfo)
    ]


def _spelling(parameter: inspect.Parameter, hint: Any, info: OptionInfo) -> str:
    written = [one for one in (info.default, *(info.param_decls or ())) if str(one).startswith("-")]
    names = written or [f"--{parameter.name.replace('_', '-')}"]
    spelt = ", ".join(f"`{name}`" for name in names)
    inner = get_args(hint)[0] if is_sequence(hint) else hint
    return spelt if inner is bool else f"{spelt} {info.metavar or TYPES[inner]}"


def _meaning(parameter: inspect.Parameter, hint: Any, info: OptionInfo) -> str:
    default = info.show_default if isinstance(info.show_default, str) else parameter.default
    is_shown = hint is not bool and info.show_default and default not in (None, ..., inspect.Parameter.empty)
    shown = [f"Default: {default}."] if is_shown else ["Required."] if default is ... else []
    return " ".join([info.help or "", *shown]).strip()


def _table(options: list[tuple[str, str]]) -> str:
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in option) + " |" for option in options]
    return "\n".join(["| option | what it does |", "|---|---|", *rows, ""])
