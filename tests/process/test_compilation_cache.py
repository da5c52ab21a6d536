"""The persistent compilation cache: a second run compiles nothing and computes the same."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from jax.sharding import PartitionSpec

import meshpar
from meshpar.inspection.program.compiling import compiling
from meshpar.launch.workers import Group
from meshpar.mesh import compilation_cache, process
from tests.command import CONFIG, Said
from tests.program.test_findings import GRID, array, crossing

OPTIONS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_compilation_cache_include_metadata_in_key",
    "jax_persistent_cache_min_compile_time_secs",
)
PROGRAMS = {"jit_step", "jit_init", "jit_evaluate"}
HIT = "/jax/compilation_cache/cache_hits"
MISS = "/jax/compilation_cache/cache_misses"


@contextmanager
def restored() -> Iterator[None]:
    """Restores the tests' own settings of JAX, which use no cache."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()


@pytest.fixture
def entries(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder of a cache that is enabled, as at the start of a process, and stores small programs too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(compilation_cache._DEFAULTS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    with restored():
        jax.config.update("jax_enable_compilation_cache", True)
        jax_cache.reset_cache()
        yield compilation_cache.folder()


@pytest.fixture
def events() -> Iterator[list[str]]:
    """The hits and misses of the cache, as they happen."""
    seen: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event in (HIT, MISS):
            seen.append(event)

    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)


def test_the_second_run_loads_its_programs_and_inspect_and_no_cache_do_not(entries, command, tmp_path, events):
    """All commands run from the same line, because the key of an entry includes its program's source lines."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    counts = []
    losses = []
    for verb, *options in (["train"], ["inspect"], ["train"], ["train", "--no-cache"]):
        events.clear()
        run_dir = f"run_dir={tmp_path}/run{len(counts)}"
        result: Said = command(verb, tmp_path / "config.yaml", run_dir, "--json", *options)
        assert result.code == 0, result.err
        counts.append((events.count(HIT), events.count(MISS)))
        if verb == "train":
            records = map(json.loads, result.out.splitlines())
            losses.append([record["loss"] for record in records if record["kind"] in ("train", "evaluation")])
    (no_hits, stored), inspected, again, without = counts
    assert (no_hits, stored >= len(PROGRAMS)) == (0, True)
    assert (inspected, again, without) == ((0, 0), (len(PROGRAMS), 0), (0, 0))
    assert losses[0] == losses[1] == losses[2]
    assert {entry.name.partition("-")[0] for entry in entries.glob("*-cache")} >= PROGRAMS


def inspected(times: int, between: Callable[[], object] = lambda: None) -> list[meshpar.Inspection]:
    """Inspections of a small program, compiled `times` times from one line; its result is checked each time."""
    found = []
    x = np.linspace(0, 1, 4096, dtype=np.float32).reshape(64, 64)
    for _ in range(times):
        jax.clear_caches()
        compiled = jax.jit(lambda x: jnp.sin(x) @ x.T).lower(x).compile()
        np.testing.assert_allclose(compiled(x), np.sin(x) @ x.T, rtol=1e-5)
        found.append(meshpar.inspect(compiled))
        between()
    return found


@pytest.mark.slow
def test_a_program_from_the_cache_reads_like_a_compiled_one(entries, events):
    compilation_cache.enable()
    fresh, cached = inspected(2)
    assert events == [MISS, HIT]
    assert cached == fresh
    assert fresh.flops == 2 * 64**3
    assert fresh.memory.total > 0


def flipped(data: bytes) -> bytes:
    """Flips a whole byte: a single bit may be one that zlib does not read."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) // 2], flipped, lambda data: b"\0" * len(data)],
    ids=["empty", "truncated", "a flipped byte", "zeros"],
)
def test_a_damaged_entry_is_not_used(entries, events, damage):
    def damage_all() -> None:
        for entry in entries.glob("*-cache"):
            entry.write_bytes(damage(entry.read_bytes()))

    compilation_cache.enable()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry for 'jit__lambda'"):
        fresh, again = inspected(2, between=damage_all)
    assert again == fresh
    assert HIT not in events


def test_half_an_entry_of_a_killed_process_is_replaced(entries, events):
    states = iter(["half", "whole", "whole"])

    def next_process() -> None:
        if next(states) == "half":
            for entry in entries.glob("*-cache"):
                entry.write_bytes(b"half")
                Path(str(entry).removesuffix("-cache") + "-atime").unlink()
        compilation_cache.remove_unfinished(entries)

    compilation_cache.enable()
    inspected(3, between=next_process)
    assert events == [MISS, MISS, HIT], "a finished entry stays"


def test_the_same_program_from_another_line_is_compiled_anew(entries, events):
    compilation_cache.enable()
    first = jax.jit(lambda x: x * 3).lower(1.0).compile()
    other = jax.jit(lambda x: x * 3).lower(1.0).compile()
    assert events == [MISS, MISS]
    assert first.as_text() != other.as_text(), "the text names the line"


def test_a_program_from_the_cache_has_no_warnings_so_inspect_disables_it(entries):
    compilation_cache.enable()
    counts = []
    for context in (nullcontext, nullcontext, compilation_cache.disabled, nullcontext):
        jax.clear_caches()
        lowered = jax.jit(crossing).lower(array((16, 32), PartitionSpec(), **GRID))
        with context(), compiling() as warnings:
            lowered.compile()
        counts.append(len(warnings))
    assert counts == [1, 0, 1, 0]


def test_programs_for_other_machines_are_not_cached(entries, events, monkeypatch):
    compilation_cache.enable()
    inspected(1)
    assert events == [MISS]
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setenv(name, "unchanged")
    process.compile_only()
    inspected(1)
    assert events == [MISS], "nothing more"


def test_jax_s_own_settings_take_precedence(entries, tmp_path, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert jax.config.jax_compilation_cache_max_size == -1
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir == str(entries)
    assert jax.config.jax_compilation_cache_max_size == -1


def test_jax_s_own_switch_disables_the_cache(entries):
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir is None
    assert not entries.exists()


def test_the_oldest_entries_are_removed_at_the_limit(entries, monkeypatch):
    compilation_cache.enable()
    inspected(1)
    size = sum(entry.stat().st_size for entry in entries.glob("*-cache"))
    monkeypatch.setitem(compilation_cache._DEFAULTS, "jax_compilation_cache_max_size", 2 * size)
    jax.config.update("jax_compilation_cache_dir", None)
    jax_cache.reset_cache()
    compilation_cache.enable()
    for n in range(8):
        jax.jit(lambda x, n=n: (jnp.sin(x) @ x.T).sum() * n).lower(jnp.ones((64, 64))).compile()
    held = sum(entry.stat().st_size for entry in entries.glob("*-cache"))
    assert size < held <= 2 * size


def test_the_folder_is_private_and_belongs_to_one_kind_of_cpu(entries, monkeypatch):
    compilation_cache.enable()
    assert stat.S_IMODE(entries.stat().st_mode) == 0o700
    read = Path.read_text

    def another_cpu(path: Path, *args: object, **options: object) -> str:
        return "flags : fpu sse2\n\n" if path == Path("/proc/cpuinfo") else read(path)

    monkeypatch.setattr(Path, "read_text", another_cpu)
    assert compilation_cache.folder() != entries
    assert compilation_cache.folder().parent == entries.parent


def test_a_relative_cache_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compilation_cache.folder().is_relative_to(tmp_path / ".cache" / "meshpar")


def test_a_cache_that_cannot_be_written_is_a_warning(entries, tmp_path, events):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.warns(
        RuntimeWarning, match=r"are not stored: .*/cache/.* cannot be written: Not a directory; set JAX_"
    ):
        compilation_cache.enable()
    inspected(1)
    assert events == []


@pytest.mark.slow
def test_two_processes_fill_one_cache_at_the_same_time(entries, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    main = [sys.executable, "-W", "error", "-c", "from meshpar.cli import main; main()"]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_PLATFORMS": "cpu"}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def started(name: str) -> subprocess.Popen[str]:
        words = ["train", str(tmp_path / "config.yaml"), f"run_dir={tmp_path / name}", "--json"]
        pipe = subprocess.PIPE
        return subprocess.Popen([*main, *words], stdout=pipe, stderr=pipe, text=True, env=environment)

    losses = []
    for running in ([started("a"), started("b")], [started("c")]):
        for child in running:
            out, err = child.communicate(timeout=300)
            assert (child.returncode, err) == (0, "")
            records = map(json.loads, out.splitlines())
            losses.append([record["loss"] for record in records if record["kind"] == "train"])
        assert all(Path(str(entry).removesuffix("cache") + "atime").exists() for entry in entries.glob("*-cache"))
    assert losses[0] == losses[1] == losses[2]
    assert len(list(entries.glob("jit_step-*-cache"))) == 1


JOINED = f"""
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from meshpar.mesh import compilation_cache, process
from meshpar.mesh.join import join

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
compilation_cache._DEFAULTS["jax_persistent_cache_min_compile_time_secs"] = 0.0
join()
process.simulate(4)
compilation_cache.enable()
mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("data"))
x = jax.make_array_from_callback((8,), sharding, lambda index: jnp.arange(8.0)[index])
events.clear()
total = jax.jit(lambda x: jnp.sum(jnp.cos(x) * x)).lower(x).compile()
print(events.count("{HIT}"), float(total(x)))
"""


def test_joined_processes_of_one_machine_load_what_those_before_them_compiled(tmp_path, monkeypatch):
    """On CPUs only the first one does: it writes, and JAX's key has the devices as each process sees them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE", raising=False)
    printed = []
    for _ in range(2):
        ended = Group([sys.executable, "-c", JOINED], 2, tmp_path, is_quiet=True).run()
        logs = [(tmp_path / f"process-{index}.log").read_text() for index in range(2)]
        assert ended.code == 0, logs
        printed.append([log.splitlines()[-1].split() for log in logs])
    before, after = [[hits for hits, _ in each] for each in printed]
    assert before == ["0", "0"]
    assert after[0] == "1"
    results = {result for each in printed for _, result in each}
    assert len(results) == 1
    assert abs(float(results.pop()) - sum(i * math.cos(i) for i in range(8))) < 1e-4
