"""Reads compiled programs: what they send, compute and hold, and whether they keep a contract."""
