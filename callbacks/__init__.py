"""Callbacks for training on several ranks."""
