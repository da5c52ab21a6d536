"""The process that runs chat templates in Jinja's sandbox. `sandbox` starts it as a script.

It reads requests, which are pickled, from its standard input, and writes a line of JSON for each. The time of a request
is bounded by a signal, which ends this process, and its memory by a limit of the process: a template may spend both in
one call, such as `'a' * 10**10`. It imports nothing of meshpar, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_ERROR = 2000


def main() -> None:
    """Answers each request: (template, variables, date, most seconds, most characters)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its input does
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=answers, flush=True)
    while True:
        try:
            text, variables, date, longest_s, longest_text = pickle.load(sys.stdin.buffer)  # noqa: S301 of our own process
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, longest_s)
        answer = _answer(text, variables, date, longest_text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=answers, flush=True)


def limit_memory(num_bytes: int) -> None:
    """Makes allocations beyond this size an error, where the system can."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _answer(text: str, variables: Mapping[str, Any], date: datetime | None, longest: int) -> str:
    now = {} if date is None else {"strftime_now": date.strftime}
    try:
        return json.dumps(_written(_compiled(text), {**variables, **now}, longest))
    except MemoryError:
        return json.dumps({"error": "it takes too much memory"})
    except RecursionError:
        return json.dumps({"error": "it calls itself without end"})
    except Exception as error:  # a template can fail as any program can
        return json.dumps({"error": str(error)[:LONGEST_ERROR] or type(error).__name__})


@dataclass
class _Output:
    """What a template has written so far."""

    blocks: list[str] = field(default_factory=list)
    size: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


_OUTPUT: ContextVar[_Output] = ContextVar("the output of the template that runs")


def _written(template: jinja2.Template, variables: Mapping[str, Any], longest: int) -> dict[str, Any]:
    output = _Output()
    _OUTPUT.set(output)
    for block in template.generate(**variables):
        output.blocks.append(block)
        output.size += len(block)
        if output.size > longest:
            raise ValueError(f"it writes more than {longest} characters")
    return {"text": "".join(output.blocks), "spans": output.spans}


# What templates that were written for transformers rely on ----------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks what the model generates."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        output = _OUTPUT.get()
        output.spans.append((output.size, output.size + len(text)))
        return text


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)
_ENVIRONMENT.filters["tojson"] = _as_json
_ENVIRONMENT.globals.update(raise_exception=_raise, strftime_now=_now)


@lru_cache(maxsize=8)
def _compiled(text: str) -> jinja2.Template:
    """The program of a template."""
    return _ENVIRONMENT.from_string(text)


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    main()
