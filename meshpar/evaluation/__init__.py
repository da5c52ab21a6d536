"""Numbers of lm-eval, by the engine of the server."""
