"""Compares a run with one device, and names what differs."""
