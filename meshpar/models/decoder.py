"""The model contract of meshpar's own decoders, which is the same for all families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import jax
import numpy as np
from flax import nnx

from meshpar.errors import Problems
from meshpar.models.contract import LayerStack, ModelContract, ModelProgram, Task
from meshpar.models.reference import Scale, decoder_sizes
from meshpar.nn.attention import Auto, context_parallel
from meshpar.nn.attention.kernel import Kernel
from meshpar.nn.attention.setting import Setting, of_run
from meshpar.nn.compressed import dequantized
from meshpar.nn.decoder import Decoder
from meshpar.nn.describe import describe, functional
from meshpar.nn.experts import Experts
from meshpar.nn.experts.balance import RouterState
from meshpar.nn.lora import LoRA, without_lora
from meshpar.nn.transformer import BLOCKS, Transformer
from meshpar.parallel.checks import check_qwix, check_rules
from meshpar.parallel.context import ParallelContext
from meshpar.train.chunks import describe_chunk
from meshpar.train.loss import Loss, next_token_loss
from meshpar.train.preferences import Copy, carried_reference
from meshpar.train.strategy import Strategy
from meshpar.tree import flatten_with_paths

PRODUCTS = {
    "fp8": "layers multiply float8_e4m3fn, and gradients in float8_e5m2; each row and column has a scale",
    "int8": "layers multiply int8, gradients too; each row and column has a scale",
}
"""What each 8-bit format means for a product."""


class DecoderModel(Decoder, ModelContract):
    """Base class of the decoder families. The file of a family also maps Hugging Face's names and keys to it."""

    reads_positions: ClassVar = True

    def program(self, task: Task) -> ModelProgram:
        abstract, init = self._initialized(task.adapter)
        forward, specs = functional(abstract, "forward"), describe(abstract)
        loss, evaluation, added = self._losses(task, forward, specs)
        return ModelProgram(
            specs=specs,
            init=init,
            loss=loss,
            evaluation=evaluation,
            rules=task.rules,
            forward=forward,
            uses_rng=self.dropout > 0,
            state=RouterState(self.experts) if self.experts else None,
            added=added,
            merged=partial(self._merged, task.adapter) if task.adapter else None,
        )

    def _initialized(self, adapter: LoRA | None) -> tuple[Transformer, Callable[[jax.Array], dict]]:
        """The model without arrays, and a function of a key that initializes its parameters."""
        graphs: list[Any] = []

        @partial(jax.jit, inline=True)  # the program of the first state does not trace it again
        def init_arrays(key: jax.Array) -> Any:
            rngs = nnx.Rngs(key)
            built = self.build(rngs)
            if adapter:
                adapter.adapt(built, rngs)
            graph, arrays = nnx.split(built)
            graphs.append(graph)
            return arrays

        def init(key: jax.Array) -> dict:
            return nnx.to_pure_dict(nnx.filter_state(init_arrays(key), nnx.Param))

        structs = jax.eval_shape(init_arrays, jax.eval_shape(lambda: jax.random.key(0)))
        return nnx.merge(graphs[0], structs), init

    def _losses(self, task: Task, forward: Any, specs: Any) -> tuple[Loss, Loss, tuple[Strategy, ...]]:
        """The losses of a step and of an evaluation, and the strategies that they need."""
        answers = task.answers
        if answers is None:
            of_step = task.loss.build(forward, self.vocab_size, task.distill)
            return of_step, next_token_loss(forward, self.vocab_size, task.loss.chunk), ()
        reference, added = None, ()
        if answers.has_reference and task.adapter:
            reference = without_lora
        elif answers.has_reference:
            reference, added = carried_reference(jax.tree.map(lambda spec: spec.dims, specs)), (Copy(),)
        build = partial(answers.build, forward, self.vocab_size, reference)
        return build(True), build(False), added

    def _merged(self, lora: LoRA, params: Any) -> Mapping[str, jax.Array]:
        """The kernels by path, in floats, with their updates."""
        flat = flatten_with_paths(params)
        return lora.merged(dequantized(self.abstract(), flat) if self.weights else flat)

    def check(self, task: Task, ctx: ParallelContext, problems: Problems) -> None:
        if task.loss.target:
            problems.add("loss", "a loss of your own needs an imported model", "model.kind=import, or no loss")
        self._check_positions(task, problems)
        if task.vocab_size > self.vocab_size:
            what = f"the data has {task.vocab_size} token ids, the model {self.vocab_size}"
            problems.add("model.vocab_size", what, f"model.vocab_size={task.vocab_size}")
        if isinstance(self.attention, Kernel):
            self.attention.check(self._attention_setting(task, ctx), problems)
        if self.experts:
            self._check_experts(self.experts, task, ctx, problems)
        if ctx.number_format:
            check_qwix(problems)
        self._check_remat(problems)
        check_rules(ctx, problems)
        context_parallel.check(self.attention, self.num_heads, ctx, problems)

    def _check_positions(self, task: Task, problems: Problems) -> None:
        if not self.learned_positions:
            return
        if task.seq_len > self.max_seq_len:
            what = f"{task.seq_len} is more than model.max_seq_len = {self.max_seq_len}"
            fix = f"model.max_seq_len={task.seq_len}, or data.seq_len={self.max_seq_len}"
            problems.add("data.seq_len", what, fix)
        theta = type(self).model_fields["rope_theta"].default
        if self.rope_theta != theta:
            what = f"{self.rope_theta:g} changes nothing: the model learns its positions, and rotates nothing"
            problems.add("model.rope_theta", what, f"model.rope_theta={theta:g}")

    def _check_experts(self, experts: Experts, task: Task, ctx: ParallelContext, problems: Problems) -> None:
        experts.check(ctx, task.seq_len, problems)
        if ctx.parallel.local and experts.balance and experts.balance.carried:
            what = f"a step changes the {experts.balance.carried} of each router, which is no trained parameter"
            problems.add("model.experts.balance", what, "model.experts.balance.load=step")
        num_loops = Counter(stack for loop in self.loops for stack in {*loop.stacks})
        if ctx.schedule and max(num_loops.values()) > 1:
            what = "stages cut a stack that one loop computes, and these layers without experts are in several loops"
            fix = "model.experts.every=1; or first_dense=0, and model.num_layers a multiple of every"
            problems.add("model.experts", what, fix)

    def _check_remat(self, problems: Problems) -> None:
        for key, names in {"save": self.remat.save, "offload": self.remat.offload}.items():
            for name in names:
                if name not in self.activations:
                    what = f"a block of kind {self._name} has no {name}, only {', '.join(self.activations)}"
                    problems.add(f"model.remat.{key}", what, f"leave out {name}")

    def _attention_setting(self, task: Task, ctx: ParallelContext) -> Setting:
        return of_run(
            ctx,
            seq_len=task.seq_len,
            head_dim=self.head_size,
            dtype=np.dtype(ctx.compute_dtype),
            window=None if self.global_layers else self.window,
            window_varies=self.window is not None and bool(self.global_layers),
            has_documents=task.has_documents,
        )

    def selected(self, task: Task, ctx: ParallelContext, batch_size: int) -> dict[str, str]:
        rows = batch_size // ctx.shards("batch") // ctx.num_passes
        vocab = self.padded_vocab // ctx.shards("vocab")
        window = None if self.global_layers else self.window
        shared = context_parallel.describe(self.attention, self.num_heads, ctx, task.seq_len, window)
        positions = task.seq_len // ctx.shards("seq")
        return (
            {
                "loss.chunk": describe_chunk(
                    "none" if task.answers else task.loss.chunk, rows, positions, self.hidden_size, vocab
                ),
                "model.attention": self.attention.describe(self._attention_setting(task, ctx)),
            }
            | ({"parallel.context": shared} if shared else {})
            | ({"precision.matmul": PRODUCTS[ctx.number_format]} if ctx.number_format else {})
            | self._selected_experts(task, ctx)
        )

    def _selected_experts(self, task: Task, ctx: ParallelContext) -> dict[str, str]:
        if self.experts is None:
            return {}
        total = sum(spec.size for spec in flatten_with_paths(self.array_specs()).values())
        num_sparse = len(self.layers_in(BLOCKS))
        routed = num_sparse * self.mlp.num_matrices * self.hidden_size * self.experts.intermediate_size
        active = total - (self.experts.num - self.experts.per_token) * routed
        parameters = f"{active / 1e9:.3g} of {total / 1e9:.3g} billion parameters are active"
        some = f"; in {num_sparse} of {self.num_layers} layers" if num_sparse < self.num_layers else ""
        return {"model.experts": f"{self.experts.describe(ctx, task.seq_len)}{some}; {parameters}"}

    def array_specs(self) -> Any:
        return describe(self.abstract())

    def reference(self, scale: Scale) -> Self:
        return type(self).model_validate(self.model_dump() | decoder_sizes(self, scale))

    def on_any_device(self) -> Self:
        return self.model_copy(update={"attention": Auto()}) if isinstance(self.attention, Kernel) else self

    def vocabulary(self) -> int:
        return self.vocab_size

    def layer_stack(self) -> LayerStack:
        return LayerStack(tuple(map(len, self.stacks.values())), self.pad_layers_to_multiple, True)
