"""Starts the processes of a run, on this machine or by a scheduler."""
