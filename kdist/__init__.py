"""Distribution strategies for Keras 3."""
