"""The page of a real compiled step in a real browser; each kind of fault is found in a page that was broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshpar.inspection.fit import judge
from meshpar.inspection.inspect import inspect
from meshpar.inspection.report.page import page
from meshpar.mesh.targets import parse
from tests.program.chromium import chromium, require
from tests.program.look import faults
from tests.program.test_bytes import prepared
from tests.xla import DEFAULT_FUSIONS

pytestmark = pytest.mark.usefixtures("lines_of_callers")
SCREENS = [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]
EVIL = """<script>window.hit = 1</script>"'><img src="nowhere" onerror="window.hit = 1">"""
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


@lru_cache
def step() -> Any:
    """The inspection of a step that communicates over each of three axes, with its traced bytes."""
    run = prepared("data2_fsdp2_tensor2")
    return run.inspect(run.compile_step(DEFAULT_FUSIONS))


def hostile() -> dict[str, Any]:
    """The same, with names that would run as code if they were not escaped."""
    plain = step().as_json()
    for collective in plain["collectives"]:
        collective |= {"tensors": [EVIL], "source": EVIL, "branches": [EVIL]}
    plain["collectives"][0]["kind"] = EVIL
    plain["largest"] = [held | {"name": EVIL, "array": EVIL, "source": EVIL} for held in plain["largest"]]
    plain["sent_bytes_per_axis"] = {
        EVIL if axes == "fsdp" else axes: b for axes, b in plain["sent_bytes_per_axis"].items()
    }
    plain["memory"]["arguments"][EVIL] = plain["memory"]["arguments"].pop("state.params")
    plain["findings"] = [{"kind": EVIL, "what": EVIL, "where": EVIL, "bytes": 3, "fix": EVIL}]
    return plain | {"opaque": [EVIL], "target": EVIL, "chip_bytes": 10**6, "fits": False}


# The page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_a_real_step_is_drawn_to_scale_and_fits_the_screen(browser, tmp_path, width, scheme):
    plain = step().as_json()
    assert faults(browser, page(plain), plain, tmp_path, width, scheme) == set()


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
@pytest.mark.parametrize("policy", [True, False], ids=["with policy", "by escaping alone"])
def test_hostile_names_are_only_text(browser, tmp_path, width, scheme, policy):
    plain = hostile()
    html = page(plain) if policy else POLICY.sub("", page(plain))
    assert faults(browser, html, plain, tmp_path, width, scheme) == set()
    assert EVIL in browser.ask("document.body.innerText")


def unguarded(more: str) -> Callable[[str], str]:
    """Adds HTML to a page, and removes the page's policy."""
    return lambda html: POLICY.sub("", html).replace("</main>", f"{more}</main>")


def put(old: str, new: str) -> Callable[[str], str]:
    return lambda html: re.sub(old, new, html)


BROKEN = {
    "a bar": (put(r'(class="sent" x="0%" y="0") width="100%"', r'\1 width="90%"'), "is out of scale"),
    "a part of the memory": (put(r'(class="part"[^>]*) width="9[^"]*"', r'\1 width="5%"'), "is out of scale"),
    "a block's place": (put(r'(class="bar" x=)"9[^"]*"', r'\1"50%"'), "is out of place"),
    "a block": (put('<g class="block">', "<g>"), "lacks a block"),
    "a wide table": (put("<table", '<table style="min-width: 1400px"'), "is wider than the screen"),
    "grey on grey": (put('<p class="soft', '<p style="color: #8884" class="soft'), "has text that cannot be read"),
    "hidden text": (put("<h2", '<h2 style="visibility: hidden"'), "has text that cannot be read"),
    "a long label": (put(">3x</text>", f">{400 * 'x'}</text>"), "has labels that overlap"),
    "a moved number": (
        put('<td class="number', '<td style="position: relative; left: -40px" class="number'),
        "has labels that overlap",
    ),
    "a script": (unguarded(EVIL), "ran code"),
    "an image from elsewhere": (unguarded('<img src="http://127.0.0.1:59999/">'), "asked for something"),
    "what the policy stops": (put("</main>", "<script>1</script></main>"), "complained"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_control_a_broken_page_is_seen(browser, tmp_path, broken):
    change, fault = BROKEN[broken]
    plain = step().as_json()
    changed = change(page(plain))
    assert changed != page(plain)
    assert fault in faults(browser, changed, plain, tmp_path, 1280)


def test_a_block_has_its_collective_as_title(browser, tmp_path):
    plain = step().as_json()
    faults(browser, page(plain), plain, tmp_path, 1280)
    titles = browser.ask("[...document.querySelectorAll('.block title')].map(t => t.textContent)")
    gather = next(title for title in titles if "blocks.mlp.gate.kernel" in title)
    assert gather.splitlines()[:3] == [
        "all_gather over fsdp",
        "3x 512 B = 1.50 KiB",
        "state.params.blocks.mlp.gate.kernel",
    ]
    assert re.fullmatch(r"meshpar/nn/layers.py:\d+", gather.splitlines()[3])


# Without a browser ------------------------------------------------------------------------------------------------


def words(html: str) -> str:
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL).split())


def test_the_page_has_the_figures_of_the_step_as_text():
    text = words(page(step().as_json()))
    assert "A device, in one step mesh: data=2, fsdp=2, tensor=2 sends" in text
    assert "Positions show the order, not the time." in text
    assert f"{step().flops:,} FLOPs" in text
    assert re.search(r"tensor ([\d,]+) bytes / as traced \1, equal", text)
    assert "Findings" not in text


@pytest.mark.parametrize(("machine_bytes", "verdict"), [(None, "fits"), (1, "does not fit")])
def test_the_verdict_is_on_top(machine_bytes, verdict):
    machine = parse("h100:1x8")
    machine = (
        machine if machine_bytes is None else replace(machine, chip=replace(machine.chip, memory_bytes=machine_bytes))
    )
    mesh = prepared("data2_fsdp2_tensor2").mesh
    text = words(page(judge(step(), machine, mesh).as_json()))
    assert text.startswith(
        f"A device, in one step A device, in one step mesh: data=2, fsdp=2, tensor=2 h100:1x8: {verdict}."
    )


def test_findings_are_listed_on_the_page():
    found = {
        "kind": "gathered twice",
        "what": "blocks.mlp.up.kernel",
        "where": "model.py:3",
        "bytes": 2048,
        "fix": "remat",
    }
    text = words(page(step().as_json() | {"findings": [found]}))
    assert "Findings gathered twice 2.00 KiB blocks.mlp.up.kernel where: model.py:3 fix: remat" in text


def test_a_program_of_one_device_sends_nothing():
    inspection = inspect(jax.jit(lambda x: x @ x).lower(jnp.ones((16, 16))).compile())
    text = words(page(inspection.as_json()))
    assert "no mesh was given sends 0 B" in text
    assert "It sends nothing." in text
    assert "in order" not in text


def test_a_branch_is_marked():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def sum_(x):
        return jax.lax.psum(x, "data")

    def keep(x):
        return jax.lax.pcast(x, "data", to="varying")

    def branch(flag, x):
        return jax.lax.cond(flag, lambda x: keep(sum_(x)), lambda x: x, x)

    mapped = jax.shard_map(branch, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec)
    plain = inspect(jax.jit(mapped).lower(True, jnp.ones((8, 4))).compile(), mesh).as_json()
    html = page(plain)
    assert 'class="hatch"' in html
    assert "all_reduce in a branch data 1x 28 B" in words(html)
    assert 'class="hatch"' not in page(step().as_json())


def test_without_chromium_a_test_is_skipped_unless_it_is_required(monkeypatch, tmp_path):
    monkeypatch.delenv("MESHPAR_REQUIRE_CHROMIUM", raising=False)
    with pytest.raises(pytest.skip.Exception, match="chromium-driver"):
        require(tmp_path / "chromedriver")
    monkeypatch.setenv("MESHPAR_REQUIRE_CHROMIUM", "1")
    with pytest.raises(pytest.fail.Exception, match="chromium-driver"):
        require(tmp_path / "chromedriver")


@pytest.mark.parametrize("flops", [0, 999, 13_824, 12_345_678_901_234_567_890])
def test_the_large_figures_are_short_however_many_flops_there_are(flops):
    """A long number would not fit the tile; it is written in full below, in small letters."""
    html = page(step().as_json() | {"flops": flops})
    figures = re.findall(r"<dd>(.*?)</dd>", html)
    assert len(figures) == 3 and max(map(len, figures)) <= len("999.99 EFLOPs")
    assert f'<dd class="soft">{flops:,} FLOPs</dd>' in html
