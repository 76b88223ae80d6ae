"""Asynchronous training with parameter servers."""
