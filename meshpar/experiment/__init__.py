"""A run from its config: the keys, what validates them, what is prepared, and the actions of the commands."""
