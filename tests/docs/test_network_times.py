"""The guides' seconds of communication are those that the planner takes, for the same machine."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from meshpar import load, prepare
from meshpar.experiment.prepare import Prepared
from meshpar.mesh import targets
from meshpar.mesh.hardware import LINKS
from meshpar.planning.estimate import work_of
from meshpar.planning.machine import StatedMachine
from tests.docs.page import BLOCK, ROOT

LLAMA = ("configs/llama3-8b.yaml", "h100:8x8")
ALL = ("mesh={fsdp: 64}", "rules=fsdp")
GROUPS = ("mesh={replica: 8, fsdp: 8}", "rules=hsdp")
OFTEN = ("num_microbatches=8", "data.batch_size=512")
GUIDES = ROOT / "docs" / "guides"
WILL_IT_FIT = (GUIDES / "will-it-fit.md").read_text()
ZERO = re.search(r"^meshpar inspect (configs/zero-7b.yaml) --target (h100:48x8) (.*?)^```", WILL_IT_FIT, re.M | re.S)
assert ZERO
BLOOM = (ZERO[1], ZERO[2], tuple(ZERO[3].replace("\\\n", " ").split()))
"""BLOOM's model under ZeRO-3: the command of the guide."""


@cache
def traced(config: str, target: str, changes: tuple[str, ...]) -> Prepared:
    run = load(ROOT / config, changes)
    return prepare(run, run.mesh.abstract(platform=StatedMachine.of(targets.parse(target)).platform))


@cache
def seconds(config: str, target: str, changes: tuple[str, ...]) -> dict[str, float]:
    """Seconds of all collectives of a step, one after another, by the axes over which they go."""
    prepared = traced(config, target, changes)
    machine = StatedMachine.of(targets.parse(target))
    assert prepared.countable_step
    found: dict[str, float] = defaultdict(float)
    for one in prepared.collectives(prepared.countable_step):
        found[", ".join(one.axes)] += machine.collective_s(one, prepared.mesh)
    return found


def text_of(page: str) -> str:
    """The text of a guide, as one line."""
    return re.sub(r"\s+", " ", (GUIDES / f"{page}.md").read_text())


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("sentence", "what", "axes"),
    [
        ("which-layout: sends for {:.2f} s in such groups", (*LLAMA, GROUPS + OFTEN), "replica fsdp"),
        ("which-layout: and for {:.2f} s with `fsdp: 64`", (*LLAMA, ALL + OFTEN), "fsdp"),
        ("which-layout: bytes within hosts need {:.2f} s over NVLink", (*LLAMA, ()), "tensor"),
        ("which-layout: sends 4743.77 GiB, which takes {:.0f} s", BLOOM, "fsdp"),
        ("will-it-fit: needs {:.0f} s for the bytes across", BLOOM, "fsdp"),
        ("tuning: over the eight links of each host take {:.2f} s", (*LLAMA, ALL), "fsdp"),
        ("tuning: only gradients cross hosts, {:.2f} s", (*LLAMA, GROUPS), "replica"),
        ("tuning: gathered within a host, {:.2f} s", (*LLAMA, GROUPS), "fsdp"),
        ("tuning: {:.2f} s over two links a host", (*LLAMA, ()), "fsdp"),
        ("tuning: products wait {:.2f} s for activations", (*LLAMA, ()), "tensor"),
    ],
)  # fmt: skip
def test_a_sentence_has_the_seconds_of_the_planner(sentence, what, axes):
    page, _, words = sentence.partition(": ")
    found = seconds(*what)
    assert words.format(sum(found[axis] for axis in axes.split())) in text_of(page)


def test_groups_are_faster_only_over_slow_links():
    machine = StatedMachine.of(targets.parse(LLAMA[1]))
    across = machine.links.across
    one_adapter = replace(across, bytes_per_s=across.bytes_per_s / machine.per_host)
    slow = replace(machine, links=replace(machine.links, across=one_adapter))
    works = [work_of(traced(*LLAMA, keys + OFTEN)) for keys in (GROUPS, ALL)]
    steps = [work.on(one).total_s for one in (machine, slow) for work in works if work]
    assert steps[1] < steps[0] < steps[2] < steps[3]
    text = text_of("which-layout")
    assert "a step takes {:.2f} s in groups and {:.2f} s with `fsdp: 64`".format(*steps[:2]) in text
    assert "it takes {:.2f} and {:.2f} s".format(*steps[2:]) in text


def test_one_link_across_hosts_would_need_the_other_time_of_the_guide():
    """What tensor parallelism sends within a host, over one link of 50 GB/s: 2.6 s."""
    sent = traced(*LLAMA, ()).traced_bytes
    assert sent
    assert f"{float(sent[('tensor',)]) / LINKS['H100 SXM'].across.bytes_per_s:.1f}" == "2.6"
    assert "they would need 2.6 s" in text_of("which-layout")


def stated(text: str) -> set[float]:
    """The GB/s of links that the prose of a page states."""
    return {float(number) for number in re.findall(r"([\d.]+) GB/s", BLOCK.sub("", text))}


def test_pages_state_no_other_bandwidths_than_the_planner_has():
    known = {link.bytes_per_s / 1e9 for links in LINKS.values() for link in (links.inside, links.across)}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {page.name: stated(page.read_text()) for page in pages}
    assert {50.0} <= found["will-it-fit.md"] & found["tuning.md"] & found["which-layout.md"]
    assert not {page for page, numbers in found.items() if numbers - known}
    assert stated("Hosts have links of 400 GB/s.") - known, "the control: eight adapters taken for one"
