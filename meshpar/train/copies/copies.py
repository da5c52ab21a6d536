"""Copies a run's state to the memory of its hosts, and finds the newest copy that survived.

Each process writes its part to the memory of its host. If no other host has the same part, it also sends it to a
process of another host. So a copy survives all processes, and the loss of a host. The idea is Gemini's (Wang et al.,
SOSP 2023).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshpar.checkpoint import memory
from meshpar.checkpoint.agree import everyones, of_first, on_all
from meshpar.errors import CheckpointError, DamagedError, DamagedWarning
from meshpar.train.copies.parts import Holders, Layout, Part
from meshpar.tree import flatten_with_paths, map_with_path


@dataclass(frozen=True)
class WholeCopy:
    """A copy of which every part is intact on some host.

    Args:
      folder: the folder of its files on this host.
      senders: process whose host lost its part -> the process that sends it.
    """

    folder: Path
    step: int
    senders: Mapping[int, int]


class Copies:
    """The copies of one run. All processes call each method.

    Args:
      run_dir: of the run.
      records: a file whose first line distinguishes the run from an earlier one in the same directory.
      structs: tree of structs with shardings, of the state.
      fixed: JSON data that must be equal for a run to resume from a copy, such as its config.

    Raises:
      CheckpointError: a host has no folder in memory, or hosts have different numbers of processes.

    Memory: each host has room for two copies of the parts that it writes, and for a third while `save` works.
    """

    def __init__(self, run_dir: Path, records: Path, structs: Any, fixed: Mapping[str, Any]):
        self.folder = memory.folder_of(run_dir)
        on_all(lambda: memory.make(self.folder))
        self.layout = Layout(flatten_with_paths(structs))
        self._holders = Holders(self.layout.parts, everyones(f"{socket.gethostname()} {self.folder}"))
        self._distance = self._holders.distance
        arrays = {path: [str(s.dtype), s.shape, self.layout.regions[path]] for path, s in self.layout.structs.items()}
        self._fixed = {**fixed, "arrays": arrays}
        self._structs = structs
        self._records = records
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._pending: Future[None] | None = None
        self._before: int | None = None

    @property
    def num_hosts(self) -> int:
        return len(set(self._holders.hosts))

    def save(self, step: int, state: Any) -> None:
        """Copies a state to the host and writes it in the background: the state may be donated at once.

        It waits until the previous copy is written on every host.

        Raises:
          CheckpointError: the previous copy could not be written on some host.

        Communication: each process's part once, if no other host has it.
        """
        on_all(self.wait)
        arrays = flatten_with_paths(state)
        process = jax.process_index()
        parts = {self._holders.parts[process]: self.layout.own(arrays)}
        if self._distance:
            parts[self._holders.parts[process - self._distance]] = self.layout.sent(arrays, self._distance)
        written = {part: parts[part] for part in self._holders.writes(process)}
        self._pending = self._thread.submit(self._write, self._current(), step, self._before, written)
        self._before = step

    def wait(self) -> None:
        """Returns when the last copy is written on this host.

        Raises:
          CheckpointError: it could not be written, such as when the memory is full.
        """
        pending = self._pending
        self._pending = None
        try:
            if pending:
                pending.result()
        except OSError as error:
            what = f"a copy of the state cannot be written to {self.folder}: {error.strerror}"
            fix = f"free some memory, set {memory.MEMORY} to another folder, or leave checkpoints.memory_every out"
            raise CheckpointError(f"{what}; {fix}") from None

    def newest(self, after: int) -> WholeCopy | None:
        """The newest intact copy after a step; None if there is none. All others are removed.

        It warns about damaged files.
        """
        current = self._current()
        found = self._agree(current, after)
        for folder in self.folder.iterdir():
            if folder != current:
                shutil.rmtree(folder, ignore_errors=True)
        self._before = found and found.step
        memory.keep(current, {self._before})
        return found

    def restore(self, copy: WholeCopy) -> Any:
        """The state of the copy that `newest` found.

        Communication: if hosts lost their parts, these are sent to them; other processes send as many zeros.
        """
        process = jax.process_index()
        to = {sender: receiver for receiver, sender in copy.senders.items()}
        parts = {part: self._read(copy, part) for part in self._reads(copy)}
        own = parts.get(self._holders.parts[process])
        if to:
            outgoing = parts[self._holders.parts[to[process]]] if process in to else None
            received = self.layout.received(outgoing, process, to)
            own = received if process in copy.senders else own
        assert own
        arrays = self.layout.placed(own)
        return map_with_path(lambda path, _: arrays[path], self._structs)

    def discard(self) -> None:
        """Removes the copies on this host, because a checkpoint is newer, or because the copies may be wrong."""
        with suppress(CheckpointError):
            self.wait()
        self._before = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self._thread.shutdown()

    def _current(self) -> Path:
        """The folder of this run, config and layout."""
        first = self._records.read_bytes().partition(b"\n")[0] if self._records.exists() else b""
        run = of_first(int.from_bytes(hashlib.sha256(first).digest()[:4]) >> 1)
        text = json.dumps({**self._fixed, "run": run}, sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _agree(self, folder: Path, after: int) -> WholeCopy | None:
        """Selects the newest step of which every part is intact on some host. A damaged file counts as missing."""
        here = memory.parts(folder)
        while True:
            texts = everyones(json.dumps({step: sorted(parts) for step, parts in here.items()}))
            held = [{int(step): set(parts) for step, parts in json.loads(text).items()} for text in texts]
            steps = {step for each in held for step in each if step > after}
            found = (
                WholeCopy(folder, step, senders)
                for step in sorted(steps, reverse=True)
                if (senders := self._holders.senders([each.get(step, set()) for each in held])) is not None
            )
            copy = next(found, None)
            if copy is None:
                return None
            damaged = [part for part in self._reads(copy) if not self._is_whole(copy, part)]
            here[copy.step] = here.get(copy.step, set()).difference(damaged)
            if not any(map(json.loads, everyones(json.dumps(damaged)))):
                return copy

    def _reads(self, copy: WholeCopy) -> set[int]:
        """The parts that this process reads: its own part, if its host has a copy, and the part that it sends."""
        process = jax.process_index()
        wanted = [receiver for receiver, sender in copy.senders.items() if sender == process]
        if process not in copy.senders:
            wanted.append(process)
        return {self._holders.parts[other] for other in wanted}

    def _is_whole(self, copy: WholeCopy, part: int) -> bool:
        try:
            self._read(copy, part)
        except DamagedError as error:
            warnings.warn(f"{error}; it is not used", DamagedWarning, stacklevel=2)
            return False
        return True

    def _read(self, copy: WholeCopy, part: int) -> Part:
        return self.layout.parsed(memory.read(copy.folder / f"{copy.step}.{part}"), part)

    def _write(self, folder: Path, step: int, before: int | None, written: Mapping[int, Part]) -> None:
        """Writes the parts of a step. It keeps the previous copy, because other hosts may not have this one yet."""
        memory.keep(folder, {before, step})
        for part, arrays in written.items():
            memory.write(folder / f"{step}.{part}", (shard for shards in arrays.values() for shard in shards))


@dataclass(frozen=True)
class CopiedBeginning:
    """The first state of a training that resumes from a copy."""

    copies: Copies
    copy: WholeCopy

    def state(self) -> Any:
        return self.copies.restore(self.copy)

    def record(self) -> dict[str, Any]:
        """The entry for the run's records; see `Beginning.record`."""
        hosts = "this host" if self.copies.num_hosts == 1 else f"{self.copies.num_hosts} hosts"
        source = f"the copy of step {self.copy.step} in the memory of {hosts}"
        paths = sorted(self.copies.layout.structs)
        return {"source": source, "restored": paths, "initialized": [], "ignored": [], "changed": {}}
