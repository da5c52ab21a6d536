"""What a step with experts sends and multiplies: the compiled one, the traced one, and the formulas."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar.cost.traced import traced_collectives, traffic
from meshpar.inspection.inspect import inspect
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.nn.experts import Balance, Experts, exchange, tiles
from tests.program.test_bytes import ROWS, SEQ, as_written, cost_as_traced, cost_as_written, prepared, sent_over

LAYERS, WIDTH, HIDDEN, NUM, PER_TOKEN = 3, 16, 8, 8, 2
FLOAT = 4


def run_of(dispatch, sizes, presets, balance=None, **settings):
    experts = Experts(num=NUM, per_token=PER_TOKEN, intermediate_size=HIDDEN, dispatch=dispatch, balance=balance)
    model = Llama(
        num_layers=LAYERS, hidden_size=WIDTH, num_heads=4, intermediate_size=32, vocab_size=32, experts=experts
    )
    return prepared((sizes, presets), model=model, **settings)


def share(n):
    return Fraction(n - 1, n)


@pytest.mark.parametrize(("n", "tensor"), [(4, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_experts_with_places_send_them_there_and_back(n, tensor):
    """Two all-to-alls in the forward and two in the backward. Over expert alone, the norm is summed besides."""
    presets = ["experts"] if tensor == 1 else ["experts", "megatron_sp"]
    run = run_of("capacity", {"expert": n, "data": 2, "tensor": tensor}, presets, num_microbatches=2)
    places = run.run.model.experts.capacity(SEQ)
    sent, _ = cost_as_written(run)
    assert sent == run.traced_bytes
    all_to_alls = 4 * LAYERS * share(n) * ROWS // (2 * n) * NUM * places * WIDTH * FLOAT
    norm = 0 if tensor > 1 else 2 * share(n) * FLOAT
    assert sent["expert",] == all_to_alls + norm


def test_without_drops_each_device_of_a_cpu_gathers_the_tokens_of_all():
    n = 4
    run = run_of("dropless", {"expert": n, "data": 2}, ["experts"])
    sent, _ = cost_as_written(run)
    assert sent == cost_as_traced(run)[0]
    tokens = ROWS // (2 * n) * SEQ
    # In the backward, ids need no gradient.
    of_token = 4 * WIDTH * FLOAT + PER_TOKEN * (2 * FLOAT + 4)
    assert sent["expert",] == LAYERS * (n - 1) * tokens * of_token + 2 * share(n) * FLOAT


def test_a_native_ragged_all_to_all_sends_the_rows_of_a_balanced_router(monkeypatch):
    monkeypatch.setattr(exchange, "platform", lambda: "gpu")
    n = 4
    tokens = ROWS // (2 * n) * SEQ
    run = run_of("dropless", {"expert": n, "data": 2}, ["experts"])
    rows = LAYERS * 4 * share(n) * tokens * PER_TOKEN * WIDTH * FLOAT
    sizes = LAYERS * (n - 1) * NUM * 4
    assert run.traced_bytes["expert",] == rows + sizes + 2 * share(n) * FLOAT


def test_tokens_cross_to_each_group_once(monkeypatch):
    """A token has four experts in two groups, so at most half of the rows of a flat exchange cross."""
    k = 2
    g = 4
    experts = Experts(num=NUM, per_token=4, intermediate_size=HIDDEN)
    model = DENSE.model_copy(update={"experts": experts})
    parallel = {"expert": {"kind": "hierarchical", "group": g}}
    run = prepared(({"expert": k * g}, ["experts"]), model=model, parallel=parallel)
    tokens = ROWS // (k * g) * SEQ
    of_row = 4 * WIDTH * FLOAT + experts.per_token * (2 * FLOAT + 4)
    counts = (k - 1) * k * 4
    inspection = inspect(as_written(run).compiled, run.mesh)
    found = inspection.collectives
    assert sent_over(found) == cost_as_traced(run)[0]
    assert "part of expert" in str(inspection)
    whole = total_sent_bytes(one for one in found if not one.is_in_parts)  # gradients, and their norm
    crossing = total_sent_bytes(one for one in found if len(one.groups[0]) == k)
    assert crossing == LAYERS * ((k - 1) * k * tokens * of_row + counts)
    monkeypatch.setattr(exchange, "platform", lambda: "gpu")
    run = prepared(({"expert": k * g}, ["experts"]), model=model, parallel=parallel)
    across = share(k) * tokens * min(experts.per_token, k) * of_row + counts
    # Inside, the buffer has room for the choices of all rows that may cross.
    inside = share(g) * 4 * tokens * k * min(experts.per_token, NUM // k) * WIDTH * FLOAT
    sizes = (g - 1) * NUM // k * 4
    assert run.traced_bytes["expert",] == LAYERS * (across + inside + sizes) + whole


DENSE = Llama(num_layers=LAYERS, hidden_size=WIDTH, num_heads=4, intermediate_size=PER_TOKEN * HIDDEN, vocab_size=32)
"""The model whose MLPs have the width that a token uses."""


def over_dense(num_flops):
    """Operations of a device over those of the dense model, without the products of routing."""
    of_token = {"logits": 6 * WIDTH * NUM, "load": 2 * NUM}
    tokens = ROWS // 8 * SEQ
    return (num_flops - LAYERS * tokens * sum(of_token.values())) / cost_as_traced(prepared("data8", model=DENSE))[1]


def test_without_drops_the_products_are_those_of_the_dense_model_though_there_is_room_for_more():
    run = run_of("dropless", {"expert": 4, "data": 2}, ["experts"])
    assert over_dense(cost_as_traced(run)[1]) == 1
    assert over_dense(cost_as_written(run)[1]) <= 1.10


def test_ragged_products_of_a_cpu_are_those_of_all_experts_with_all_rows(monkeypatch):
    """Control."""
    monkeypatch.setattr(tiles, "_in_tiles", lambda _, *operands: tiles._by_xla(*operands))
    assert over_dense(cost_as_written(run_of("dropless", {"expert": 4, "data": 2}, ["experts"]))[1]) > 2


def test_a_balance_by_the_load_of_the_step_sends_a_number_for_each_expert():
    """In each layer; and once the number of tokens."""
    step, last_step, none = (
        run_of("dropless", {"expert": 4, "data": 2}, ["experts"], balance).traced_bytes
        for balance in (Balance(load="step"), Balance(load="last_step"), None)
    )
    added = {axes: step[axes] - last_step[axes] for axes in step if step[axes] != last_step[axes]}
    assert added == {("data", "expert"): 2 * share(8) * (LAYERS * NUM + 1) * FLOAT}
    assert last_step["data", "expert"] - none["data", "expert"] == 2 * share(8) * FLOAT


def test_a_step_sends_a_ragged_buffer_once():
    """Not the buffer that it writes to, and no more than that has room for."""
    mesh = MeshLayout(expert=4).abstract()

    def send(rows):
        place = lax.pcast(jnp.zeros(4, jnp.int32), "expert", to="varying")
        room = lax.pcast(jnp.zeros((64, 8), jnp.float32), "expert", to="varying")
        return lax.ragged_all_to_all(rows, room, place, place, place, place, axis_name="expert")

    spec = jax.sharding.PartitionSpec("expert")
    sent = jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec)
    program = jax.make_jaxpr(sent)(jnp.ones((64, 8), jnp.float32))
    assert traffic(traced_collectives(program)) == {("expert",): share(4) * 16 * 8 * FLOAT}


def test_a_compiled_ragged_all_to_all_sends_the_smaller_buffer():
    lines = ["HloModule m, num_partitions=4", "", "ENTRY %main (a: f32[64,8]) -> f32[16,8] {"]
    lines += [
        "  %a = f32[64,8]{1,0} parameter(0)",
        "  %b = f32[16,8]{1,0} parameter(1)",
        "  %o = s32[4]{0} parameter(2)",
    ]
    sent = "ROOT %r = f32[16,8]{1,0} ragged-all-to-all(%a, %b, %o, %o, %o, %o), replica_groups={{0,1,2,3}}"
    found = collectives_of("\n".join([*lines, f"  {sent}", "}"]))
    back = "ROOT %r = f32[64,8]{1,0} ragged-all-to-all(%b, %a, %o, %o, %o, %o), replica_groups={{0,1,2,3}}"
    found += collectives_of("\n".join([*lines, f"  {back}", "}"]))
    assert [one.sent_bytes for one in found] == [share(4) * 16 * 8 * FLOAT] * 2
