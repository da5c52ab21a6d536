"""The reader of compiled programs, on hand-written text in forms that only GPUs' and TPUs' compilers print."""

from __future__ import annotations

from fractions import Fraction

import pytest
from jax.sharding import PartitionSpec as P

from meshpar.errors import ProgramError
from meshpar.inspection.inspect import inspect
from meshpar.inspection.program import hlo
from meshpar.inspection.program.groups import find_groups, parse_groups
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.inspection.program.text import ArrayType
from tests.program.test_hlo import ONE, compiled, compiled_text, make_mesh, repeat, shift

EVENS = ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", EVENS),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2] {'a'}", EVENS),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", EVENS),
        ("mesh['a'=8] {'a':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=4,'b'=2] {'b','a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,2,2]T(1,0,2)) {'a'}", ((0, 4, 2, 6), (1, 5, 3, 7))),
    ],
)
def test_each_printed_form_of_groups_is_read(text, groups):
    assert parse_groups(text, 8) == groups
    assert find_groups(f"%p), channel_id=1, replica_groups={text}, dimensions={{0}}", "replica_groups", 8) == groups


@pytest.mark.parametrize(
    "text",
    ["mesh['a'=8] {'a':2}", "mesh['a'=4], device_ids=(3,2,1,0) {'a'}", "[2,4]", "{{0,1},{2,3}", "{{}}", "{{0,8}}"],
)
def test_unknown_forms_of_groups_raise(text):
    with pytest.raises(ProgramError):
        find_groups(f"%p), replica_groups={text}, dimensions={{0}}", "replica_groups", 8)


ADD = """
%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}
"""


def module(body: str, computations: str = "", num_arguments: int = 1) -> str:
    layouts = ", ".join(["bf16[4,8]{1,0}"] * num_arguments)
    header = f"HloModule m, is_scheduled=true, entry_computation_layout={{({layouts})->f32[]}}, num_partitions=8"
    entry = f"ENTRY %main (p: bf16[4,8]) -> bf16[4,8] {{\n  %p = bf16[4,8]{{1,0}} parameter(0)\n  {body}\n}}\n"
    return f"{header}\n{ADD}{computations}\n{entry}"


HALVES = "replica_groups={{0,1,2,3},{4,5,6,7}}"
ASYNC = {
    "all-gather": (
        f"%s = (bf16[4,8]{{1,0}}, bf16[16,8]{{1,0}}) all-gather-start(%p), channel_id=1, {HALVES}, dimensions={{0}}",
        "bf16[16,8]{1,0}",
        (256, 192),
    ),
    "all-gather of two": (
        "%s = ((bf16[4,8]{1,0}, bf16[4,8]{1,0}), (bf16[16,8]{1,0}, bf16[16,8]{1,0})) "
        f"all-gather-start(%p, %p), channel_id=1, {HALVES}, dimensions={{0}}",
        "(bf16[16,8]{1,0}, bf16[16,8]{1,0})",
        (512, 384),
    ),
    "all-reduce": (
        f"%s = bf16[4,8]{{1,0}} all-reduce-start(%p), channel_id=1, {HALVES}, to_apply=%add",
        "bf16[4,8]{1,0}",
        (64, 96),
    ),
    "reduce-scatter": (
        f"%s = ((bf16[4,8]{{1,0}}), bf16[1,8]{{1,0}}) reduce-scatter-start(%p), channel_id=1, {HALVES}, to_apply=%add",
        "bf16[1,8]{1,0}",
        (64, 48),
    ),
    "all-to-all": (
        f"%s = ((bf16[4,8]{{1,0}}), bf16[4,8]{{1,0}}) all-to-all-start(%p), channel_id=1, {HALVES}, dimensions={{0}}",
        "bf16[4,8]{1,0}",
        (64, 48),
    ),
    "collective-permute": (
        "%s = (bf16[4,8]{1,0:T(8,128)(2,1)}, bf16[4,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}",
        "bf16[4,8]{1,0}",
        (64, 16),  # two of eight devices send
    ),
}


@pytest.mark.parametrize("name", ASYNC)
def test_a_start_and_its_done_count_once(name):
    start, result, expected = ASYNC[name]
    opcode = name.removesuffix(" of two")
    [collective] = collectives_of(module(f"{start}\n  ROOT %d = {result} {opcode}-done(%s)"))
    assert (collective.full_bytes, collective.sent_bytes) == expected
    assert collective.kind == hlo.KINDS[opcode]


@pytest.mark.parametrize("call", ["async-start(%p), calls=%wrapped", "call-start(%p), to_apply=%wrapped"])
def test_a_wrapped_collective_counts_once(call):
    """On GPUs both the start and the done name the wrapped computation; on TPUs SparseCores are called like this."""
    wrapped = f"""
%wrapped (q: bf16[4,8]) -> bf16[16,8] {{
  %q = bf16[4,8]{{1,0}} parameter(0)
  ROOT %g = bf16[16,8]{{1,0}} all-gather(%q), channel_id=1, {HALVES}, dimensions={{0}}
}}
"""
    done = call.replace("%p", "%s").replace("-start", "-done")
    body = f"%s = ((bf16[4,8]{{1,0}}), bf16[16,8]{{1,0}}) {call}\n  ROOT %d = bf16[16,8]{{1,0}} {done}"
    [collective] = collectives_of(module(body, wrapped))
    assert (collective.full_bytes, collective.times) == (256, 1)


def test_a_collective_that_tpus_advance_in_other_fusions_counts_once():
    """Its start, the fusions in which it advances, here in a loop, and its end all contain the whole collective."""
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}'

    def part(name: str, root: str) -> str:
        return f"""
%{name} (q: bf16[4,8]) -> bf16[16,8] {{
  %q = bf16[4,8]{{1,0}} parameter(0)
  %g = bf16[16,8]{{1,0}} all-gather(%q), channel_id=1, {HALVES}, dimensions={{0}}, {config}
  ROOT %r = bf16[16,8]{{1,0}} {root}
}}
"""

    start = part("begin", 'custom-call(%g), custom_call_target="AsyncCollectiveStart"')
    done = part("end", 'custom-call(%g), custom_call_target="AsyncCollectiveDone"')
    body = """%s = bf16[16,8]{1,0} fusion(%p), kind=kLoop, calls=%begin
  %m = bf16[16,8]{1,0} fusion(%p), kind=kLoop, calls=%async_collective_fusion.1
  ROOT %d = bf16[16,8]{1,0} fusion(%p), kind=kLoop, calls=%end"""
    advance = part("async_collective_fusion.1", "copy(%g)")
    [collective] = collectives_of(module(body, start + advance + done))
    assert (collective.full_bytes, collective.times) == (256, 1)
    alone = advance.replace(config, "use_global_device_ids=true")  # control: an ordinary gather
    assert len(collectives_of(module(body, start + alone + done))) == 2


def test_tpus_all_reduce_scatter_is_a_reduce_scatter():
    fused = f"""
%all-reduce-scatter.1 (q: bf16[4,8]) -> bf16[1,8] {{
  %q = bf16[4,8]{{1,0}} parameter(0)
  %r = bf16[4,8]{{1,0}} all-reduce(%q), channel_id=1, {HALVES}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %shard = bf16[1,8]{{1,0}} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={{1,8}}
}}
"""
    text = module("ROOT %f = bf16[1,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1", fused)
    [collective] = collectives_of(text)
    assert (collective.kind, collective.full_bytes, collective.sent_bytes) == ("reduce_scatter", 64, 48)
    [plain] = collectives_of(text.replace("%all-reduce-scatter.1", "%fused"))
    assert (plain.kind, plain.sent_bytes) == ("all_reduce", 96)


def test_a_permute_that_moves_nothing_sends_nothing():
    text = module("ROOT %c = bf16[4,8]{1,0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{2,2}}")
    assert total_sent_bytes(collectives_of(text)) == Fraction(64, 8)
    assert total_sent_bytes(collectives_of(text.replace("{{0,1},{2,2}}", "{{0,0},{2,2}}"))) == 0
    assert total_sent_bytes(collectives_of(text.replace("{{0,1},{2,2}}", "{}"))) == 0


@pytest.mark.parametrize(
    ("branches", "times"),
    [
        ("branch_computations={%skip, %send}", 1),
        ("true_computation=%send, false_computation=%skip", 1),
        ("true_computation=%skip, false_computation=%send", 2),
    ],
)
def test_the_branch_for_true_is_the_second(branches, times):
    """Some compilers print branches by number, others by truth value with the one for true first."""
    both = """
%skip (s: bf16[4,8]) -> bf16[4,8] {
  ROOT %s = bf16[4,8]{1,0} parameter(0)
}
%send (t: bf16[4,8]) -> bf16[4,8] {
  %t = bf16[4,8]{1,0} parameter(0)
  ROOT %c = bf16[4,8]{1,0} collective-permute(%t), channel_id=1, source_target_pairs={{0,1}}
}
"""
    scope = 'metadata={op_name="jit(f)/taken_2_1_of_1/cond"}'
    text = module(f"ROOT %r = bf16[4,8]{{1,0}} conditional(%i, %p, %p), {branches}, {scope}", both)
    assert [collective.times for collective in collectives_of(text)] == [times]


def test_an_empty_group_is_all_devices_however_long_the_header():
    text = module("ROOT %r = bf16[4,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={}, to_apply=%add", "", 3000)
    assert collectives_of(text, make_mesh())[0].axes == ("data", "fsdp", "tensor")


# Loops whose length follows from their counter, as on TPUs ------------------------------------------------------


def counted_loop(start: str = "constant(0)", limit: str = "constant(4)", step: str = "constant(1)", direction="LT"):
    loop = f"""
%body (c: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %c = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = bf16[4,8]{{1,0}} get-tuple-element(%c), index=1
  %step = s32[] {step}
  %next = s32[] add(%i, %step)
  %y = bf16[4,8]{{1,0}} all-reduce(%x), channel_id=1, {HALVES}, to_apply=%add
  ROOT %carry = (s32[], bf16[4,8]{{1,0}}) tuple(%next, %y)
}}

%condition (d: (s32[], bf16[4,8])) -> pred[] {{
  %d = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%d), index=0
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%j, %limit), direction={direction}
}}
"""
    body = f"""%start = s32[] {start}
  %copied = s32[] copy(%start)
  %init = (s32[], bf16[4,8]{{1,0}}) tuple(%copied, %p)
  ROOT %w = (s32[], bf16[4,8]{{1,0}}) while(%init), condition=%condition, body=%body"""
    return module(body, loop)


@pytest.mark.parametrize(
    ("loop", "times"),
    [
        ({}, 4),
        ({"start": "constant(1)"}, 3),
        ({"step": "constant(3)"}, 2),
        ({"start": "constant(9)"}, 0),
    ],
)
def test_the_length_of_a_loop_follows_from_its_start_its_limit_and_its_step(loop, times):
    """XLA peels the first turn off some loops, so the limit alone would count one turn too many."""
    [collective] = collectives_of(counted_loop(**loop))
    assert collective.times == times


@pytest.mark.parametrize(
    "loop",
    [
        {"start": "parameter(1)"},
        {"limit": "get-tuple-element(%d), index=0"},
        {"step": "get-tuple-element(%c), index=0"},
        {"step": "constant(-1)"},
        {"direction": "NE"},
    ],
)
def test_a_collective_in_a_loop_of_unknown_length_raises(loop):
    with pytest.raises(ProgramError, match="loop of unknown length"):
        collectives_of(counted_loop(**loop))


def test_a_loop_of_unknown_length_without_collectives_does_not_raise():
    text = counted_loop(direction="NE").replace(
        "all-reduce(%x), channel_id=1, " + HALVES + ", to_apply=%add", "copy(%x)"
    )
    assert collectives_of(text) == []


def test_a_condition_runs_once_more_than_the_body():
    asks = f"%n = bf16[] all-reduce(%z), channel_id=2, {HALVES}, to_apply=%add\n  %limit ="
    [_, condition] = collectives_of(counted_loop().replace("%limit =", asks))
    assert condition.times == 5


# Controls ------------------------------------------------------------------------------------------------------


def test_control_a_wrong_trip_count_changes_the_bytes():
    text = compiled_text(repeat(shift, 5), P("fsdp"), P("fsdp"), (8, 4))
    assert '"known_trip_count":{"n":"5"}' in text
    wrong = text.replace('"known_trip_count":{"n":"5"}', '"known_trip_count":{"n":"7"}')
    assert total_sent_bytes(collectives_of(wrong)) == 7 * 64


def test_control_a_loop_that_the_reader_misses_raises():
    text = compiled_text(repeat(shift, 5), P("fsdp"), P("fsdp"), (8, 4))
    with pytest.raises(
        ProgramError, match=r"1 collective cannot be counted:\n.*collective-permute(?s:.*)is not reached"
    ):
        collectives_of(text.replace(" while(", " until("))


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"])
def test_control_a_kind_that_the_reader_misses_raises(kind, monkeypatch):
    """The search of the raw lines does not use KINDS: without one of them, its programs raise."""
    known = hlo.KINDS[kind]
    programs = [program for *program, (found, *_) in ONE.values() if found == known]
    assert programs
    monkeypatch.delitem(hlo.KINDS, kind)
    with pytest.raises(ProgramError, match="of an unknown kind"):
        collectives_of(compiled(*programs[0]))


@pytest.mark.parametrize(
    "line",
    [
        f"all-scatter(%p), channel_id=1, {HALVES}",
        f"swap(%p), channel_id=1, {HALVES}",
        "swap(%p), channel_id=1, source_target_pairs={{0,1}}",
        "collective-swap-start(%p), channel_id=1",
        "send(%p, %t), channel_id=1",
        'send(%p, %t), is_host_transfer=true, frontend_attributes={_xla_handler_name="xla_megascale_runtime"}',
        f"custom-call(%p), {HALVES}",
    ],
)
def test_communication_of_an_unknown_kind_raises(line):
    with pytest.raises(ProgramError, match="of an unknown kind"):
        collectives_of(module(f"ROOT %u = bf16[4,8]{{1,0}} {line}"))


def test_a_callbacks_send_to_the_host_and_words_in_quotes_are_no_communication():
    host = "%s = (bf16[4,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true"
    quoted = 'ROOT %c = bf16[4,8]{1,0} copy(%p), metadata={op_name="f32[] all-reduce(x), replica_groups={{0,1}}"}'
    assert collectives_of(module(f"{host}\n  {quoted}")) == []


def test_all_problems_of_a_program_are_reported_at_once():
    lines = [f"%u{i} = bf16[4,8]{{1,0}} all-scatter(%p), channel_id=1, {HALVES}" for i in range(2)]
    with pytest.raises(ProgramError, match=r"2 collectives cannot be counted(?s:.*)%u0(?s:.*)%u1"):
        collectives_of(module("\n  ".join(lines)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no ENTRY computation"),
        ("module @m { func.func public @main() }", "no ENTRY computation"),
        (module("ROOT %c = bf16[4,8]{1,0} call(%p), to_apply=%gone"), "'gone' that its text does not contain"),
        (module("").replace("num_partitions=8", "replica_count=8"), "several replicas"),
        (module(f"ROOT %r = () all-reduce(%p), channel_id=1, {HALVES}, to_apply=%add"), "has no array as its result"),
        (module(f"ROOT %r = word[4] all-reduce(%p), channel_id=1, {HALVES}, to_apply=%add"), "unknown dtype word"),
    ],
)
def test_text_that_cannot_be_read_raises(text, problem):
    with pytest.raises(ProgramError, match=problem):
        collectives_of(text)


@pytest.mark.parametrize(
    ("array", "num_bytes"),
    [
        (ArrayType("pred", (3,)), 3),
        (ArrayType("bf16", (2, 3)), 12),
        (ArrayType("f8e4m3fn", (5,)), 5),
        (ArrayType("s4", (3,)), 2),
        (ArrayType("c64", ()), 8),
    ],
)
def test_the_bytes_of_an_array_follow_its_dtype(array, num_bytes):
    assert array.num_bytes == num_bytes


# Kernels ---------------------------------------------------------------------------------------------------------

CUDNN = """%f = (bf16[2,4,1024,128]{3,1,2,0}, f32[2,4,1024]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(g)/dot_product_attention_fwd"}, \
backend_config={"cudnn_fmha_backend_config": {"fmha_scale": 0.088, "intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["2", "4", "1024", "1024"], "tuple_shapes": []}, "is_flash_attention": true, \
"mask_type": "CAUSAL", "sliding_window_length": 0, "max_seg_per_batch": 1}}"""
SPLASH = """%s = (f32[128,128]{1,0}, bf16[2,256,128]{2,1,0}) custom-call(%q, %k, %k), \
custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(step)/declares_4096_flops/splash_mha_fwd/pallas_call" stack_frame_id=15}"""


def inspected(call: str):
    body = f"""  %q = bf16[2,1024,4,128]{{3,2,1,0}} parameter(0)
  %k = bf16[2,1024,2,128]{{3,2,1,0}} parameter(1)
  {call}
  ROOT %z = f32[] constant(0)"""
    return inspect(f"HloModule m, num_partitions=1\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


@pytest.mark.parametrize(
    ("call", "products"),
    [
        (CUDNN, 2 * (1024**2 / 2)),
        (CUDNN.replace("fmhaSoftmax", "fmhaSoftmaxBackward"), 5 * (1024**2 / 2)),
        (CUDNN.replace('length": 0', 'length": 100'), 2 * (1024 * 100 - 100**2 / 2)),
        (CUDNN.replace("CAUSAL", "NO_MASK"), 2 * 1024**2),
    ],
)
def test_cudnns_attention_counts_its_visible_scores(call, products):
    found = inspected(call)
    assert (found.flops, found.opaque) == (2 * 2 * 4 * 128 * products, ())


def test_a_pallas_kernel_counts_what_it_declares():
    found = inspected(SPLASH)
    assert (found.flops, found.opaque) == (4096, ())
    found = inspected(SPLASH.replace("declares_4096_flops/", ""))
    assert (found.flops, found.opaque) == (0, ("tpu_custom_call",))
