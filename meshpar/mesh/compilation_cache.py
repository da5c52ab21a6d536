"""The persistent compilation cache: a process loads programs from disk that an earlier process compiled.

It is JAX's own cache, in a folder of the user's cache directory. The key of an entry is a hash of the program with its
source lines, the compiler's options and version, XLA_FLAGS and the kind of devices. So a changed model is compiled
again, and a report never shows the source lines of an older program.

Safety: an entry contains machine code for the CPU that compiled it, which another CPU that shares the disk may not be
able to run (openxla/xla#44565). So each kind of CPU has its own folder, in which only the owner can write. The next
process removes an entry whose writer was killed. An entry that cannot be decompressed is not used, with a warning.
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshpar.mesh import join

MAX_BYTES = 2**30
"""The size at which the entries that were not used for the longest time are removed."""
MIN_COMPILE_S = 0.1
"""Programs that compile in less time are not stored."""

_DEFAULTS: dict[str, Any] = {
    "jax_compilation_cache_max_size": MAX_BYTES,
    "jax_persistent_cache_min_compile_time_secs": MIN_COMPILE_S,
    "jax_compilation_cache_include_metadata_in_key": True,
}
_OF_THE_CPU = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
"""The lines of /proc/cpuinfo that are the same for all CPUs of a kind, on x86 and ARM."""


def enable() -> None:
    """Stores compiled programs in `folder()`, and loads them from there.

    The user's configuration of JAX's cache comes first: JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=false turns the cache off. Joined processes must all find a program or all compile it;
    otherwise some wait for others. So processes on several machines have a cache only if JAX_COMPILATION_CACHE_DIR
    names a shared folder.

    Warns:
      RuntimeWarning: the folder cannot be written; programs are compiled, and not stored.
    """
    configured: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    is_on_hosts = jax.distributed.is_initialized() and not join.is_on_one_host()
    if configured or not _is_enabled() or is_on_hosts:
        return
    entries = folder()
    try:
        entries.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(entries, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")
        remove_unfinished(entries)
    except OSError as error:
        fix = "set JAX_COMPILATION_CACHE_DIR to another folder, or use --no-cache"
        what = f"{entries} cannot be written: {error.strerror}"
        warnings.warn(f"compiled programs are not stored: {what}; {fix}", RuntimeWarning, stacklevel=2)
        return
    for option, value in _DEFAULTS.items():
        if option.upper() not in os.environ:
            jax.config.update(option, value)
    jax.config.update("jax_compilation_cache_dir", str(entries))


def disable() -> None:
    """Turns the cache off for the rest of the process."""
    _set(False)


@contextmanager
def disabled() -> Iterator[None]:
    """Turns the cache off inside the `with` block."""
    before = _is_enabled()
    _set(False)
    try:
        yield
    finally:
        _set(before)


def folder() -> Path:
    """The folder of this user's entries for this kind of CPU: in XDG_CACHE_HOME, by default `~/.cache`."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    caches = configured if configured.is_absolute() else Path.home() / ".cache"
    return caches / "meshpar" / "programs" / f"{platform.machine()}-{_fingerprint()}"


def remove_unfinished(entries: Path) -> None:
    """Removes the entries without a time of last use, which JAX writes last.

    JAX writes an entry in place and never overwrites one. A process that is killed while it writes leaves a part of an
    entry, which every later process would try to read.
    """
    for entry in entries.glob("*-cache"):
        last_used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
        with suppress(FileNotFoundError):
            if last_used.stat().st_size:
                continue
        entry.unlink(missing_ok=True)


def _fingerprint() -> str:
    """A hash of the CPU's model and instructions; of the machine's name if the kernel does not report them."""
    lines: list[str] = []
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        lines = [line for line in first.splitlines() if line.startswith(_OF_THE_CPU)]
    return hashlib.sha256("\n".join(lines or [platform.node()]).encode()).hexdigest()[:12]


def _is_enabled() -> bool:
    return jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]


def _set(enabled: bool) -> None:
    """JAX reads this option at its first program; a reset makes it read the option again."""
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()
