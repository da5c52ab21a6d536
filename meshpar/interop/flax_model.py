"""Imports a user's own Flax model from a config, with or without a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from meshpar.config import Strings, Target, default
from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.interop import user_code
from meshpar.interop.assembled import assembled
from meshpar.interop.causal import Causal, linen_functions, nnx_functions
from meshpar.interop.declared import changing, lazily, unboxed
from meshpar.interop.inferred import INFER, OF_SHARDS
from meshpar.interop.losses import takes
from meshpar.interop.modes import mode
from meshpar.interop.module import Functions, functions
from meshpar.interop.named_loss import ModelCall
from meshpar.interop.specs import Init, check_axes, specs_of
from meshpar.models.contract import ModelContract, ModelProgram, Task
from meshpar.parallel.checks import check_recognized
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.spec import ArraySpec
from meshpar.train.loss import Batch, Loss, LossSums, next_token_loss
from meshpar.train.tasks import NamedLoss
from meshpar.train.training import step_key
from meshpar.tree import flatten_with_paths


class Import(ModelContract):
    """A Flax model that a user's function returns.

    >>> Import(target="my_package.my_module:build", arguments={"width": 64}).target
    'my_package.my_module:build'
    """

    kind: Literal["import"] = "import"
    target: Target
    """`package.module:name` of a function that returns a Linen module; or of an NNX class or a function that returns an
    NNX module, called with `rngs`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""
    dims: dict[str, tuple[str, ...]] | Literal["infer"] = Field(default_factory=dict)
    """Path glob -> a name for each dim of these parameters, instead of the model's declarations. Or `infer`: names that
    are missing are inferred from the loss."""
    activation_dims: Strings = default(())
    """Names of dims that only activations have. Rules may use them."""
    axes: dict[str, str] = Field(default_factory=dict)
    """The model's own name of a mesh axis -> meshpar's, `{tp: tensor}`."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Parameter of the model's call -> array of the batch, `{x: image}`, for a loss by name. Default: by equal names,
    or the only array besides the labels."""
    manual: bool = False
    """Whether model and loss are written for a device's rows and shards, and communicate over axes other than those of
    the batch themselves. Others are partitioned."""

    called_with: ClassVar[tuple[str, ...]] = ("tokens",)
    """The arrays of a batch with which the loss of the next token calls the model."""

    @property
    def is_local(self) -> bool:
        return self.manual

    def module(self) -> Any:
        """The Linen module; or a function with an argument `rngs` that returns one of NNX."""
        build = _builder(self)
        if "rngs" in signature(build.__init__ if isinstance(build, type) else build).parameters:
            return partial(build, **self.arguments)
        return _linen(self, build)

    def built(self, seq_len: int) -> _Model:
        """Imports the model, and makes functions of it that are called with tokens."""
        module = self.module()
        return _of_linen(module, seq_len) if isinstance(module, nn.Module) else _of_nnx(module)

    def program(self, task: Task) -> ModelProgram:
        """Imports the model, and its own loss if the config names one.

        The config's loss is a function (model, params, batch, key) that returns the same as a loss of
        `meshpar.training`; `model` is the Linen module, or the `GraphDef` of the NNX module. If the model has
        collections that change, the loss has a fifth argument, `carried`, and a third result. The default loss is the
        cross entropy of the next token, from the logits `model(tokens)`.

        Raises:
          ConfigError: the target is not a Flax model, importing it is not allowed, or it does not fit the data.
        """
        if task.adapter and self.manual:
            what = "a model for local shards gets its shards of a kernel, to which it adds its own updates"
            raise ConfigError(f"lora: {what}; model.manual=false")
        check_axes(self.axes)
        arrays = self.batch_specs(1, task.seq_len) if task.arrays is None else one_row(task.arrays)
        with user_code.blamed(self.target):
            user = self._functions(task, arrays)
            dims = {} if self.dims == INFER else self.dims
            found = specs_of(user.init, user.carried, task.seed, dims, self.axes)
        program, _ = assembled(
            user, found, arrays, task.rules, axes=self.axes, mesh=task.mesh, infers=self.dims == INFER,
            key=jax.eval_shape(partial(step_key, task.seed), 0) if user.draws else None, lora=task.adapter,
            gathers=self.manual, returns_carried=task.loss.target is None and task.named is None,
        )  # fmt: skip
        return replace(program, activation_dims=self.activation_dims)

    def _functions(self, task: Task, arrays: Mapping[str, ArraySpec]) -> Functions:
        """The functions of parameters that the task needs of the model.

        Args:
          arrays: of a batch of one row.
        """
        target = task.loss.target
        own = None if target is None else user_code.load(target)
        if task.named:
            return _of_named(self, task.named, arrays)
        if own is not None and is_model_loss(own):
            return functions(self.module(), own, None, _zeros(arrays))
        if task.arrays is not None:
            name = (target or "").rpartition(":")[2] or "loss"
            fix = f"def {name}(model, batch), or (model, batch, key); or a loss by name, loss=classify"
            raise ConfigError(f"loss: the loss of rows of arrays is your own, or has a name; {fix}")
        user = self.built(task.seq_len)
        structs = jax.eval_shape(lazily(user.carried), jax.random.key(task.seed))
        carried = user.carried if jax.tree.leaves(structs) else None
        if target is None:
            loss, evaluation = self._next_token_losses(user, task, structs if carried else {})
            return Functions(user.init, loss, evaluation, carried, user.draws)
        loss = _own(target, user.module, carried is not None)
        return Functions(user.init, loss, loss, carried, draws=True)

    def check(self, task: Task, ctx: ParallelContext, problems: Problems) -> None:
        check_recognized(ctx, "the loss of an imported model", self.is_local, problems)
        if task.named and self.manual:
            what = "a loss by name is written for whole arrays, and this model for local shards"
            problems.add("model.manual", what, "model.manual=false, or a loss of your own")
        if self.dims == INFER and self.manual:
            problems.add(
                "model.dims = infer", OF_SHARDS, "model.manual=false, or names, model.dims={up.kernel: [embed, mlp]}"
            )
        if self.inputs and not task.named:
            what = "a loss of your own, and that of the next token, call the model themselves"
            problems.add("model.inputs", what, "no model.inputs, or a loss by name, loss=classify")
        if isinstance(task.loss.chunk, int):
            whole = "an imported model computes all logits at once, so that its loss has no chunks"
            problems.add("loss.chunk", whole, "loss.chunk=none")
        if task.distill:
            what = "an imported model computes its loss itself, which has no teacher"
            problems.add("distill", what, "no distill; or a loss of your own, loss: package.module:name, that calls it")
        if task.has_documents and task.loss.target is None and len(self.called_with) == 1:
            what = (
                f"{self.target} is called with the tokens alone, so a token attends to other documents of its row too"
            )
            fix = "data.documents_in_row=joined, or a loss of your own, which may read batch['segments']"
            problems.add("data.documents_in_row = separate", what, fix)

    def names(self, task: Task) -> Mapping[str, tuple[str, ...]]:
        """`dims`; if they are inferred, those of each parameter."""
        if self.dims != INFER:
            return self.dims
        specs = self.program(replace(task, adapter=None)).specs
        return {path.removesuffix(".value"): spec.dims for path, spec in flatten_with_paths(specs).items()}

    def causal(self, seq_len: int) -> tuple[Causal, Init]:
        """The functions with which the model generates, and its init.

        Raises:
          ConfigError: it is written for local shards, or has state that the forward changes.
        """
        if self.manual:
            raise ConfigError("model.manual: a model for local shards cannot generate; model.manual=false")
        with user_code.blamed(self.target):
            user = self.built(seq_len)
            first = jax.random.key(0)
            carried = jax.eval_shape(lazily(user.carried), first)
            apply = decoding = None
            kept = [path for path, kind in changing(carried).items() if kind == nnx.BatchStat.__name__]
            if isinstance(user.module, nn.Module):
                kept = list(map(str, carried))
                apply, decoding = linen_functions(user.module)
            elif not kept:
                params = jax.eval_shape(lazily(user.init), first)
                others = jax.jit(lazily(user.carried))(first) if jax.tree.leaves(carried) else None
                apply, decoding = nnx_functions(user.module, params, others)
        if kept or apply is None:
            what = f"{self.target} has state that the forward changes: {', '.join(kept)}"
            raise ConfigError(f"{what}; a model generates from its parameters alone")
        return Causal(apply, decoding, self.axes), user.init

    def _next_token_losses(self, user: _Model, task: Task, carried: Any) -> tuple[Callable[..., LossSums], ...]:
        """Returns the loss of a step and the loss of an evaluation."""
        if carried and isinstance(user.module, nn.Module):
            what = f"{self.target} has collections that change: {', '.join(map(str, carried))}"
            raise ConfigError(f"{what}; set a loss that returns their new values, loss: package.module:name")
        vocab_size = _vocab_size(self, user, task.seq_len)
        if task.vocab_size > vocab_size:
            what = f"the data has {task.vocab_size} token ids"
            raise ConfigError(f"{what}, but {self.target} has logits for {vocab_size}")
        loss = _next_token(self, user, partial(task.loss.build, vocab_size=vocab_size), is_training=True)
        build = partial(next_token_loss, vocab_size=vocab_size)
        return loss, _next_token(self, user, build, is_training=False)


@dataclass(frozen=True)
class _Model:
    """A user's model in Linen or NNX.

    Args:
      module: the Linen module, or the `GraphDef` of the NNX module.
      init: key -> parameters.
      carried: key -> the initial state that the forward changes, such as batch statistics.
      apply: (params, carried, arrays of the call, is_training, key) -> logits, and the next `carried`.
      draws: whether a step gives it a key, as Linen's dropout needs. NNX has keys of its own.
    """

    module: Any
    init: Init
    carried: Init
    apply: Callable[..., tuple[jax.Array, Any]]
    draws: bool = False


def _next_token(model: Import, user: _Model, build: Callable[..., Loss], is_training: bool) -> Callable[..., LossSums]:
    """Returns the next token's loss as a function with the arguments of a user's own loss."""

    def loss(params: Any, batch: Batch, key: jax.Array | None, carried: Any = None) -> LossSums:
        with user_code.blamed(model.target):
            inputs = [batch[name] for name in model.called_with]
            logits, after = user.apply(params, carried or {}, inputs, is_training, key)
        sums = build(lambda params, batch, key: logits)(params, batch, key, {})
        return replace(sums, carried=after)

    return loss


def _own(target: str, module: Any, carries: bool) -> Callable[..., Any]:
    """Imports the loss that a config names."""
    user_loss = user_code.load(target)
    arguments = ("model", "params", "batch", "key", *(["carried"] if carries else []))
    if not takes(user_loss, len(arguments)):
        name = target.rpartition(":")[2]
        fix = f"def {name}({', '.join(arguments)}), or def {name}(model, batch, key)"
        raise ConfigError(f"{target} is called with {len(arguments)} arguments; {fix}")

    def loss(*arguments: Any) -> Any:
        with user_code.blamed(target):
            return user_loss(module, *arguments)

    return loss


def one_row(arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """The arrays of a batch of one row."""
    return {name: replace(spec, shape=(1, *spec.shape[1:])) for name, spec in arrays.items()}


def is_model_loss(loss: Callable[..., Any]) -> bool:
    """Whether a loss is one of `training`'s: (model, batch), or (model, batch, key)."""
    names = [*signature(loss).parameters]
    return (takes(loss, 2) or takes(loss, 3)) and not takes(loss, 4) and names[1:2] != ["params"]


def _zeros(arrays: Mapping[str, ArraySpec]) -> dict[str, jax.Array]:
    return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in arrays.items()}


def _of_named(model: Import, loss: NamedLoss, arrays: Mapping[str, ArraySpec]) -> Functions:
    """The functions of a loss by name."""
    module = model.module()
    call = ModelCall.of(module, model.target, model.inputs)
    example = _zeros(arrays)
    found = functions(module, call.trained(loss), call.evaluated(loss), example)

    evaluated: Any = found.evaluation

    def outputs(key: jax.Array) -> Any:
        carried = (found.carried(key),) if found.carried else ()
        params, *others = unboxed((lazily(found.init)(key), *carried))
        return evaluated(params, example, None, *others)[2]

    def evaluation(*arguments: Any) -> LossSums:
        return evaluated(*arguments)[0]

    def of_rows(*arguments: Any) -> dict[str, jax.Array]:
        return evaluated(*arguments)[1]

    bounds = loss.bounds(jax.eval_shape(lazily(outputs), jax.random.key(0)))
    of_all = of_rows if loss.row_metrics else None
    return replace(found, evaluation=evaluation, draws=True, of_rows=of_all, bounds=bounds)


def _builder(model: Import) -> Callable[..., Any]:
    """The user's function, whose parameters fit the arguments of the config."""
    build = user_code.load(model.target)
    if not callable(build):
        raise ConfigError(f"{model.target} is {type(build).__name__}, not a function that returns a Flax model")
    parameters = signature(build.__init__ if isinstance(build, type) else build).parameters
    hidden = ("self", "parent", "name") if isinstance(build, type) else ()  # Linen adds the last two
    _check_arguments(model, {name: p for name, p in parameters.items() if name not in hidden})
    return build


def _linen(model: Import, build: Callable[..., Any]) -> nn.Module:
    module = build(**model.arguments)
    if isinstance(module, nn.Module):
        return module
    what = f"{model.target} returns {type(module).__name__}, not a Linen module, and has no argument rngs for NNX"
    raise ConfigError(f"{what}; name a function that returns a Flax model")


def _check_arguments(model: Import, parameters: Mapping[str, Parameter]) -> None:
    """Checks the arguments in the config against the parameters of the user's function."""
    problems = Problems()
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    named = {name: p for name, p in parameters.items() if name != "rngs" and p.kind in by_name}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    listed = f"it has {', '.join(named)}" if named else "it has none"
    for name in model.arguments:
        if name not in named and not takes_any:
            fix = suggestion(name, named, listed)
            problems.add(f"model.arguments.{name}", f"{model.target} has no such argument", fix)
    for name, parameter in named.items():
        if parameter.default is Parameter.empty and name not in model.arguments:
            problems.add(f"model.arguments.{name}", f"{model.target} requires it", listed)
    problems.raise_any(ConfigError, f"{model.target} cannot be called with these arguments:")


def _of_linen(module: nn.Module, seq_len: int) -> _Model:
    tokens = jnp.zeros((1, seq_len), jnp.int32)

    def variables(key: jax.Array) -> dict[str, Any]:
        return dict(module.init(key, tokens, **mode(module, is_training=False)))

    def carried(key: jax.Array) -> dict[str, Any]:
        return {name: value for name, value in variables(key).items() if name != "params"}

    def apply(
        params: Any, carried: Any, inputs: Sequence[jax.Array], is_training: bool, key: Any = None
    ) -> tuple[jax.Array, Any]:
        more = mode(module, is_training)
        more |= {"rngs": {"dropout": key}} if is_training and draws else {}
        return module.apply({"params": params}, *inputs, **more), carried  # pyright: ignore

    draws = bool(mode(module, is_training=True))
    return _Model(module, lambda key: variables(key)["params"], carried, apply, draws)


def _of_nnx(build: Callable[..., nnx.Module]) -> _Model:
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))

    def init(key: jax.Array) -> Any:
        return nnx.state(build(rngs=nnx.Rngs(key)), nnx.Param)

    def carried(key: jax.Array) -> Any:
        return nnx.state(build(rngs=nnx.Rngs(key)), nnx.Not(nnx.Param)) or {}

    def apply(
        params: Any, carried: Any, inputs: Sequence[jax.Array], is_training: bool, key: Any = None
    ) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, carried) if carried else nnx.merge(graph, params)
        if is_training:
            model.train()
        else:
            model.eval()
        logits = model(*inputs, **mode(model, is_training))  # pyright: ignore
        return logits, nnx.state(model, nnx.Not(nnx.Param)) if carried else carried

    return _Model(graph, init, carried, apply)


def _vocab_size(model: Import, user: _Model, seq_len: int) -> int:
    tokens = jax.ShapeDtypeStruct((1, seq_len), jnp.int32)

    def logits(key: jax.Array, tokens: jax.Array) -> Any:
        params = unboxed(lazily(user.init)(key))
        carried = unboxed(lazily(user.carried)(key))
        return user.apply(params, carried, [tokens], False)[0]

    with user_code.blamed(model.target):
        output = jax.eval_shape(logits, jax.random.key(0), tokens)
    if getattr(output, "ndim", 0) != 3:
        shape = getattr(output, "shape", type(output).__name__)
        call = f"model(tokens[1, {seq_len}])"
        raise ConfigError(f"{model.target}: {call} returns {shape}, not logits [batch, seq, vocab]")
    return output.shape[-1]
