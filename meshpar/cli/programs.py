"""Describes the verbs that run in several processes: the devices that each needs, and the folder of its logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from meshpar.cli import verbs
from meshpar.errors import ConfigError

if TYPE_CHECKING:
    from meshpar.experiment.config import Run

TRAIN, VERIFY = "train", "verify"
LOGS = Path("logs")
"""The folder for the logs of processes without a run directory."""


class VerbCall(NamedTuple):
    """A verb with its arguments.

    Args:
      num_devices: the devices of all processes together; None if the mesh uses all devices that exist.
      run: the run that the verb trains; None for other verbs.
    """

    verb: str
    num_devices: int | None
    run: Run | None = None

    @property
    def run_dir(self) -> Path | None:
        return self.run.run_dir if self.run else None

    @property
    def logs(self) -> Path:
        return self.run_dir / LOGS if self.run_dir else LOGS


def parse(command: Sequence[str]) -> VerbCall:
    """Checks a command line of `meshpar`, and its config, before any process starts.

    Raises:
      ConfigError: the verb does not run in several processes; or see `load` and `open_source`.
      click.UsageError: the verb does not have such an argument.
    """
    verb, *arguments = command
    if verb not in _PROGRAMS:
        *others, last = _PROGRAMS
        raise ConfigError(f"launch {verb}: only {', '.join(others)} and {last} run in several processes")
    parser: Any = typer.main.get_command(verbs(verb))
    parser = parser.commands[verb]
    while hasattr(parser, "commands"):
        _, parser, arguments = parser.resolve_command(parser.make_context(verb, list(arguments)), arguments)
    return _PROGRAMS[verb](parser.make_context(verb, arguments).params)


def _train(words: dict[str, Any]) -> VerbCall:
    from meshpar.experiment.config import load

    run = load(words["config"], words["overrides"] or [])
    return VerbCall(TRAIN, words["devices"] or run.mesh.requested(), run)


def _inspect(words: dict[str, Any]) -> VerbCall:
    return _train(words)._replace(verb="inspect", run=None)


def _generate(words: dict[str, Any]) -> VerbCall:
    from meshpar.serve.source import open_source

    run = open_source(words["source"], words["overrides"] or []).run
    return VerbCall("generate", words["devices"] or run.mesh.requested())


def _verify(words: dict[str, Any]) -> VerbCall:
    from meshpar.experiment.config import load
    from meshpar.verification.shrink import shrink

    return VerbCall(VERIFY, shrink(load(words["config"], words["overrides"] or [])).mesh.requested())


def _bench(words: dict[str, Any]) -> VerbCall:
    return VerbCall("bench", words["devices"])


_PROGRAMS: dict[str, Callable[[dict[str, Any]], VerbCall]] = {
    TRAIN: _train,
    "generate": _generate,
    VERIFY: _verify,
    "inspect": _inspect,
    "bench": _bench,
}
