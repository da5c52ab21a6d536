"""A training: state, gradients, the step and its loop."""
