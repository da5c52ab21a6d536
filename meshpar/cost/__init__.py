"""Counts FLOPs, bytes, memory and time in the trace of a step."""
