"""The layouts of eight devices on which equivalence is proven."""

from __future__ import annotations

LAYOUTS = {
    "data8": ({"data": 8}, ["replicated"]),
    "zero1": ({"fsdp": 8}, ["zero1"]),
    "zero2": ({"fsdp": 8}, ["zero2"]),
    "zero3": ({"fsdp": 8}, ["fsdp"]),
    "hsdp2x4": ({"replica": 2, "fsdp": 4}, ["hsdp"]),
    "tensor4": ({"data": 2, "tensor": 4}, ["megatron"]),
    "tensor4_sp": ({"data": 2, "tensor": 4}, ["megatron_sp"]),
    "data2_fsdp2_tensor2": ({"data": 2, "fsdp": 2, "tensor": 2}, ["fsdp", "megatron_sp"]),
}
