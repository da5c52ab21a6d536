"""A program that imports a model into a train state and prints its peak memory, for test_memory.py.

The peak is the kernel's VmHWM, which `clear_refs` resets to the memory that is resident now.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

from meshpar.config import Config
from meshpar.data import Synthetic
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import prepare
from meshpar.interop import huggingface
from meshpar.interop.pretrained import PretrainedBeginning
from meshpar.interop.safetensors import Tensor
from meshpar.models import Llama
from meshpar.optim import SGD

SIZES = {"num_layers": 12, "hidden_size": 512, "num_heads": 8, "intermediate_size": 2048, "vocab_size": 24576}


def resident(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def main(folder: Path, how: str) -> None:
    run = Run(
        model=Llama(**SIZES),
        data=Synthetic(vocab_size=SIZES["vocab_size"], seq_len=16),
        optim=SGD(lr=1e-3, momentum=0.0),
        precision=Precision(),
        num_steps=1,
        run_dir=folder / "run",
    )
    prepared = prepare(run)
    pretrained = huggingface.open_pretrained(folder)
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())
    held = {}
    if how == "all at once":
        held = {name: tensor.read() for name, tensor in pretrained.tensors.items()}

        def read(tensor, rows=slice(None), columns=slice(None)):
            whole = next(array for array in held.values() if array.shape == tensor.shape)
            return whole[(rows, columns)[: len(tensor.shape)]]

        Tensor.read = read
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS") - sum(array.nbytes for array in held.values())
    state = jax.block_until_ready(PretrainedBeginning(prepared, pretrained).state())
    needed = sum(array.nbytes for array in jax.tree.leaves(state))
    print(needed, resident("VmHWM") - before)


if __name__ == "__main__":
    assert issubclass(Run, Config)
    main(Path(sys.argv[1]), sys.argv[2])
