"""The memory, the communication and the compilations of the two programs of generation."""

from __future__ import annotations

import logging
from functools import lru_cache

import jax
import numpy as np
import pytest

from meshpar.inspection.program.hlo import Collective, collectives_of
from meshpar.models import Llama
from meshpar.serve.batch import requests_of
from meshpar.serve.paged_model import GREEDY
from meshpar.train.state import structs
from tests.serving import MAX_TOKENS, MODELS, PROMPTS, SIZES, batch_decoding, batch_engine, params, served

F64 = 8
ROWS = len(PROMPTS)
SLOTS = 6 + MAX_TOKENS
KV_HEADS = 4
HEAD_DIM = 4
PROGRAMS = ["jit(decode)", "jit(prefill)"]


@pytest.fixture(autouse=True)
def _float64(float64):
    """Every test of this module computes in float64."""


@lru_cache
def compiled(layout: str, lowering: str, **sizes: int) -> jax.stages.Compiled:
    return batch_decoding("llama", layout, lowering, **sizes).compile_decode().compiled


def found(layout: str, lowering: str) -> list[Collective]:
    return collectives_of(compiled(layout, lowering).as_text(), batch_decoding("llama", layout, lowering).ctx.mesh)


@pytest.mark.parametrize(
    ("layout", "shards", "lowering"),
    [("one", 1, "auto"), ("tensor4", 4, "manual"), ("data2_fsdp2_tensor2", 8, "auto")],
)
def test_the_cache_is_donated_and_has_its_closed_form(layout, shards, lowering):
    closed_form = 2 * SIZES["num_layers"] * ROWS * SLOTS * KV_HEADS * HEAD_DIM * F64 // shards
    assert batch_decoding("llama", layout, lowering).cache_bytes == closed_form
    assert compiled(layout, lowering).memory_analysis().alias_size_in_bytes == closed_form
    # A copied cache would not be aliased, and would be among the temporaries.
    assert compiled(layout, lowering).memory_analysis().temp_size_in_bytes < 2**15


def test_control_a_cache_that_is_not_donated_is_seen():
    decode = batch_decoding("llama", "one", "manual")
    again = jax.jit(lambda params, turn, cache: decode.logits(params, turn, cache))

    row, whole = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((ROWS,), (ROWS, 1)))
    batch = {"tokens": whole, "positions": whole, "rows": row, "last": row}
    memory = again.lower(structs(decode.params), batch, structs(decode.cache)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 0
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes > decode.cache_bytes


@pytest.mark.parametrize(
    ("layout", "lowering"), [("one", "auto"), ("tensor4", "manual"), ("data2_fsdp2_tensor2", "auto")]
)
def test_decoding_needs_temporaries_of_one_layer(layout, lowering, monkeypatch):
    """A scan over layers that split and stacked the cache would hold a copy of all of it."""
    few = compiled(layout, lowering).memory_analysis().temp_size_in_bytes
    monkeypatch.setitem(MODELS, "llama", Llama(**SIZES | {"num_layers": 8}))
    many = batch_decoding("llama", layout, lowering)
    a_layer = many.cache_bytes // 8
    assert many.compile_decode().compiled.memory_analysis().temp_size_in_bytes - few < a_layer


def test_a_token_sends_megatrons_bytes_and_two_numbers_for_the_choice():
    hidden = ROWS * SIZES["hidden_size"] * F64
    values = ROWS * F64
    want = [hidden] * (1 + 2 * SIZES["num_layers"]) + [values, values // 2]
    sent = [collective.full_bytes for collective in found("tensor4", "manual") for _ in range(int(collective.times))]
    assert {collective.kind for collective in found("tensor4", "manual")} == {"all_reduce"}
    assert sorted(sent) == sorted(want)


@pytest.mark.parametrize("layout", ["tensor4", "data2_fsdp2_tensor2"])
def test_gspmd_moves_no_keys_and_values(layout):
    """Nor rows of the batch: nothing is sent over `data`, and only parameters over `fsdp`."""
    largest = max(collective.full_bytes for collective in found(layout, "auto") if "tensor" in (collective.axes or ()))
    assert largest <= ROWS * SIZES["hidden_size"] * F64
    assert not [
        collective for collective in found(layout, "auto") if collective.axes is None or "data" in collective.axes
    ]


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
    handler = Compilations()
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield handler.names
    logger.removeHandler(handler)


def test_prefill_and_decode_are_compiled_once_for_any_prompts_and_number_of_tokens(compilations):
    params("llama")  # programs of their own draw them
    compilations.clear()
    engine = batch_engine("llama", "data2_fsdp2_tensor2", "manual")
    assert compilations == PROGRAMS
    for prompts in (PROMPTS, PROMPTS[:1], [[7, 7]] * 3):
        answers = served(engine, requests_of(prompts, MAX_TOKENS, GREEDY))
        assert {len(answer) for answer in answers} == {MAX_TOKENS}
    assert compilations == PROGRAMS


def test_control_a_compilation_is_seen(compilations):
    jax.jit(lambda x: x + 1)(np.zeros(3))
    assert len(compilations) == 1
