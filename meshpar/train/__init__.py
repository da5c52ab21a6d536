"""A training: state, gradients, the step, its loop, rows of data and records."""
