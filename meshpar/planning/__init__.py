"""Finds the layout of a run on a machine: its mesh, rules, pipeline and microbatches, by what its traced steps cost."""
