from . import collectives, convert, data, loggers, models, optim, pipeline
from .checkpoint.checkpoints import About, Checkpoints, checkpoints
from .checkpoint.kept import Kept
from .checkpoint.saved import Saved
from .collectives.reduction import Reduce
from .errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    ContractWarning,
    DataError,
    DataWarning,
    MeshError,
    MeshparError,
    PlanError,
    ProgramError,
    ProofError,
    RunError,
    ScheduleError,
    ShardingError,
)
from .experiment.actions import explain, fit, inspect
from .experiment.config import Init, Precision, Run, load
from .experiment.prepare import Prepared, prepare
from .inspection.contract import Allowed, Contract
from .inspection.findings.finding import Finding
from .inspection.findings.planned import Planned
from .inspection.inspect import Inspection
from .inspection.program.compiling import compiling
from .inspection.program.hlo import Collective, collectives_of, total_sent_bytes
from .inspection.report.report import Report
from .interop.flax_model import Import
from .interop.training import training
from .mesh.layout import AxisSizes, MeshLayout
from .mesh.process import simulate
from .models import GPT, Llama
from .nn.lora import LoRA
from .optim import SGD, Adafactor, AdamW, Lion, Muon
from .optim.ema import averaged
from .optim.freeze import Freeze
from .parallel.context import ParallelContext, constrain
from .parallel.pipeline.schedule import (
    ZBV,
    GPipe,
    Interleaved,
    OneFOneB,
    PipeDream2BW,
    Written,
    ZeroBubbleH1,
    ZeroBubbleH2,
)
from .parallel.strategies import FullySharded, Parallel, TensorParallel
from .plan.fit import Judgement
from .proof.prove import prove
from .proof.verdict import Proof
from .serve.generate import Completion, Generated, generate
from .sharding.resolve import Placement, resolve
from .sharding.rules import AxisRules
from .sharding.spec import ArraySpec
from .train.data import (
    Arrow,
    Bytes,
    Ids,
    Jsonl,
    Mixture,
    Numpy,
    Parquet,
    Part,
    StandardLibrary,
    Synthetic,
    Text,
    TokenizerFile,
)
from .train.loop.signals import Interrupted
from .train.loop.stopping import EarlyStopping
from .train.loss import Criterion, Distill, Tally
from .train.records.loggers import MLflow, TensorBoard, WandB
from .train.training import Training

__all__ = [
    "GPT",
    "SGD",
    "ZBV",
    "About",
    "Adafactor",
    "AdamW",
    "Allowed",
    "ArraySpec",
    "Arrow",
    "AxisRules",
    "AxisSizes",
    "Bytes",
    "CheckpointError",
    "Checkpoints",
    "Collective",
    "Completion",
    "ConfigError",
    "Contract",
    "ContractError",
    "ContractWarning",
    "Criterion",
    "DataError",
    "DataWarning",
    "Distill",
    "EarlyStopping",
    "Finding",
    "Freeze",
    "FullySharded",
    "GPipe",
    "Generated",
    "Ids",
    "Import",
    "Init",
    "Inspection",
    "Interleaved",
    "Interrupted",
    "Jsonl",
    "Judgement",
    "Kept",
    "Lion",
    "Llama",
    "LoRA",
    "MLflow",
    "MeshError",
    "MeshLayout",
    "MeshparError",
    "Mixture",
    "Muon",
    "Numpy",
    "OneFOneB",
    "Parallel",
    "ParallelContext",
    "Parquet",
    "Part",
    "PipeDream2BW",
    "Placement",
    "PlanError",
    "Planned",
    "Precision",
    "Prepared",
    "ProgramError",
    "Proof",
    "ProofError",
    "Reduce",
    "Report",
    "Run",
    "RunError",
    "Saved",
    "ScheduleError",
    "ShardingError",
    "StandardLibrary",
    "Synthetic",
    "Tally",
    "TensorBoard",
    "TensorParallel",
    "Text",
    "TokenizerFile",
    "Training",
    "WandB",
    "Written",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "averaged",
    "checkpoints",
    "collectives",
    "collectives_of",
    "compiling",
    "constrain",
    "convert",
    "data",
    "explain",
    "fit",
    "generate",
    "inspect",
    "load",
    "loggers",
    "models",
    "optim",
    "pipeline",
    "prepare",
    "prove",
    "resolve",
    "simulate",
    "total_sent_bytes",
    "training",
]
