"""Names of dims, the rules that place them on axes, and placements."""
