"""Target machines: descriptions of devices, for which XLA compiles real programs without the hardware.

    v5e:16x16    a slice of TPU chips, by the shape of its torus
    h100:64x8    64 hosts of 8 GPUs

Programs are compiled, and reports are read from their text; nothing runs. TPUs need libtpu, GPUs the CUDA plugin.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from jax.experimental import topologies

from meshpar.errors import MeshError, nearest
from meshpar.mesh.hardware import CHIPS, FOR_XLA, Chip

TPUS = {"v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "TPU7x"}
GPUS = {
    "a100": "A100 80GB SXM",
    "a100_40gb": "A100 40GB",
    "h100": "H100 SXM",
    "h200": "H200 SXM",
    "b200": "B200",
}
PLANNED = {"h100_hbm2e": "H100 96GB HBM2e", "h100_pcie": "H100 PCIe", "gb200": "GB200"}
"""GPUs that a plan estimates, and that XLA has no description of."""
_CUDA = {"jax_cuda12_plugin", "jax_cuda13_plugin"}
_FORM = re.compile(r"(?P<chip>\w+):(?P<shape>\d+(?:x\d+)*)$")


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    Args:
      text: the machine as the user wrote it.
      chip: the kind of its chips.
      shape: chips along each side of a TPU's torus; or hosts, and GPUs per host.

    >>> parse("v5p:4x4x8").num_chips
    128
    """

    text: str
    chip: Chip
    shape: tuple[int, ...]
    is_tpu: bool

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    def devices(self) -> list[Any]:
        """The JAX devices of the machine.

        Raises:
          MeshError: the compiler for it is not installed, or does not know the machine.
        """
        modules, extra = ({"libtpu"}, "tpu-target") if self.is_tpu else (_CUDA, "gpu-target")
        if not self.is_tpu and self.chip.name not in FOR_XLA:
            near = "b200" if self.chip.name == "GB200" else "h100"
            why = f"XLA has no description of a {self.chip.name}"
            raise MeshError(f"--target {self.text}: {why}; compile for {near}, whose kernels are the same")
        if not any(map(find_spec, modules)):
            fix = f"install it with: pip install 'meshpar[{extra}]'"
            raise MeshError(f"--target {self.text}: its compiler is not installed; {fix}")
        try:
            return list(self._topology().devices)
        except Exception as error:
            report = str(error).strip().partition("\n")[0]
            raise MeshError(f"--target {self.text}: the compiler does not know this machine: {report}") from None

    def _topology(self) -> Any:
        if self.is_tpu:
            return topologies.get_topology_desc(self.text, "tpu")
        hosts, gpus = [1, *self.shape][-2:]
        gpu = FOR_XLA[self.chip.name]
        return topologies.get_topology_desc("", platform="cuda", topology=f"1x{hosts}x{gpus}", target_config=gpu)


def parse(text: str) -> Target:
    """Reads a machine, such as `v5e:16x16`.

    Raises:
      MeshError: no machine matches the text; or it has different chips, which no compiler knows.
    """
    if "+" in text:
        why = "no compiler knows a machine of different chips"
        raise MeshError(f"--target {text}: {why}; `meshpar plan` estimates one")
    match = _FORM.match(text)
    if not match:
        raise MeshError(f"--target {text}: not a machine; write chip:shape, as in v5e:4x4, v5p:4x4x4 or h100:4x8")
    known = TPUS | GPUS | PLANNED
    name = match["chip"].lower()
    if name not in known:
        near = nearest(name, known)
        meant = f"did you mean {near}? There are" if near else "there are"
        raise MeshError(f"--target {text}: no chip is called {match['chip']!r}; {meant} {', '.join(known)}")
    chip = next(chip for chip in CHIPS if chip.name == known[name])
    shape = tuple(int(size) for size in match["shape"].split("x"))
    if 0 in shape:
        raise MeshError(f"--target {text}: a machine with a size of 0 has no devices; write at least 1")
    if name not in TPUS and len(shape) > 2:
        raise MeshError(f"--target {text}: write hosts x GPUs on each, as in {name}:4x8")
    return Target(text, chip, shape, name in TPUS)
