"""Keras' own tests, on several ranks in the scope: `bash tests/run --keras`."""
