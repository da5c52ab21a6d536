"""What the two programs of generation hold, send and cost: read from what was compiled."""

from __future__ import annotations

import logging
from functools import lru_cache

import jax
import numpy as np
import pytest

from meshpar.inspection.program.hlo import Collective, collectives_of
from meshpar.models import Llama
from meshpar.serve.cache import device_bytes
from meshpar.train.state import structs
from tests.serving import MAX_TOKENS, MODELS, PROMPTS, SIZES, decoding, generator, params

F64, ROWS, SLOTS, KV_HEADS, HEAD_DIM = 8, len(PROMPTS), 6 + MAX_TOKENS, 4, 4


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test here."""


@lru_cache
def compiled(layout: str, lowering: str, **sizes: int) -> jax.stages.Compiled:
    return decoding("llama", layout, lowering, **sizes).compile_decode().compiled


def found(layout: str, lowering: str) -> list[Collective]:
    return collectives_of(compiled(layout, lowering).as_text(), decoding("llama", layout, lowering).ctx.mesh)


@pytest.mark.parametrize(
    ("layout", "shards", "lowering"),
    [("one", 1, "auto"), ("tensor4", 4, "manual"), ("data2_fsdp2_tensor2", 8, "auto")],
)
def test_the_cache_is_donated_and_has_its_closed_form(layout, shards, lowering):
    closed_form = 2 * SIZES["num_layers"] * ROWS * SLOTS * KV_HEADS * HEAD_DIM * F64 // shards
    assert device_bytes(decoding("llama", layout, lowering).cache) == closed_form
    assert compiled(layout, lowering).memory_analysis().alias_size_in_bytes == closed_form
    # A cache that is copied would not be in the alias, and twice in what is held.
    assert compiled(layout, lowering).memory_analysis().temp_size_in_bytes < 2**15


def test_a_cache_that_is_not_donated_is_seen():
    decode = decoding("llama", "one", "manual")
    again = jax.jit(lambda params, turn, cache: decode.logits(params, turn, cache))

    row, whole = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((ROWS,), (ROWS, 1)))
    batch = {"tokens": whole, "positions": whole, "rows": row, "last": row}
    kept = again.lower(structs(decode.params), batch, structs(decode.cache)).compile().memory_analysis()
    assert kept.alias_size_in_bytes == 0
    assert kept.temp_size_in_bytes + kept.output_size_in_bytes > device_bytes(decode.cache)


@pytest.mark.parametrize(
    ("layout", "lowering"), [("one", "auto"), ("tensor4", "manual"), ("data2_fsdp2_tensor2", "auto")]
)
def test_decoding_needs_temporaries_of_one_layer(layout, lowering, monkeypatch):
    """It would be a copy of the whole cache, if the scan over layers took it apart and put it together again."""
    few = compiled(layout, lowering).memory_analysis().temp_size_in_bytes
    monkeypatch.setitem(MODELS, "llama", Llama(**SIZES | {"num_layers": 8}))
    many = decoding("llama", layout, lowering)
    a_layer = device_bytes(many.cache) // 8
    assert many.compile_decode().compiled.memory_analysis().temp_size_in_bytes - few < a_layer


def test_a_token_sends_what_megatron_says_and_two_numbers_to_be_chosen():
    hidden, values = ROWS * SIZES["hidden_size"] * F64, ROWS * F64
    want = [hidden] * (1 + 2 * SIZES["num_layers"]) + [values, values // 2]
    sent = [one.full_bytes for one in found("tensor4", "manual") for _ in range(one.times)]
    assert {one.kind for one in found("tensor4", "manual")} == {"all_reduce"}
    assert sorted(sent) == sorted(want)


@pytest.mark.parametrize("layout", ["tensor4", "data2_fsdp2_tensor2"])
def test_gspmd_moves_no_keys_and_values(layout):
    """Nor rows of the batch: what goes over `data` is nothing, over `fsdp` parameters alone."""
    largest = max(one.full_bytes for one in found(layout, "auto") if "tensor" in (one.axes or ()))
    assert largest <= ROWS * SIZES["hidden_size"] * F64
    assert not [one for one in found(layout, "auto") if one.axes is None or "data" in one.axes]


class Compilations(logging.Handler):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def emit(self, record):
        if record.getMessage().startswith("Finished XLA compilation of"):
            self.names.append(record.getMessage().split()[4])


@pytest.fixture
def compilations():
    """The names of the programs that XLA compiles."""
    handler, logger = Compilations(), logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield handler.names
    logger.removeHandler(handler)


def test_prefill_and_decode_are_compiled_once_for_any_prompts_and_number_of_tokens(compilations):
    params("llama")  # drawn by programs of their own
    compilations.clear()
    model = generator("llama", "data2_fsdp2_tensor2", "manual")
    assert compilations == ["jit(prefill)", "jit(decode)"]
    for prompts in (PROMPTS, PROMPTS[:1], [[7, 7]] * 3):
        assert len(list(model.turns(prompts))) == MAX_TOKENS
    assert compilations == ["jit(prefill)", "jit(decode)"]


def test_a_compilation_in_the_loop_would_be_seen(compilations):
    jax.jit(lambda x: x + 1)(np.zeros(3))
    assert len(compilations) == 1
