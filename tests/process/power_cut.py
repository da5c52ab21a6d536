"""A disk whose power can be cut: an ext4 file system in an image, on a loop device.

A copy of the image is what the disk held at that instant: what the file system had sent to it, and nothing that was
only written to memory. The writer is stopped while the image is copied, and the image is read again until two reads in
a row are equal, so that the copy shows one instant. A disk's own cache, which a sync empties, is not modelled.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEGABYTES = 48


def make_image(path: Path) -> None:
    """Makes an empty file system."""
    with path.open("wb") as file:
        file.truncate(MEGABYTES * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", path], check=True, capture_output=True)


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """Mounts an image; its journal is replayed, as at the next start of a machine."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, capture_output=True)


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stops a process during the body."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def copy_image(image: Path, copy: Path) -> None:
    """Copies the disk as it is now."""
    before = b""
    now = image.read_bytes()
    while now != before:
        before = now
        now = image.read_bytes()
    copy.write_bytes(now)


def why_not(folder: Path) -> str | None:
    """Why no image can be mounted here; None if one can."""
    if os.geteuid() != 0:
        return "only root can mount an image of a disk"
    if not shutil.which("mkfs.ext4"):
        return "mkfs.ext4 is missing"
    image = folder / "probe.img"
    try:
        make_image(image)
        with mounted(image, folder / "probe"):
            return None
    except subprocess.CalledProcessError as error:
        return f"no image can be mounted: {error.stderr.decode().strip()}"
    finally:
        image.unlink(missing_ok=True)
