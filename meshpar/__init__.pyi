from . import collectives, convert, data, export, federated, loggers, models, optim, pipeline, tables
from .checkpoint.checkpoints import CheckpointMetadata, Checkpoints, checkpoints
from .checkpoint.retention import Retention
from .checkpoint.saved import Checkpoint
from .collectives.reduction import Reduce
from .compression import Compressed, compress
from .data import (
    Arrow,
    Bytes,
    Chat,
    Ids,
    Jsonl,
    Mixture,
    MixtureComponent,
    NoData,
    Numpy,
    Parquet,
    Preferences,
    Prompts,
    Shards,
    StandardLibrary,
    Synthetic,
    Text,
    TokenizerFile,
)
from .data.images.augment import Augment
from .data.images.config import Images
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
    RunError,
    ScheduleError,
    ShardingError,
    VerificationError,
)
from .experiment.actions import explain, fit, inspect
from .experiment.config import Init, Offload, Precision, Run, load
from .experiment.prepare import Prepared, prepare
from .inspection.contract import Allowed, Contract
from .inspection.findings.finding import Finding
from .inspection.findings.planned import Planned
from .inspection.fit import FitReport
from .inspection.inspect import Inspection
from .inspection.program.compiling import compiling
from .inspection.program.hlo import Collective, collectives_of, total_sent_bytes
from .inspection.report.report import Report
from .interop.encoder_model import EncoderModel
from .interop.family_model import FamilyModel
from .interop.flax_model import Import
from .interop.imported_callback import ImportedCallback
from .interop.imported_data import ImportedData
from .interop.inferred import infer_dims
from .interop.layers import layers
from .interop.training import training
from .launch.elastic import Elastic
from .mesh.join import join
from .mesh.layout import AxisSizes, MeshLayout
from .mesh.process import simulate
from .models import GPT, Llama
from .nn import attention, experts
from .nn.compressed import LowRankKernel
from .nn.experts import Balance, Experts
from .nn.lora import LoRA
from .nn.quantized_kernel import Quantized
from .nn.remat import Remat
from .optim import SGD, Adafactor, AdamW, Lion, Muon
from .optim.ema import averaged
from .optim.freeze import Freeze
from .parallel.context import ParallelContext, constrain
from .parallel.local_updates import LocalUpdates, OuterAdam, OuterAverage, OuterNesterov
from .parallel.pipeline.schedule import (
    ZBV,
    GPipe,
    Interleaved,
    OneFOneB,
    PipeDream2BW,
    ScheduleFile,
    ZeroBubbleH1,
    ZeroBubbleH2,
)
from .parallel.strategies import ContextParallel, ExpertParallel, FullySharded, Parallel, TensorParallel
from .partition.partitioned import partitioned
from .planning.plan import Plan, plan
from .records.loggers import MLflow, Prometheus, TensorBoard, WandB
from .serve.generate import Completion, Generated, generate
from .serve.own_source import CausalModel
from .sharding.resolve import Placement, resolve
from .sharding.rules import AxisRules
from .sharding.spec import ArraySpec
from .train.cross_entropy import cross_entropy
from .train.grpo import GRPO
from .train.loop.signals import Interrupted
from .train.loop.stopping import EarlyStopping
from .train.loss import Distill, LossConfig, LossSums
from .train.preferences import DPO, ORPO
from .train.tasks import Classify, Contrastive, MaskedTokens, Regress
from .train.training import Training
from .verification.report import Verification
from .verification.verify import verify

__version__: str

__all__ = [
    "DPO",
    "GPT",
    "GRPO",
    "ORPO",
    "SGD",
    "ZBV",
    "Adafactor",
    "AdamW",
    "Allowed",
    "ArraySpec",
    "Arrow",
    "Augment",
    "AxisRules",
    "AxisSizes",
    "Balance",
    "Bytes",
    "CausalModel",
    "Chat",
    "Checkpoint",
    "CheckpointError",
    "CheckpointMetadata",
    "Checkpoints",
    "Classify",
    "Collective",
    "Completion",
    "Compressed",
    "ConfigError",
    "ContextParallel",
    "Contract",
    "ContractError",
    "ContractWarning",
    "Contrastive",
    "DataError",
    "DataWarning",
    "Distill",
    "EarlyStopping",
    "Elastic",
    "EncoderModel",
    "ExpertParallel",
    "Experts",
    "FamilyModel",
    "Finding",
    "FitReport",
    "Freeze",
    "FullySharded",
    "GPipe",
    "Generated",
    "Ids",
    "Images",
    "Import",
    "ImportedCallback",
    "ImportedData",
    "Init",
    "Inspection",
    "Interleaved",
    "Interrupted",
    "Jsonl",
    "Lion",
    "Llama",
    "LoRA",
    "LocalUpdates",
    "LossConfig",
    "LossSums",
    "LowRankKernel",
    "MLflow",
    "MaskedTokens",
    "MeshError",
    "MeshLayout",
    "MeshparError",
    "Mixture",
    "MixtureComponent",
    "Muon",
    "NoData",
    "Numpy",
    "Offload",
    "OneFOneB",
    "OuterAdam",
    "OuterAverage",
    "OuterNesterov",
    "Parallel",
    "ParallelContext",
    "Parquet",
    "PipeDream2BW",
    "Placement",
    "Plan",
    "PlanError",
    "Planned",
    "Precision",
    "Preferences",
    "Prepared",
    "ProgramError",
    "Prometheus",
    "Prompts",
    "Quantized",
    "Reduce",
    "Regress",
    "Remat",
    "Report",
    "Retention",
    "Run",
    "RunError",
    "ScheduleError",
    "ScheduleFile",
    "ShardingError",
    "Shards",
    "StandardLibrary",
    "Synthetic",
    "TensorBoard",
    "TensorParallel",
    "Text",
    "TokenizerFile",
    "Training",
    "Verification",
    "VerificationError",
    "WandB",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "attention",
    "averaged",
    "checkpoints",
    "collectives",
    "collectives_of",
    "compiling",
    "compress",
    "constrain",
    "convert",
    "cross_entropy",
    "data",
    "experts",
    "explain",
    "export",
    "federated",
    "fit",
    "generate",
    "infer_dims",
    "inspect",
    "join",
    "layers",
    "load",
    "loggers",
    "models",
    "optim",
    "partitioned",
    "pipeline",
    "plan",
    "prepare",
    "resolve",
    "simulate",
    "tables",
    "total_sent_bytes",
    "training",
    "verify",
]
