"""Injects faults into a run, and compares it with an undisturbed one."""
