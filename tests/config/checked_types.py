"""Configs in a user's code, as a type checker reads them.

`scripts/check.sh` checks that the configs of `accepted` have no type error and that each line of `refused` has one: a
comment that ignores no error is an error itself. `test_python_configs.py` calls both.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import meshpar
from meshpar import Freeze, LossConfig, Retention, Run, TensorBoard

LLAMA = {"kind": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
FOLDER = Path("folder")


def in_short() -> Run:
    """Each section of a run as the shorthand, or the mapping, that a file may contain."""
    return Run(
        model=LLAMA,
        loss="mine:loss",
        data={"kind": "synthetic"},
        optim={"kind": "adamw", "lr": 1e-3},
        lora={"paths": ["blocks.**"]},
        distill={"teacher": "runs/teacher"},
        freeze=["blocks.**", ["a", "b"], {"paths": "c", "until": 3}],
        mesh={"fsdp": 2, "dcn": {"data": 2}},
        rules=["fsdp", "megatron"],
        parallel={"tensor": {"overlap": "ring"}},
        precision={"compute": "bfloat16"},
        num_steps=10,
        contract={"all_to_all": 0},
        run_dir="runs/one",
        eval_every=5,
        init={"from_hf": "folder"},
        checkpoints=5,
        early_stopping={"patience": 3},
        loggers=["tensorboard", {"kind": "wandb", "mode": "offline"}],
    )


def in_full() -> Run:
    """The same run, whose sections are configs."""
    return Run(
        model=meshpar.Llama(num_layers=1, hidden_size=8, num_heads=2, intermediate_size=8),
        loss=LossConfig(target="mine:loss"),
        data=meshpar.Synthetic(),
        optim=meshpar.AdamW(lr=1e-3),
        lora=meshpar.LoRA(paths=("blocks.**",)),
        distill=meshpar.Distill(teacher=Path("runs/teacher")),
        freeze=(Freeze(paths=("blocks.**",)), Freeze(paths=("a", "b")), Freeze(paths=("c",), until=3)),
        mesh=meshpar.MeshLayout(fsdp=2, dcn=meshpar.AxisSizes(data=2)),
        rules=meshpar.AxisRules(preset=("fsdp", "megatron")),
        parallel=meshpar.Parallel(tensor=meshpar.TensorParallel(overlap="ring")),
        precision=meshpar.Precision(compute="bfloat16"),
        num_steps=10,
        contract=meshpar.Contract(all_to_all=meshpar.Allowed(times=0)),
        run_dir=Path("runs/one"),
        eval_every=5,
        init=meshpar.Init(from_hf=FOLDER),
        checkpoints=Retention(every=5),
        early_stopping=meshpar.EarlyStopping(patience=3),
        loggers=(TensorBoard(), meshpar.WandB(mode="offline")),
    )


def accepted() -> list[object]:
    """Shorthands of single configs."""
    return [
        meshpar.AxisRules(preset="fsdp", embed=["fsdp"], heads=()),
        meshpar.AdamW(lr=1, schedule={"kind": "cosine", "warmup_steps": 3}),
        meshpar.Distill(teacher="runs/teacher", rules="fsdp"),
        meshpar.Freeze(paths="blocks.**"),
        meshpar.Init(from_checkpoint="runs/one", exclude=["params.head.**"]),
        meshpar.Import(target="mine:build", activation_dims=["classes"]),
        meshpar.Llama(num_layers=2, hidden_size=8, num_heads=2, intermediate_size=8, window=4, global_layers=[1]),
        meshpar.GPT(num_layers=2, hidden_size=8, num_heads=2, intermediate_size=8, attention="blocks"),
        meshpar.Mixture(parts=[{"weight": 1.0, "data": {"kind": "synthetic"}}]),
        meshpar.Numpy(path=FOLDER, tokenizer={"kind": "ids", "vocab_size": 8, "bos": 0}),
        meshpar.OneFOneB(num_microbatches=4, cut=[1, 2]),
        meshpar.Parallel(pipeline={"kind": "1f1b", "num_microbatches": 4}, gradient_reduction={"across": "int8"}),
        meshpar.LocalUpdates(every=8, outer="nesterov", compress={"kind": "int8", "error_feedback": True}),
        meshpar.Reduce(within="bf16", across={"kind": "powersgd", "rank": 2}),
        meshpar.ScheduleFile(num_microbatches=4, path="orders.txt"),
        meshpar.Text(path=FOLDER, tokenizer="tokenizer.json"),
    ]


def refused() -> tuple[Callable[[], object], ...]:
    """What neither the type checker nor the constructor accepts."""
    plain = in_full()
    return (
        lambda: Freeze(paths=3),  # pyright: ignore[reportArgumentType]
        lambda: Freeze(path="a"),  # pyright: ignore[reportCallIssue]
        lambda: meshpar.AdamW(lr=1, schedule=3),  # pyright: ignore[reportArgumentType]
        lambda: meshpar.AxisRules(embed=3),  # pyright: ignore[reportArgumentType]
        lambda: meshpar.Init(from_hf=3),  # pyright: ignore[reportArgumentType]
        lambda: meshpar.LoRA(paths="blocks.**"),  # pyright: ignore[reportArgumentType]
        lambda: meshpar.MeshLayout(dcn=2),  # pyright: ignore[reportArgumentType]
        lambda: meshpar.Parallel(pipeline="1f1b"),  # pyright: ignore[reportArgumentType]
        lambda: meshpar.Reduce(across=8),  # pyright: ignore[reportArgumentType]
        lambda: Run(model=LLAMA, data=plain.data, optim="adamw", num_steps=1, run_dir="a"),  # pyright: ignore[reportArgumentType]
        lambda: Run(model=LLAMA, data=plain.data, optim=plain.optim, num_steps=1, run_dir=3),  # pyright: ignore[reportArgumentType]
    )


def sections_are_read_as_configs(run: Run) -> tuple[Retention, tuple[str, ...], str | None, Path]:
    """Fields have the types of configs when read, whatever they were set from."""
    return run.checkpoints, run.freeze[0].paths, run.loss.target, run.run_dir
