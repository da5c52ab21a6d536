"""Finds the fastest layout of a run on a machine by the cost of traced steps."""
