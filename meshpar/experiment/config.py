"""The root of a config: a whole training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic

from meshpar import config
from meshpar.checkpoint.retention import Retention
from meshpar.config import Coerced, Config, FilePath, Positive, RunPath, Section, Seed, Strings, default
from meshpar.cost.memory import Widths
from meshpar.data import Data as Tokens
from meshpar.data.images.config import Images
from meshpar.errors import ConfigError
from meshpar.experiment.of_init import with_model, with_tokenizer
from meshpar.inspection.contract import Contract
from meshpar.interop import user_code
from meshpar.interop.encoder_model import EncoderModel
from meshpar.interop.family_model import FamilyModel
from meshpar.interop.flax_model import Import
from meshpar.interop.imported_callback import ImportedCallback
from meshpar.interop.imported_data import ImportedData
from meshpar.launch.elastic import Elastic
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Family
from meshpar.nn.attention.codes import CacheFormat
from meshpar.nn.lora import LoRA
from meshpar.optim import Optimizer
from meshpar.optim.freeze import Freeze
from meshpar.optim.pruning import Pruning
from meshpar.parallel.context import Format, ParallelContext
from meshpar.parallel.strategies import Parallel
from meshpar.records.loggers import Logger, TensorBoard
from meshpar.regular_files import remote, stored
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules, Rules
from meshpar.train.grpo import GRPO
from meshpar.train.loop.stopping import EarlyStopping
from meshpar.train.loss import Distill, LossConfig
from meshpar.train.preferences import DPO, ORPO
from meshpar.train.tasks import Classify, Contrastive, MaskedTokens, Regress

Model = Annotated[Family | FamilyModel | EncoderModel | Import, pydantic.Field(discriminator="kind")]
"""One of meshpar's models, or a user's Flax model."""
Data = Annotated[Tokens | ImportedData | Images, pydantic.Field(discriminator="kind")]
"""Packed tokens, or rows of arrays."""
AnyLoss = Annotated[
    LossConfig | Classify | Regress | MaskedTokens | Contrastive | DPO | ORPO | GRPO,
    pydantic.Field(discriminator="kind"),
]
"""The next token's cross entropy or a user's own loss; a loss by name, of an imported model; or one of preferences."""
Float = Literal["bfloat16", "float32", "float64"]


class Precision(Config):
    """The dtypes in which a run stores, computes, sums and updates."""

    params: Float = "float32"
    """Dtype of the stored parameters."""
    compute: Float = "float32"
    """Dtype in which the model computes and parameters are gathered."""
    matmul: Format | None = None
    """8-bit format in which layers multiply by their weights: `fp8` (e4m3, gradients e5m2) or `int8`, with a scale for
    each row and column. Needs `meshpar[quantized]`. Default: `compute`."""
    cache: CacheFormat | None = None
    """Format of the keys and values that `generate` and `serve` store, with a scale for each token and head. Default:
    `compute`."""
    gradients: Float | None = None
    """Dtype in which gradients are summed. Default: float32 at least."""
    master: Float | None = None
    """Dtype of the optimizer's own copy of the parameters. Default: no copy."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated bfloat16 parameters are rounded. `stochastic` needs no master copy."""

    @pydantic.model_validator(mode="after")
    def _rounds_bfloat16(self) -> Precision:
        if self.rounding == "stochastic" and self.params != "bfloat16":
            raise ValueError(f"rounding: stochastic is for params: bfloat16, and not for {self.params}")
        if self.rounding == "stochastic" and self.master:
            raise ValueError("rounding: stochastic replaces the master copy; set only one of the two")
        return self

    @property
    def widths(self) -> Widths:
        """Bytes per element of parameters, activations, gradients and their sums."""
        compute = np.dtype(self.compute).itemsize
        sums = max(compute, 4)
        gradients = np.dtype(self.gradients).itemsize if self.gradients else sums
        return Widths(np.dtype(self.params).itemsize, compute, gradients, sums)


class Offload(Config):
    """Selects the state that is stored in the host's memory. Activations are selected by `model.remat.offload`."""

    optimizer: Literal["device", "host"] = "device"
    """Memory of the optimizer's state between steps."""


class Init(Config):
    """The source of the initial parameters: a checkpoint or a Hugging Face folder. Others are initialized at random."""

    from_checkpoint: RunPath = default(None)
    """A checkpoint, or a run directory, whose last one is used; or an address such as `s3://bucket/run`."""
    include: Strings = default(("params.**",))
    """Globs of the paths in the train state to restore."""
    exclude: Strings = default(())
    """Globs of paths not to restore although `include` matches them, such as a new head."""
    from_hf: Coerced[Path | None, str] = default(None)
    """A local folder with `config.json` and safetensors files, as Hugging Face's libraries write it."""

    adapter: Coerced[Path | None, str] = default(None)
    """A local folder with an adapter of PEFT for the model in `from_hf`, with the ranks, scales and projections of
    `lora`, which trains on it."""

    upcycle: bool = False
    """Whether the MLP of each block of the dense model in `from_hf` is copied into each of its experts
    (arXiv:2212.05055)."""

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> Init:
        if (self.from_checkpoint is None) == (self.from_hf is None):
            raise ValueError("set either from_checkpoint or from_hf")
        if self.upcycle and self.from_hf is None:
            raise ValueError("upcycle needs from_hf, the folder of a dense model")
        if self.adapter and self.from_hf is None:
            raise ValueError("adapter needs from_hf, the folder of its model")
        return self


class Run(Config):
    """A training run: everything that a config file specifies."""

    supplied: ClassVar = {"model": "init"}

    model: Section[Model]
    """One of meshpar's models, or a Flax model of your own. Sizes that are missing are those of `init`."""
    loss: Coerced[AnyLoss, str | dict[str, Any]] = default(LossConfig())
    """The loss to minimize, by name, or your own as `package.module:name`."""
    data: Section[Data]
    """The training data, and how it is cut into batches."""
    optim: Section[Optimizer]
    """The optimizer and its learning rate."""
    lora: Section[LoRA | None] = default(None)
    """Trains low-rank matrices alongside the model's kernels, and freezes the model."""
    distill: Section[Distill | None] = default(None)
    """Trains the model to predict what a teacher model predicts (distillation)."""
    freeze: Coerced[tuple[Freeze, ...], Sequence[Freeze | str | list[str] | dict[str, Any]]] = default(())
    """Parameters that are not updated: globs, or `{paths: [...], until: 100}` to train them from step 100 on."""
    prune: Section[Pruning | None] = default(None)
    """Sets weights to zero during the run, by a schedule. Default: none."""
    mesh: Section[MeshLayout] = default(MeshLayout())
    """The size of each mesh axis; one may be -1."""
    rules: Rules = default(AxisRules(preset="replicated"))
    """The axes that shard each dim: presets, and rules of your own."""
    lowering: Literal["manual", "auto"] = "manual"
    """`manual`: one shard_map with meshpar's own communication. `auto`: GSPMD, where XLA chooses it."""
    strict: bool = False
    """Whether it is an error that an imported model moves activations that no rule or constraint declares. `meshpar
    explain --activations` lists them."""
    parallel: Section[Parallel] = default(Parallel())
    """Strategies of the manual lowering: overlaps, a pipeline, the reduction of gradients."""
    precision: Section[Precision] = default(Precision())
    """The dtypes of parameters, products, gradients and the optimizer."""
    offload: Section[Offload] = default(Offload())
    """The state that is stored in the host's memory."""
    num_steps: Positive
    """The number of steps of the whole run, also after a resume."""
    num_microbatches: Positive = 1
    """Equal parts of a batch that are computed one after another; gradients are reduced once."""
    contract: Section[Contract | None] = default(None)
    """Limits on the compiled step; a step that exceeds them is refused."""
    seed: Seed = 0
    """Determines the initial parameters, dropout and the order of the data."""
    run_dir: FilePath
    """Local directory for metrics and checkpoints. A run resumes from the last checkpoint in it."""
    log_every: Positive = 10
    """Steps between records of the training loss."""
    eval_every: Positive | None = None
    """Steps between evaluations on held-out data; default: only at the end."""
    init: Section[Init | None] = default(None)
    """Source of the initial parameters; default: they are initialized at random."""
    elastic: Section[Elastic | None] = default(None)
    """How the run continues with fewer processes; by default it needs all."""
    checkpoints: Coerced[Retention, int | dict[str, Any]] = default(Retention())
    """How often checkpoints are saved, and which are retained."""
    early_stopping: Section[EarlyStopping | None] = default(None)
    """When to end before `num_steps`."""
    max_skipped_steps: Positive | None = 10
    """Steps in a row that are skipped because loss or gradients are not finite, after which the run ends; null for no
    limit."""
    check_replicas_every: Positive | None = 100
    """Steps between comparisons of replicated state, which find silent corruption; null for none."""
    loggers: Coerced[tuple[Logger, ...], Sequence[Logger | str | dict[str, Any]]] = default((TensorBoard(),))
    """Loggers that receive the records besides `run_dir/metrics.jsonl`: tensorboard, wandb, mlflow, prometheus."""
    callbacks: Coerced[tuple[ImportedCallback, ...], Sequence[ImportedCallback | str | dict[str, Any]]] = default(())
    """Objects whose methods are called at events of the training."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_init(cls, data: Any) -> Any:
        """Takes from the source that `init` names the sizes of the model, and the tokenizer of conversations."""
        if not isinstance(data, dict):
            return data
        init = data.get("init")
        init = init.model_dump() if isinstance(init, Init) else init
        return with_tokenizer(with_model(data, init), init) if isinstance(init, dict) else data

    @pydantic.field_validator("run_dir", mode="before")
    @classmethod
    def _is_local(cls, run_dir: Any) -> Any:
        if isinstance(run_dir, (str, Path)) and stored(str(run_dir)) and (problem := remote(run_dir)):
            raise ValueError(f"{problem[0]}\nrun_dir=FOLDER, and checkpoints.mirror={run_dir} copies it there")
        return run_dir

    @pydantic.model_validator(mode="after")
    def _evaluates_before_it_stops(self) -> Run:
        if self.early_stopping and not self.eval_every:
            raise ValueError("early_stopping needs evaluations: set eval_every, the steps between them")
        return self

    def context(self, mesh: AnyMesh) -> ParallelContext:
        """The parallel context of the run's programs on a mesh."""
        dcn = self.mesh.dcn.sizes if self.mesh.dcn else {}
        accum = self.precision.gradients
        return ParallelContext(
            mesh=mesh,
            rules=self.rules,
            manual=self.lowering == "manual",
            parallel=self.parallel,
            compute_dtype=np.dtype(self.precision.compute),
            accum_dtype=accum and np.dtype(accum),
            num_microbatches=self.num_microbatches,
            number_format=self.precision.matmul,
            dcn_axes=tuple(axis for axis, size in dcn.items() if size > 1),
            strict=self.strict,
            reads_positions=self.model.reads_positions,
        )


def load(path: Path | str, overrides: Sequence[str] | str = ()) -> Run:
    """Reads a config file, with `key=value` overrides: a list, or a single one.

    Raises:
      ConfigError: lists every problem of the config; or it names code that `interop.user_code` does not permit.

    Examples:
      >>> run = load("configs/quickstart.yaml", ["num_steps=50", "optim.lr=1e-3"])
      >>> run.num_steps, run.optim.lr
      (50, 0.001)
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    loaded = config.load(Run, path, overrides)
    permit_code(loaded, Path(path), overrides)
    replaces = any(override.startswith("callbacks=") for override in overrides)  # all of them
    for callback in loaded.callbacks:
        user_code.permit(callback.target, None if replaces else Path(path))
    return loaded


def permit_code(run: Run, path: Path, overrides: Sequence[str] = ()) -> None:
    """Permits the import of a run's model, loss and data, as `interop.user_code` allows it.

    Args:
      path: the config's file, or the directory of a run, which has its config in a checkpoint. What this process has
        permitted already needs no file then.

    Raises:
      ConfigError: the config may not import one of them.
    """
    data = run.data if isinstance(run.data, ImportedData) else None
    model = run.model if isinstance(run.model, Import) and run.model.kind == "import" else None
    targets = {
        ("model.target",): model and model.target,
        ("loss", "loss.target"): run.loss.target,
        ("loss.reward",): getattr(run.loss, "reward", None),
        ("data.target",): data and data.target,
        ("data.transform",): data and data.transform,
    }
    for keys, target in targets.items():
        if target and not (path.is_dir() and user_code.is_permitted(target)):
            is_on_command_line = any(f"{key}={target}" in overrides for key in keys)
            user_code.permit(target, None if is_on_command_line else path)


def as_run(run: Run | Path | str) -> Run:
    """The run itself, or the one in a config file.

    Raises:
      ConfigError: see `load`; or `run` is something else.
    """
    if isinstance(run, Run):
        return run
    if isinstance(run, (Path, str)):
        return load(run)
    raise ConfigError(f"expected a Run or the path of a config file, not {type(run).__name__}")
