from . import collectives
from .adopt import training
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
    MeshError,
    MeshparError,
    PlanError,
    ProgramError,
    ProofError,
    ScheduleError,
    ShardingError,
)
from .flow import explain, fit
from .inspection.compiling import compiling
from .inspection.contract import Contract
from .inspection.finding import Finding, Planned
from .inspection.hlo import Collective, collectives_of, total_sent_bytes
from .inspection.inspect import Inspection, inspect
from .mesh.layout import MeshLayout
from .mesh.process import simulate
from .models import GPT, Llama
from .nn.lora import LoRA
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
from .prepared import Prepared, prepare
from .proof.prove import prove
from .proof.verdict import Proof
from .run import Init, Run, load
from .serve.generate import Completion, Generated, generate
from .sharding.constrain import constrain
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
from .train.ema import averaged
from .train.freeze import Freeze
from .train.loggers import MLflow, TensorBoard, WandB
from .train.loss import Criterion, Distill, Tally
from .train.optim import SGD, Adafactor, AdamW, Lion, Muon
from .train.stopping import EarlyStopping
from .train.training import Training

__all__ = [
    "GPT",
    "SGD",
    "ZBV",
    "About",
    "Adafactor",
    "AdamW",
    "ArraySpec",
    "Arrow",
    "AxisRules",
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
    "Distill",
    "EarlyStopping",
    "Finding",
    "Freeze",
    "GPipe",
    "Generated",
    "Ids",
    "Init",
    "Inspection",
    "Interleaved",
    "Jsonl",
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
    "Parquet",
    "Part",
    "PipeDream2BW",
    "Placement",
    "PlanError",
    "Planned",
    "Prepared",
    "ProgramError",
    "Proof",
    "ProofError",
    "Reduce",
    "Run",
    "Saved",
    "ScheduleError",
    "ShardingError",
    "StandardLibrary",
    "Synthetic",
    "Tally",
    "TensorBoard",
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
    "explain",
    "fit",
    "generate",
    "inspect",
    "load",
    "prepare",
    "prove",
    "resolve",
    "simulate",
    "total_sent_bytes",
    "training",
]
