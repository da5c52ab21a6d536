"""Trains a config once for each point of a grid of values, and compares the runs."""
