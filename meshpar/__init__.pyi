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
    ShardingError,
)
from .inspection.compiling import compiling
from .inspection.contract import Contract
from .inspection.finding import Finding, Planned
from .inspection.hlo import Collective, collectives_of, total_sent_bytes
from .inspection.inspect import Inspection, inspect
from .mesh.layout import MeshLayout
from .mesh.process import simulate
from .models import GPT, Llama
from .proof.prove import prove
from .proof.verdict import Proof
from .run import Init, Prepared, Run, explain, fit, load, prepare
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
from .train.loss import Tally
from .train.optim import SGD, Adafactor, AdamW, Lion, Muon
from .train.training import Training

__all__ = [
    "GPT",
    "SGD",
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
    "ConfigError",
    "Contract",
    "ContractError",
    "ContractWarning",
    "DataError",
    "Finding",
    "Ids",
    "Init",
    "Inspection",
    "Jsonl",
    "Kept",
    "Lion",
    "Llama",
    "MeshError",
    "MeshLayout",
    "MeshparError",
    "Mixture",
    "Muon",
    "Numpy",
    "Parquet",
    "Part",
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
    "ShardingError",
    "StandardLibrary",
    "Synthetic",
    "Tally",
    "Text",
    "TokenizerFile",
    "Training",
    "checkpoints",
    "collectives",
    "collectives_of",
    "compiling",
    "constrain",
    "explain",
    "fit",
    "inspect",
    "load",
    "prepare",
    "prove",
    "resolve",
    "simulate",
    "total_sent_bytes",
    "training",
]
