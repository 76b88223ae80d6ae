"""Losses of a step: the compiled ones of the global batch, and those that are computed by hand."""
