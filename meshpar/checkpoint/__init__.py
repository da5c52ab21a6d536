"""Checkpoints: what is saved and how it is restored on another mesh, and copies in the memory of other hosts."""
