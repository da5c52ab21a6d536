"""The persistent compilation cache: programs that were compiled by earlier processes are loaded from disk.

JAX's own cache is used, in a folder of the user's cache directory. An entry is found by a hash of the program with its
source lines, the compiler's options and version, XLA_FLAGS and the kind of devices, so a changed model is compiled
anew, and a report never shows the source lines of an older program.

Safety: an entry contains machine code, which XLA:CPU compiles for the CPU at hand without regard to others that share
the disk (openxla/xla#44565), so each kind of CPU has a folder of its own. Only its owner can write there. An entry that
a process was writing when it was killed is removed by the next process. An entry that cannot be decompressed is not
used, with a warning.
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

    It changes nothing where the user configured JAX's cache: JAX_COMPILATION_CACHE_DIR is the place and
    JAX_ENABLE_COMPILATION_CACHE=false turns it off. Joined processes must find the same programs, or those that compile
    wait for the others: if they are on several machines, they have a cache only in a shared folder, which the user must
    name.

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
    """Compiles every program anew from here on."""
    _set(False)


@contextmanager
def disabled() -> Iterator[None]:
    """Compiles every program within anew."""
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

    JAX writes an entry in place and never overwrites one. Without this a process that is killed meanwhile would leave
    half an entry, which all later processes would read in vain.
    """
    for entry in entries.glob("*-cache"):
        last_used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
        with suppress(FileNotFoundError):
            if last_used.stat().st_size:
                continue
        entry.unlink(missing_ok=True)


def _fingerprint() -> str:
    """A hash of the CPU's model and instructions; of the machine's name where the kernel does not say them."""
    lines: list[str] = []
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        lines = [line for line in first.splitlines() if line.startswith(_OF_THE_CPU)]
    return hashlib.sha256("\n".join(lines or [platform.node()]).encode()).hexdigest()[:12]


def _is_enabled() -> bool:
    return jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]


def _set(enabled: bool) -> None:
    """JAX decides at its first program whether it has a cache; only a reset lets it decide again."""
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()
