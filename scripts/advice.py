"""Writes what the planner says of three models on H100s into the guide that chooses a layout.

    python scripts/advice.py

`advice`: the layouts that it puts first. `stages`: the fastest with each stage of ZeRO. Nothing is compiled or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from meshpar import load, plan
from meshpar.errors import ConfigError
from meshpar.planning.plan import Plan, loses_by
from meshpar.tree import human_bytes, human_time

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "llama3-8b.yaml"
PAGE = ROOT / "docs" / "guides" / "which-layout.md"
MODELS = {
    "1.2B": (
        "model.vocab_size=32000", "data.vocab_size=32000", "model.num_layers=22", "model.hidden_size=2048",
        "model.num_heads=16", "model.num_kv_heads=16", "model.intermediate_size=5632",
    ),
    "8B": (),
    "70B": ("model.num_layers=80", "model.hidden_size=8192", "model.num_heads=64", "model.intermediate_size=28672"),
}  # fmt: skip
"""Model -> what it changes of the config."""
PER_HOST = 8
ROWS = 2
"""Rows of a batch for each device, as the config has on the 64 that it is for."""
STAGES = {"replicated": "data", "zero1": "fsdp", "zero2": "fsdp", "fsdp": "fsdp"}
"""Rules -> the axis of all devices."""
CASES = [(model, hosts, None) for model in ("8B", "70B") for hosts in (1, 8, 64)]
CASES_OF_STAGES = [(model, 8, rules) for model in ("1.2B", "8B") for rules in STAGES]
Case = tuple[str, int, str | None]


@cache
def advised(model: str, hosts: int, rules: str | None = None) -> Plan | str:
    """The plan of a model for so many hosts, or why there is none.

    Args:
      rules: those of all devices along one axis. Default: any layout.
    """
    devices = hosts * PER_HOST
    run = load(CONFIG, [*MODELS[model], f"data.batch_size={ROWS * devices}", f"mesh={{fsdp: {devices}}}", "rules=fsdp"])
    try:
        fix = [f"rules=[{rules}]", f"mesh.{STAGES[rules]}={devices}"] if rules else []
        return plan(run, f"h100:{hosts}x{PER_HOST}", fix=fix)
    except ConfigError as error:
        return str(error).splitlines()[0].partition(": ")[2].rstrip(":")


def line(model: str, hosts: int, rules: str | None = None) -> str:
    """The row of a case."""
    found = advised(model, hosts, rules)
    devices = hosts * PER_HOST
    named = [model, f"`{rules}`"] if rules else [model, str(devices)]
    if isinstance(found, str):
        return _row(*named, found, "", "", "", *([] if rules else [""]))
    best, *others = found.ranked
    estimate = best.estimate
    measures = human_time(estimate.total_s), human_bytes(estimate.total_bytes)
    if rules:
        settings = str(best.layout).partition("] ")[2]
        exposed = sum(time for term, time in estimate.terms.items() if term.startswith("exposed"))
        return _row(*named, f"`{settings}`" if settings else "the config's remat", *measures, human_time(exposed))
    speed = ROWS * found.run.data.seq_len / estimate.total_s
    loses = f"{loses_by(others[0], best)}: `{others[0].layout}`" if others else ""
    return _row(*named, f"`{best.layout}`", *measures, f"{speed:,.0f}", loses)


def table(head: Iterable[str], cases: Iterable[Case]) -> str:
    rule = ["--:" if name in ("step", "holds", "tokens/s", "exposed") else "---" for name in head]
    return "\n" + "\n".join([_row(*head), _row(*rule), *(line(*case) for case in cases)]) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = {
    "advice": (("model", "H100s", "layout", "step", "holds", "tokens/s", "the next layout loses by"), CASES),
    "stages": (("model", "rules", "the fastest that fits", "step", "holds", "exposed"), CASES_OF_STAGES),
}


def block(name: str) -> re.Pattern[str]:
    """Matches a table of the guide."""
    return re.compile(rf"(?<=<!-- {name} -->\n)\n.*?\n(?=\n<!-- end -->)", re.DOTALL)


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, (head, cases) in TABLES.items():
        written = table(head, cases)
        page = block(name).sub(lambda _, written=written: written, page)
    PAGE.write_text(page)
