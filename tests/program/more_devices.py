"""Compares what a compiled step with collective matmuls over more than eight devices sends with the traced step.

JAX_NUM_CPU_DEVICES=9 python -m tests.program.more_devices ring none
"""

from __future__ import annotations

import sys

import jax

from meshpar import AdamW, AxisRules, Llama, MeshLayout, Run, Synthetic, prepare
from meshpar.parallel.strategies import Parallel, TensorParallel
from tests.program.test_bytes import sent_as_written


def main(way: str, remat: str) -> None:
    n = jax.device_count()
    run = Run(
        model=Llama(
            num_layers=2, hidden_size=2 * n, num_heads=n, intermediate_size=4 * n, vocab_size=2 * n, remat=remat
        ),
        data=Synthetic(batch_size=2, seq_len=2 * n, vocab_size=2 * n),
        optim=AdamW(lr=1e-3),
        mesh=MeshLayout(tensor=n),
        rules=AxisRules(preset="megatron_sp"),
        parallel=Parallel(tensor=TensorParallel(overlap=way)),
        num_steps=1,
        run_dir="unused",
    )
    step = prepare(run)
    sent = sent_as_written(step)
    print("equal" if sent == step.traced_bytes else f"compiled: {sent}, traced: {step.traced_bytes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
