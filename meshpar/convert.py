"""Converts Hugging Face folders to run directories and back, for `meshpar convert`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np

from meshpar import config
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.saved import FOLDER, Checkpoint, find
from meshpar.checkpoint.selection import AVERAGES, PARAMS
from meshpar.data import Ids, NoData, TokenizerFile
from meshpar.data.corpus import Batching
from meshpar.data.rows.config import RowData
from meshpar.data.special_tokens import end_ids, special_tokens
from meshpar.data.tokenizer import Tokenizer
from meshpar.errors import CheckpointError, ConfigError, Problems
from meshpar.experiment.config import Init, Precision, Run, load, permit_code
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.experiment.start import from_files
from meshpar.interop.encoder_model import EncoderModel
from meshpar.interop.export import LARGEST_FILE, check_free, copy_companions, export, whole_or_not
from meshpar.interop.family_model import FamilyModel
from meshpar.interop.folder import CONFIG, MODEL_FILES, SOURCE, read_json
from meshpar.interop.huggingface import Pretrained
from meshpar.interop.open_folder import open_folder
from meshpar.interop.peft import files_of, is_adapter
from meshpar.interop.peft_export import write_adapter
from meshpar.mesh.layout import MeshLayout
from meshpar.models.contract import ModelContract
from meshpar.models.decoder import DecoderModel
from meshpar.nn.compressed import dense, dequantized
from meshpar.optim import AdamW
from meshpar.parallel.precision import wide_dtype
from meshpar.parallel.strategies import Parallel
from meshpar.records.file import FILE, read
from meshpar.sharding.rules import AxisRules
from meshpar.train.loss import LossConfig
from meshpar.train.preferences import OfAnswers
from meshpar.train.tasks import Classify, Contrastive, MaskedTokens
from meshpar.tree import flatten_with_paths, map_with_path

__all__ = ["from_hf", "to_hf", "to_peft"]

RUN_CONFIG = "config.yaml"
TOKENIZER = "tokenizer.json"


def from_hf(folder: Path | str, run_dir: Path | str, overrides: Sequence[str] = ()) -> Run:
    """Creates a run directory from a Hugging Face model. The run does not need the folder afterwards.

    The directory contains `config.yaml`, with the model's sizes; the checkpoint of step 0, from which `train` resumes;
    and `hugging_face`, with the `config.json`, the tokenizer and the chat template of the model. The config names no
    data, so it does not train before you set `data`. A config that `extends` it into another `run_dir` starts from this
    run's last checkpoint, which its `init` names.

    Args:
      overrides: `key=value` changes to the config: `mesh.fsdp=8`, `optim.lr=1e-5`.

    Memory: the run's state on its mesh, and a second copy of one parameter.

    Raises:
      CheckpointError: the run directory exists; or lists what is wrong with the folder, see `open_folder`.
      ConfigError: lists what is wrong with the overrides.

    Examples:
      A run is written as a Hugging Face folder, and the folder becomes a run again:

      >>> import tempfile
      >>> from meshpar import Run, convert, fit
      >>> with tempfile.TemporaryDirectory() as name:
      ...     folder = Path(name)
      ...     run = Run(
      ...         model={"kind": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8},
      ...         data={"kind": "synthetic", "batch_size": 8, "seq_len": 8}, optim={"kind": "adamw", "lr": 1e-3},
      ...         mesh={"data": -1}, num_steps=1, run_dir=folder / "run", loggers=[],
      ...     )
      ...     _ = fit(run, json=True)  # doctest: +ELLIPSIS
      ...     convert.to_hf(folder / "run", folder / "hf")
      ...     again = convert.from_hf(folder / "hf", folder / "again", ["mesh.data=8"])
      {"kind": "run", ...
      >>> again.model.hidden_size
      8
    """
    folder, run_dir = Path(folder), Path(run_dir)
    check_free(run_dir)
    pretrained = open_folder(folder)
    with whole_or_not(run_dir) as made:
        (made / MODEL_FILES).mkdir()
        (made / MODEL_FILES / CONFIG).write_text(json.dumps(pretrained.config, indent=2) + "\n")
        copy_companions(pretrained.folder, made / MODEL_FILES)
        if not is_adapter(folder):  # which is merged
            (made / MODEL_FILES / SOURCE).write_text(json.dumps({"folder": str(folder.resolve())}) + "\n")
        plain = run_of(pretrained, run_dir, run_dir / MODEL_FILES).model_copy(
            update={"init": Init(from_checkpoint=run_dir)}
        )
        (made / RUN_CONFIG).write_text(config.to_yaml(plain))
        run = load(made / RUN_CONFIG, overrides)
        run.mesh.simulate(None)
        prepared = prepare(run.model_copy(update={"data": NoData(**_batches(run))}))
        state = from_files(prepared, pretrained.fitted(prepared.run.model)).state()
        (made / RUN_CONFIG).write_text(config.to_yaml(run))
        with checkpoints(made / FOLDER, about=prepared.about) as saved:
            saved.save(0, state)
    return run


def run_of(pretrained: Pretrained, run_dir: Path, files: Path) -> Run:
    """A run of the model in the dtype of its files; for bfloat16 the optimizer keeps a float32 copy. It has no data.

    Args:
      files: the folder in which the tokenizer is.
    """
    model = pretrained.model
    size = model.vocab_size
    path = files / TOKENIZER
    ends = [one for one in end_ids(pretrained.folder) if one < size]
    own = Ids(vocab_size=size, bos=ends[0] if ends else size - 1, eos=ends[0] if ends else None)
    has_file = (pretrained.folder / TOKENIZER).is_file()
    precision = Precision()
    if pretrained.dtype == np.dtype("bfloat16"):
        precision = Precision(params="bfloat16", compute="bfloat16", master="float32")
    run = Run(
        model=model,  # pyright: ignore[reportArgumentType]  one of those in ARCHITECTURES
        data=NoData(seq_len=min(256, model.max_seq_len), tokenizer=TokenizerFile(path=str(path)) if has_file else own),
        optim=AdamW(lr=1e-5),
        precision=precision,
        num_steps=1000,
        run_dir=run_dir,
    )
    return _encoder_run(run, model, pretrained.folder) if isinstance(model, EncoderModel) else run


def _encoder_run(run: Run, model: EncoderModel, folder: Path) -> Run:
    """The run with the head and the loss of an encoder, which has no next token to predict."""
    if model.wanted.head == "hidden" and model.text:
        model = model.model_copy(update={"head": "pairs"})
    loss: Classify | Contrastive | MaskedTokens = Classify()
    if model.wanted.head == "pairs":
        loss = Contrastive()
    elif model.wanted.head == "masked_tokens" and model.text:
        mask_id, pad_id = _mask_id(folder, run.data.tokenizer), model.text.pad_id
        loss = MaskedTokens(mask_id=mask_id, pad_id=pad_id, vocab_size=model.vocab_size)
    return run.model_copy(update={"model": model, "loss": loss})


def _mask_id(folder: Path, tokenizer: Tokenizer) -> int:
    """The id of the token that stands for a hidden one.

    Raises:
      CheckpointError: the tokenizer has none.
    """
    token = special_tokens(folder).get("mask_token")
    found = tokenizer.id_of(token) if token and isinstance(tokenizer, TokenizerFile) else None
    if found is None:
        what = f"{folder} has no tokenizer with a mask_token, which the loss of its head needs"
        raise CheckpointError(f"{what}; write a config with init.from_hf={folder} and loss.mask_id=ID")
    return found


def _batches(run: Run) -> dict[str, Any]:
    return run.data.model_dump(include={*Batching.model_fields}, exclude_none=True)


def to_hf(source: Path | str, folder: Path | str, largest_file: int = LARGEST_FILE) -> None:
    """Writes the last checkpoint of a run as a Hugging Face folder, with LoRA merged into the kernels.

    A compressed model is written with the kernels that its codes and factors stand for.

    Args:
      source: a run directory, or the config of a run.
      largest_file: bytes of tensors per file.

    Raises:
      CheckpointError: the folder exists, there is no checkpoint, or no supported architecture matches the model.

    Example: see `from_hf`.
    """
    folder = Path(folder)
    check_free(folder)
    run, params, saved = trained(Path(source))
    companions = _companions(run, saved)
    if isinstance(run.model, FamilyModel):
        export(folder, run.model, params, companions, largest_file)
        return
    model = _with_architecture(run.model, saved)
    plain = model.model_copy(update={"weights": None, "low_rank": ()})
    with TemporaryDirectory() as own:
        if companions is None:
            companions = Path(own)
            _write_language(run.data.tokenizer, model.vocab_size, companions)
        export(folder, plain, dense(model.abstract(), params), companions, largest_file)


def to_peft(source: Path | str, folder: Path | str, base: str | None = None) -> None:
    """Writes the LoRA of a run's last checkpoint as an adapter, which the library PEFT adds to the base model.

    Args:
      source: a run directory, or the config of a run.
      base: the base model's folder or name, for readers of the adapter. Default: `init.from_hf`, or the folder that was
        converted into the run or into the one that it began with.

    Raises:
      CheckpointError: the folder exists, there is no checkpoint, it has no LoRA, or PEFT has no form for it.
      ConfigError: nothing says which the base model is.
    """
    folder = Path(folder)
    check_free(folder)
    run, _, nested, saved = _restored(Path(source))
    params = flatten_with_paths(nested)
    if run.lora is None:
        raise CheckpointError(f"{saved.folder} was trained without LoRA; export with --format hf")
    model = run.model if isinstance(run.model, FamilyModel) else _with_architecture(run.model, saved)
    if isinstance(model, DecoderModel):
        if model.low_rank:
            what = f"{saved.folder} adapts a compressed model, which PEFT has not"
            raise CheckpointError(f"{what}; export with --format hf")
        params = dequantized(model.abstract(), params)  # DoRA's magnitudes are norms of the kernels
        model = model.model_copy(update={"weights": None})
    base = base or base_of(run, saved.run_dir)
    write_adapter(folder, model, run.lora, params, base, _companions(run, saved))


def _with_architecture(model: ModelContract, saved: Saved) -> DecoderModel:
    """The model, which has an architecture of Hugging Face.

    Raises:
      CheckpointError: it is a user's own.
    """
    if not isinstance(model, DecoderModel):
        what = "an imported model, for which Hugging Face has no architecture; export --format stablehlo"
        raise CheckpointError(f"{saved.folder} holds {what}")
    return model


def base_of(run: Run, run_dir: Path) -> str:
    """The folder with the weights that a run's LoRA adapts.

    Raises:
      ConfigError: they are in no folder that is known.
    """
    init = run.init
    if init and init.from_hf and not is_adapter(init.from_hf):
        return str(init.from_hf.resolve())
    kept, began = run_dir / MODEL_FILES, _began_with(run, run_dir)
    if began and began.name == "0" and (kept / SOURCE).is_file():
        return str(read_json(kept, SOURCE, Problems()).get("folder"))
    if init and init.from_hf:
        what, fix = f"{init.from_hf}, an adapter that was merged", f"meshpar convert RUN --from-hf {init.from_hf}, and "
    else:
        what, fix = str(began or "random weights"), ""
    fix += f"meshpar export {began or 'RUN'} FOLDER --format hf"
    raise ConfigError(f"base: the run began with {what}, which no folder holds; {fix} writes one, for --base FOLDER")


def _began_with(run: Run, run_dir: Path) -> Path | None:
    """The checkpoint with which a run began, if it began with one."""
    init = run.init
    if not (init and init.from_checkpoint):
        return None
    if init.from_checkpoint.resolve() == run_dir.resolve():  # as `convert` wrote it
        return run_dir / FOLDER / "0"
    records = read(run_dir / FILE) if (run_dir / FILE).is_file() else []
    sources = [record["source"] for record in records if record["kind"] == "restored" and record["step"] == 0]
    return Path(sources[0]) if sources else init.from_checkpoint


def _companions(run: Run, saved: Saved) -> Path | None:
    """The folder with the files of the model that a run started from."""
    if (saved.run_dir / MODEL_FILES).is_dir():
        return saved.run_dir / MODEL_FILES
    return files_of(run.init.from_hf) if run.init and run.init.from_hf else None


def _write_language(tokenizer: Tokenizer, vocab_size: int, folder: Path) -> None:
    """Writes the tokenizer of a run's data as that of a model: it opens prompts, and ends answers, as the run does."""
    last = tokenizer.bos if tokenizer.eos is None else tokenizer.eos
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": last}
    if max(ids.values()) < vocab_size:
        (folder / CONFIG).write_text(json.dumps(ids))
    if isinstance(tokenizer, TokenizerFile) and Path(tokenizer.path).is_file():
        copy_companions(tokenizer.folder, folder)
        (folder / TOKENIZER).write_text(tokenizer.opening_with_bos())


class Saved(NamedTuple):
    """Where a run's parameters came from: its directory, and the checkpoint in it."""

    run_dir: Path
    checkpoint: Checkpoint

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder


def run_at(source: Path) -> Run:
    """The run of the last checkpoint, without its arrays.

    Args, Raises: see `trained`.
    """
    run_dir = load(source).run_dir if source.is_file() else source
    return _saved_run(find(run_dir, PARAMS))


def trained(source: Path) -> tuple[Run, dict[str, jax.Array], Saved]:
    """A run, and the parameters of its last checkpoint by path, on one device, with LoRA merged into the kernels.

    They are the averages of `optim.ema`, if the run has them.

    Args:
      source: a run directory, or the config of a run.

    Raises:
      CheckpointError: there is no checkpoint, or it holds no config of a run.
    """
    run, prepared, params, saved = _restored(source)
    if not prepared.merged:
        return run, flatten_with_paths(params), saved
    model = run.model
    if isinstance(model, DecoderModel) and model.weights:  # the sums are no codes
        run = run.model_copy(update={"model": model.model_copy(update={"weights": None})})
    return run, dict(prepared.merged(params)), saved


def carried_of(run: Run, saved: Saved) -> dict[str, jax.Array]:
    """The state that the forward changes, such as batch statistics, of the checkpoint of a run, by path."""
    carried = _without_files(run).placement.structs.carried
    paths = [f"carried.{path}" for path in flatten_with_paths(carried)]
    return flatten_with_paths(saved.checkpoint.restore({"carried": carried}, paths)["carried"]) if paths else {}


def _restored(source: Path) -> tuple[Run, Prepared, Any, Saved]:
    """As `trained`, also prepared on one device, and with the matrices of LoRA for themselves."""
    run_dir = load(source).run_dir if source.is_file() else source
    saved = find(run_dir, (*PARAMS, *AVERAGES))
    run = _saved_run(saved)
    if isinstance(run.model, EncoderModel):  # whose arrays do not depend on the rows
        run = run.model_copy(update={"data": NoData(**_batches(run))})
    permit_code(run, run_dir)
    prepared = _without_files(run)
    return (
        run,
        prepared,
        restore_params(saved, prepared.placement.structs.params),
        Saved(saved.folder.parents[1], saved),
    )


def _without_files(run: Run) -> Prepared:
    """The run prepared on one device; the files of its tokens may be gone. A loss of answers would need them."""
    data = run.data if isinstance(run.data, RowData) else NoData(**_batches(run))
    loss = LossConfig() if isinstance(run.loss, OfAnswers) else run.loss
    return on_one_device(run.model_copy(update={"data": data, "loss": loss}))


def restore_params(saved: Checkpoint, structs: Any) -> Any:
    """The parameters of a checkpoint; the average instead of each that has one (`optim.ema`), as evaluations use it.

    Args:
      structs: tree of `ShapeDtypeStruct`s with shardings.

    Raises:
      CheckpointError: see `Checkpoint.restore`.
    """
    averages = {
        path: jax.ShapeDtypeStruct(struct.shape, wide_dtype(struct.dtype), sharding=struct.sharding)
        for path, struct in flatten_with_paths(structs).items()
        if f"opt_state.ema.{path}" in saved.described
    }
    include = (*PARAMS, *AVERAGES) if averages else PARAMS
    exclude = [f"params.{path}" for path in averages]
    read = saved.restore({"params": structs, "opt_state": {"ema": averages}}, include, exclude)
    means = read["opt_state"]["ema"]
    return map_with_path(lambda path, x: means[path].astype(x.dtype) if path in means else x, read["params"])


def on_one_device(run: Run) -> Prepared:
    """The run prepared on one device, without what only its training on a mesh needs."""
    one: dict[str, Any] = {
        "mesh": MeshLayout(), "rules": AxisRules(preset=("replicated",)), "parallel": Parallel(), "num_microbatches": 1,
        "distill": None, "contract": None,
    }  # fmt: skip
    return prepare(run.model_copy(update=one), MeshLayout().build(jax.devices()[:1]))


def _saved_run(saved: Checkpoint) -> Run:
    try:
        return Run.model_validate_json(json.dumps(saved.meta["config"]), strict=True)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{saved.folder} holds no config of a run, so its model is unknown") from None
