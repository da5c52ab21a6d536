"""The options of a training besides the model: optimizer, LoRA, freezing, pruning and dtypes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic

from meshpar import config
from meshpar.config import Coerced, Config, Section, default
from meshpar.errors import ConfigError, Problems, excerpt
from meshpar.nn.lora import LoRA, is_lora
from meshpar.optim import elementwise
from meshpar.optim.base import Descent, Positive
from meshpar.optim.freeze import Freeze, for_good, frozen_until, thawing
from meshpar.optim.frozen_layers import LAYERS, check_frozen_rows, frozen_rows, on_trained_rows
from meshpar.optim.pruning import Prune, Pruning
from meshpar.optim.wrapped import Wrapping
from meshpar.parallel.checks import check_float64
from meshpar.parallel.combinations import check_combinations
from meshpar.parallel.context import Format, ParallelContext
from meshpar.parallel.local_updates import KEY
from meshpar.parallel.rounds import Rounds
from meshpar.parallel.strategies import Parallel
from meshpar.parallel.trainable import without
from meshpar.train.step import StateParams, Update
from meshpar.tree import flatten_with_paths

Rounding = Literal["nearest", "stochastic"]
Frozen = Freeze | str | Sequence[str] | dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """See `meshpar.training`.

    Args:
      tx: an Optax transformation, or one of `meshpar.optim`.
    """

    tx: optax.GradientTransformation | Descent
    num_steps: int | None
    lora: LoRA | None
    freeze: tuple[Freeze, ...]
    clip_norm: float | None
    params_dtype: Any
    wrapping: Wrapping

    @property
    def needs_kinds(self) -> bool:
        """Whether it depends on how the loss uses each parameter."""
        return bool(self.lora or self.wrapping.prune or isinstance(self.tx, Descent))

    def check(self, ctx: ParallelContext, is_local: bool, problems: Problems) -> None:
        """Adds each option that does not fit the others.

        Args:
          is_local: whether the loss is written for local shards.
        """
        local, prune = ctx.parallel.local, self.wrapping.prune
        self._check_dtypes(problems)
        self._check_num_steps(ctx, problems)
        if prune and self.num_steps:
            prune.check(self.num_steps, self.wrapping.ema, problems)
        if local:
            params = self.params_dtype and np.dtype(self.params_dtype).name
            local.check_state(self.wrapping.ema, self.wrapping.master_dtype, params, problems)
        if self.lora and is_local:
            what = "a loss for local shards gets its shards of a kernel, to which it adds its own updates"
            problems.add("lora", what, "manual=False, or no lora")
        check_combinations(self.features(ctx), problems)

    def features(self, ctx: ParallelContext) -> list[str]:
        """The keys of the features in use, which some others exclude; see `parallel.combinations`."""
        used = {"freeze": self.freeze, "lora": self.lora, "prune": self.wrapping.prune}
        own = [key for key, value in used.items() if value] + ctx.parallel.features
        return [*own, *(["precision.matmul"] if ctx.number_format else [])]

    def _check_num_steps(self, ctx: ParallelContext, problems: Problems) -> None:
        local = ctx.parallel.local
        if self.num_steps is None:
            needing = {
                KEY: local, "prune": self.wrapping.prune, "freeze.until": any(one.until for one in self.freeze),
                "tx": isinstance(self.tx, Descent),
            }  # fmt: skip
            for key in (key for key, value in needing.items() if value):
                problems.add(key, "it depends on the number of steps of the whole training", "pass num_steps=")
        elif local:
            local.check_steps(self.num_steps, problems)
        if isinstance(self.tx, Descent):
            return
        if local and local.growth is not None:
            what = "rounds grow by the learning rate, which an Optax transformation does not tell"
            problems.add(f"{KEY}.growth", what, f"{KEY}.growth=null, or tx=meshpar.optim.AdamW(lr=...)")
        if any(one.layers for one in self.freeze):
            what = "the optimizer gets some rows of each stack, and line searches would get functions of whole stacks"
            problems.add("freeze.layers", what, "no layers, or tx=meshpar.optim.AdamW(lr=...)")
        if any(one.until for one in self.freeze):
            what = "the moments of a parameter that thaws begin at zero, for which an Optax transformation is no help"
            problems.add("freeze.until", what, "no until, or tx=meshpar.optim.AdamW(lr=...)")

    def _check_dtypes(self, problems: Problems) -> None:
        for name, dtype in (("params_dtype", self.params_dtype), ("master_dtype", self.wrapping.master_dtype)):
            check_float64(name, dtype, problems)
        if self.wrapping.rounding != "stochastic":
            return
        if self.params_dtype is None or np.dtype(self.params_dtype).name != "bfloat16":
            what = "stochastic is for params_dtype=bfloat16"
            problems.add("rounding", what, "params_dtype=jnp.bfloat16, or rounding='nearest'")
        if self.wrapping.master_dtype:
            problems.add("rounding", "stochastic replaces the master copy", "set only one of the two")

    def check_complex(self, specs: Any, ctx: ParallelContext) -> None:
        """Refuses options that would drop the imaginary part of a parameter.

        Raises:
          ConfigError: a parameter is complex, and an option is for real numbers.
        """
        reduction = ctx.parallel.gradient_reduction
        used = {
            f"the optimizer {type(self.tx).__name__}": isinstance(self.tx, Descent), "prune": self.wrapping.prune,
            "a master copy": self.wrapping.master_dtype, "stochastic rounding": self.wrapping.rounding == "stochastic",
            "parallel.gradient_reduction": reduction and reduction.rounds,
        }  # fmt: skip
        real = [name for name, value in used.items() if value]
        problems = Problems()
        for path, spec in flatten_with_paths(specs).items():
            if real and jnp.issubdtype(spec.dtype, jnp.complexfloating):
                what = (
                    f"is {spec.dtype.name}, and {', '.join(real)} {'is' if len(real) == 1 else 'are'} for real numbers"
                )
                problems.add(path, what, "two real parameters; or an Optax transformation, without these options")
        problems.raise_any(ConfigError, "the options do not fit these parameters:")

    def frozen(self, specs: Any, constant: tuple[str, ...] = ()) -> Any:
        """For how many steps each parameter is frozen; None if none is. With LoRA, only its matrices are trained.

        Args:
          constant: paths of parameters that no gradient changes, such as those of quantized kernels.
        """
        freeze = self.freeze
        if self.lora:
            freeze += (Freeze(paths=tuple(path for path in flatten_with_paths(specs) if not is_lora(path))),)
        if constant:
            freeze += (Freeze(paths=constant),)
        return frozen_until(freeze, specs, self.num_steps or sys.maxsize) if freeze else None

    def frozen_rows(self, specs: Any, ctx: ParallelContext) -> Any:
        """Which layers of stacks are frozen; None if none is."""
        rows = frozen_rows(self.freeze, specs)
        check_frozen_rows(rows, ctx.stage_axes or ctx.axes(LAYERS), self.wrapping.prune is not None)
        return rows

    def update(self, specs: Any, frozen: Any, rows: Any, kinds: Any, state_params: StateParams | None = None) -> Update:
        """The optimizer of the parameters that are not frozen for good.

        Args:
          specs: tree of `ArraySpec`.
          rows: see `frozen_rows`.
          kinds: the same of `Matrix`; None if nothing needs it.
          state_params: see `Update`.
        """
        never = for_good(frozen)
        trained = kinds and without(kinds, never)
        tx, clip_norm, rate = self.tx, self.clip_norm, None
        if isinstance(tx, Descent):
            assert self.num_steps, "`check` requires it"
            clip_norm, rate = tx.clip_norm, tx.learning_rate(self.num_steps)
            is_elementwise = tx.elementwise and self.wrapping.is_elementwise
            tx = tx.build(self.num_steps, trained, thawing(frozen))
        else:
            structs = jax.tree.map(lambda spec: spec.struct, without(specs, never))
            is_elementwise = self.wrapping.is_elementwise and elementwise.is_elementwise(tx, structs)
        tx = self.wrapping.of(on_trained_rows(tx, rows), without(specs, never), trained)
        return Update(tx, clip_norm, rate, self.wrapping.dtype, state_params, is_elementwise)

    def rounds(self, ctx: ParallelContext) -> Rounds | None:
        """When the rounds of local updates end; None without them."""
        local = ctx.parallel.local
        if local is None:
            return None
        assert self.num_steps, "`check` requires it"
        rate = self.tx.learning_rate(self.num_steps) if isinstance(self.tx, Descent) else lambda updates: 1.0
        return local.rounds(self.num_steps, rate)


def _of_floats(dtype: Any) -> Any:
    """A dtype as it is. Raises ValueError if it is not one of floating-point numbers."""
    try:
        fits = dtype is None or jnp.issubdtype(np.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"is {dtype!r}, and no dtype of floating-point numbers\njnp.float32, or jnp.bfloat16")
    return dtype


DType = Annotated[Any, pydantic.AfterValidator(_of_floats)]


class Arguments(Config):
    """The arguments of `meshpar.training` that a config has too, which are checked as there."""

    lowering: Literal["manual", "auto"] = "manual"
    parallel: Section[Parallel] = default(Parallel())
    num_microbatches: config.Positive = 1
    num_steps: config.Positive | None = None
    seed: config.Seed = 0
    number_format: Format | None = None
    rounding: Rounding = "nearest"
    clip_norm: Positive | None = None
    ema: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    compute_dtype: DType = None
    accum_dtype: DType = None
    params_dtype: DType = None
    master_dtype: DType = None
    draws: bool = False
    strict: bool = False
    manual: bool = False
    offload_optimizer: bool = False
    lora: Section[LoRA | None] = default(None)
    """See `Run`."""
    freeze: Coerced[tuple[Freeze, ...], Sequence[Frozen]] = default(())
    """See `Run`."""
    prune: Section[Pruning | None] = default(None)
    """See `Run`."""


def checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `training`, those that a config has too as it would read them.

    Raises:
      ConfigError: lists every value that a config does not accept.
    """
    known = {*Arguments.model_fields} - {"freeze"}  # which `options` reads, as it may be a single one
    given = {name: _plain(x) for name, x in arguments.items() if name in known}
    read = Arguments(**given)
    return arguments | {name: getattr(read, name) for name in given}


def _plain(x: Any) -> Any:
    """NumPy's numbers as Python's."""
    return x.item() if isinstance(x, np.generic) else x


def options(
    tx: Any,
    num_steps: int | None,
    lora: LoRA | dict[str, Any] | None,
    freeze: Frozen | Sequence[Frozen],
    prune: Prune | dict[str, Any] | None,
    *,
    clip_norm: float | None,
    ema: float | None,
    params_dtype: Any,
    **wrapping: Any,
) -> Options:
    """The options as `training` gets them.

    Raises:
      ConfigError: a value is none that a config accepts.
    """
    if not isinstance(tx, Descent) and not (hasattr(tx, "init") and hasattr(tx, "update")):
        what = f"tx is {excerpt(repr(tx))}, and no optimizer"
        raise ConfigError(f"{what}; pass optax.adamw(1e-3), or meshpar.optim.AdamW(lr=1e-3)")
    if isinstance(tx, Descent):
        problems = Problems()
        for name, value in {"clip_norm": clip_norm, "ema": ema}.items():
            if value is not None:
                problems.add(name, f"{type(tx).__name__} has a {name} of its own", f"{type(tx).__name__}({name}=...)")
        problems.raise_any(ConfigError, "these arguments of training are wrong:")
        ema = tx.ema
    entries = [freeze] if isinstance(freeze, (str, dict, Freeze)) else freeze
    given = Arguments(lora=lora, freeze=entries, prune=prune)  # pyright: ignore
    return Options(
        tx=tx,
        num_steps=num_steps,
        lora=given.lora,
        freeze=given.freeze,
        clip_norm=clip_norm,
        params_dtype=params_dtype,
        wrapping=Wrapping(prune=given.prune, ema=ema, **wrapping),
    )
