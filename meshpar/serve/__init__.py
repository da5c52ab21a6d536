"""Generates text: the engine with its pages, and the server."""
