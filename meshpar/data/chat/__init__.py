"""Conversations as data: rendered by the template of a model, with targets on the answers alone."""
