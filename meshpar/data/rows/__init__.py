"""Rows of named arrays: data that are not packed tokens, such as pictures, pairs and tables."""
